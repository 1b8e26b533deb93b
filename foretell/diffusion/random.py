"""Fills positions in random order.

Which masked positions of the block are next is drawn before the forward; only their rows are read.

Paper: Nie et al., Large Language Diffusion Models, arXiv:2502.09992, section 2.4
Guarantee: lossy: with one token a step, of a model whose conditionals are exact, it is exact
Cost: target 1
Needs: a model that fills canvases
Trains: nothing
Differs:
- the order is drawn before the rows are known, which changes no distribution and lets caches
compute less
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from foretell.core.masked_text import Sheet
from foretell.diffusion.loop import Ordered, Proposals

if TYPE_CHECKING:
    from foretell.core.context import Context


@dataclass(frozen=True)
class Random(Ordered):
    """A block of 0 is the whole canvas."""

    block: int = -1  # positions filled before later ones; 0: all; -1: the model's, else 32
    steps: int = 0  # forwards in all, shared among the blocks; 0: one for each token

    knows_order = True

    def eligible_positions(self, ctx: Context, sheet: Sheet, state: Any) -> Sequence[int]:
        remaining = list(super().eligible_positions(ctx, sheet, state))
        count = state.next_count(sheet.block(self.block), len(remaining))
        chosen_positions = []
        for draw_index in range(count):
            uniform_probs = torch.full((len(remaining),), 1 / len(remaining), dtype=torch.float64)
            chosen_positions.append(
                remaining.pop(ctx.rng.sample(uniform_probs, "draft", sheet.commits, draw_index))
            )
        return sorted(chosen_positions)

    def choose_positions(self, sheet: Sheet, proposals: Proposals, state: Any) -> Sequence[int]:
        return range(len(proposals))
