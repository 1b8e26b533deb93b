"""The rows of K-Forcing: uniform noise that a small network turns into what enters the model.

Row i stands at the place of the i-th next token, and says the token that its noise and that of the
rows before it stand for.

Source: K-Forcing: Joint Next-K-Token Decoding via Push-Forward Language Modeling, as its published
code has it (alibaba-damo-academy/K-Forcing, models/pflm.py).
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from foretell.drafters.heads.networks.anchored import Anchored
from foretell.drafters.heads.networks.base import HeadConfig

THETA = 10_000.0  # of the slowest wave's period to the fastest's


class KForcing(Anchored):
    """m + MLP(norm(m)) of m = W [waves(noise), waves(temperature)]."""

    kind = "k-forcing"
    options: ClassVar[dict[str, Any]] = {"rows": 4}
    bound = True

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        width = config.target.hidden
        del self.vectors  # its rows are made of noise
        self.joined = nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.ones(width))  # of a norm that takes the mean off
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    @torch.no_grad()
    def take_weights(self, target: Any) -> None:
        """Rows that are as large as a token's, since all weights but these are the target's."""
        embedding_size = target.embed(range(min(target.vocab, 4_096))).float().std()
        for layer, weight_scale in (
            (self.joined, embedding_size),
            (self.wide, 1.0),
            (self.narrow, embedding_size),
        ):
            nn.init.normal_(layer.weight, std=float(weight_scale) / layer.in_features**0.5)
            nn.init.zeros_(layer.bias)

    def noise_waves(self, numbers: torch.Tensor) -> torch.Tensor:
        """Numbers (n,) -> (n, E), cosines and sines, in float64 until they are made."""
        width = self.config.target.hidden
        wave_numbers = torch.arange(width // 2, dtype=torch.float64, device=numbers.device)
        turns = numbers.double()[:, None] * THETA ** (-wave_numbers / (width // 2))
        wave_rows = torch.cat([(2 * math.pi * turns).cos(), (2 * math.pi * turns).sin()], -1)
        return F.pad(wave_rows, (0, width - wave_rows.shape[1]))

    def noise_vectors(self, noise: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        """Vectors (n, E) that rows of noise (n,), in [0, 1), enter with at temperatures (n,)."""
        wave_rows = torch.cat([self.noise_waves(noise), self.noise_waves(temperature)], -1)
        m: torch.Tensor = self.joined(wave_rows.to(self.scale.dtype))
        normed_rows = F.layer_norm(m.float(), m.shape[-1:]).to(m.dtype) * self.scale
        expanded: torch.Tensor = self.narrow(F.gelu(self.wide(normed_rows)))
        return m + expanded

    def rows(self, row_places: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        raise AssertionError("its rows are made of noise")
