"""The network of Medusa: one small block a depth over the target's last state.

Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding
Heads" (arXiv 2401.10774), section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from foretell.drafters.heads.networks.base import Drafted, Head, HeadConfig, Nodes, Texts
from foretell.drafters.heads.networks.layers import Attend


class Residual(nn.Module):
    """z + SiLU(W z + b), with W and b zero at first, so that it begins as the identity."""

    def __init__(self, hidden: int):
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """(..., E) -> (..., E)"""
        out: torch.Tensor = states + F.silu(self.linear(states))
        return out


def stack_blocks(hidden: int, layers: int) -> nn.Module:
    """A block of so many layers."""
    if layers == 1:
        return Residual(hidden)
    return nn.Sequential(*(Residual(hidden) for _ in range(layers)))


class Medusa(Head):
    """K blocks side by side, all of which read the target's normed last state.

    The newest token's state is not known yet, so they read that of the token before it: the block
    of depth k, from 0, draws the token k + 2 places after the one whose state it reads. No block
    reads a drafted token, nor the newest one. The output matrix is the target's, or one of its own
    after each block.
    """

    kind = "medusa"
    options: ClassVar[dict[str, Any]] = {
        "blocks": 4,
        "layers": 1,  # of each block
        "own_matrix": 0,  # rows of the blocks' own output matrices; 0: the target's
    }
    trained = ("blocks", "layers")
    layers = 0
    laws = 4
    depths = 4
    reads_normed = True

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        block_count, layer_count = (
            self.whole_option("blocks", 1, 16),
            self.whole_option("layers", 1, 16),
        )
        matrix_rows = self.own_rows()
        self.deepest = block_count
        hidden = config.target.hidden
        self.blocks = nn.ModuleList(stack_blocks(hidden, layer_count) for _ in range(block_count))
        if matrix_rows:
            self.matrix = nn.ModuleList(
                nn.Linear(hidden, matrix_rows, bias=False) for _ in range(block_count)
            )

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.config.target.layers,)

    def unroll_depths(self, texts: Texts, depths: int) -> Iterator[Drafted]:
        for depth, block in enumerate(self.blocks[:depths]):
            yield Drafted(depth, block(texts.features))

    def step(self, nodes: Nodes, attend: Attend) -> tuple[torch.Tensor, torch.Tensor]:
        """States (n, K, E), one of each depth, and the features as they were."""
        states = torch.stack([block(nodes.features) for block in self.blocks], 1)
        return states, nodes.features

    def depths_of(self, nodes: Nodes) -> torch.Tensor:
        depths = torch.arange(self.deepest, device=nodes.features.device)
        return depths.expand(len(nodes.features), -1)
