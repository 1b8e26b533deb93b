"""Commits each position by itself, by a clock that runs from 1 to 0.

At step i of N a masked position is committed with probability 1 - s/t, where t and s are the times
of this step and the next: the reverse process of masked diffusion as it was trained.

Paper: Ye et al., Dream 7B: Diffusion Large Language Models, arXiv:2508.15487, section 3.4
Guarantee: lossy: tokens of one step are drawn apart from each other
Cost: target 1
Needs: a model that fills canvases
Trains: nothing
Differs:
- a step whose coins commit nothing makes no forward: the coins are thrown before, which changes no
distribution
- the clock is that of each block, where there are blocks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from foretell.core.masked_text import Sheet
from foretell.core.settings import Range
from foretell.diffusion.loop import Denoising, Proposals

if TYPE_CHECKING:
    from foretell.core.context import Context


class Clock:
    """Steps of the current block that are over."""

    def __init__(self) -> None:
        self.block: tuple[int, int] | None = None
        self.step = 0


@dataclass(frozen=True)
class Origin(Denoising):
    """Times are evenly spaced from 1 to `eps`."""

    block: int = 0  # positions that are filled before later ones; 0: all together
    steps: Annotated[int, Range(0)] = 0  # of a block; 0: one for each of its tokens
    # time of the last step
    eps: Annotated[float, Range(0, 1, open_low=True, open_high=True)] = 1e-3

    knows_order = True

    def start_state(self, ctx: Context, sheet: Sheet) -> Any:
        return Clock()

    def eligible_positions(self, ctx: Context, sheet: Sheet, state: Any) -> Sequence[int]:
        block = sheet.block(self.block)
        if block != state.block:
            state.block, state.step = block, 0
        steps = self.steps or block[1] - block[0]
        masked_positions = super().eligible_positions(ctx, sheet, state)
        while True:
            time_now, time_next = (
                1 - (1 - self.eps) * (state.step + offset) / steps for offset in (0, 1)
            )
            state.step += 1
            if state.step >= steps:
                return masked_positions
            probability = 1 - time_next / time_now
            # No other draw of a request has these keys: a block's positions are its own.
            accepted_positions = [
                position
                for position in masked_positions
                if ctx.rng.accept(probability, "accept", position - sheet.first, state.step)
            ]
            if accepted_positions:
                return accepted_positions

    def choose_positions(self, sheet: Sheet, proposals: Proposals, state: Any) -> Sequence[int]:
        return range(len(proposals))
