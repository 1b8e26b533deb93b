"""The engine: admission, failures that stay alone, interruption, branches, chunks and the numbers
it keeps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from foretell.core.context import Context
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Commit, Drop, Finish, Fork, Kept, Sampling, Steps
from foretell.engine import scheduler as schedule
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.errors import BadConfig, PromptTooLong, RequestFailed, Unsupported
from foretell.spec import resolve_method
from foretell.speculation.strategy import Strategy
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from tests import laws


def start(
    strategy: Strategy, prompt: Sequence[int], engine: Engine | None = None, **options: Any
) -> tuple[Engine, Live]:
    """A request in an engine of toys."""
    engine = engine or Engine(
        {"target": Toy(8, copy=1.0), "draft": Toy(8, noise=0.5, copy=1.0, name="small")}
    )
    return engine, engine.add(Request(prompt, strategy, Sampling(**options)))


# --- a strategy that is no speculation


@dataclass(frozen=True)
class Beam(Strategy):
    """Beam search: the `width` likeliest texts, all extended in one forward."""

    width: int = 3

    def run(self, ctx: Context) -> Steps:
        (first,) = yield Fork(0, 1)  # branch 0 stays as it is: nothing is final before the end
        beams: list[tuple[float, int]] = [(0.0, first)]
        kept = Kept([], None)
        while not kept.reason:
            replies = yield [Ask(TokenTree(ctx.branches[b].tokens[-1]), branch=b) for _, b in beams]
            rows = {b: reply.logits for (_, b), reply in zip(beams, replies, strict=True)}
            logs = {b: r[0].log_softmax(-1).tolist() for b, r in rows.items()}
            options = [(score + p, b, t) for score, b in beams for t, p in enumerate(logs[b])]
            chosen = sorted(options, reverse=True)[: self.width]
            beams, parents = [], [b for _, b in beams]
            for b in parents:
                heirs = [(score, t) for score, parent, t in chosen if parent == b]
                if not heirs:
                    yield Drop(b)
                    continue
                more = (yield Fork(b, len(heirs) - 1)) if len(heirs) > 1 else []
                for handle, (score, t) in zip([b, *more], heirs, strict=True):
                    kept = yield Commit([t], rows[b], branch=handle)
                    beams.append((score, handle))
        yield Finish(max(beams)[1], kept.reason)


def beam_by_loops(toy: Toy, prompt: Sequence[int], width: int, length: int) -> list[int]:
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(length):
        options = []
        for score, text in beams:
            row = laws.row(toy, [*prompt, *text])
            total = math.log(sum(math.exp(x) for x in row))
            options += [(score + x - total, (*text, t)) for t, x in enumerate(row)]
        beams = sorted(options, reverse=True)[:width]
    return list(max(beams)[1])


@pytest.mark.parametrize("width", [1, 2, 5])
def test_beam_search_needs_nothing_of_the_speculative_loop(width: int) -> None:
    differs = False
    for seed in range(12):
        toy = Toy(5, seed)
        engine = Engine({"target": toy})
        lives = [
            engine.add(Request(p, Beam(width), Sampling(max_new_tokens=6)))
            for p in ([1, 2], [3], [4, 0, 1, 2])
        ]
        told: dict[int, list[int]] = {live.index: [] for live in lives}
        caches = []
        while engine.live:
            for event in engine.step():
                told[event.request] += event.tokens
            caches += [c for live in lives for c in live.caches.values()]
        for live in lives:
            assert live.error is None and live.reason == "length"
            want = beam_by_loops(toy, live.ctx.request.prompt, width, 6)
            assert live.ctx.output == want == told[live.index]
            differs = differs or want != beam_by_loops(toy, live.ctx.request.prompt, 1, 6)
            assert live.ctx.stats.calls == {"target": 6}, "all beams share a forward"
        assert caches and all(c.sharers == [0] for c in caches), "rows were left behind"
    assert differs == (width > 1)


@dataclass(frozen=True)
class Handover(Strategy):
    """Writes on a second branch, drops the first and goes on."""

    def run(self, ctx: Context) -> Steps:
        reply = yield Ask(TokenTree(ctx.tokens[-1]))
        (other,) = yield Fork(0, 1)
        yield Commit([1], reply.logits, branch=other, sources=["one"])
        yield Drop(0)
        yield Commit([2], reply.logits, branch=other, sources=["two"])
        yield Finish(other)


def test_events_tell_the_tokens_of_the_branch_that_is_left_once_and_in_order() -> None:
    engine, live = start(Handover(), [3])
    events = list(engine.run())
    assert live.error is None and live.ctx.output == [1, 2]
    assert [t for e in events for t in e.tokens] == [1, 2]


@dataclass(frozen=True)
class Both(Strategy):
    """Asks two different trees of one branch at once."""

    def run(self, ctx: Context) -> Steps:
        trees = [
            TokenTree(ctx.tokens[-1]).chain([1, 2]),
            TokenTree(ctx.tokens[-1]).chain([3]).chain([1]),
        ]
        replies = yield [Ask(tree, rows=range(3)) for tree in trees]
        for tree, reply in zip(trees, replies, strict=True):
            toy = ctx.models["target"]
            assert isinstance(toy, Toy)
            for node, row in enumerate(reply.logits.tolist()):
                assert row == laws.row(toy, [*ctx.tokens, *tree.tokens_to(node)])
        yield Commit([0], replies[0].logits)
        yield Finish()


def test_two_asks_of_one_branch_are_answered_one_after_the_other() -> None:
    engine, live = start(Both(), [5, 6])
    laws.finish(engine, live)
    assert live.ctx.output == [0]


@dataclass(frozen=True)
class Deep(Strategy):
    """Needs another kind of forward than everybody else: its states are asked for."""

    def run(self, ctx: Context) -> Steps:
        while True:
            reply = yield Ask(TokenTree(ctx.tokens[-1]), taps=(0,))
            kept = yield Commit([int(reply.logits[0].argmax())], reply.logits)
            if kept.reason:
                return


@pytest.mark.parametrize("deep_first", [True, False])
def test_requests_of_another_kind_take_turns(deep_first: bool) -> None:
    engine = Engine({"target": Toy(8)})
    kinds: list[Strategy] = [Deep(), Plain(), Plain()] if deep_first else [Plain(), Plain(), Deep()]
    lives = [engine.add(Request([1], kind, Sampling(max_new_tokens=20))) for kind in kinds]
    for _ in range(20):
        engine.step()
    assert all(len(live.ctx.output) >= 8 for live in lives), "somebody waits for the others to end"


# --- failures stay alone


class Failing:
    """A processor that breaks when the text has grown to a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] >= self.length:
            raise ValueError("no more")
        return scores


def test_one_request_breaks_and_the_others_go_on() -> None:
    prompts = [[1, 2, 3], [2, 3, 4, 5], [1, 2, 3]]
    alone = []
    for prompt in (prompts[0], prompts[2]):
        engine, live = start(laws.build("token-recycling"), prompt, max_new_tokens=12)
        laws.finish(engine, live)
        alone.append(live.ctx.output)
    engine, first = start(laws.build("token-recycling"), prompts[0], max_new_tokens=12)
    _, broken = start(
        laws.build("draft"),
        prompts[1],
        engine,
        max_new_tokens=12,
        temperature=1.0,
        logits_processors=[Failing(7)],
    )
    _, last = start(laws.build("token-recycling"), prompts[2], engine, max_new_tokens=12)
    reasons = {e.request: e.done for e in engine.run() if e.done}
    assert reasons == {0: "length", 1: "error", 2: "length"}
    assert isinstance(broken.error, RequestFailed) and isinstance(
        broken.error.__cause__, ValueError
    )
    assert "no more" in str(broken.error) and "\n" not in str(broken.error)
    assert [first.ctx.output, last.ctx.output] == alone and not broken.caches and not engine.live


@dataclass(frozen=True)
class Asking(Strategy):
    """Yields one wrong ask."""

    wrong: str = ""

    def run(self, ctx: Context) -> Steps:
        yield Ask(TokenTree(ctx.tokens[-1]))
        if self.wrong == "root":
            yield Ask(TokenTree((ctx.tokens[-1] + 1) % 8))
        elif self.wrong == "branch":
            yield Ask(TokenTree(ctx.tokens[-1]), branch=7)
        else:
            yield Ask(TokenTree(ctx.tokens[-1]), model="unheard-of")


@pytest.mark.parametrize("wrong", ["root", "branch", "model"])
def test_a_wrong_ask_ends_its_own_request_only(wrong: str) -> None:
    engine, good = start(Plain(), [1, 2], max_new_tokens=6)
    _, bad = start(Asking(wrong), [1, 2], engine)
    list(engine.run())
    assert good.error is None and len(good.ctx.output) == 6
    assert isinstance(bad.error, RequestFailed) and bad.reason == "error" and not bad.caches


@pytest.mark.parametrize("spec", ["plain", "token-recycling", "draft:drafts=2", "ngram"])
@pytest.mark.parametrize("when", [1, 2, 5, 8])
def test_an_interrupted_forward_loses_nothing(
    spec: str, when: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, options = laws.build(spec), {"max_new_tokens": 15, "temperature": 1.0}
    engine, live = start(strategy, [1, 2, 3, 1, 2], **options)
    laws.finish(engine, live)
    want = live.ctx.output
    count, real = itertools.count(1), Toy.run

    def run(self: Toy, *args: Any) -> Any:
        result = real(self, *args)
        if next(count) == when:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(Toy, "run", run)
    engine, live = start(strategy, [1, 2, 3, 1, 2], **options)
    told: list[int] = []
    interrupted = 0
    while engine.live:
        try:
            told += [t for event in engine.step() for t in event.tokens]
        except KeyboardInterrupt:
            interrupted += 1
    assert interrupted == 1 and live.ctx.output == want and told == want


def test_leaving_the_loop_early_ends_what_is_in_flight() -> None:
    engine, live = start(laws.build("draft"), [1, 2, 3], max_new_tokens=50)
    run = engine.run()
    next(run)
    assert live.caches
    run.close()
    assert not engine.live and not live.caches
    _, again = start(Plain(), [1], engine, max_new_tokens=3)
    laws.finish(engine, again)
    assert len(again.ctx.output) == 3


# --- admission, limits, chunks


def test_what_cannot_be_served_is_refused_before_a_forward() -> None:
    engine = Engine({"target": Toy(8, context=10)})
    wrong: list[tuple[list[Any], type[Exception]]] = [
        ([], BadConfig),
        ([8], BadConfig),
        ([-1], BadConfig),
        ([1.5], BadConfig),
        ([1] * 10, PromptTooLong),
    ]
    for prompt, error in wrong:
        with pytest.raises(error) as caught:
            engine.add(Request(prompt, Plain()))
        assert "\n" not in str(caught.value)
    with pytest.raises(BadConfig, match="stop"):
        engine.add(Request([1], Plain(), Sampling(stop=("a",))))
    with pytest.raises(BadConfig, match="vocabulary"):
        engine.add(Request([1], Plain(), Sampling(logit_bias={99: 1.0})))
    assert not engine.live and engine.models["target"].calls == 0


@pytest.mark.parametrize("spec", ["plain", "token-recycling", "draft", "ngram"])
def test_zero_and_one_new_tokens(spec: str) -> None:
    for count in (0, 1):
        engine, live = start(laws.build(spec), [1, 2, 1, 2], max_new_tokens=count)
        laws.finish(engine, live)
        assert len(live.ctx.output) == count and live.reason == "length"
        assert live.ctx.stats.drafted == 0 and live.ctx.stats.calls.get("target", 0) == count


@pytest.mark.parametrize("spec", ["plain", "token-recycling", "draft", "ngram"])
def test_the_context_is_filled_and_not_exceeded(spec: str) -> None:
    models = {
        "target": Toy(8, context=20, copy=1.0),
        "draft": Toy(8, context=20, noise=0.4, copy=1.0, name="small"),
    }
    engine, live = start(laws.build(spec), [1, 2, 3, 1, 2, 3], Engine(models), max_new_tokens=500)
    laws.finish(engine, live)
    assert len(live.ctx.tokens) == 20 and live.reason == "length"


def test_long_prompts_go_in_by_chunks_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [laws.prompts(1, 8)[0] * n for n in (1, 9, 4)]
    alone = []
    for prompt in prompts:
        engine, live = start(laws.build("ngram"), prompt, max_new_tokens=8)
        laws.finish(engine, live)
        alone.append(live.ctx.output)
    long = [1, 2, 3, 4, 5, 6, 7, 0] * 5
    engine, live = start(Plain(), long, max_new_tokens=4)
    laws.finish(engine, live)
    alone.append(live.ctx.output)
    for name, size in (("CHUNK", 3), ("LEAST", 3), ("STEP", 3)):
        monkeypatch.setattr(schedule, name, size)
    engine = Engine({"target": Toy(8, copy=1.0)})
    lives = [start(laws.build("ngram"), prompt, engine, max_new_tokens=8)[1] for prompt in prompts]
    lives.append(start(Plain(), long, engine, max_new_tokens=4)[1])
    laws.finish(engine, *lives)
    assert [live.ctx.output for live in lives] == alone
    assert lives[-1].ctx.stats.calls["target"] == 12 + 1 + 3, (
        "39 pending tokens: 12 chunks, then with the last rows"
    )


# --- numbers


@pytest.mark.parametrize("spec", ["plain", "token-recycling", "draft:drafts=2", "ngram"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_numbers_add_up(spec: str, temperature: float) -> None:
    engine, live = start(
        laws.build(spec), [1, 2, 3, 1, 2], max_new_tokens=40, temperature=temperature
    )
    sources = [s for event in engine.run() for s in event.sources]
    stats = live.ctx.stats
    assert stats.tokens == len(live.ctx.output) == len(sources) == 40 and stats.prompt_tokens == 5
    assert stats.calls["target"] == stats.steps + 1
    assert stats.accepted == sum(s != "target" for s in sources)
    assert stats.mat == pytest.approx((40 - stats.first_tokens) / stats.steps)
    assert (
        sum(good for _, good in stats.by_depth) >= stats.accepted
        and stats.drafted >= stats.accepted
    )
    assert all(good <= tested for tested, good in stats.by_depth)
    assert (
        stats.total_s >= stats.ttft_s > 0
        and stats.target_s > 0
        and stats.to_dict()["MAT"] == stats.mat
    )
    assert (stats.calls.get("draft", 0) > 0) == spec.startswith("draft")
    if spec == "plain":
        assert stats.mat == 1.0 and stats.drafted == 0 and stats.first_tokens == 1


@pytest.mark.parametrize("spec", ["plain", "token-recycling", "draft:drafts=2"])
def test_logprobs_are_the_targets_own(spec: str) -> None:
    models = laws.world(laws.build(spec), 8, copy=2.0)
    toy = models["target"]
    assert isinstance(toy, Toy)
    engine, live = start(
        laws.build(spec),
        [1, 2, 3, 1, 2],
        Engine(models),
        max_new_tokens=12,
        temperature=0.7,
        repetition_penalty=1.2,
        logprobs=3,
    )
    laws.finish(engine, live)
    assert len(live.logprobs) == len(live.ctx.output)
    for n, (token, (value, best)) in enumerate(zip(live.ctx.output, live.logprobs, strict=True)):
        row = torch.tensor(laws.row(toy, live.ctx.tokens[: 5 + n])).log_softmax(-1)
        assert value == pytest.approx(float(row[token]), abs=1e-5)
        assert [t for t, _ in best] == row.topk(3).indices.tolist()


@pytest.mark.parametrize("spec", ["token-recycling", "draft:drafts=2"])
def test_a_model_without_trees_refuses_methods_that_branch(spec: str) -> None:
    models = {"target": Toy(4), "draft": Toy(4, noise=0.5)}
    models["target"].caps = frozenset()
    engine = Engine(models)
    with pytest.raises(Unsupported, match=r"tree|rows"):
        engine.add(Request([1], resolve_method(spec)[1], name=spec))
    assert engine.add(Request([1], resolve_method("ngram")[1])) and not models["target"].calls
