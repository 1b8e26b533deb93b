"""The network of Clover: a recurrence over the drafted tokens after layers over the text.

Sources: Xiao et al., "Clover: Regressive Lightweight Speculative Decoding with Sequential
Knowledge" (arXiv 2405.00263) and "Clover-2: Accurate Inference for Regressive Lightweight
Speculative Decoding" (arXiv 2408.00264), section 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from foretell.drafters.heads.networks.base import HeadConfig
from foretell.drafters.heads.networks.layers import Attend, Layer, LayerShape, Norm
from foretell.drafters.heads.networks.recurrent import Recurrent
from foretell.drafters.heads.networks.taking import take_layer, take_norm

NEAR = 0.01  # how far random weights are from the identity, or from nothing


def near_identity(linear: nn.Linear, identity: bool = True) -> None:
    """Sets weights to the identity over the first inputs, or to nothing, with a little noise."""
    with torch.no_grad():
        linear.weight.uniform_(0, NEAR)
        if identity:
            row_count = linear.weight.shape[0]
            linear.weight[:, :row_count] += torch.eye(row_count)
        if linear.bias is not None:
            linear.bias.zero_()


class Gate(nn.Module):
    """x + cos(q, k) v by heads: a token taken in as far as it points where the state does.

    q is of the state, k and v of the token, and of each head one cosine.
    """

    def __init__(self, shape: LayerShape):
        super().__init__()
        width = shape.hidden
        self.heads, self.eps = shape.heads, shape.eps
        self.norm = Norm(width, shape.eps)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        near_identity(self.q_proj)
        near_identity(self.k_proj)
        near_identity(self.v_proj, identity=False)

    def forward(self, x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1))
            for part in (self.q_proj(self.norm(x)), self.k_proj(token), self.v_proj(token))
        )
        cosine = F.cosine_similarity(q.float(), k.float(), dim=-1, eps=self.eps)
        return x + (cosine.to(v.dtype)[..., None] * v).flatten(-2)


class Clover(Recurrent):
    """Two layers over the state and the newest token, then a vector that takes in the tokens
    drafted, each through a gate. What the output matrix reads is the vector at first, and vector
    and token below.
    """

    kind = "clover"
    layers = 2
    depths = 5
    decay = 0.7
    regression = 10.0

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        shape = config.target.layer_shape()
        width = shape.hidden
        self.entry, self.gate = Gate(shape), Gate(shape)
        self.augment = nn.ModuleList([Layer(shape) for _ in range(self.layers)])
        self.augment_norm = Norm(width, shape.eps)
        self.first = nn.Linear(width, width)
        self.below = nn.Linear(2 * width, width)
        self.norm = Norm(width, shape.eps)
        near_identity(self.first)
        near_identity(self.below)

    @torch.no_grad()
    def take_weights(self, target: Any) -> None:
        """Both layers are the target's last one at first, and both norms its last norm."""
        for layer in self.augment:
            assert isinstance(layer, Layer)
            take_layer(layer, target.loop.layers[-1])
        take_norm(self.augment_norm, target.loop.norm)
        take_norm(self.norm, target.loop.norm)

    def text_vectors(
        self, states: torch.Tensor, embedded: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        h = self.entry(states, embedded)
        rotation = self.rotation(positions)
        for layer in self.augment:
            h = layer(h, rotation, attend)
        out: torch.Tensor = self.augment_norm(h)
        return out

    def draft_rows(
        self, vectors: torch.Tensor, embedded: torch.Tensor, depth: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        vectors = vectors[..., : self.hidden]
        if depth:
            vectors = self.gate(vectors, embedded)
            out = self.below(torch.cat([vectors, embedded], -1))
        else:
            out = self.first(vectors)
        return self.norm(out), vectors
