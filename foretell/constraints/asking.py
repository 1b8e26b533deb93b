"""A constraint's questions to the outside, asked beside the forwards rather than in the engine.

What verification will want to know of a tree's nodes is known before they are computed. So the
questions go along with the tree, in a `Call`: other requests go on meanwhile, and the answers are
there when the rows are. A constraint that is asked for more than that waits for it.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretell.core.request import Method
from foretell.core.types import Ask, Call, Message, Steps, Together
from foretell.speculation.strategy import Strategy

if TYPE_CHECKING:
    from foretell.core.context import Context
    from foretell.core.model import Model
    from foretell.core.sampling_options import Sampling


def inner_method(strategy: Any) -> Any:
    """Returns the method that an Asking wraps, or the method itself."""
    return strategy.inner if isinstance(strategy, Asking) else strategy


def ask_ahead(strategy: Method, sampling: Sampling) -> Method:
    """Wraps a method so that it asks ahead, where the constraint of its text has questions."""
    if isinstance(strategy, Asking) or not getattr(sampling.constraint, "asks", False):
        return strategy
    return Asking(strategy)


@dataclass(frozen=True, eq=False)
class Asking(Strategy):
    """A method whose forwards are accompanied by its constraint's questions.

    Data that is kept by method is kept for this and for the inner method alike.
    """

    inner: Method

    def __eq__(self, other_method: object) -> bool:
        return self.inner == (
            other_method.inner if isinstance(other_method, Asking) else other_method
        )

    def __hash__(self) -> int:
        return hash(self.inner)

    @property
    def models(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.inner.models

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.inner.needs

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Any]:
        return self.inner.bring(models)

    @property
    def one_text(self) -> bool:  # type: ignore[override]
        return bool(getattr(self.inner, "one_text", False))

    def run(self, ctx: Context) -> Steps:
        return _note_steps(self.inner.run(ctx.scope_to(self.inner)), ctx)


def _note_steps(steps: Steps, ctx: Context) -> Steps:
    """Runs the steps with their questions, and notes at the end what became of these."""
    try:
        yield from _accompany_steps(steps, ctx)
    finally:
        _note_counts(ctx)


def _accompany_steps(steps: Steps, ctx: Context) -> Generator[Message, Any, Any]:
    """Runs the steps; each of their asks goes with a call that gets the answers it will need."""
    answer: Any = None
    error: Exception | None = None
    try:
        while True:
            try:
                message = steps.throw(error) if error is not None else steps.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = error = None
            try:
                answer = yield from _send_questions(message, ctx)
            except Exception as raised_error:
                error = raised_error
    finally:
        steps.close()


def _send_questions(message: Message, ctx: Context) -> Generator[Message, Any, Any]:
    """Yields the message, with what has to be asked for it; returns its answer."""
    if isinstance(message, Together):
        accompanied_steps = [_accompany_steps(branch_steps, ctx) for branch_steps in message.steps]
        message = Together(accompanied_steps, message.first)
    asks = [message] if isinstance(message, Ask) else message if isinstance(message, list) else []
    question_calls = []
    for ask in asks:
        branch = ctx.branches[ask.branch]
        find_questions = getattr(
            branch.sampler.guide and branch.sampler.guide.tracker, "unknown", None
        )
        if find_questions is None:
            continue
        tree = ask.tree
        call = find_questions(
            [[*branch.output, *tree.tokens_to(node)] for node in range(len(tree))]
        )
        if call is not None:
            question_calls.append(call)
    if not question_calls:
        return (yield message)
    message_steps = [
        _single_message(message),
        *(_single_message(Call(call)) for call in question_calls),
    ]
    message_answer = (yield Together(message_steps))[0]
    _note_counts(ctx)
    return message_answer


def _note_counts(ctx: Context) -> None:
    """Writes down what became of the request's questions."""
    ctx.stats.outside = dict(getattr(ctx.request.sampling.constraint, "counts", {}))


def _single_message(message: Message) -> Generator[Message, Any, Any]:
    return (yield message)
