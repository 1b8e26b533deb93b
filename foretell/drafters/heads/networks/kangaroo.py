"""The network of Kangaroo: attention alone after the target's first layers.

Source: Liu et al., "Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting"
(arXiv 2404.18911), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from foretell.drafters.heads.networks.base import Drafted, Head, HeadConfig, Nodes, Texts
from foretell.drafters.heads.networks.caches import KnownStates
from foretell.drafters.heads.networks.layers import (
    Attend,
    Attention,
    Norm,
    Rotation,
    causal_attention,
)
from foretell.errors import BadConfig


class Kangaroo(Head):
    """x + attention(norm(x)), then a norm, over what leaves the target's first layers.

    A row reads the state of its own token, so the head needs nothing else of it. A drafted token's
    state comes of the target's first layers as the text's do: all depths are the same to it, and it
    is trained at one.
    """

    kind = "kangaroo"
    options: ClassVar[dict[str, Any]] = {"layers": 2}  # of the target that run before it
    trained = ("layers",)
    depths = 1
    lag = 0
    cache = KnownStates

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        shape, exits = config.target.layer_shape(), config.target.layers - 1
        if not 1 <= self.taps[0] <= exits:
            raise BadConfig.field("layers", self.taps[0], f"between 1 and {exits} for this target")
        self.rotation = Rotation(shape.width, shape.theta)
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape, shape.hidden)
        self.norm = Norm(shape.hidden, shape.eps)

    @property
    def taps(self) -> tuple[int, ...]:
        return (int(self.option("layers")),)

    def run_layer(
        self, states: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Rows (..., n, E) that the output matrix reads, of states (..., n, E)."""
        attended = self.self_attn(self.input_layernorm(states), self.rotation(positions), attend)
        out: torch.Tensor = self.norm(states + attended)
        return out

    def unroll_depths(self, texts: Texts, depths: int) -> Iterator[Drafted]:
        positions = torch.arange(texts.ids.shape[1], device=texts.ids.device)
        states = self.run_layer(texts.features, positions, causal_attention)
        for depth in range(depths):
            yield Drafted(depth, texts.shift_left(states, depth))

    def step(self, nodes: Nodes, attend: Attend) -> tuple[torch.Tensor, torch.Tensor]:
        """Nodes below get the states of the target's first layers, not these."""
        return self.run_layer(nodes.features, nodes.positions, attend), nodes.features
