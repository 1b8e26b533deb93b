"""Who takes part in the next forward: nobody waits for others' texts, and any plan gives the same
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from foretell.cache.job import Job
from foretell.core.context import Context
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Commit, Open, Sampling, Steps
from foretell.engine import scheduler as schedule
from foretell.engine.engine import Engine
from foretell.engine.live import Live, OpenAsk
from foretell.engine.scheduler import FairPlan, Planned, Waiting
from foretell.speculation.costs import Costs
from foretell.speculation.strategy import Strategy
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from foretell.testing.toy_canvas import ToyCanvas
from tests import laws
from tests.diffusion.worlds import filled


class Wide(Toy):
    """Says that it can do everything, and counts the tokens it computes."""

    caps = Toy.caps | {"taps", "layers"}
    tokens = 0

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        first: Job,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        self.tokens += ids.shape[1]
        logits, _ = super().run(ids, positions, rows, first, ())
        return logits, {tap: torch.zeros(ids.shape[1], 2) for tap in taps}


@dataclass(frozen=True)
class Special(Strategy):
    """Asks for another kind of forward than everybody else."""

    kind: str

    def run(self, ctx: Context) -> Steps:
        while True:
            tree = TokenTree(ctx.tokens[-1])
            ask = Ask(tree)
            if self.kind == "taps":
                ask.taps = (0,)
            elif self.kind == "layers":
                ask.layers = (0,)
            elif self.kind == "states":
                ask.states = torch.zeros(1, 2)
            reply = yield ask
            kept = yield Commit([int(reply.logits[0].argmax())], reply.logits)
            if kept.reason:
                return


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16 tokens."""
    for name, size in (("CHUNK", 16), ("DRAFT_CHUNK", 8), ("LEAST", 2), ("STEP", 4)):
        monkeypatch.setattr(schedule, name, size)


LONG = [1, 2, 3, 4, 5, 6, 7, 0] * 20


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", ["taps", "layers", "states"])
def test_a_long_prompt_does_not_starve_other_kinds_of_asks(kind: str) -> None:
    engine = Engine({"target": Wide(8)}, plan=FairPlan(8))
    long = engine.add(Request(LONG, Plain(), Sampling(max_new_tokens=2)))
    other = engine.add(Request([1], Special(kind), Sampling(max_new_tokens=30)))
    plain = engine.add(Request([1], Plain(), Sampling(max_new_tokens=30)))
    while not long.ctx.output:
        engine.step()
        assert long.error is None and other.error is None
    assert len(other.ctx.output) >= 4 and len(plain.ctx.output) >= 4


@pytest.mark.usefixtures("small")
def test_a_long_prompt_of_a_draft_model_lets_the_target_run() -> None:
    draft = Wide(8, noise=0.3, name="draft")
    engine = Engine({"target": Wide(8), "draft": draft}, plan=FairPlan(8))
    running = engine.add(Request([1, 2], Plain(), Sampling(max_new_tokens=40)))
    engine.step()
    engine.add(Request(LONG, laws.build("draft"), Sampling(max_new_tokens=2)))
    while draft.tokens < len(LONG):
        engine.step()
    assert len(running.ctx.output) >= len(LONG) // 8 - 2


@pytest.mark.usefixtures("small")
def test_no_draft_step_waits_for_a_text_of_the_target() -> None:
    engine = Engine(
        {"target": Wide(8), "draft": Wide(8, noise=0.3, name="draft")}, plan=FairPlan(8)
    )
    engine.add(Request(LONG, Plain(), Sampling(max_new_tokens=2)))
    drafting = engine.add(Request([1, 2], laws.build("draft"), Sampling(max_new_tokens=60)))
    long = engine.live[0]
    while not long.ctx.output:
        engine.step()
    assert len(drafting.ctx.output) >= len(LONG) // 16 - 1


@pytest.mark.usefixtures("small")
def test_a_tree_larger_than_a_step_does_not_wait_for_texts() -> None:
    engine = Engine({"target": Wide(8)}, plan=FairPlan(8))
    engine.add(Request(LONG, Plain(), Sampling(max_new_tokens=2)))
    running = engine.add(Request([1, 2], Big(), Sampling(max_new_tokens=60)))
    long = engine.live[0]
    while not long.ctx.output:
        engine.step()
    assert len(running.ctx.output) >= 8


@pytest.mark.parametrize("between_tokens", [None, 0.0105, 0.02, 0.001])
@pytest.mark.parametrize("before", [0, 100])
def test_a_piece_of_a_text_takes_the_time_there_is(
    monkeypatch: pytest.MonkeyPatch, between_tokens: float | None, before: int
) -> None:
    """A forward of n tokens takes 6 ms, half a millisecond for each beyond the fourth, and 1 us for
    each row that each of them reads.
    """
    monkeypatch.setattr(schedule, "LEAST", 2)
    target = Wide(8)
    engine = Engine({"target": target})
    costs = Costs()
    costs.seconds = {1: 0.006, 4: 0.006, 64: 0.036, 1024: 0.516}
    costs.slope = {64: 64e-6}
    waiting = []
    for text in ([1], [2], [3], [4], LONG):
        live = engine.add(Request(text, Plain(), Sampling(max_new_tokens=4)))
        pending = max(0, engine.cache_of(live, "target", 0).sync(text) - before)
        waiting.append(OpenAsk(live, target, Ask(TokenTree(0)), live.root, 0, 0, pending))
    planned = FairPlan(between_tokens=between_tokens)(waiting, {(target, "torch", None): costs})
    steps, (text, piece) = planned[:4], planned[4]
    assert [tokens for _, tokens in steps] == [1, 1, 1, 1] and text is waiting[4]

    def takes(tokens: int) -> float:
        return 0.006 + 0.0005 * tokens + 1e-6 * tokens * (before + tokens / 2)

    allowed = between_tokens or schedule.STRETCH * takes(0)
    want = max([2, *(n for n in range(len(LONG)) if takes(n) <= allowed)])
    assert piece == min(want, text.pending)
    # Where nobody reads tokens as they come, only seconds that were asked for are a limit.
    for entry in waiting[:4]:
        entry.live.ctx.request.streamed = False
    plan = FairPlan(between_tokens=between_tokens)
    unread = plan(waiting, {(target, "torch", None): costs})[4][1]
    assert unread == (piece if between_tokens else min(schedule.CHUNK, text.pending))
    waiting[2].live.ctx.request.streamed = True
    assert plan(waiting, {(target, "torch", None): costs})[4][1] == piece
    alone = FairPlan()(waiting[4:], {(target, "torch", None): costs})
    assert alone[0][1] == schedule.CHUNK
    engine.run().close()


@dataclass(frozen=True)
class Big(Strategy):
    """Its trees have more nodes than a step may lack tokens."""

    def run(self, ctx: Context) -> Steps:
        while True:
            reply = yield Ask(TokenTree(ctx.tokens[-1]).chain([1, 2, 3, 4, 5, 6, 7, 0, 1]))
            kept = yield Commit([int(reply.logits[0].argmax())], reply.logits)
            if kept.reason:
                return


@dataclass(frozen=True)
class Reader(Strategy):
    """Never asks the target: it reads long texts with another model for ever, or writes."""

    text: int

    def run(self, ctx: Context) -> Steps:
        for _ in range(10):
            branch = yield Open([1] * self.text, "draft")
            for _ in range(1 if self.text > 9 else 40):
                reply = yield Ask(TokenTree(ctx.branches[branch].tokens[-1]), "draft", branch)
                yield Commit([int(reply.logits[0].argmax())], reply.logits, branch)


@pytest.mark.usefixtures("small")
def test_texts_get_through_where_others_take_steps_for_ever() -> None:
    """Also where the steps are of another model's group, and the target is never asked."""
    draft, judge = (Wide(8, noise=0.3, name=name) for name in ("draft", "judge"))
    engine = Engine({"target": Wide(8), "draft": draft, "judge": judge}, plan=FairPlan(8))
    reading = engine.add(Request([1], Reader(150), Sampling(max_new_tokens=2)))
    writing = engine.add(Request([1], Judging(), Sampling(max_new_tokens=2)))
    while writing.reason is None and reading.reason is None:
        engine.step()
    assert draft.tokens > 100


@dataclass(frozen=True)
class Judging(Strategy):
    """Writes on a quiet branch of the model `judge`."""

    def run(self, ctx: Context) -> Steps:
        branch = yield Open([1, 2], "judge")
        for _ in range(500):
            reply = yield Ask(TokenTree(ctx.branches[branch].tokens[-1]), "judge", branch)
            yield Commit([int(reply.logits[0].argmax())], reply.logits, branch)


# --- a plan of the user's own


@dataclass
class ShortestFirst:
    """Serves the ask with the fewest tokens to compute, alone; notes the costs it was given."""

    keys: set[Any] = field(default_factory=set)

    def __call__(self, waiting: Waiting, costs: Mapping[Any, Costs]) -> Planned:
        self.keys |= costs.keys()
        shortest = min(waiting, key=lambda entry: entry.size)
        return [(shortest, shortest.pending)]


def in_pieces(waiting: Waiting, costs: Mapping[Any, Costs]) -> Planned:
    """The newest request first, three tokens of its text at a time."""
    entry = waiting[-1]
    return [(entry, 3)]


PLANS: list[Callable[[], schedule.Plan]] = [ShortestFirst, lambda: in_pieces]


@pytest.mark.parametrize("make", PLANS)
def test_any_plan_gives_the_same_tokens(make: Callable[[], schedule.Plan]) -> None:
    specs = ["plain", "ngram", "draft:drafts=2", "token-recycling"]
    models = laws.world(laws.build("draft"), 8, copy=1.5)

    def outputs(plan: schedule.Plan | None) -> list[list[int]]:
        engine = Engine(models, (7,), plan)
        lives: list[Live] = []
        for i, prompt in enumerate(laws.prompts(12, 8)):
            sampling = Sampling(max_new_tokens=12, temperature=float(i % 2), seed=i)
            strategy = laws.build(specs[i % len(specs)])
            lives.append(engine.add(Request(prompt, strategy, sampling, tenant=str(i))))
        laws.finish(engine, *lives)
        return [live.ctx.output for live in lives]

    assert outputs(make()) == outputs(None)


def test_costs_are_kept_by_model_backend_and_layers() -> None:
    target, draft = Wide(8), Wide(8, noise=0.3, name="draft")
    plan = ShortestFirst()
    engine = Engine({"target": target, "draft": draft}, plan=plan)
    lives = [
        engine.add(Request([1, 2], strategy, Sampling(max_new_tokens=4)))
        for strategy in (laws.build("draft"), Special("layers"))
    ]
    laws.finish(engine, *lives)
    want = {(target, "torch", None), (draft, "torch", None), (target, "torch", (0,))}
    assert engine.costs.keys() == want == plan.keys
    for key in want:
        assert engine.costs[key].seconds.keys() >= {1} or key[0] is target
    assert engine.costs_of(target) is engine.costs[target, "torch", None]
    assert engine.costs_of(target, "other") is not engine.costs_of(target)


def test_canvases_share_a_forward_as_far_as_their_rows_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that waited come next, and every text is what it is alone."""
    model = ToyCanvas()
    prompts = [[0], [1, 2], [3], [2, 1, 0], [1]]
    alone = [denoised(model, prompt) for prompt in prompts]
    widths: list[int] = []
    forward = model.forward

    def noted(jobs: Sequence[Job]) -> Any:
        widths.append(sum(len(job.tokens) for job in jobs))
        return forward(jobs)

    monkeypatch.setattr(model, "forward", noted)
    monkeypatch.setattr(schedule, "ROWS", 24)
    assert [live.ctx.output for live in filled(model, "confidence:block=0", *prompts)] == alone
    assert max(widths) <= 24 < 8 * 5 and len(widths) >= 5 * 8 / 2
    widths.clear()
    monkeypatch.setattr(schedule, "ROWS", 4)  # one canvas has more
    assert [live.ctx.output for live in filled(model, "confidence:block=0", *prompts)] == alone
    assert max(widths) == 11 and len(widths) == 5 * 8


def denoised(model: ToyCanvas, prompt: list[int]) -> list[int]:
    (live,) = filled(model, "confidence:block=0", prompt)
    return live.ctx.output
