"""Fills the whole block in every step, and takes back what it was least sure of.

Every forward commits a proposal at each masked position of the block; then those committed tokens
of the block that had the lowest probabilities when they were committed are masked again, as many as
the remaining steps are to fill. So a token may be corrected as long as its block is not done.

Paper: He et al., MDPO: Overcoming the Training-Inference Divide of Masked Diffusion Language
Models, arXiv:2508.13148 (running confidence remasking)
Guarantee: lossy: tokens of one step are drawn apart from each other, and some are drawn again
Cost: target 1
Needs: a model that fills canvases
Trains: nothing
Differs:
- the steps of a block fill equal shares; the published code has other schedules too
- a token that was given is never taken back
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretell.core.masked_text import Sheet
from foretell.diffusion.loop import Ordered, Proposals, Quotas, take_back

if TYPE_CHECKING:
    from foretell.core.context import Context


class Left:
    """Masks that the current block still has when its steps so far are over."""

    def __init__(self, quotas: Quotas):
        self.quotas = quotas
        self.block: tuple[int, int] | None = None
        self.masks = 0


@dataclass(frozen=True)
class Rcr(Ordered):
    """Settings of steps; a block is filled at once with steps=1."""

    block: int = -1  # positions filled before later ones; 0: all; -1: the model's, else 32
    steps: int = 0  # forwards in all, shared among the blocks; 0: one for each token

    remasks = True

    def start_state(self, ctx: Context, sheet: Sheet) -> Any:
        return Left(Quotas(self.steps, len(sheet.masked)))

    def fill_positions(self, sheet: Sheet, proposals: Proposals, state: Any) -> None:
        block = sheet.block(self.block)
        if block != state.block:
            state.block, state.masks = block, len(proposals)
        state.masks -= state.quotas.next_count(block, len(proposals))
        proposals.drawn_tokens()  # all are drawn before the first of them is committed
        for index in range(len(proposals)):
            proposals.commit(sheet, index)
        take_back(sheet, block, state.masks)
