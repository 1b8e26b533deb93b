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


def bare(strategy: Any) -> Any:
    """The method itself."""
    return strategy.inner if isinstance(strategy, Asking) else strategy


def asking(strategy: Method, sampling: Sampling) -> Method:
    """The same method, that asks ahead where the constraint of its text has questions."""
    if isinstance(strategy, Asking) or not getattr(sampling.constraint, "asks", False):
        return strategy
    return Asking(strategy)


@dataclass(frozen=True, eq=False)
class Asking(Strategy):
    """A method whose forwards are accompanied by its constraint's questions.

    Whatever is kept by method is kept for it and for the method itself alike.
    """

    inner: Method

    def __eq__(self, other: object) -> bool:
        return self.inner == (other.inner if isinstance(other, Asking) else other)

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
        return _noted(self.inner.run(ctx.scoped(self.inner)), ctx)


def _noted(steps: Steps, ctx: Context) -> Steps:
    """The steps accompanied, and at the end what became of the questions."""
    try:
        yield from _accompanied(steps, ctx)
    finally:
        _note(ctx)


def _accompanied(steps: Steps, ctx: Context) -> Generator[Message, Any, Any]:
    """The steps, each of whose asks goes with a call that gets the answers it will need."""
    answer: Any = None
    error: Exception | None = None
    try:
        while True:
            try:
                message = steps.throw(error) if error is not None else steps.send(answer)
            except StopIteration as end:
                return end.value
            answer = error = None
            try:
                answer = yield from _with_questions(message, ctx)
            except Exception as raised:
                error = raised
    finally:
        steps.close()


def _with_questions(message: Message, ctx: Context) -> Generator[Message, Any, Any]:
    """Yields the message, with what has to be asked for it; returns its answer."""
    if isinstance(message, Together):
        inner = [_accompanied(one, ctx) for one in message.steps]
        message = Together(inner, message.first)
    asks = [message] if isinstance(message, Ask) else message if isinstance(message, list) else []
    calls = []
    for ask in asks:
        branch = ctx.branches[ask.branch]
        unknown = getattr(branch.sampler.guide and branch.sampler.guide.tracker, "unknown", None)
        if unknown is None:
            continue
        tree = ask.tree
        call = unknown([[*branch.output, *tree.tokens_to(node)] for node in range(len(tree))])
        if call is not None:
            calls.append(call)
    if not calls:
        return (yield message)
    together = [_one(message), *(_one(Call(call)) for call in calls)]
    answer = (yield Together(together))[0]
    _note(ctx)
    return answer


def _note(ctx: Context) -> None:
    """Writes down what became of the request's questions."""
    ctx.stats.outside = dict(getattr(ctx.request.sampling.constraint, "counts", {}))


def _one(message: Message) -> Generator[Message, Any, Any]:
    return (yield message)
