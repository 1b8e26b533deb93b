"""drafters/heads/extra_rows.py against transformers' own forward of every path, one by one."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from foretell.core.drafter import Drafter, Feedback
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Reply, Sampling
from foretell.drafters.heads.extra_rows import BLANK, Beside, read_beside
from foretell.engine.engine import Engine
from foretell.errors import BadConfig
from foretell.models.decoder.decoder import Decoder
from foretell.speculation.composition import Composition
from foretell.speculation.strategy import Speculative
from foretell.strategies.plain import Plain
from tests.models.decoder.families import tiny

MODEL: Any = tiny("llama").double()
LAYERS = 3
VECTORS = torch.randn(3, 32, generator=torch.Generator().manual_seed(1)).double()
MATRIX = torch.randn(32, 32, generator=torch.Generator().manual_seed(2)).double() / 6


def vectors(places: Sequence[int], states: torch.Tensor | None) -> torch.Tensor:
    """Trained ones at entry 0, and a map of the nodes' states above."""
    own = VECTORS[list(places)]
    return own if states is None else states @ MATRIX + own


def row_after(text: list[int], path: list[int], place: int, entry: int) -> torch.Tensor:
    """The logits of row `place` of the chain below the last of `text` and `path`, by transformers
    alone: what enters layer `entry` at the rows' positions is written over.
    """
    tokens = [*text, *path]
    count = place + 1
    embedded = MODEL.get_input_embeddings()(torch.tensor([[*tokens, *[0] * count]]))

    def write(module: Any, args: Any, kwargs: Any) -> Any:
        hidden = (args[0] if args else kwargs["hidden_states"]).clone()
        node = hidden[0, len(tokens) - 1].expand(count, -1)
        hidden[0, len(tokens) :] = vectors(range(count), node if entry else None)
        return (
            ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})
        )

    hook = MODEL.model.layers[entry].register_forward_pre_hook(write, with_kwargs=True)
    with torch.no_grad():
        logits: torch.Tensor = MODEL(inputs_embeds=embedded).logits[0, -1]
    hook.remove()
    return logits


@dataclass(frozen=True)
class Probe(Drafter):
    """Drafts a fixed shape around the target's own texts, with rows below some of its nodes."""

    entry: int = 0
    rows: bool = True
    seen: list[Any] = field(default_factory=list, hash=False, compare=False)

    whole = True

    def propose(self, ctx: Any, state: Any, budget: int) -> TokenTree:
        last = ctx.tokens[-1]
        tree = TokenTree(last)
        if ctx.depth < 2:
            return tree
        best = (3 * last + 1) % 97
        first = tree.add(0, best)
        tree.add(0, (best + 1) % 97)
        tree.add(first, (7 * last + 3) % 97)
        tree.beside = 4 if self.rows else 0
        return tree

    def target_rows(self, ctx: Any, state: Any, tree: TokenTree, taps: Any, rows_of: Any) -> Any:
        if not tree.beside:
            return (yield from rows_of(tree, taps))
        counts = [2, 0, 1, 1]
        beside = Beside(counts, lambda states: vectors(beside.places, states), self.entry)
        reply, below = yield from read_beside(ctx, tree, beside, taps=taps)
        self.seen.append((list(ctx.tokens), tree, below))
        return reply

    def observe(self, ctx: Any, state: Any, step: Feedback) -> None:
        assert step.reply.nodes == list(range(len(step.tree)))


def texts_of(requests: Sequence[Request]) -> list[list[int]]:
    engine = Engine({"target": Decoder(tiny("llama").double())})
    lives = [engine.add(request) for request in requests]
    for _ in engine.run():
        pass
    for live in lives:
        assert live.error is None, live.error
    return [list(live.ctx.tokens) for live in lives]


def request(strategy: Any, prompt: list[int], seed: int = 0, temperature: float = 1.0) -> Request:
    sampling = Sampling(max_new_tokens=10, temperature=temperature, seed=seed)
    return Request(prompt, strategy, sampling)


@pytest.mark.parametrize("entry", [0, 1, 2])
def test_rows_say_what_plain_forwards_say_and_nodes_never_notice(entry: int) -> None:
    probe = Probe(entry)
    (text,) = texts_of([request(Speculative(probe), [3, 5, 7])])
    assert text == texts_of([request(Plain(), [3, 5, 7])])[0]
    assert len(probe.seen) > 3
    for before, tree, below in probe.seen:
        assert [len(rows) for rows in below] == [2, 0, 1, 1]
        for node, rows in enumerate(below):
            for place, row in enumerate(rows):
                expected = row_after(before, tree.tokens_to(node), place, entry)
                assert torch.allclose(row.double(), expected, atol=1e-6), (node, place)


def test_what_a_row_says_depends_on_the_rows_before_it() -> None:
    """The comparison above has power: another vector of the first row is seen in the second."""
    whole = row_after([3, 5, 7], [], 1, 0)
    before = VECTORS[0].clone()
    VECTORS[0] += 1
    try:
        assert not torch.allclose(row_after([3, 5, 7], [], 1, 0), whole, atol=1e-3)
    finally:
        VECTORS[0] = before


@pytest.mark.parametrize("entry", [0, 2])
def test_requests_with_and_without_rows_share_forwards(entry: int) -> None:
    prompts = [[3, 5, 7], [11, 2], [8, 8, 8, 1], [4]]
    plain = [request(Plain(), prompt, seed) for seed, prompt in enumerate(prompts)]
    strategies = [Speculative(Probe(entry)), Plain(), Speculative(Probe(0)), Speculative(Probe(1))]
    mixed = [
        request(strategy, prompt, seed)
        for seed, (strategy, prompt) in enumerate(zip(strategies, prompts, strict=True))
    ]
    assert texts_of(mixed) == texts_of(plain)


@pytest.mark.parametrize("entry", [0, 1])
def test_a_cache_that_lost_its_rows_in_between_reads_the_text_again(entry: int) -> None:
    """The layers from the entry on then find tokens before the tree of which there is no state."""
    model = Decoder(tiny("llama").double())

    @dataclass(frozen=True)
    class Forgetful(Probe):
        def target_rows(
            self, ctx: Any, state: Any, tree: TokenTree, taps: Any, rows_of: Any
        ) -> Any:
            steps: Generator[Any, Any, Reply] = super().target_rows(ctx, state, tree, taps, rows_of)
            answer = None
            while True:
                try:
                    ask = steps.send(answer)
                except StopIteration as done:
                    return done.value
                answer = yield ask
                for live in engine.live:
                    for cache in live.caches.values():
                        cache.forget()

    probe = Forgetful(entry)
    engine = Engine({"target": model})
    live = engine.add(request(Speculative(probe), [3, 5, 7, 9, 2]))
    for _ in engine.run():
        pass
    assert live.error is None, live.error
    assert live.ctx.tokens == texts_of([request(Plain(), [3, 5, 7, 9, 2])])[0]
    for before, tree, below in probe.seen:
        expected = row_after(before, tree.tokens_to(2), 0, entry)
        assert torch.allclose(below[2][0].double(), expected, atol=1e-6)


@pytest.mark.parametrize("entry", [0, 1, 2])
def test_hidden_states_are_those_of_the_nodes_alone(entry: int) -> None:
    """Of layers below the entry, too, which the first of two forwards ran."""
    seen: list[Any] = []

    @dataclass(frozen=True)
    class Tapping(Probe):
        taps = (1, 2, 3)

        def observe(self, ctx: Any, state: Any, step: Feedback) -> None:
            text = list(ctx.tokens[: len(ctx.tokens) - len(step.tokens)])
            seen.append((text, step.tree, step.reply))

    texts_of([request(Speculative(Tapping(entry)), [3, 5, 7])])
    inside: dict[int, torch.Tensor] = {}
    for text, tree, reply in seen[:4]:
        for node in range(len(tree)):
            tokens = torch.tensor([[*text, *tree.tokens_to(node)]])
            hooks = [
                layer.register_forward_hook(
                    lambda _, args, out, tap=tap: inside.__setitem__(tap, out[0])
                )
                for tap, layer in enumerate(MODEL.model.layers, 1)
            ]
            with torch.no_grad():
                MODEL(tokens)
            for hook in hooks:
                hook.remove()
            for tap in (1, 2, 3):
                state = reply.hidden[tap][reply.new.index(node)]
                expected = inside[tap].reshape(-1, 32)[-1]
                assert torch.allclose(state.double(), expected, atol=1e-6), (tap, node)


def test_the_rows_stand_behind_the_nodes() -> None:
    tree = TokenTree(5).chain([6, 7])
    wide = Beside([1, 0, 2], lambda _: torch.empty(0)).to_width(tree)
    assert wide.tokens == [5, 6, 7, BLANK, BLANK, BLANK]
    assert wide.parents == [-1, 0, 1, 0, 2, 4]
    assert wide.depths == [0, 1, 2, 1, 3, 4]


def test_a_drafter_with_rows_of_its_own_stands_alone() -> None:
    with pytest.raises(BadConfig, match=r"test-extra-rows has rows of its own .* name it alone"):
        Composition((Probe(), Drafter()))
