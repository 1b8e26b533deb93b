"""The parts that heads are made of.

Attention is handed in, so that a layer is the same in training, where it sees whole texts, and in
drafting, where it sees a cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from foretell.errors import BadConfig

WIDE = 32  # times as many numbers as the stream that a layer may work on

# q (..., H, n, D), k and v (..., KV, n, D) of the new rows -> (..., n, H, D). A fourth argument,
# `row_pair`, is a key and a value of each row, shaped as k and v, that it alone sees.
Attend = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class LayerShape:
    """A decoder layer as the target's: widths, heads, rotation."""

    hidden: int  # E, width of the stream
    heads: int
    kv_heads: int
    width: int  # D, of a head
    intermediate: int
    theta: float = 10_000.0  # base of the rotation
    eps: float = 1e-5

    def __post_init__(self) -> None:
        """Raises BadConfig for numbers that no layer has: they are read from files."""
        max_numbers = WIDE * self.hidden if type(self.hidden) is int else 0
        for name in ("hidden", "heads", "kv_heads", "width", "intermediate"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= max_numbers:
                raise BadConfig.field(f"layer:{name}", value, f"a number from 1 to {max_numbers}")
        if self.heads % self.kv_heads or self.heads * self.width > max_numbers or self.width % 2:
            head_text = f"{self.heads} of {self.width} numbers, {self.kv_heads} with keys"
            raise BadConfig(f"layer: has no such heads ({head_text})")
        for name in ("theta", "eps"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise BadConfig.field(f"layer:{name}", value, "a number above 0")


def as_float32(x: torch.Tensor) -> torch.Tensor:
    """The tensor in float32, or wider."""
    return x if x.dtype == torch.float64 else x.float()


class Norm(nn.Module):
    """x / rms(x) * weight, in float32 or wider."""

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide_states = as_float32(x)
        wide_states = wide_states * torch.rsqrt(
            wide_states.square().mean(-1, keepdim=True) + self.variance_epsilon
        )
        return (self.weight * wide_states).to(x.dtype)


class Rotation(nn.Module):
    """Cosines and sines of positions, as llama's: the two halves of a head turn against each
    other.
    """

    def __init__(self, width: int, theta: float):
        super().__init__()
        exponents = torch.arange(0, width, 2).double() / width
        self.frequencies: torch.Tensor
        self.register_buffer("frequencies", theta**-exponents, persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions (..., n) -> cosines and sines (..., n, D), float32."""
        angles = positions.double()[..., None] * self.frequencies
        both_halves = torch.cat([angles, angles], -1)
        return both_halves.cos().float(), both_halves.sin().float()


def turn_rows(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """x (..., heads, n, D) turned by cosines and sines (..., n, D) of its rows."""
    first_half, second_half = x.chunk(2, -1)
    swapped = torch.cat([-second_half, first_half], -1)
    return (x * cosines.unsqueeze(-3) + swapped * sines.unsqueeze(-3)).to(x.dtype)


class Attention(nn.Module):
    """Queries, keys and values of `inputs` numbers a row; its result has the stream's width.

    `head_norms`: whether queries and keys go through a norm before they are turned, as in qwen3.
    """

    def __init__(self, shape: LayerShape, inputs: int, head_norms: bool = False):
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(inputs, shape.heads * shape.width, bias=False)
        self.k_proj = nn.Linear(inputs, shape.kv_heads * shape.width, bias=False)
        self.v_proj = nn.Linear(inputs, shape.kv_heads * shape.width, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.width, shape.hidden, bias=False)
        self.q_norm = Norm(shape.width, shape.eps) if head_norms else None
        self.k_norm = Norm(shape.width, shape.eps) if head_norms else None

    def project_rows(
        self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (..., n, inputs) -> q (..., H, n, D), k and v (..., KV, n, D), turned."""
        width = self.shape.width
        q, k, v = (
            part(x).unflatten(-1, (-1, width)).transpose(-3, -2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return turn_rows(q, *rotation), turn_rows(k, *rotation), v

    def forward(
        self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], attend: Attend
    ) -> torch.Tensor:
        attended = attend(*self.project_rows(x, rotation)).flatten(-2)
        out: torch.Tensor = self.o_proj(attended)
        return out


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of whole texts, each row to those up to itself: see `Attend`."""
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return attended.transpose(-3, -2)


class Gated(nn.Module):
    """The feed-forward block: down(silu(gate x) * up x)."""

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """A decoder layer.

    `inputs`: numbers a row that attention reads; None: the stream, through a norm of its own where
    `normed` is set.
    """

    def __init__(
        self,
        shape: LayerShape,
        inputs: int | None = None,
        normed: bool = True,
        head_norms: bool = False,
    ):
        super().__init__()
        attended_width = shape.hidden if inputs is None else inputs
        self.self_attn = Attention(shape, attended_width, head_norms)
        self.mlp = Gated(shape.hidden, shape.intermediate)
        self.input_layernorm = Norm(shape.hidden, shape.eps) if normed and inputs is None else None
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)

    def forward(
        self,
        h: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
        read: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """h (..., n, E), the stream -> the same after the layer. `read`: what attention reads in
        its place.
        """
        if read is None:
            read = h if self.input_layernorm is None else self.input_layernorm(h)
        h = h + self.self_attn(read, rotation, attend)
        out: torch.Tensor = h + self.mlp(self.post_attention_layernorm(h))
        return out
