"""The network of the MLP speculator: a state that takes in one drafted token after the other.

Source: Wertheimer et al., "Accelerating Production LLMs with Combined Token/Embedding Speculators"
(arXiv 2404.19124), section 2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from foretell.heads.base import HeadConfig
from foretell.heads.layers import Attend, Norm
from foretell.heads.recurrent import Recurrent, take_norm

STEPS = 3  # over which the text's part of a state falls to a half


def unit(x: torch.Tensor) -> torch.Tensor:
    """x / rms(x), in float32."""
    return F.rms_norm(x.float(), x.shape[-1:]).to(x.dtype)


class MlpSpeculator(Recurrent):
    """state = gelu(norm(project(state) + scale * read(token))), and the same weights at every
    step; the projection of the target's state alone is apart.
    """

    kind = "mlp-speculator"
    depths = STEPS
    decay = 1.0
    reads_normed = True

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        shape = config.target.layer()
        width = shape.hidden
        self.first = nn.Linear(width, width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.read = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.inner = nn.LayerNorm(width, shape.eps)
        self.norm = Norm(width, shape.eps)
        for linear in (self.first, self.project, self.read, self.out):
            nn.init.normal_(linear.weight, std=width**-0.5)
        kept = 0.5 ** (0.5 / STEPS)
        self.scale = math.sqrt((1 - kept**2) / 2) / kept

    @torch.no_grad()
    def begin(self, target: Any) -> None:
        take_norm(self.norm, target)

    def vectors(
        self,
        states: torch.Tensor,
        embedded: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        return unit(states) / math.sqrt(2)

    def draft(
        self, vectors: torch.Tensor, embedded: torch.Tensor, depth: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        project = self.project if depth else self.first
        added = self.scale * self.read(unit(embedded))
        state = F.gelu(self.inner(project(vectors[..., : self.hidden]) + added))
        read: torch.Tensor = self.norm(self.out(state))
        return read, state
