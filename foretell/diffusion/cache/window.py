"""Computes the first masked positions, over the rows of what is near: the far ones are left out.

Every `refresh` steps a forward computes the whole canvas, and any masked position may be filled.
In the steps between, only the `active` first masked positions and what was committed since are
computed; they read what is committed and the `window` first masked positions, as these were when
the phase began, and only active positions are filled.

Paper: Window-Diffusion: Accelerating Diffusion Language Model Inference with Windowed Token Pruning
and Caching
Guarantee: lossy: rows are up to `refresh` steps old, and far masks are not read
Cost: target 1
Needs: a model that fills canvases
Trains: nothing
Try: --model dlm-lists --method threshold --kv window
Differs:
- which rows are read is a set of positions, so that tokens which were committed beyond the window
stay in it; the published code for Dream takes them for a beginning of the text
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from foretell.core.masked_text import Sheet
from foretell.core.settings import Range
from foretell.diffusion.planner import CanvasKV, Planner, View
from foretell.errors import BadConfig


@dataclass(frozen=True)
class Window(CanvasKV):
    """Counts of positions and steps. Methods fill the whole canvas under it: block=0."""

    active: Annotated[int, Range(1)] = 16  # masked positions that are computed
    window: int = 64  # masked positions that are read
    refresh: Annotated[int, Range(1)] = 32  # steps between two computations of all rows

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.active > self.window:
            raise BadConfig.field("window:active", self.active, f"at most window={self.window}")

    def planner(self) -> Phases:
        return Phases(self.active, self.window, self.refresh)


class Phases(Planner):
    steady = False

    def __init__(self, active: int, window: int, refresh: int):
        self.active, self.window, self.refresh = active, window, refresh

    def start_canvas(self, sheet: Sheet) -> None:
        self.step = 0  # of the phase
        self.masked: list[int] = []  # when the phase began
        self.read: list[int] = []  # what its later steps read

    def plan_view(self, sheet: Sheet, block: tuple[int, int], requested: Sequence[int]) -> View:
        masked_positions = sheet.masked
        if self.step and self.step < self.refresh:
            if self.step == 1:  # the tokens that the first step committed are known now
                far_positions = set(masked_positions[self.window :])
                self.read = [
                    position for position in range(sheet.end) if position not in far_positions
                ]
            near_positions = set(self.read)
            active_positions = [
                position for position in masked_positions if position in near_positions
            ][: self.active]
            sought_positions = sorted({*active_positions} & {*requested})
            if sought_positions:
                self.step += 1
                newly_committed = {*self.masked} - {*masked_positions}
                return View(
                    sought_positions, sorted({*active_positions, *newly_committed}), self.read
                )
        self.step, self.masked = 1, masked_positions
        return View(requested)
