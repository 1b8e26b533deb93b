"""Whole samples of one request side by side, each maybe sped up by a drafter."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING

from foretell.core.drafter import Drafter
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Fork, Message, Steps
from foretell.speculation.strategy import Speculative, Strategy, decode_one_by_one

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

    def draw_sample(self, ctx: Context) -> Steps:
        """Draws a sample, on the branch of its context."""
        return decode_one_by_one(ctx) if self.inner is None else Speculative(self.inner).run(ctx)


def fork_samples(
    ctx: Context, sample_count: int, start_branch: int | None = None
) -> Generator[Message, list[int], list[int]]:
    """The branch `start_branch`, or the context's, and n - 1 copies; what its text has is computed
    once, and shared.
    """
    first_branch = ctx.branch if start_branch is None else start_branch
    if sample_count < 2:
        return [first_branch]
    yield Ask(TokenTree(ctx.branches[first_branch].tokens[-1]), branch=first_branch, rows=())
    copied_branches = yield Fork(first_branch, sample_count - 1)
    return [first_branch, *copied_branches]
