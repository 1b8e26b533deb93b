"""FSPAD's network: EAGLE-1's, with features that tokens gate and distributions beside the features.

Source: Gui et al., "Boosting Lossless Speculative Decoding via Feature Sampling and Partial
Alignment Distillation" (arXiv 2408.15562). The matrices of both halves are this
project's reading of it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from foretell.drafters.heads.networks.base import HeadConfig
from foretell.drafters.heads.networks.eagle import Eagle
from foretell.errors import BadConfig


class Sampled(nn.Module):
    """A state that is told which token was drawn: f + down(silu(gate e) * up f).

    The product is `times` as wide as the state, and begins as nothing.
    """

    def __init__(self, hidden: int, times: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, times * hidden, bias=False)
        self.up_proj = nn.Linear(hidden, times * hidden, bias=False)
        self.down_proj = nn.Linear(times * hidden, hidden, bias=False)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """(..., E) of tokens and of the states before them -> (..., E)."""
        gated = F.silu(self.gate_proj(embedded)) * self.up_proj(states)
        out: torch.Tensor = states + self.down_proj(gated)
        return out


class Apart(nn.Module):
    """Rows for the output matrix, apart from the estimated state: a + down(silu(up a)).

    The regression sees `a` alone, so that it does not hold back the laws. Begins as `a`.
    """

    def __init__(self, hidden: int):
        super().__init__()
        self.up_proj = nn.Linear(hidden, hidden // 2, bias=False)
        self.down_proj = nn.Linear(hidden // 2, hidden, bias=False)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = states + self.down_proj(F.silu(self.up_proj(states)))
        return out


class Fspad(Eagle):
    """EAGLE-1 whose states are gated by their tokens, and whose output matrix reads through an
    adapter that the regression does not reach.

    Options: `times`, how many times as wide as a state the gated product is, and `adapter`, whether
    there is one. Without both (0, False) it is EAGLE-1. Raises BadConfig.
    """

    kind = "fspad"
    agreement = 0.5
    by_library = False
    options: ClassVar[dict[str, Any]] = {**Eagle.options, "times": 2, "adapter": True}
    trained = ("times", "adapter")

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        times, adapter = self.option("times"), self.option("adapter")
        if type(times) is not int or not 0 <= times <= 16:
            raise BadConfig.field("fspad:times", times, "between 0 (no gate) and 16")
        if type(adapter) is not bool:
            raise BadConfig.field("fspad:adapter", adapter, "true or false")
        hidden = config.target.hidden
        self.sampled = Sampled(hidden, times) if times else None
        self.apart = Apart(hidden) if adapter else None

    def enter_layer(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        if self.sampled is not None:
            states = self.sampled(embedded, states)
        return super().enter_layer(embedded, states)

    def leave_layer(self, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return out if self.apart is None else self.apart(out), out
