"""Keeps the rows before and after the current block while a denoiser fills it.

The first forward of a block computes the whole canvas; the following ones compute the block alone,
over the rows of everything else.

Paper: Wu et al., Fast-dLLM: Training-free Acceleration of Diffusion LLM by Enabling KV Cache and
Parallel Decoding, arXiv:2505.22618, section 3.2
Guarantee: lossy: rows outside a block are those of the canvas when the block began
Cost: target 1
Needs: a model that fills canvases
Trains: nothing
Try: --model dlm-lists --method threshold --kv dual
Differs:
- of a model whose rows speak of the next position, the row before the block is computed too, where
the published code commits the block's first token unseen by the rule
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretell.core.masked_text import Sheet
from foretell.diffusion.planner import ByBlock, CanvasKV, View


@dataclass(frozen=True)
class Dual(CanvasKV):
    """Has no settings; blocks are those of the method."""

    def planner(self) -> BlockAlone:
        return BlockAlone()


class BlockAlone(ByBlock):
    def view_within(self, sheet: Sheet, block: tuple[int, int], requested: Sequence[int]) -> View:
        return View(requested, range(*block))
