"""FastKV against a llama by hand, layer by layer; what each layer computes, counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretell.core.model import Computed
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.drafters.own.layerskip import Layerskip
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, Unsupported
from foretell.kv.evict import layer_skipping as skipping
from foretell.kv.evict.fastkv import Fastkv
from foretell.models.decoder.decoder import Decoder
from foretell.spec import build_cache_policy
from foretell.speculation.strategy import Speculative
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from tests.cache.users import by_chunks
from tests.kv.by_hand import ByHand, before
from tests.kv.policies import PROMPT, run, target
from tests.kv.twin import by_engine

# What laws of all policies use, see tests/kv/policies.py.
SMALL_SPEC = "fastkv:budget=10,length=14,window=3,kernel=3"

TOKENS = 8
SMALL = Fastkv(tsp=0.6, retain=0.4, layers=1, window=3, kernel=3)
LATE = Fastkv(budget=7, length=9, layers=2, window=2, kernel=5)


def best(votes: list[float], window: int, kernel: int, count: int) -> list[int]:
    """Of the places, the window's and those before it with the most votes around them."""
    older = len(votes) - window
    half = kernel // 2
    near = [sum(votes[max(0, i - half) : min(older, i + half + 1)]) for i in range(older)]
    order = sorted(range(older), key=lambda i: (near[i], i))
    return [*sorted(order[older - (count - window) :]), *range(older, len(votes))]


def by_loops(kv: Fastkv, prompt: list[int], tokens: int, slip: str = "") -> Any:
    """The greedy text, and rows (KV, n, D) that each layer holds when the prompt is in."""
    model = ByHand()
    window = 1 if slip == "last alone" else kv.window
    going = kv.length or int(len(prompt) * kv.tsp)
    kept = kv.budget or int(len(prompt) * kv.retain)
    places = list(range(len(prompt)))
    h = model.embed(prompt)
    held = []
    for layer in range(model.layers):
        turned = [*range(len(places))] if slip == "places anew" else places
        q, k, v = model.rows(layer, h, turned)
        h, weights = model.through(layer, h, q, k, v, before(len(places)))
        given = weights[:, len(places) - window :].sum(1).unflatten(0, (len(k), -1)).sum(1)
        rows = [best(votes, kv.window, kv.kernel, kept) for votes in given.tolist()]
        held.append([torch.stack([part[i, row] for i, row in enumerate(rows)]) for part in (k, v)])
        if layer == kv.layers - 1 + (slip == "a layer late"):
            chosen = best(given.sum(0).tolist(), kv.window, kv.kernel, going)
            places, h = [places[i] for i in chosen], h[chosen]
    text = [model.likeliest(h[-1])]
    begun = [[part.clone() for part in pair] for pair in held]
    for place in range(len(prompt), len(prompt) + tokens - 1):
        h = model.embed(text[-1:])
        for layer, pair in enumerate(held):
            q, *new = model.rows(layer, h, [place])
            pair[:] = [torch.cat(parts, 1) for parts in zip(pair, new, strict=True)]
            seen = torch.ones(1, pair[0].shape[1], dtype=torch.bool)
            h, _ = model.through(layer, h, q, pair[0], pair[1], seen)
        text.append(model.likeliest(h[0]))
    return text, begun


def agree(kv: Fastkv, slip: str = "") -> bool:
    text, held = by_engine(kv, PROMPT, TOKENS)
    want, rows = by_loops(kv, PROMPT, TOKENS, slip)
    pairs = zip(held[len(PROMPT)], rows, strict=True)
    return text == want and all(
        torch.allclose(mine, other, atol=1e-5)
        for ours, theirs in pairs
        for mine, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("kv", [SMALL, LATE])
@pytest.mark.parametrize("piece", [512, 2])
@torch.inference_mode()
def test_it_holds_the_rows_and_writes_the_text_of_loops(
    kv: Fastkv, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretell.kv.evict.fastkv.PIECE", piece)
    assert agree(kv)


@pytest.mark.parametrize("slip", ["last alone", "places anew", "a layer late"])
@torch.inference_mode()
def test_a_slip_is_noticed(slip: str) -> None:
    assert not agree(SMALL, slip)


def counted(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Nodes that pass each layer from now on."""
    passed: dict[int, int] = {}
    whole = Decoder._compute_jobs

    def counting(self: Any, jobs: Any, taps: Any) -> Computed:
        for job in jobs:
            for layer in range(len(self.layout)) if job.layers is None else job.layers:
                passed[layer] = passed.get(layer, 0) + len(job.tokens)
        return whole(self, jobs, taps)

    monkeypatch.setattr(Decoder, "_compute_jobs", counting)
    return passed


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_each_layer_computes_the_rows_that_are_declared(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = counted(monkeypatch)
    run(target(), [PROMPT], SMALL, tokens=1, plan=by_chunks(chunk))
    going = int(0.6 * len(PROMPT))
    assert passed == {0: len(PROMPT), 1: going, 2: going}
    assert SMALL.count_going(8000) == 4800 and Fastkv().count_going(8000) == 1600
    assert SMALL.count_rows(8000) == 3200 and Fastkv().count_rows(8000) == 800


def test_all_tokens_and_all_rows_are_the_full_cache_bit_by_bit() -> None:
    want, full = by_engine(None, PROMPT, TOKENS)
    text, held = by_engine(Fastkv(tsp=1, retain=1), PROMPT, TOKENS)
    assert text == want and held.keys() == full.keys()
    for length, rows in held.items():
        for ours, theirs in zip(rows, full[length], strict=True):
            assert all(map(torch.equal, ours, theirs))


def test_a_short_prompt_is_read_as_a_whole() -> None:
    assert Fastkv().count_rows(9) == Fastkv().count_going(9) == 9
    assert Fastkv().count_rows(10) == 9 and Fastkv().count_going(10) == 9
    want, _ = by_engine(None, PROMPT[:9], TOKENS)
    text, _ = by_engine(Fastkv(), PROMPT[:9], TOKENS)
    assert text == want


def forward(cache: Any, tokens: list[int], chunk: int, ask: Ask) -> list[Any]:
    replies, done = [], False
    while not done:
        job, done = cache.prepare(ask, tokens, chunk)
        replies.append(target().forward([job])[0])
    return replies


@torch.inference_mode()
def test_forks_in_the_middle_of_a_prompt_go_on_by_themselves() -> None:
    model = target()
    rows = []
    caches = [model.cache()]
    caches[0].use(SMALL.build_policy(model), len(PROMPT))
    first, _ = caches[0].prepare(Ask(TokenTree(PROMPT[-1])), PROMPT, 6)
    model.forward([first])
    caches.append(caches[0].fork())
    other = [*PROMPT[:6], *PROMPT[::-1][6:]]
    for cache, text in ((caches[0], other), (caches[1], PROMPT)):
        (*_, reply) = forward(cache, text, 4, Ask(TokenTree(text[-1])))
        rows.append(reply.logits)
        cache.commit([*text, 1])
        assert cache.base == SMALL.count_rows(len(PROMPT)) and cache.policy.waiting is None
    for text, row in zip((other, PROMPT), rows, strict=True):
        cache = model.cache()
        cache.use(SMALL.build_policy(model), len(text))
        assert torch.allclose(
            forward(cache, text, 1000, Ask(TokenTree(text[-1])))[-1].logits, row, atol=1e-5
        )


@torch.inference_mode()
def test_the_last_token_may_be_asked_for_again_and_in_parts() -> None:
    """A forward that first ran some layers below the cut goes on from there."""
    model = target()
    root = TokenTree(PROMPT[-1])
    rows = []
    for kv, before_it in ((LATE, ()), (LATE, (None,)), (LATE, (1,)), (LATE, (2,))):
        cache = model.cache()
        cache.use(kv.build_policy(model), len(PROMPT))
        for exit_layer in before_it:
            layers = None if exit_layer is None else tuple(range(exit_layer))
            taps = () if exit_layer is None else (exit_layer,)
            forward(cache, PROMPT, 1000, Ask(root, rows=[0], layers=layers, taps=taps))
        rows.append(forward(cache, PROMPT, 1000, Ask(root, rows=[0]))[-1].logits)
        cache.commit([*PROMPT, 1])
        held = [part[:, : cache.base] for part in (*cache.k, *cache.v)]
        rows.append(torch.cat([part.flatten() for part in held])[None])
    for i, found in enumerate(rows):
        assert torch.allclose(found, rows[i % 2], atol=1e-5)


def test_a_state_of_a_token_that_leaves_out_layers_is_the_one_it_left_with() -> None:
    model = target()
    cache = model.cache()
    cache.use(SMALL.build_policy(model), len(PROMPT))
    with torch.inference_mode():
        ask = Ask(TokenTree(PROMPT[-1]), taps=(1, 3))
        job, _ = cache.prepare(ask, PROMPT, 1000)
        job.taps = ask.taps
        (reply,) = model.forward([job])
        assert torch.equal(reply.hidden[1], reply.hidden[3])
        (reply,) = forward(cache, PROMPT, 1000, ask)[-1:]
        assert reply.hidden[3].shape == reply.hidden[1].shape
        assert not torch.allclose(reply.hidden[1], reply.hidden[3])


@pytest.mark.parametrize("exit_layer", [1, 2])
def test_drafts_of_first_layers_leave_the_text_as_it_is(exit_layer: int) -> None:
    for kv in (SMALL, LATE):
        (want,) = run(target(), [PROMPT], kv)
        drafts = Speculative(Layerskip(exit_layer=exit_layer), nodes=4)
        (live,) = run(target(), [PROMPT], kv, drafts)
        assert live.error is None and live.ctx.output == want.ctx.output


def test_the_prompt_stays_on_an_backend_that_runs_parts_of_the_layers() -> None:
    """But for its last tokens, which are watched, all jobs are as plain as any."""
    watched = []
    model = target()
    whole = model._compute_jobs
    engine = Engine({"target": model})
    sampling = Sampling(temperature=0.0, max_new_tokens=4)
    engine.add(Request(list(PROMPT), Plain(), sampling, policy=SMALL.build_policy(model)))

    def looking(jobs: Any, taps: Any) -> Computed:
        watched.extend((len(j.tokens), j.layers) for j in jobs if not j.suits(True, True))
        return whole(jobs, taps)

    model._compute_jobs = looking  # type: ignore[method-assign]
    try:
        while engine.live:
            engine.step()
    finally:
        del model._compute_jobs
    assert watched == [(3, (0,)), (3, (1, 2))]


@pytest.mark.parametrize(("field", "value"), [("retain", 0.3), ("budget", 8), ("length", 8)])
def test_bad_settings_are_refused(field: str, value: float) -> None:
    with pytest.raises(BadConfig, match=f"fastkv:{field}"):
        build_cache_policy(f"fastkv:{field}={value}")


def test_models_that_it_cannot_run_on_are_refused() -> None:
    with pytest.raises(Unsupported, match="layers or more that can be run one by one"):
        Fastkv().build_policy(Toy(30))
    with pytest.raises(BadConfig, match="fastkv:layers"):
        Fastkv(layers=3).build_policy(target())
    assert skipping.check_layers("fastkv", target()) == 3
