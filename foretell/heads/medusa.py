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

from foretell.errors import BadConfig
from foretell.heads.base import Drafted, Head, HeadConfig, Nodes, Texts
from foretell.heads.layers import Attend


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


class Medusa(Head):
    """K blocks side by side, all of which read the target's normed last state.

    The newest token's state is not known yet, so they read that of the token before it: the block
    of depth k draws the token k + 2 places behind the one whose state it reads. No block reads a
    drafted token, nor the newest one. The output matrix is the target's.
    """

    kind = "medusa"
    options: ClassVar[dict[str, Any]] = {"blocks": 4}
    layers = 0
    laws = 4
    depths = 4
    reads_normed = True

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        count = self.option("blocks")
        if not isinstance(count, int) or not 1 <= count <= 16:
            raise BadConfig.field("medusa:blocks", count, "between 1 and 16")
        self.deepest = count
        hidden = config.target.hidden
        self.blocks = nn.ModuleList(Residual(hidden) for _ in range(count))

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.config.target.layers,)

    def unroll(self, texts: Texts, depths: int) -> Iterator[Drafted]:
        for depth, block in enumerate(self.blocks[:depths]):
            yield Drafted(depth, block(texts.features))

    def step(self, nodes: Nodes, attend: Attend) -> tuple[torch.Tensor, torch.Tensor]:
        """States (n, K, E), one of each depth, and the features as they were."""
        states = torch.stack([block(nodes.features) for block in self.blocks], 1)
        return states, nodes.features
