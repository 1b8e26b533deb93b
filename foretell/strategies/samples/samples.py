"""Whole samples of one request side by side, each maybe sped up by a drafter."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING

from foretell.core.drafter import Drafter
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Fork, Message, Steps
from foretell.speculation.strategy import Speculative, Strategy, one_by_one

if TYPE_CHECKING:
    from foretell.core.context import Context
    from foretell.core.model import Model


class Samples(Strategy):
    """The base of strategies with a field `inner`, the drafter of every sample."""

    inner: Drafter | None

    @property
    def models(self) -> tuple[str, ...]:  # type: ignore[override]
        return () if self.inner is None else self.inner.models

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return () if self.inner is None else self.inner.needs

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        return {} if self.inner is None else self.inner.bring(models)

    def drawn(self, ctx: Context) -> Steps:
        """One sample, on the branch of its context."""
        return one_by_one(ctx) if self.inner is None else Speculative(self.inner).run(ctx)


def branches(
    ctx: Context, n: int, start: int | None = None
) -> Generator[Message, list[int], list[int]]:
    """The branch `start`, or the context's, and n - 1 copies; what its text has is computed once,
    and shared.
    """
    first = ctx.branch if start is None else start
    if n < 2:
        return [first]
    yield Ask(TokenTree(ctx.branches[first].tokens[-1]), branch=first, rows=())
    twins = yield Fork(first, n - 1)
    return [first, *twins]
