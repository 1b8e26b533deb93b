"""Predicted bytes are those that are taken, and a budget is kept."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from foretell.api.lm import LM
from foretell.core import memory_size as memory
from foretell.core.context import Context
from foretell.core.drafter import Drafter
from foretell.core.memory_size import Demand, Room, compute_footprint, find_room, rows_of, sizes_of
from foretell.core.model import Model
from foretell.core.request import Request
from foretell.core.tree import Law, TokenTree
from foretell.core.types import Sampling
from foretell.drafters.model.draft import Draft
from foretell.engine import memory_budget as budget
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, Unsupported
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.fused import fused_blocks
from foretell.speculation.strategy import Speculative
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from foretell.testing.toy_canvas import ToyCanvas
from tests import laws, tiny
from tests.diffusion.worlds import request as denoised

BANNED = range(12, 24)  # tokens


@dataclass(frozen=True)
class Full(Drafter):
    """Drafts as much as it may, a chain or all of it below the root, and all in vain."""

    chain: bool = False
    draws: bool = False  # type: ignore[misc]
    whole = True

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return () if self.chain else ("tree",)

    def propose(self, ctx: Context, state: Any, budget: int) -> TokenTree:
        tree = TokenTree(ctx.tokens[-1])
        vocab = ctx.models["target"].vocab
        node = 0
        for token in BANNED[: min(budget - 1, ctx.depth if self.chain or not ctx.depth else 99)]:
            law = None
            if self.draws and not ctx.sampler.greedy:
                # One law a draw; what was drawn does not matter here.
                law = Law(torch.full((vocab,), 1 / vocab, dtype=torch.get_default_dtype()))
            child = tree.add(node, token, law, source="full")
            node = child if self.chain else 0
        return tree


class Counter:
    """The most bytes of cache buffers, logits, masks and laws that were there at a time."""

    def __init__(self, engine: Engine):
        self.peak = 0
        self.engine = engine
        self.asks: Sequence[Any] = ()
        plan = engine.plan

        def noted(waiting: Any, costs: Any) -> Any:
            planned = plan(waiting, costs)
            self.asks = [entry.ask for entry, _ in planned]
            return planned

        engine.plan = noted
        for model in engine.models.values():
            self.watch(model)

    def watch(self, model: Model) -> None:
        forward = type(model).forward

        def counted(jobs: Any) -> Any:
            replies = forward(model, jobs)
            caches = [cache for live in self.engine.live for cache in live.caches.values()]
            tensors = [part for cache in caches for part in (*cache.keys, *cache.values)]
            tensors += [reply.logits for reply in replies]
            for job in jobs:
                tensors += [mask for mask in job.masks.values() if mask is not None]
            tensors += [law.probs for ask in self.asks for law in ask.tree.laws if law is not None]
            found = {tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor.numel()}
            self.peak = max(self.peak, sum(found.values()))
            return replies

        model.forward = counted  # type: ignore[method-assign]


def run(models: dict[str, Model], *requests: Request, limit: int | None) -> tuple[int, list[Any]]:
    """The most bytes there were at a time beside weights, and the requests."""
    engine = Engine(models)
    engine.admission.budget = limit
    counter = Counter(engine)
    lives = [engine.add(request) for request in requests]
    laws.finish(engine, *lives)
    return counter.peak, lives


def toy() -> dict[str, Model]:
    return {"target": Toy(24, seed=3), "draft": Toy(24, seed=3, noise=0.4, name="draft")}


def llama() -> dict[str, Model]:
    pair = tiny.llama(), tiny.relative(tiny.llama())
    names = ("target", "draft")
    return {name: Decoder(hf, name, fused_blocks) for name, hf in zip(names, pair, strict=True)}


def vain(tokens: int, temperature: float = 0.0) -> Sampling:
    """Every step gives one token, so that the last drafts are as late as they can be."""
    bias = dict.fromkeys(BANNED, -1e9)
    return Sampling(max_new_tokens=tokens, temperature=temperature, logit_bias=bias)


def random_request(draw: random.Random, vocab: int) -> Request:
    chain = draw.random() < 0.5
    strategy: Any = Speculative(Full(chain, draw.random() < 0.5), nodes=draw.randint(1, 12))
    if draw.random() < 0.15:
        strategy = Plain()
    prompt = [draw.randrange(vocab) for _ in range(draw.choice([1, 2, draw.randint(3, 40)]))]
    return Request(prompt, strategy, vain(draw.randint(1, 16), draw.choice([0.0, 1.0])))


def predicted(models: dict[str, Model], request: Request, batch: int = 1) -> int:
    demand = budget.demand_of(request, models["target"])
    names = request.strategy.models
    drafts = [sizes_of(models[name]) for name in names]
    found = compute_footprint(sizes_of(models["target"]), drafts, demand, batch)
    return found.total - found.weights


@pytest.mark.parametrize(("make", "count"), [(toy, 150), (llama, 50)])
def test_predicted_bytes_are_those_that_are_taken(make: Any, count: int) -> None:
    draw = random.Random(5)
    models = make()
    before = torch.get_default_dtype()
    torch.set_default_dtype(models["target"].dtype)  # of the laws
    try:
        for _ in range(count):
            request = random_request(draw, models["target"].vocab)
            want = predicted(models, request)
            taken, _ = run(models, request, limit=1 << 40)
            assert taken == want, (request.strategy, request.sampling)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("make", [toy, llama])
def test_a_draft_model_and_a_long_prompt_stay_below(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains of a draft model are rarely as long as they may be to the very end."""
    monkeypatch.setattr(budget, "CHUNK", 512)
    models = make()
    for length, prompt, temperature in ((3, 90, 1.0), (6, 9, 1.0), (5, 40, 0.0)):
        strategy = Speculative(Draft(length=length), nodes=length)
        sampling = Sampling(max_new_tokens=20, temperature=temperature)
        request = Request([i % 20 for i in range(prompt)], strategy, sampling)
        want = predicted(models, request)
        taken, _ = run(models, request, limit=1 << 40)
        assert 0.9 * want < taken <= want


def test_requests_in_one_forward_add_up() -> None:
    models = toy()
    requests = [Request([i, 1, 2, 3], Speculative(Full(), nodes=5), vain(20)) for i in range(4)]
    want = predicted(models, requests[0], batch=4)
    taken, _ = run(models, *requests, limit=1 << 40)
    assert taken == want


def test_pieces_of_a_long_prompt_are_counted() -> None:
    demand = Demand(prompt=1025, length=1100, nodes=4, chunk=512)
    sizes = memory.Sizes(0, 0, 0, 0, 1)
    assert compute_footprint(sizes, (), demand).masks == max(512 * 512, (512 + 5) * (1024 + 5))
    demand = replace(demand, prompt=1027)
    assert compute_footprint(sizes, (), demand).masks == 512 * 1024
    plain = Demand(prompt=1, length=50, nodes=0)
    assert compute_footprint(sizes, (), plain).masks == 0


def test_more_nodes_and_longer_texts_never_take_less() -> None:
    target, draft = (sizes_of(model) for model in toy().values())
    for chains in (False, True):
        demand = Demand(prompt=5, length=40, nodes=0, drawn=True, chains=chains)
        by_nodes = [
            compute_footprint(target, [draft], replace(demand, nodes=n)).total for n in range(30)
        ]
        by_length = [
            compute_footprint(target, [draft], replace(demand, nodes=4, length=n)).total
            for n in range(6, 99)
        ]
        assert by_nodes == sorted(by_nodes) and by_length == sorted(by_length)
        assert len(set(by_nodes)) == 30 or chains


# --- a budget


def test_drafts_give_way_before_the_length() -> None:
    target, draft = (sizes_of(model) for model in toy().values())
    demand = Demand(prompt=10, length=60, nodes=12, drawn=True)
    seen = []
    for available in range(0, compute_footprint(target, [draft], demand).total + 200, 97):
        found = find_room(target, [draft], demand, available)
        if isinstance(found, int):
            assert found > available
            assert isinstance(find_room(target, [draft], demand, found), Room)
            assert isinstance(find_room(target, [draft], demand, found - 1), int)
            continue
        seen.append(found)
        assert found.bytes <= available and found.rows == rows_of(
            replace(demand, nodes=found.nodes, length=found.length)
        )
        if found.length < 60:
            assert not found.nodes
            longer = replace(demand, nodes=0, length=found.length + 1)
            assert compute_footprint(target, [draft], longer).total > available
        elif found.nodes < 12:
            more = replace(demand, nodes=found.nodes + 1)
            assert compute_footprint(target, [draft], more).total > available
    assert seen[0].length < 15 and not seen[0].nodes
    assert seen[-1].length == 60 and seen[-1].nodes == 12
    assert any(found.length == 60 and not found.nodes for found in seen)
    assert len({found.nodes for found in seen}) > 8


@pytest.mark.parametrize("make", [toy, llama])
def test_a_budget_is_kept_and_changes_no_greedy_token(make: Any) -> None:
    models = make()
    weights = sum(model.weight_bytes for model in models.values())
    prompt = [1, 2, 3, 1, 2]
    sampling = Sampling(max_new_tokens=30)

    def asked() -> Request:
        return Request(prompt, Speculative(Draft(length=6), nodes=6), sampling)

    plain = run(models, Request(prompt, Plain(), sampling), limit=None)[1][0].ctx.output
    whole = predicted(models, asked())
    drafted = set()
    for share in (1.0, 0.9, 0.8, 0.7, 0.55, 0.4):
        taken, (live,) = run(models, asked(), limit=weights + int(share * whole))
        output = live.ctx.output
        assert taken <= share * whole and output == plain[: len(output)]
        assert len(output) == 30 or (live.reason == "length" and not live.ctx.stats.drafted)
        drafted.add(live.ctx.stats.drafted)
    assert 0 in drafted and len(drafted) > 2


def test_the_law_is_kept_within_a_budget() -> None:
    strategy = Speculative(Draft(length=2), nodes=2)
    models = laws.world(strategy)
    request = Request(laws.PROMPT, strategy, Sampling(temperature=1.0, max_new_tokens=3))
    most = predicted(models, request)

    def small(engine: Engine) -> None:
        engine.admission.budget = most - 1

    assert laws.check_law(strategy, tokens=3).depth == 2
    assert laws.check_law(strategy, tokens=3, prepare=small).depth == 1


def test_requests_wait_for_room() -> None:
    models = toy()
    requests = [Request([i, 1, 2], Speculative(Full(), nodes=5), vain(20)) for i in range(6)]
    one = predicted(models, requests[0])
    alone = [run(models, request, limit=None)[1][0].ctx.output for request in requests]
    taken, lives = run(models, *requests, limit=2 * one + one // 2)
    assert one < taken <= 2 * one
    assert [live.ctx.output for live in lives] == alone


def test_a_budget_that_is_too_small_is_refused_with_one_that_would_do() -> None:
    lm = tiny.lm()
    for model in lm.models.values():
        model.backend = None  # type: ignore[attr-defined]
    weights = sum(model.weight_bytes for model in lm.models.values())
    assert weights == sum(p.numel() * 4 for m in lm.models.values() for p in _unique(m))
    with pytest.raises(BadConfig, match=r"budget=1000: must be at least \d+ bytes") as caught:
        lm.limit(budget=1000)
    enough = int(str(caught.value).split()[-6])
    assert weights < enough < weights + 4000
    lm.limit(budget=enough)
    assert len(lm.generate([5], "draft", max_new_tokens=9).tokens) == 1
    with pytest.raises(BadConfig, match=r"too small for a prompt of 40 tokens.* \d+ bytes") as told:
        lm.generate([5] * 40, "ngram", max_new_tokens=9)
    assert "\n" not in str(told.value)
    lm.limit(
        budget=next(
            int(word) for word in str(told.value).split() if word.isdigit() and len(word) > 4
        )
    )
    assert len(lm.generate([5] * 40, "ngram", max_new_tokens=9).tokens) == 1
    for wrong in (0, -1):
        with pytest.raises(BadConfig, match=f"budget={wrong}: must be above 0"):
            lm.limit(budget=wrong)


def _unique(model: Model) -> list[Any]:
    hf = model.hf  # type: ignore[attr-defined]
    return list(dict.fromkeys([*hf.parameters(), *hf.buffers()]))


@dataclass(frozen=True)
class Several(Plain):
    """A strategy that might open further texts."""

    one_text = False


def test_what_cannot_be_told_beforehand_is_refused_by_name() -> None:
    lm = LM(Toy(8))
    lm.limit(budget=1 << 30)
    with pytest.raises(Unsupported, match=r"within a budget cannot run on toy.*leave the budget"):
        lm.generate([1, 2], Several())
    model = Toy(8)
    cache = model.cache()

    class Elsewhere(type(cache)):  # type: ignore[misc]
        any_length = False

    model.cache = lambda *_: Elsewhere(model.layout, model.dtype, model.device)  # type: ignore[method-assign]
    engine = Engine({"target": model})
    engine.admission.budget = 1 << 30
    with pytest.raises(Unsupported, match=r"backend='torch'"):
        engine.add(Request([1, 2], Plain()))


@pytest.mark.parametrize(("method", "copies"), [("confidence", 1), ("freedave:drafts=3", 4)])
@pytest.mark.parametrize("block", [0, 3])
def test_a_canvas_takes_what_is_predicted(method: str, copies: int, block: int) -> None:
    """All its rows, and those of the canvases beside it; a smaller budget makes it shorter."""
    model = ToyCanvas(sharpness=9.0, block=block)
    demand = Demand(prompt=2, length=12, nodes=0, canvases=copies)
    found = compute_footprint(sizes_of(model), (), demand)
    asked = [denoised(model, method, (0, 1), max_new_tokens=10) for _ in range(2)]
    peak, (live,) = run({"target": model}, asked[0], limit=found.total)
    assert len(live.ctx.output) == 10
    assert found.rows / 2 < peak <= found.total - found.laws
    if copies == 1 and not block:
        assert peak == found.rows + found.logits
    peak, (live,) = run({"target": model}, asked[1], limit=found.total // 2)
    assert 0 < len(live.ctx.output) < 10 and peak <= found.total // 2
