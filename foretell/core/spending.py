"""Budgets of requests: so many forwards, so many seconds.

A request that has spent it ends where it stands, with the reason `budget`. A method that searches
is told by an exception, `Spent`, at what it asked for next, and may name its best answer itself, as
long as that takes no more forwards. Where it does not, the answer is the best branch that has
ended, else the best one so far: that with the highest mean log-probability a token by the target's
own rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from foretell.core.types import Ask, Commit, Finish, Fork, Message, Steps, Together
from foretell.errors import BadConfig

REASON = "budget"


class Spent(Exception):
    """No more forwards are run."""


@dataclass(frozen=True)
class Spending:
    """At least one of the two is a limit; 0: none."""

    forwards: int = 0  # of all models, as a request's statistics count them
    seconds: float = 0.0  # from its start on

    def __post_init__(self) -> None:
        if not self.forwards and not self.seconds:
            raise BadConfig("budget: limits nothing; give forwards=N, seconds=S, or both")
        if self.forwards < 0:
            raise BadConfig.field("budget:forwards", self.forwards, "a number above 0")
        if not (self.seconds >= 0 and math.isfinite(self.seconds)):
            raise BadConfig.field("budget:seconds", self.seconds, "seconds above 0")


@dataclass
class Ledger:
    """Spendings of a request, and how likely the texts of its branches are."""

    ctx: Any  # a core.context.Context
    limits: Spending
    started: float = field(default_factory=time.perf_counter)
    logprobs: dict[int, float] = field(default_factory=dict)  # of each branch's output

    @property
    def is_spent(self) -> bool:
        forwards, seconds = self.limits.forwards, self.limits.seconds
        if forwards and sum(self.ctx.stats.calls.values()) >= forwards:
            return True
        return bool(seconds) and time.perf_counter() - self.started >= seconds

    def note_message(self, message: Message, answer: Any) -> None:
        """Takes note of what a message did to the branches."""
        if isinstance(message, Fork):
            log_probability = self.logprobs.get(message.branch, 0.0)
            self.logprobs.update(dict.fromkeys(answer, log_probability))
        elif isinstance(message, Commit):
            log_probability = self.logprobs.get(message.branch, 0.0)
            for row, token in zip(message.rows, answer.tokens, strict=False):  # some have no rows
                log_probability += float(row.float().log_softmax(-1)[token])
            self.logprobs[message.branch] = log_probability

    def rank_branches(self) -> list[int]:
        """The branches, the answer first."""

        def worth(handle: int) -> tuple[bool, bool, float]:
            branch = self.ctx.branches[handle]
            mean_logprob = self.logprobs.get(handle, 0.0) / max(len(branch.output), 1)
            return branch.reason is not None, bool(branch.output), mean_logprob

        branches = self.ctx.branches
        visible_branches = [handle for handle in branches if not branches[handle].quiet]
        return sorted(visible_branches, key=worth, reverse=True)


def limit_steps(steps: Steps, ctx: Any, limits: Spending | None) -> Steps:
    """A method's steps for as long as the request has something to spend."""
    return steps if limits is None else _guard_steps(steps, Ledger(ctx, limits), root=True)


def _guard_steps(steps: Steps, ledger: Ledger, root: bool = False) -> Generator[Message, Any, Any]:
    """The steps, until the budget is spent. Returns what they return, or None where it was; the
    root's then end with a Finish.
    """
    answer: Any = None
    error: Exception | None = None
    try:
        while True:
            try:
                message = steps.throw(error) if error is not None else steps.send(answer)
            except StopIteration as end:
                return end.value
            answer = error = None
            if costs_forwards(message) and ledger.is_spent:
                break
            if isinstance(message, Together):
                guarded_steps = [_guard_steps(child_steps, ledger) for child_steps in message.steps]
                message = Together(guarded_steps, message.first)
            try:
                answer = yield message
            except Exception as raised:
                error = raised
                continue
            ledger.note_message(message, answer)
            if isinstance(message, Together) and ledger.is_spent:
                break
        if root:
            yield from _end_steps(steps, ledger)
    finally:
        steps.close()


def costs_forwards(message: Message) -> bool:
    """Whether it costs forwards."""
    return isinstance(message, Ask | Together | list)


def _end_steps(steps: Steps, ledger: Ledger) -> Steps:
    """Tells the method; ends with the answer that it names, else with the best branch."""
    try:
        message = steps.throw(Spent())
        while not (costs_forwards(message) or isinstance(message, Finish)):
            message = steps.send((yield message))
    except (Spent, StopIteration):
        message = None
    if isinstance(message, Finish):
        yield Finish(message.branch, REASON, message.answers)
        return
    order = ledger.rank_branches()
    branches = ledger.ctx.branches
    answers = []
    for handle in order if len(order) > 1 else ():
        branch = branches[handle]
        mean_logprob = ledger.logprobs.get(handle, 0.0) / max(len(branch.output), 1)
        answers.append((list(branch.output), mean_logprob, branch.reason or REASON))
    yield Finish(order[0], REASON, answers)


def spending_of(budget: str | Mapping[str, Any] | Spending | None) -> Spending | None:
    """Reads a budget like "forwards=2000,seconds=30". Raises BadConfig."""
    if budget is None or isinstance(budget, Spending):
        return budget
    expected = "limits like 'forwards=2000,seconds=30'"
    if not isinstance(budget, str) or not budget.strip():
        raise BadConfig.field("budget", budget, expected)
    given_limits: dict[str, str] = {}
    for part in budget.split(","):
        name, equals, value = part.strip().partition("=")
        if name not in ("forwards", "seconds") or not equals or name in given_limits:
            raise BadConfig.field("budget", budget, expected)
        given_limits[name] = value
    try:
        return Spending(int(given_limits.get("forwards", 0)), float(given_limits.get("seconds", 0)))
    except ValueError:
        raise BadConfig.field("budget", budget, expected) from None
