"""Lazily filled rows are those of a forward through all layers, whatever was asked and rejected."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch

from foretell.cache.cache import Cache
from foretell.core.model import Model
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.drafters.model.lazy_layers import LazyCache, LazyLayers
from foretell.errors import Unsupported
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.fused import fused_blocks
from foretell.testing.toy import Toy
from foretell.testing.toy_layers import ToyLayers
from tests import tiny

EXITS = (1, 3, 4)


@cache
def llama(kind: torch.dtype = torch.float64) -> Decoder:
    return Decoder(tiny.llama(num_hidden_layers=4).to(kind), "tiny", fused_blocks)


@torch.inference_mode()
def eager(model: Model, tokens: Sequence[int]) -> tuple[Cache, torch.Tensor]:
    """A cache of all tokens but the last, and the last one's row, by one ordinary forward."""
    held = model.cache()
    job, _ = held.prepare(Ask(TokenTree(tokens[-1])), tokens, len(tokens))
    return held, model.forward([job])[0].logits[0]


class Rounds:
    """Rounds of drafts on a lazy cache, each token up to a random exit, and random acceptance."""

    def __init__(self, base: Model, exits: Sequence[int] = EXITS, seed: int = 0, chunk: int = 512):
        self.base, self.exits, self.chunk = base, exits, chunk
        self.model = LazyLayers(base, exits, "s2d")
        held = self.model.cache()
        assert isinstance(held, LazyCache)
        self.cache = held
        self.draw = np.random.default_rng(seed)
        self.text = self.draw.integers(0, base.vocab, 5).tolist()
        self.ran: list[tuple[int, int]] = []  # (layer, how many rows)
        self.rejected = 0

    @torch.inference_mode()
    def ask(self, tree: TokenTree, node: int, exit_layer: int) -> torch.Tensor:
        ask = Ask(tree, rows=[node], layers=tuple(range(exit_layer)))
        whole = False
        while not whole:
            job, whole = self.cache.prepare(ask, self.text, self.chunk)
            assert job.layers is not None and len(job.tokens)
            self.ran += [(layer, len(job.tokens)) for layer in job.layers]
            reply = self.model.forward([job])[0]
        assert reply.nodes == [node]
        return reply.logits[0]

    def round(self) -> None:
        tree = TokenTree(self.text[-1])
        for node in range(int(self.draw.integers(0, 5))):
            for exit_layer in self.exits[: int(self.draw.integers(1, len(self.exits) + 1))]:
                self.ask(tree, node, exit_layer)
            tree.add(node, int(self.draw.integers(0, self.base.vocab)))
        kept = int(self.draw.integers(0, len(tree)))
        self.rejected += len(tree) - 1 - kept
        more = self.draw.integers(0, self.base.vocab, int(self.draw.integers(1, 3))).tolist()
        self.text += [*tree.tokens[1 : kept + 1], *more]

    def check_rows(self) -> None:
        """Every row that the cache claims to hold, in the layers in which it claims it."""
        self.cache.commit(self.text)
        held, _ = eager(self.base, self.text)
        for place, exit_layer in enumerate(self.exits):
            end = self.cache.base + self.cache.filled[place]
            assert end <= len(self.text) - 1
            for layer in range(0 if place == 0 else self.exits[place - 1], exit_layer):
                for ours, theirs in ((self.cache.k, held.k), (self.cache.v, held.v)):
                    assert torch.allclose(ours[layer][:, :end], theirs[layer][:, :end], atol=1e-10)


@pytest.mark.parametrize("chunk", [512, 3])
def test_lazy_rows_are_eager_ones_after_a_hundred_rounds(chunk: int) -> None:
    for base, rounds in ((llama(), 100), (ToyLayers(5, seed=3), 40)):
        test = Rounds(base, chunk=chunk)
        uneven = 0
        for number in range(rounds):
            if len(test.text) > 100:
                test.cache.forget()
                test.text = test.text[:5]
            test.round()
            if number % 5 == 0:
                test.check_rows()
                uneven += test.cache.filled[0] > test.cache.filled[-1]
        assert test.rejected > rounds // 2 and uneven > 2
        test.cache.commit(test.text)
        tree = TokenTree(test.text[-1])
        rows = [test.ask(tree, 0, exit_layer) for exit_layer in EXITS]
        held, want = eager(base, test.text)
        assert torch.allclose(rows[-1], want, atol=1e-9)
        for ours, theirs in zip((*test.cache.k, *test.cache.v), (*held.k, *held.v), strict=True):
            count = len(test.text)
            assert torch.allclose(ours[:, :count], theirs[:, :count], atol=1e-10)


def test_every_layer_runs_once_for_a_token() -> None:
    """Nothing that was kept is computed again, and nothing that no later token needed."""
    test = Rounds(llama(), seed=2)
    depths: dict[int, int] = {}  # of the text's positions, the layers that have read them
    want = 0
    for _ in range(12):
        tree = TokenTree(test.text[-1])
        for node in range(3):
            reached = EXITS[int(test.draw.integers(0, 3))]
            here = len(test.text) - 1 + node
            for exit_layer in EXITS[: EXITS.index(reached) + 1]:
                test.ask(tree, node, exit_layer)
            for position in range(here + 1):
                want += max(0, reached - depths.get(position, 0))
                depths[position] = max(reached, depths.get(position, 0))
            tree.add(node, int(test.draw.integers(0, 9)))
        kept = int(test.draw.integers(0, 4))
        test.text += [*tree.tokens[1 : kept + 1], 9 + kept]  # a token that no draft had
        depths = {p: depth for p, depth in depths.items() if p < len(test.text) - 1}
    assert sum(count for _, count in test.ran) == want


def test_a_row_that_is_there_is_computed_again_where_its_logits_are_wanted() -> None:
    test = Rounds(llama())
    tree = TokenTree(test.text[-1]).chain([3, 4])
    first = test.ask(tree, 1, 1)
    deep = test.ask(tree, 1, 3)
    assert torch.allclose(test.ask(tree, 1, 1), first, atol=1e-10)
    assert torch.allclose(test.ask(tree, 1, 3), deep, atol=1e-10)
    # Another draft below the same root, as long: none of its rows may be taken for the other's.
    other = TokenTree(test.text[-1]).chain([7, 8])
    _, want = eager(llama(), [*test.text, 7, 8])
    for exit_layer in EXITS:
        row = test.ask(other, 2, exit_layer)
    assert torch.allclose(row, want, atol=1e-9)


def test_a_fork_goes_its_own_way() -> None:
    test = Rounds(llama(), seed=4)
    test.ask(TokenTree(test.text[-1]), 0, 1)
    twin = Rounds(llama(), seed=5)
    twin.cache, twin.text = test.cache.fork(), list(test.text)
    assert isinstance(twin.cache, LazyCache)
    for _ in range(6):
        test.round()
        twin.round()
    test.check_rows()
    twin.check_rows()


def test_exits_that_wait_for_different_layers_share_no_forward() -> None:
    first, second = Rounds(llama(), seed=6), Rounds(llama(), seed=7)
    for test in (first, second):
        test.ask(TokenTree(test.text[-1]), 0, 1)
    jobs = [
        test.cache.prepare(Ask(TokenTree(test.text[-1]), rows=[0], layers=(1, 2)), test.text, 9)[0]
        for test in (first, second)
    ]
    assert jobs[0].forward_key == jobs[1].forward_key and jobs[0].layers == (1, 2)
    with torch.inference_mode():
        both = first.model.forward(jobs)
    for test, reply in zip((first, second), both, strict=True):
        alone = Rounds(llama())
        alone.text = test.text
        alone.ask(TokenTree(test.text[-1]), 0, 1)
        want = alone.ask(TokenTree(test.text[-1]), 0, 3)
        assert torch.allclose(reply.logits[0], want, atol=1e-9)


@pytest.mark.parametrize("slip", ["states of others", "rows that were rejected", "a layer skipped"])
def test_slips_are_caught(slip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = LazyCache.prepare

    def prepare(self: LazyCache, ask: Ask, tokens: Sequence[int], chunk: int) -> object:
        job, whole = right(self, ask, tokens, chunk)
        if job.states is not None and slip == "states of others":
            job.states = job.states.roll(1, 0)
        elif job.states is not None and slip == "a layer skipped":
            job.layers = job.layers[1:] if job.layers else None
        return job, whole

    monkeypatch.setattr(LazyCache, "prepare", prepare)
    if slip == "rows that were rejected":
        monkeypatch.setattr(
            "foretell.drafters.model.lazy_layers._shared_prefix_length",
            lambda ours, theirs: min(len(ours), len(theirs)),
        )
    test = Rounds(llama(), seed=1)
    with pytest.raises(AssertionError):
        for _ in range(12):
            test.round()
            test.check_rows()


def test_models_whose_layers_run_as_a_whole_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"s2d cannot run on toy: .*use the method draft"):
        LazyLayers(Toy(4), (1, 2), "s2d")
