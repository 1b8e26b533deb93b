"""Rows of a prefix that several caches read: the tokens are those of a whole cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from foretell.backends.graphs import GraphsBackend
from foretell.backends.openvino import OpenVinoBackend
from foretell.cache import shared
from foretell.cache.cache import Cache
from foretell.cache.policy import Segment
from foretell.cache.states import TappedStates
from foretell.core.context import Context
from foretell.core.model import Model
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Fork, Sampling, Steps, Together
from foretell.engine.engine import Engine
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.fused import fused_blocks
from foretell.ops.attention import LayerQuery
from foretell.speculation.strategy import Strategy, verify_and_commit
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy, ToyRecurrent
from tests import laws
from tests.cache.test_backends import missing
from tests.cache.users import Evictor, run
from tests.models.decoder.families import tiny

VOCAB = 8
SPECS = ("token-recycling", "draft:drafts=3", "suffix", "plain")
GREEDY = Sampling(max_new_tokens=12)
SAMPLED = Sampling(max_new_tokens=12, temperature=0.8, seed=4)


@torch.inference_mode()
def segment_of(model: Any, tokens: Sequence[int], taps: Sequence[int] = ()) -> Segment:
    """The rows of all these tokens."""
    held = model.cache()
    if taps:
        held.states = TappedStates(taps)
    text = [*tokens, 0]
    job, _ = held.prepare(Ask(TokenTree(0)), text, 999)
    model.forward([job])
    shared: Segment = held.share_rows(text)
    held.drop()
    assert shared.tokens == tuple(tokens)
    return shared


def copied(segment: Segment) -> list[torch.Tensor]:
    return [part.clone() for part in (*segment.k, *segment.v) if part is not None]


@cache
def llamas(family: str = "llama") -> dict[str, Model]:
    near = Decoder(tiny("llama", noise=0.1, dtype=torch.float64), "near")
    return {"target": Decoder(tiny(family, dtype=torch.float64), family), "draft": near}


@cache
def toys(window: int | None = None) -> dict[str, Model]:
    near = Toy(VOCAB, seed=3, noise=0.6, copy=1.5)
    return {"target": Toy(VOCAB, seed=3, copy=1.5, window=window), "draft": near}


WORLDS: dict[str, Any] = {
    "toy": (toys, VOCAB),
    "windowed toy": (lambda: toys(6), VOCAB),
    "llama": (llamas, 97),
    "mistral": (lambda: llamas("mistral"), 97),
    "gemma2": (lambda: llamas("gemma2"), 97),
    "gpt_oss": (lambda: llamas("gpt_oss"), 97),
}


@pytest.mark.parametrize("world", WORLDS)
def test_two_requests_with_a_prefix_say_what_each_says_alone(world: str) -> None:
    """Drafting in chains and trees, greedy and sampled, with windows, softcaps and sinks."""
    make, vocab = WORLDS[world]
    models = make()
    prefix = [(7 * i + i * i) % vocab for i in range(14)]
    texts = [[*prefix, 1, 2, 3, 1, 2], [*prefix, 5]]
    segment = segment_of(models["target"], prefix)
    before = copied(segment)
    for spec in SPECS if vocab == VOCAB else SPECS[:2]:
        for sampling in (GREEDY, SAMPLED):
            strategy = laws.build(spec)
            requests = [Request(text, strategy, sampling, tenant=str(text)) for text in texts]
            alone = [run(models, request)[0].ctx.output for request in requests]
            for request in requests:
                request.prefix = segment
            lives = run(models, *requests, chunk=3)
            assert [live.ctx.output for live in lives] == alone, spec
            again = run(models, *requests, preempt=4)
            assert [live.ctx.output for live in again] == alone, "rows given up come back"
    assert all(map(torch.equal, copied(segment), before)), "somebody wrote to shared rows"


def test_rows_of_another_prefix_are_caught() -> None:
    """The slip: a segment that says it holds other tokens than its rows are of."""
    models = toys()
    prefix = [1, 2, 3, 4, 5, 6]
    true = segment_of(models["target"], prefix)
    false = segment_of(models["target"], [1, 2, 3, 4, 5, 7])
    false = Segment(true.tokens, 0, false.k, false.v, {})
    request = Request([*prefix, 1, 2], Plain(), GREEDY)
    alone = run(models, request)[0].ctx.output
    for segment, same in ((true, True), (false, False)):
        request.prefix = segment
        assert (run(models, request)[0].ctx.output == alone) == same


def test_a_prefix_of_another_text_is_not_used() -> None:
    models = toys()
    segment = segment_of(models["target"], [1, 2, 3, 4])
    for text in ([1, 2, 3, 5, 6], [1, 2, 3, 4], [1, 2]):
        request = Request(text, Plain(), GREEDY)
        alone = run(models, request)[0].ctx.output
        request.prefix = segment
        assert run(models, request)[0].ctx.output == alone


# --- attention in parts, without a model

HEADS, GROUPS, KEY, VALUE = 4, 2, 6, 5


def random(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def slope(here: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    distance = (here[:, None] - there[None, :]).double()
    return -torch.tensor([0.5, 0.25, 0.1, 0.01])[:, None, None] * distance


@pytest.mark.parametrize("window", [None, 3, 9, 17])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("bias", [None, slope], ids=["", "biased"])
@torch.inference_mode()
def test_a_text_in_two_segments_and_own_rows_is_one_text(
    window: int | None, softcap: float | None, sunk: bool, bias: Any
) -> None:
    generator = torch.Generator().manual_seed(0)
    layout = ((GROUPS, KEY, VALUE),)
    tokens = list(range(20))
    text = [*tokens, 3, 4]
    sinks = random(generator, HEADS) if sunk else None
    k, v = random(generator, GROUPS, 21, KEY), random(generator, GROUPS, 21, VALUE)
    whole, parted = (Cache(layout, torch.float64, torch.device("cpu"), 4) for _ in range(2))
    for start, end in ((0, 8), (8, 14)):
        rows = slice(start, end)
        assert parted.adopt_segment(
            Segment(tuple(tokens[rows]), start, [k[:, rows]], [v[:, rows]], {})
        )
    tree = TokenTree(4).chain([5, 6, 7]).chain([8, 9]).chain([1], at=2)
    outs = []
    q, new_k, new_v = (random(generator, n, 7, d) for n, d in ((4, KEY), (2, KEY), (2, VALUE)))
    for held in (whole, parted):
        job, _ = held.prepare(Ask(TokenTree(3)), text[:-1], 99)
        first = held.length
        job.write(0, k[:, first:], v[:, first:])
        held.finish(job)
        job, _ = held.prepare(Ask(tree), text, 99)
        assert len(job.tokens) == 7 and job.seen is not None
        outs.append(job.attend(LayerQuery(0, q, new_k, new_v, 0.4, window, softcap, sinks, bias)))
    assert parted.base == 7 and len(parted.segments) == 2
    assert float((outs[0] - outs[1]).abs().max()) <= 1e-12


# --- who may adopt, and what stays


def test_shared_rows_outlive_the_cache_they_were_taken_from() -> None:
    makers: list[Any] = [lambda *args: GraphsBackend(*args, record=None)]
    if not missing("openvino"):
        makers.append(OpenVinoBackend)
    for make in makers:
        model = Decoder(tiny("llama", head_dim=16), "llama", fused_blocks)
        model.use(make)
        segment = segment_of(model, [5, 6, 7, 8])
        before = copied(segment)
        for i in range(3):  # others now have the memory of the first cache
            segment_of(model, [9 + i, 4, 3, 2, 1])
        assert all(map(torch.equal, copied(segment), before))


@torch.inference_mode()
def test_a_cache_may_copy_what_it_shares() -> None:
    """Then its rows are its own, in order, and the segments have one reader fewer."""
    text = [(5 * i + i * i) % VOCAB for i in range(30)]
    toy = Toy(VOCAB)
    first = segment_of(toy, text[:9])
    cache_ = toy.cache()
    cache_.adopt_segment(first)
    cache_.unshare_rows()
    assert (cache_.base, cache_.length, first.readers, cache_.segments) == (9, 9, 0, ())
    cache_ = toy.cache()
    cache_.adopt_segment(first)
    job, _ = cache_.prepare(Ask(TokenTree(text[24]), rows=()), text[:25], 99)
    toy.forward([job])
    cache_.commit(text[:25])
    assert (cache_.base, cache_.length) == (15, 24)
    for _ in range(2):
        cache_.unshare_rows()
        assert (cache_.base, cache_.length, first.readers, cache_.segments) == (24, 24, 0, ())
        for layer in range(2):
            assert cache_.k[layer][0, :24, 0].tolist() == text[:24]
            assert cache_.v[layer][0, :24, 0].tolist() == [*range(24)]
    laws.check_cache(cache_, toy, text[:25])


def test_a_cache_that_keeps_states_adopts_those_rows_only_that_have_them() -> None:
    toy = toys()["target"]
    prefix = [1, 2, 3, 4]
    bare, full = segment_of(toy, prefix), segment_of(toy, prefix, (2,))
    held = toy.cache()
    held.states = TappedStates((2,))
    assert not held.adopt_segment(bare) and held.length == 0 and not held.segments
    held.states = TappedStates((1, 2))
    assert not held.adopt_segment(full)
    held.states = TappedStates((2,))
    assert held.adopt_segment(full) and held.length == 4
    other = toy.cache()
    other.states = TappedStates((2,))
    text = [*prefix, 5, 6]
    with torch.inference_mode():
        for each in (held, other):
            job, _ = each.prepare(Ask(TokenTree(6)), text, 99)
            toy.forward([job])
            each.commit([*text, 7])
    assert torch.equal(held.states.read_states((2,), -1, 6), other.states.read_states((2,), -1, 6))
    assert len(full.states[2]) == 4, "a writer never changes a segment"


def test_a_cache_with_a_policy_computes_its_own_rows() -> None:
    """Or they would be others than those plain decoding under the policy has."""
    models = toys()
    prefix = [1, 2, 3, 4, 5, 6, 7, 1]
    request = Request([*prefix, 1, 2], laws.build("suffix"), GREEDY, policy=Evictor())
    alone = run(models, request)[0].ctx.output
    request.prefix = segment_of(models["target"], prefix)
    assert run(models, request)[0].ctx.output == alone


def test_a_model_without_rows_shares_none() -> None:
    with pytest.raises(AssertionError, match="no rows"):
        segment_of(ToyRecurrent(VOCAB), [1, 2, 3])


@dataclass(frozen=True)
class Forked(Strategy):
    """Four texts that go on from the prompt, and again four from each of them."""

    def run(self, ctx: Context) -> Steps:
        yield Ask(TokenTree(ctx.tokens[-1]))
        texts = [0, *(yield Fork(0, 3))]
        yield Together([few(ctx.on(text)) for text in texts])
        for text in list(texts):
            texts += yield Fork(text, 3)
        yield Together([Plain().run(ctx.on(text)) for text in texts])


def few(ctx: Context) -> Steps:
    for _ in range(8):
        tree = TokenTree(ctx.tokens[-1])
        reply = yield Ask(tree, branch=ctx.branch)
        yield from verify_and_commit(ctx, tree, reply)


@pytest.mark.parametrize("family", ["toy", "llama", "gemma2"])
def test_forks_of_a_long_text_hold_it_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = Toy(VOCAB) if family == "toy" else llamas(family)["target"]
    prompt = [(3 * i + i * i) % VOCAB for i in range(40)]
    texts = []
    for lent in (1 << 30, 8):
        monkeypatch.setattr(shared, "LENT", lent)
        engine = Engine({"target": model})
        sampling = Sampling(max_new_tokens=24, temperature=1.0, seed=3)
        live = engine.add(Request(prompt, Forked(), sampling))
        held: list[tuple[tuple[Segment, ...], int]] = []
        while engine.live:
            engine.step()
            if len(live.caches) == 16 and not held:
                held = [(cache.segments, cache.base) for cache in live.caches.values()]
        texts.append([branch.output for branch in live.ctx.branches.values()])
        assert [len(segments) for segments, _ in held] == [0 if lent > 40 else 2] * 16
        if lent == 8:
            assert len({segments[0] for segments, _ in held}) == 1
            assert len({segments[1] for segments, _ in held}) == 4
            assert max(rows for _, rows in held) < 8
    assert texts[0] == texts[1]


@pytest.mark.parametrize("taps", [(), (1, 3)])
@torch.inference_mode()
def test_who_forgets_rows_that_were_lent_has_them_again(
    taps: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their states too, which are lent beside them."""
    monkeypatch.setattr(shared, "LENT", 4)
    model: Any = llamas()["target"]
    text = [(3 * i + i * i) % VOCAB for i in range(20)]
    held = model.cache()
    if taps:
        held.states = TappedStates(taps)
    for end in (8, 16):
        part = text[: end + 1]
        job, _ = held.prepare(Ask(TokenTree(part[-1])), part, 99)
        model.forward([job])
        held.settle(part)
        held.lend_rows(part)
    assert len(held.segments) == 2 and held.length == 16
    twin = held.fork()
    held.forget()
    assert held.length == 16
    rows = []
    for one in (held, twin):
        job, _ = one.prepare(Ask(TokenTree(text[-1])), text, 99)
        rows.append(model.forward([job])[0].logits)
    assert torch.allclose(rows[0], rows[1], atol=1e-9)
    if taps:
        assert held.states is not None and twin.states is not None
        assert held.states.reach == twin.states.reach == 20
        for start in (0, 5, 12, 18):
            ours, theirs = (one.states.read_states(taps, start - 2, 20) for one in (held, twin))
            assert torch.allclose(ours, theirs, atol=1e-9)


def test_what_a_text_lends_is_given_back_with_its_last_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared, "LENT", 8)
    toy = Toy(VOCAB)
    text = [i % VOCAB for i in range(30)]
    first = toy.cache()
    job, _ = first.prepare(Ask(TokenTree(text[-1])), text, 99)
    toy.forward([job])
    early = first.fork()
    first.settle(text)
    first.lend_rows(text)
    (segment,) = first.segments
    assert first.base == 0 and first.length == 29 and segment.readers == 1
    twin = first.fork()
    assert segment.readers == 2 and twin.segments == first.segments
    early.settle(text)
    assert early.base == 29 and not early.segments, "it went on with rows of its own"
    first.drop()
    twin.drop()
    assert segment.readers == 0
