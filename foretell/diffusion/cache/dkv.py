"""Keeps the rows of committed tokens, one step late.

The rows of a token still move in the step after its commitment, and settle then. So a committed
token is computed once more with its true id, and skipped from then on; every `every` steps all rows
are computed anew, and so are they in the first two steps of a block.

`mode=greedy` is for methods that know the next positions before they look (`random`): it computes
what was just committed, what is to be committed next, and the `window` masked positions next to
each of those.

Paper: Ma et al., dKV-Cache: The Cache for Diffusion Language Models, arXiv:2505.15781
Guarantee: lossy: rows of committed tokens are up to `every` steps old
Cost: target 1
Needs: a model that fills canvases
Trains: nothing
Try: --model dlm-lists --method threshold --kv dkv
Differs:
- of a model whose rows speak of the next position, the row before each wanted one is computed
anyway, committed or not; the published code instead keeps rows whose next token is committed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from foretell.core.masked_text import Sheet
from foretell.core.settings import OneOf, Range
from foretell.diffusion.planner import CanvasKV, Planner, View

EVERY = {"decode": 8, "greedy": 2}  # steps, as published


@dataclass(frozen=True)
class Dkv(CanvasKV):
    """Counts of steps and positions."""

    # steps between two computations of all rows; 0: 8, or 2 of mode=greedy
    every: Annotated[int, Range(0)] = 0
    mode: Annotated[str, OneOf(EVERY)] = "decode"  # or greedy
    window: Annotated[int, Range(0)] = 4  # masked positions beside each next one, of mode=greedy

    def planner(self) -> Planner:
        refresh_steps = self.every or EVERY[self.mode]
        return Late(refresh_steps) if self.mode == "decode" else Near(refresh_steps, self.window)


class Counted(Planner):
    """Knows the step within a block, and what was committed before the last two forwards."""

    steady = False

    def __init__(self, refresh_steps: int):
        self.every = refresh_steps

    def start_canvas(self, sheet: Sheet) -> None:
        self.block: tuple[int, int] | None = None
        self.step = 0
        self.before: frozenset[int] = frozenset()  # committed at the last forward
        self.settled: frozenset[int] = frozenset()  # and at the one before it

    def plan_view(self, sheet: Sheet, block: tuple[int, int], requested: Sequence[int]) -> View:
        if block != self.block:
            self.block, self.step = block, 0
        masked_positions = set(sheet.masked)
        committed = frozenset(
            position for position in range(sheet.end) if position not in masked_positions
        )
        is_full = self.step <= 1 or self.step % self.every == 0
        view = View(requested) if is_full else self.partial_view(sheet, committed, requested)
        self.settled, self.before = self.before, committed
        self.step += 1
        return view

    def partial_view(
        self, sheet: Sheet, committed: frozenset[int], requested: Sequence[int]
    ) -> View:
        """The view of a forward that does not compute everything; `committed`: positions that are
        committed now.
        """
        raise NotImplementedError


class Late(Counted):
    def partial_view(
        self, sheet: Sheet, committed: frozenset[int], requested: Sequence[int]
    ) -> View:
        # Committed before the last forward, which computed them with their true ids.
        settled_rows = self.before & committed
        return View(
            requested, [position for position in range(sheet.end) if position not in settled_rows]
        )


class Near(Counted):
    needs_order = True

    def __init__(self, refresh_steps: int, window: int):
        super().__init__(refresh_steps)
        self.window = window

    def partial_view(
        self, sheet: Sheet, committed: frozenset[int], requested: Sequence[int]
    ) -> View:
        masked_positions = [position for position in sheet.masked if position not in set(requested)]
        near_positions: set[int] = set()
        for position in requested:
            nearest = sorted(
                masked_positions, key=lambda candidate: (abs(candidate - position), candidate)
            )
            near_positions.update(nearest[: self.window])
        return View(requested, sorted({*(committed - self.before), *near_positions, *requested}))
