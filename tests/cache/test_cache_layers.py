"""Not all layers need keys and values: views that skip layers, a toy whose layers keep none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch

from foretell.cache.cache import Cache
from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting, Feedback
from foretell.core.model import Model
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.models.decoder.decoder import Decoder
from foretell.speculation.strategy import Speculative
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from foretell.testing.toy_layers import ToyLayers
from foretell.testing.views import Skipped
from tests import laws
from tests.cache.users import Evictor, run
from tests.models.decoder.families import tiny

TEXT = [(11 * i + i * i) % 90 for i in range(15)]
SAMPLINGS = [Sampling(max_new_tokens=20), Sampling(max_new_tokens=20, temperature=0.8, seed=3)]


class Bare(Toy):
    """Its first layer and its last one keep no rows."""

    layers = 4

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.layout = (None, *self.layout[1:3], None)


@dataclass(frozen=True)
class Itself(Drafter):
    """The target drafts for itself with some of its layers, brought as a view."""

    layers: tuple[int, ...] = (0, 2)
    length: int = 3
    models = ("itself",)

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        target = models["target"]
        assert isinstance(target, Decoder)
        return {"itself": Skipped(target, self.layers)}

    def steps(self, ctx: Context, state: Any, budget: int) -> Drafting:
        tree = TokenTree(ctx.tokens[-1])
        last = 0
        for _ in range(min(self.length, ctx.depth)):
            reply = yield Ask(tree, "itself", ctx.branch, rows=[last])
            best, other = reply.logits[0].topk(2).indices.tolist()
            tree.add(last, other)
            last = tree.add(last, best)
        return tree


@cache
def llama() -> Decoder:
    return Decoder(tiny("llama", dtype=torch.float64), "llama")


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_a_model_that_drafts_for_itself(sampling: Sampling) -> None:
    models: dict[str, Model] = {"target": llama()}
    for layers in ((0, 1), (1,), (0, 1, 2)):
        strategy = Speculative(Itself(layers), nodes=8)
        requests = [
            Request(text, strategy, sampling, tenant=str(len(text))) for text in (TEXT, TEXT[:6])
        ]
        plain = [
            run(models, Request(request.prompt, Plain(), sampling))[0].ctx.output
            for request in requests
        ]
        for options in ({}, {"chunk": 4}, {"preempt": 5}):
            lives = run(models, *requests, **options)
            assert [live.ctx.output for live in lives] == plain
    stats = lives[0].ctx.stats  # with all layers every draft is right at temperature 0
    assert stats.accepted > 0


def test_a_view_keeps_rows_of_its_layers_only() -> None:
    view = Skipped(llama(), (0, 2))
    held = view.cache()
    assert [rows is None for rows in held.k] == [False, True, False]
    assert held.layout[1] is None and len(held.keys[0]) == 2
    tree = TokenTree(TEXT[-1]).chain([3]).chain([4, 5])
    with torch.inference_mode():
        job, _ = held.prepare(Ask(tree), TEXT, 99)
        view.forward([job])
        twin = held.fork()
        text = [*TEXT, 4, 5, 6]
        held.commit(text)
        assert held.length == len(TEXT) + 2
        assert_same_rows(held, view, text)
        assert_same_rows(twin, view, text)
        segment = held.share_rows(text)
        other = view.cache()
        assert other.adopt_segment(segment) and segment.k[1] is None
        job, _ = other.prepare(Ask(TokenTree(6)), text, 99)
        assert job.tokens == [6]
        rows = view.forward([job])[0].logits
        assert torch.allclose(rows, view.score(text), atol=1e-9)


def assert_same_rows(held: Cache, model: Any, text: list[int]) -> None:
    held.commit(text)
    fresh = model.cache()
    job, _ = fresh.prepare(Ask(TokenTree(text[-1])), text, 99)
    model.forward([job])
    for ours, theirs in zip((*held.k, *held.v), (*fresh.k, *fresh.v), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert torch.allclose(ours[:, : held.length], theirs[:, : held.length], atol=1e-9)


@pytest.mark.parametrize("policy", [None, Evictor()], ids=["", "evicting"])
@pytest.mark.parametrize("spec", ["suffix", "token-recycling", "draft"])
def test_a_toy_with_layers_that_keep_nothing(spec: str, policy: Any) -> None:
    bare = {"target": Bare(8, seed=3, copy=1.5), "draft": Bare(8, seed=3, noise=0.6, copy=1.5)}
    full = {"target": Toy(8, seed=3, copy=1.5), "draft": Toy(8, seed=3, noise=0.6, copy=1.5)}
    prompt = [1, 2, 3, 1, 2, 3, 1]
    for sampling in SAMPLINGS:
        request = Request(prompt, laws.build(spec), sampling, policy=policy)
        want = run(full, request)[0].ctx.output
        for options in ({}, {"chunk": 2}, {"preempt": 6}):
            assert run(bare, request, **options)[0].ctx.output == want


def test_the_law_on_a_toy_with_layers_that_keep_nothing() -> None:
    setting = laws.Setting(Sampling(max_new_tokens=2, temperature=1.0))
    models = {"target": Bare(3, seed=3, copy=0.5), "draft": Bare(3, seed=3, noise=0.6)}
    law = laws.enumerate_law(laws.build("draft:length=2,drafts=2"), laws.PROMPT, setting, models)
    reference = laws.reference(Toy(3, seed=3, copy=0.5), laws.PROMPT, setting)
    assert law.distance(reference) <= laws.EXACT and 0 < law.accepted < law.drafted


# --- forwards that go on where another one stopped


@dataclass(frozen=True)
class Exiting(Drafter):
    """Runs the first layers over its drafts, and asks for states from above and below the exit."""

    layers: int = 2
    taps = (1, 2, 3, -1)
    kept: bool = True  # whether it takes care that what enters the other layers is kept
    seen: list[Feedback] = field(default_factory=list, hash=False)

    def steps(self, ctx: Context, state: Any, budget: int) -> Drafting:
        tree = TokenTree(ctx.tokens[-1])
        if ctx.depth > 1:
            tree.chain([int(ctx.tokens[-2]), 1])
            tree.chain([5])
            layers = tuple(range(self.layers))
            taps = (1, self.layers) if self.kept else (self.layers,)
            if layers:
                yield Ask(tree, branch=ctx.branch, rows=[], taps=taps, layers=layers)
        return tree

    def observe(self, ctx: Context, state: Any, step: Feedback) -> None:
        self.seen.append(step)


@pytest.mark.parametrize("kept", [True, False])
def test_a_whole_ask_runs_what_is_left_of_the_layers(kept: bool) -> None:
    """Where states below the exit are wanted that were not kept, all layers run anew."""
    sampling = Sampling(max_new_tokens=16)
    prompt = [1, 2, 3, 1]
    found = []
    for drafter in (Exiting(kept=kept), Exiting(layers=0)):
        model = ToyLayers(8, seed=3)
        live = run({"target": model}, Request(prompt, Speculative(drafter, nodes=9), sampling))[0]
        found.append((live.ctx.output, drafter.seen))
        assert live.ctx.stats.calls["target"] == len(drafter.seen)
    (ours, ours_seen), (theirs, theirs_seen) = found
    assert (
        ours == theirs == run({"target": model}, Request(prompt, Plain(), sampling))[0].ctx.output
    )
    for left, right in zip(ours_seen, theirs_seen, strict=True):
        assert torch.equal(left.reply.logits, right.reply.logits)
        assert left.reply.hidden.keys() == right.reply.hidden.keys() == {1, 2, 3, 4}
        for tap in (1, 2, 3, 4):
            ours_rows = left.reply.hidden[tap][-len(left.tree) :]
            assert torch.equal(ours_rows, right.reply.hidden[tap][-len(right.tree) :])


def test_what_is_left_of_the_layers() -> None:
    model = ToyLayers(8, seed=3)
    cache, tree = model.cache(), TokenTree(1).chain([2, 0])
    with torch.inference_mode():
        model.forward([cache.prepare(Ask(tree, layers=(0, 1), taps=(2,), rows=[]), [0, 1], 99)[0]])
        grown = TokenTree(1).chain([2, 0, 3])
        assert cache.prepare(Ask(grown), [0, 1], 99)[0].layers is None, "a node has no rows yet"
    cache = model.cache()
    with torch.inference_mode():
        model.forward([cache.prepare(Ask(tree, layers=(0, 1), taps=(2,), rows=[]), [0, 1], 99)[0]])
        shorter = TokenTree(1).chain([2])
        for _ in range(2):  # interrupted, it goes on in the same way
            job, _ = cache.prepare(Ask(shorter), [0, 1], 99)
            assert job.layers == (2, 3) and job.states is not None and len(job.states) == 3
        assert torch.equal(model.forward([job])[0].logits, model.score([0, 1], shorter))
        cache.commit([0, 1, 2, 5])
    assert cache.length == 3 and not cache.tapped


def test_pending_tokens_are_kept_where_other_layers_follow() -> None:
    model = ToyLayers(8, seed=3)
    cache = model.cache()
    with torch.inference_mode():
        text = [0, 1, 2, 3]
        model.forward([cache.prepare(Ask(TokenTree(3), rows=()), text, 99)[0]])
        job, _ = cache.prepare(Ask(TokenTree(3), layers=(0, (1, "mlp"), 3)), text, 99)
        assert job.tokens == [3] and cache.length == 3
        model.forward([job])
        assert torch.equal(
            model.forward([cache.prepare(Ask(TokenTree(3)), text, 99)[0]])[0].logits,
            model.score(text),
        )


def test_rows_of_the_layers_that_later_asks_run_are_kept() -> None:
    model = ToyLayers(8, seed=3)
    cache = model.cache()
    with torch.inference_mode():
        for text, layers in (
            ([0, 1], (0, 1, 2, 3)),
            ([0, 1, 2], (0, 2, 3)),
            ([0, 1, 2, 4], (0, 3)),
        ):
            ask = Ask(TokenTree(text[-1]), layers=layers, lasting=True)
            job, _ = cache.prepare(ask, text, 99)
            assert len(job.tokens) == (2 if len(text) == 2 else 1)
            model.forward([job])
        assert not cache.recomputable, "other layers would give other rows"
        job, _ = cache.prepare(Ask(TokenTree(5)), [0, 1, 2, 4, 5], 99)
        assert job.tokens == [0, 1, 2, 4, 5] and cache.recomputable, "layer 1 lacks rows"
        assert torch.equal(model.forward([job])[0].logits[-1], model.score([0, 1, 2, 4, 5])[0])
