"""Takes back the tokens that were least sure, near the end of a block, and fills them anew.

It goes on as `confidence` does; once seven eighths of a block's steps are over, `further` steps
each mask the committed tokens of the block with the lowest probabilities again, and fill as many.

Paper: Wang et al., Remasking Discrete Diffusion Models with Inference-Time Scaling,
arXiv:2503.00307, as ParallelBench (arXiv:2510.04767) runs it
Guarantee: lossy: which position is filled depends on the token that was drawn for it
Cost: target 1
Needs: a model that fills canvases
Trains: nothing
Differs:
- a token that was given is never taken back
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from foretell.core.masked_text import Sheet
from foretell.core.settings import Range
from foretell.diffusion.loop import Ordered, Proposals, Quotas, rank_positions, take_back

if TYPE_CHECKING:
    from foretell.core.context import Context

SHARE = 7 / 8  # of a block's steps, after which tokens are taken back


class Again:
    """How far the current block is; `left`: its further steps, `further`: whether one is next."""

    def __init__(self, quotas: Quotas):
        self.quotas = quotas
        self.block: tuple[int, int] | None = None
        self.done = self.planned = self.left = 0
        self.further = False


@dataclass(frozen=True)
class Remdm(Ordered):
    """Settings of remasking; `further` 0 is `confidence`."""

    block: int = -1  # positions filled before later ones; 0: all; -1: the model's, else 32
    steps: int = 0  # forwards in all, shared among the blocks; 0: one for each token
    further: Annotated[int, Range(0)] = 4  # steps of each block
    count: Annotated[int, Range(1)] = 1  # tokens that each of them takes back

    remasks = True

    def start_state(self, ctx: Context, sheet: Sheet) -> Any:
        return Again(Quotas(self.steps, len(sheet.masked)))

    def fill_positions(self, sheet: Sheet, proposals: Proposals, state: Any) -> None:
        block = sheet.block(self.block)
        if block != state.block:
            state.block, state.done, state.remaining = block, 0, self.further
            state.planned = state.quotas.steps_of(len(proposals))
        count = self.count
        if not state.further:
            count = state.quotas.next_count(block, len(proposals))
            state.done += 1
        for index in rank_positions(proposals.token_probs())[:count]:
            proposals.commit(sheet, index)
        state.further = state.remaining > 0 and state.done >= math.ceil(SHARE * state.planned)
        if state.further:
            state.remaining -= 1
            take_back(sheet, block, self.count)
