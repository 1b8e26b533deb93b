"""Branches: copies of a text, texts of their own, and what is left when they end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from foretell.cache.job import Job
from foretell.core.context import Context
from foretell.core.distribution import Sampler
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import (
    Ask,
    Commit,
    Drop,
    Finish,
    Fork,
    Open,
    Reply,
    Sampling,
    Steps,
    Together,
)
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.errors import PromptTooLong
from foretell.speculation.strategy import Strategy, verify_and_commit
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from tests import laws

EXACT = laws.claiming("exact")


@dataclass(frozen=True)
class Moved(Strategy):
    """Runs a strategy on a copy of the text, or on a text of its own, branch 0 being dropped."""

    writer: Strategy
    prompt: tuple[int, ...] = ()  # none: a copy

    @property
    def models(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.writer.models

    def run(self, ctx: Context) -> Steps:
        if self.prompt:
            yield Drop(0)
            branch = yield Open(self.prompt, quiet=False)
        else:
            (branch,) = yield Fork(0, 1)
            yield Drop(0)
        yield from self.writer.run(ctx.on(branch))
        yield Finish(branch, ctx.branches[branch].reason or "")


def run(strategy: Strategy, prompt: list[int], engine: Engine, sampling: Sampling) -> Live:
    live = engine.add(Request(prompt, strategy, sampling))
    told = [token for event in engine.run() for token in event.tokens]
    if live.error is not None:
        raise live.error.__cause__ or live.error
    assert told == live.ctx.output and not live.caches
    return live


@pytest.mark.parametrize("spec", ["plain", *EXACT])
def test_every_method_runs_on_any_branch(spec: str) -> None:
    writer = laws.build(spec)
    models = laws.world(writer, 8, copy=2.0)
    sampling = Sampling(max_new_tokens=12, logprobs=2)
    prompt = [1, 2, 3, 1, 2]
    want = run(Plain(), prompt, Engine(models), sampling)
    for strategy, own in ((Moved(writer), prompt), (Moved(writer, tuple(prompt)), [4, 4, 4])):
        live = run(strategy, own, Engine(models), sampling)
        assert live.ctx.output == want.ctx.output and live.reason == want.reason
        # The logprobs of a Finish on another branch are that branch's.
        assert [best for _, best in live.logprobs] == [best for _, best in want.logprobs]


def check_own_law(spec: str) -> None:
    """A branch opened with a prompt has that prompt's law, penalties included."""
    strategy = Moved(laws.build(spec), laws.PROMPT)
    setting = laws.SETTINGS["penalties"]
    setting = replace(setting, sampling=replace(setting.sampling, max_new_tokens=2))
    models = laws.world(strategy)
    law = laws.enumerate_law(strategy, (0, 0), setting, models, warm=False)
    target = models["target"]
    assert isinstance(target, Toy)
    assert law.distance(laws.reference(target, laws.PROMPT, setting)) <= laws.EXACT


def test_the_law_of_a_branch_is_the_law_of_its_text() -> None:
    for spec in ("plain", "ngram", "draft:length=2"):
        check_own_law(spec)
        strategy = Moved(laws.build(spec))
        laws.check_law(strategy, "penalties", 2, drafts=spec != "plain")


def test_penalties_of_the_requests_prompt_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slip: the branch's penalties count the request's prompt."""

    def sampler(sampling: Sampling, prompt: object, *rest: Any) -> Sampler:
        return Sampler(sampling, (0, 0), *rest)

    monkeypatch.setattr("foretell.engine.messages.Sampler", sampler)
    with pytest.raises(AssertionError):
        check_own_law("plain")


# --- ends


@dataclass(frozen=True)
class GoOn(Strategy):
    """After branch 0 has ended, another branch goes on, and a third is dropped."""

    def run(self, ctx: Context) -> Steps:
        other, third = yield Fork(0, 2)
        kept = None
        while kept is None or not kept.reason:
            reply = yield Ask(TokenTree(ctx.tokens[-1]))
            _, kept = yield from verify_and_commit(ctx, TokenTree(ctx.tokens[-1]), reply)
        yield Drop(third)
        yield from Plain().run(ctx.on(other))
        yield Finish(other, "judged")


def test_dropping_a_branch_after_branch_0_has_ended_does_not_end_the_search() -> None:
    engine = Engine({"target": Toy(8, copy=1.0)})
    live = run(GoOn(), [1, 2, 3], engine, Sampling(max_new_tokens=6, temperature=1.0))
    assert live.reason == "judged" and len(live.ctx.output) == 6
    assert live.ctx.stats.calls == {"target": 12}


@dataclass(frozen=True)
class Many(Strategy):
    """Reads the text, and then goes on from it 15 times more."""

    def run(self, ctx: Context) -> Steps:
        yield Ask(TokenTree(ctx.tokens[-1]))
        more = yield Fork(0, 15)
        yield Together([Plain().run(ctx.on(branch)) for branch in (0, *more)])


def test_forks_of_a_text_that_was_just_read_read_none_of_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toy = Toy(8)
    computed: list[int] = []
    right = toy.forward

    def counting(jobs: Sequence[Job]) -> list[Reply]:
        computed.append(sum(len(job.tokens) for job in jobs))
        return right(jobs)

    monkeypatch.setattr(toy, "forward", counting)
    prompt = [i % 8 for i in range(100)]
    run(Many(), prompt, Engine({"target": toy}), Sampling(max_new_tokens=3, temperature=1.0))
    assert computed == [100, 16, 16, 16]


# --- texts of their own


@dataclass(frozen=True)
class Quiet(Strategy):
    """Writes `count` tokens on a quiet branch, then two on branch 0. Without a prompt the branch
    is a fork of branch 0.
    """

    prompt: tuple[int, ...] | None
    count: int
    model: str = "target"

    def run(self, ctx: Context) -> Steps:
        if self.prompt is not None:
            branch = yield Open(self.prompt, self.model)
        else:
            (branch,) = yield Fork(0, quiet=True)
        view = ctx.on(branch)
        for _ in range(self.count):
            tree = TokenTree(view.tokens[-1])
            reply = yield Ask(tree, self.model, branch)
            kept = yield Commit([int(reply.logits[0].argmax())], reply.logits, branch)
            assert kept.reason is None
        told = list(view.output)
        yield Drop(branch)
        reply = yield Ask(TokenTree(ctx.tokens[-1]))
        yield Commit([told[0], told[-1]], torch.cat([reply.logits] * 2))
        yield Finish(0, "done", [(told, 0.0, "")])


@pytest.mark.parametrize(
    ("model", "prompt"),
    [("target", (4, 5)), ("other", (4, 5)), ("target", None)],
    ids=["opened", "of another model", "forked"],
)
def test_a_quiet_branch_has_no_stops_no_limit_and_no_statistics(
    model: str, prompt: tuple[int, ...] | None
) -> None:
    models = {"target": Toy(8), "other": Toy(8, 5, name="other")}
    engine = Engine(models, eos=tuple(range(8)))  # every token ends a text
    live = engine.add(Request([1, 2, 3], Quiet(prompt, 9, model), Sampling(max_new_tokens=2)))
    events = [token for event in engine.run() for token in event.tokens]
    assert live.error is None
    told = live.answers[0][0]
    text = list(prompt or (1, 2, 3))
    for _ in range(9):
        row = laws.row(models[model], text)
        text.append(row.index(max(row)))
    assert told == text[-9:]
    assert events == live.ctx.output == told[:1], "branch 0 keeps its stops"
    assert live.ctx.stats.tokens == 1 and live.ctx.stats.steps == 0
    assert live.ctx.stats.calls.get(model, 0) >= 9


def test_a_prompt_that_does_not_fit_its_model_is_refused() -> None:
    models = {"target": Toy(8), "other": Toy(8, context=5, name="small")}
    for prompt in ((), (1, 2, 3, 4, 5)):
        engine = Engine(models)
        live = engine.add(Request([1], Quiet(prompt, 1, "other")))
        list(engine.run())
        assert isinstance(live.error, PromptTooLong) and "small" in str(live.error)
