"""SWIFT: what is left out, the search beside the drafts, and the defects of the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from foretell.cache.cache import Cache
from foretell.core.context import Context
from foretell.core.drafter import Drafting
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Sampling
from foretell.drafters.model.without_replacement import Urn, widen_node
from foretell.drafters.own import swift
from foretell.drafters.own.gaussian import Surrogate
from foretell.drafters.own.swift import State, Swift, sibling_count
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.errors import BadConfig, Unsupported
from foretell.models.decoder.decoder import Decoder
from foretell.speculation.strategy import Speculative
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from foretell.testing.toy_layers import ToyLayers
from tests import laws
from tests.cache.users import run
from tests.models.decoder.families import tiny

SPECS = ["swift:window=2,context=3,length=2,skip=0.5"]
PROMPT = [1, 2, 3, 1, 2]
GREEDY = Sampling(max_new_tokens=28)
SAMPLED = Sampling(max_new_tokens=24, temperature=0.8, seed=3)


class Deep(ToyLayers):
    layers = 6
    fading = 1.0  # every layer counts


@dataclass(frozen=True)
class Watched(Swift):
    """Keeps its states, and after each step the set in use with its score."""

    states: list[State] = field(default_factory=list, hash=False)
    starts: list[Any] = field(default_factory=list, hash=False)  # sets that requests began with
    history: list[tuple[float, Any]] = field(default_factory=list, hash=False)

    def start(self, ctx: Context) -> State:
        self.states.append(super().start(ctx))
        self.starts.append(self.states[-1].skip)
        return self.states[-1]

    def steps(self, ctx: Context, state: State, budget: int) -> Drafting:
        tree = yield from super().steps(ctx, state, budget)
        self.history.append((state.best, state.skip))
        return tree


def watched(model: Any = None, sampling: Sampling = GREEDY, **fields: Any) -> tuple[Watched, Live]:
    drafter = Watched(**{"window": 8, "length": 3, "bayes": 3, "enough": 1.0, **fields})
    model = model or Deep(8, seed=3)
    live = run({"target": model}, Request(PROMPT, Speculative(drafter, nodes=9), sampling))[0]
    return drafter, live


# --- what is left out


def test_first_and_last_layer_stay_and_sets_have_one_size() -> None:
    drafter, _ = watched(skip=0.4)
    state = drafter.states[0]
    halves = {(layer, half) for layer in (1, 2, 3, 4) for half in ("attention", "mlp")}
    assert set(state.halves) == halves and state.tried == len(state.points) > 5
    assert all(point.sum() == 3 and set(point) == {0.0, 1.0} for point in state.points)
    assert len({tuple(point) for point in state.points}) > 5
    assert drafter.starts[0] == {half for half in halves if half[0] % 2}, "every odd layer"


def test_what_runs_is_what_is_not_left_out() -> None:
    state = State([], 4, frozenset())
    assert state.parts_without(frozenset()) == (0, 1, 2, 3)
    skip = frozenset({(1, "attention"), (2, "attention"), (2, "mlp")})
    assert state.parts_without(skip) == (0, (1, "mlp"), 3)


def test_with_nothing_left_out_every_draft_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(State, "parts_without", lambda self, skip: tuple(range(self.layers)))
    drafter, live = watched(sure=0.0)
    assert live.ctx.stats.accepted > live.ctx.stats.steps
    assert live.ctx.stats.by_depth[0][1] == live.ctx.stats.drafts
    assert {score for score, _ in drafter.history} == {-1.0, 1.0}


# --- trees


def test_the_surer_the_fewer_siblings() -> None:
    assert [sibling_count(chance) for chance in (0.96, 0.95, 0.81, 0.8, 0.51, 0.5, 0.1)] == [
        3, 5, 5, 8, 8, 10, 10,
    ]  # fmt: skip


def test_sampling_options_hold_on_every_branch_of_verification() -> None:
    """The reference's last branch takes a bare softmax."""
    laws.check_law(laws.build("swift:length=2", nodes=4), "top-p", tokens=2)


def swayed(
    ctx: Context,
    tree: TokenTree,
    node: int,
    row: torch.Tensor,
    width: Callable[[float], int],
    room: int,
    source: str,
    best: bool,
) -> tuple[list[int], float]:
    """`widen`, where the token drawn first decides how many are drawn, as in the reference."""
    urn = Urn(ctx.sampler.law(row, [*ctx.output, *tree.tokens_to(node)]))
    first = urn.add_draw(ctx, tree, node, len(tree), source)
    chance = float(urn.q[tree.tokens[first]])
    nodes = [first]
    if chance < 0.4 and room > 1:
        nodes.append(urn.add_draw(ctx, tree, node, len(tree), source))
        tree.tries[node].reverse()
    return nodes, chance


def test_widths_that_a_draw_decides_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swift, "widen_node", swayed)
    with pytest.raises(AssertionError, match="the law of the first"):
        laws.check_law(laws.build("swift:length=1", nodes=4), "plain", tokens=2)
    monkeypatch.setattr(swift, "widen_node", widen_node)
    laws.check_law(laws.build("swift:length=1", nodes=4), "plain", tokens=2)


# --- the search


def test_the_best_set_never_gets_worse_and_is_what_drafts() -> None:
    drafter, live = watched()
    scores = [score for score, _ in drafter.history]
    assert scores == sorted(scores) and len(set(scores)) > 2
    state = drafter.states[0]
    assert state.best == max([*state.scores, state.best]) and live.ctx.stats.accepted


def test_every_few_tries_the_process_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    known = []

    class Asked(Surrogate):
        def __init__(self, points: np.ndarray, values: np.ndarray):
            known.append(len(points))
            super().__init__(points, values)

    monkeypatch.setattr(swift, "Surrogate", Asked)
    drafter, _ = watched()
    assert known[:3] == [2, 5, 8] and drafter.states[0].tried > 8


@pytest.mark.parametrize("fields", [{"tries": 3}, {"patience": 2}, {"enough": 0.0}])
def test_a_search_ends_and_gives_up_its_branch(fields: dict[str, Any]) -> None:
    drafter = Watched(**{"window": 4, "length": 3, **fields})
    engine = Engine({"target": Deep(8, seed=3)})
    live = engine.add(Request(PROMPT, Speculative(drafter, nodes=9), GREEDY))
    while not (drafter.states and drafter.states[0].over):
        engine.step()
    engine.step()
    tried = drafter.states[0].tried
    assert list(live.ctx.branches) == [0] and {key[1] for key in live.caches} == {0}
    laws.finish(engine, live)
    assert tried == drafter.states[0].tried and 1 <= tried <= 3 + 20 * (
        fields.keys() == {"patience"}
    )


def test_the_search_leaves_the_rows_of_verification_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And copies no cache, where the reference clones it for every draft and every try."""

    def forbidden(*args: Any, **options: Any) -> Any:
        raise AssertionError("a cache was copied")

    monkeypatch.setattr(Cache, "fork", forbidden)
    monkeypatch.setattr(Cache, "share_rows", forbidden)
    model = Deep(8, seed=3)
    for interval in (1, 4096):
        engine = Engine({"target": model})
        strategy = Speculative(Swift(window=4, context=4, interval=interval, length=2), nodes=9)
        live = engine.add(Request(PROMPT, strategy, Sampling(max_new_tokens=24)))
        while len(live.ctx.output) < 12:
            engine.step()
        assert live.ctx.output and engine.live and (len(live.caches) == 2) == (interval == 1)
        laws.check_cache(live.caches["target", 0], model, list(live.ctx.tokens))
        engine.end(live)


def test_sets_belong_to_their_requests() -> None:
    """The reference has one set in its module, for all requests of a process."""
    alone = {
        sampling.seed: watched(sampling=sampling)[1].ctx.output for sampling in (GREEDY, SAMPLED)
    }
    drafter = Watched(window=8, length=3, bayes=3, enough=1.0)
    strategy = Speculative(drafter, nodes=9)
    requests = [Request(PROMPT, strategy, s, tenant=str(s.seed)) for s in (GREEDY, SAMPLED)]
    lives = run({"target": Deep(8, seed=3)}, *requests)
    for live in lives:
        assert live.ctx.output == alone[live.ctx.request.sampling.seed]
    first, second = drafter.states
    assert first.scores != second.scores and first.points is not second.points


def test_the_next_request_of_a_tenant_begins_with_the_best_set() -> None:
    drafter = Watched(window=4, length=3, tries=5)
    engine = Engine({"target": Deep(8, seed=3)})
    for tenant in ("a", "a", "b"):
        live = engine.add(Request(PROMPT, Speculative(drafter, nodes=9), GREEDY, tenant=tenant))
        laws.finish(engine, live)
    first, second, other = drafter.starts
    assert first == other and second == drafter.states[0].skip != first


def test_a_transformers_tokens_are_those_of_plain_decoding() -> None:
    model = Decoder(tiny("llama", num_hidden_layers=4), "llama")
    text = [(11 * i + i * i) % 90 for i in range(9)]
    sampling = Sampling(max_new_tokens=16)
    plain = run({"target": model}, Request(text, Plain(), sampling))[0].ctx.output
    strategy = laws.build("swift:window=3,context=4,length=3", nodes=8)
    for options in ({"chunk": 4}, {"preempt": 9}):
        live = run({"target": model}, Request(text, strategy, sampling), **options)[0]
        assert live.ctx.output == plain and live.ctx.stats.drafted


def test_rows_that_were_lost_are_read_again_by_all_layers() -> None:
    want = watched(sampling=SAMPLED)[1].ctx.output
    request = Request(
        PROMPT, Speculative(Swift(window=8, length=3, bayes=3, enough=1.0), nodes=9), SAMPLED
    )
    for preempt in (8, 19):
        assert run({"target": Deep(8, seed=3)}, request, preempt=preempt)[0].ctx.output == want


# --- refusals


def test_models_with_nothing_to_leave_out_are_refused() -> None:
    class Shallow(ToyLayers):
        layers = 2

    request = Request(PROMPT, Speculative(Swift()), GREEDY)
    with pytest.raises(BadConfig, match="0 halves between the first and the last"):
        run({"target": Shallow(8)}, request)
    for model in (Toy(8), Decoder(tiny("gemma2"), "gemma2")):
        with pytest.raises(Unsupported, match=r"layers|parts"):
            run({"target": model}, request)


def test_best_tokens_draw_nothing_and_leave_a_seed_its_tokens() -> None:
    strategy = laws.build("swift:window=2,context=3,length=2,skip=0.5,best=yes")
    assert isinstance(strategy, Speculative) and not strategy.drafter.draws
    laws.check_seeds(strategy)
    laws.check_law(strategy, "top-p", 2)
