"""Which positions of a canvas a forward computes, and which rows these read: planners.

A planner is what `kv=` gives a denoiser. The base keeps nothing from one forward to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from foretell.core.masked_text import Sheet
from foretell.errors import BadConfig, Unsupported
from foretell.kv.base import KV, CachePolicy

if TYPE_CHECKING:
    from foretell.core.context import Context
    from foretell.core.model import Model


@dataclass(frozen=True)
class View:
    """Positions: those whose tokens are wanted, those that are computed (None: all), and those
    whose rows are read (None: all).
    """

    requested: Sequence[int]
    computed: Sequence[int] | None = None
    attended: Sequence[int] | None = None

    def with_shifted_rows(self, shift: int) -> View:
        """Adds the rows that say what is wanted, `shift` before the wanted positions."""
        if self.computed is None or not shift:
            return self
        needed_positions = {max(0, position - shift) for position in self.requested}
        return replace(self, computed=sorted({*self.computed, *needed_positions}))


class Planner(CachePolicy):
    """The planner of one request, told of every forward in turn. `fork` gives one that knows
    nothing yet.
    """

    plain = False
    steady = True  # whether a plan is the same for all canvases that one block goes through
    needs_order = False  # whether it serves only methods that know the next positions beforehand

    def start_canvas(self, sheet: Sheet) -> None:
        """A new canvas is under it."""

    def plan_view(self, sheet: Sheet, block: tuple[int, int], requested: Sequence[int]) -> View:
        """Plans what the next forward computes, where the tokens of the `requested` positions are
        sought; `block`: the current one, from where to where.
        """
        return View(requested)


class CanvasKV(KV):
    """The base of what `kv=` takes for denoisers."""

    def build_policy(self, target: Model) -> Planner:
        if "canvas" not in target.caps:
            need = "a model that fills canvases"
            raise Unsupported.missing_capability(
                f"kv={self.name}", target.name, need, "leave kv out"
            )
        if getattr(target, "canvas_length", 0):
            need = "a model whose text and masks read each other: its text has rows of its own"
            cure = "leave kv out: they are kept in any case"
            raise Unsupported.missing_capability(f"kv={self.name}", target.name, need, cure)
        return self.planner()

    def planner(self) -> Planner:
        raise NotImplementedError


def planner_of(ctx: Context) -> Planner:
    """A request's planner. Raises Unsupported for a policy of other caches."""
    policy: Any = ctx.request.policy
    if policy is None:
        return Planner()
    if not isinstance(policy, Planner):
        policy_name = policy.name or type(policy).__name__
        model_name = ctx.models["target"].name
        need = "a model that writes from left to right"
        raise Unsupported.missing_capability(
            f"kv={policy_name}", model_name, need, "use kv=dual, prefix, dkv or window"
        )
    if policy.needs_order and not getattr(ctx.request.strategy, "knows_order", False):
        raise BadConfig(
            f"kv={policy.name} in this mode computes the positions that are filled next, and "
            f"{ctx.request.name} chooses them by what it sees; use method=random, or another mode"
        )
    forked = policy.fork()
    assert isinstance(forked, Planner)
    return forked


class ByBlock(Planner):
    """Computes all rows when a block begins, and a part of them until it is filled."""

    def start_canvas(self, sheet: Sheet) -> None:
        self.block: tuple[int, int] | None = None

    def plan_view(self, sheet: Sheet, block: tuple[int, int], requested: Sequence[int]) -> View:
        if block != self.block:
            self.block = block
            return View(requested)
        return self.view_within(sheet, block, requested)

    def view_within(self, sheet: Sheet, block: tuple[int, int], requested: Sequence[int]) -> View:
        """The view of a block that has begun."""
        raise NotImplementedError
