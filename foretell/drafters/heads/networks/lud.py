"""The row of Lexical Unit Decoding: one trained embedding that asks for a token not yet written.

Source: Lexical Unit Decoding (arXiv 2405.15208), as its abstract tells it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from foretell.drafters.heads.networks.anchored import Anchored
from foretell.drafters.heads.networks.base import HeadConfig


class Lud(Anchored):
    """A row, the same at every place below a node; its position says what it is asked for."""

    kind = "lud"
    bound = True

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        self.vectors = nn.Parameter(torch.zeros(1, config.target.hidden))

    @torch.no_grad()
    def take_weights(self, target: Any) -> None:
        """The mean of all tokens' embeddings, which is no token's."""
        mean_vector = target.embed(range(target.vocab)).float().mean(0)
        self.vectors.copy_(mean_vector[None].to(self.vectors))

    def rows(self, row_places: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        return self.vectors[torch.zeros_like(row_places)]
