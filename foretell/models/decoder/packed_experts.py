"""The matrices of a layer's experts, packed: those of all experts lie beside each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from foretell.models.decoder.packed import PackedLinear
from foretell.native.packing import BLOCK


def clamped_silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The gate of gpt-oss's experts (OpenAI, "gpt-oss model card", section 2.2)."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(gate * 1.702)


class PackedExperts(nn.Module):
    """Experts with packed matrices, in place of a module of transformers that has them stacked.

    `gate`, `up` (X * I outputs) and `down` (X * E outputs) hold the matrices of X experts.
    """

    def __init__(
        self, gate: PackedLinear, up: PackedLinear, down: PackedLinear, count: int, act_fn: Any
    ):
        super().__init__()
        self.gate, self.up, self.down = gate, up, down
        self.count = count
        self.act_fn = act_fn  # None: `clamped_silu`

    @classmethod
    def of(cls, module: Any, format: str) -> PackedExperts:
        """Packs the experts of a module of transformers, which is left without them."""
        gate_up, down = module.gate_up_proj.data, module.down_proj.data
        bias, down_bias = (
            getattr(module, f"{name}_proj_bias", None) for name in ("gate_up", "down")
        )
        no_biases = (None, None)
        act_fn = getattr(module, "act_fn", None)
        if act_fn is None:  # gpt-oss: (inputs, outputs), gate and up are neighbours
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
            parts = gate_up[:, 0::2], gate_up[:, 1::2], down
            bias_pair = no_biases if bias is None else (bias[:, 0::2], bias[:, 1::2])
        else:
            parts = (*gate_up.chunk(2, 1), down)
            bias_pair = no_biases if bias is None else bias.chunk(2, 1)
        gate, up, down_layer = (
            cls._pack(part, part_bias, format)
            for part, part_bias in zip(parts, (*bias_pair, down_bias), strict=True)
        )
        return cls(gate, up, down_layer, len(down), act_fn)

    @staticmethod
    def _pack(weights: torch.Tensor, bias: torch.Tensor | None, format: str) -> PackedLinear:
        """Packs matrices (X, N, K) as one of X * N outputs."""
        linear = nn.Linear(weights.shape[2], weights.shape[0] * weights.shape[1], False, "meta")
        linear.weight = nn.Parameter(weights.reshape(-1, weights.shape[2]), requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias.reshape(-1), requires_grad=False)
        return PackedLinear.of(linear, format)

    def parts(self) -> Iterator[tuple[str, list[PackedLinear]]]:
        """The matrices of each expert, by their names in the library."""
        for name, linear in (("gate", self.gate), ("up", self.up), ("down", self.down)):
            yield name, linear.split([linear.out_features // self.count] * self.count)

    def _matrix(self, linear: PackedLinear, expert: int) -> PackedLinear:
        """One expert's matrix, of those of all."""
        outputs = linear.out_features // self.count
        first = expert * outputs
        if outputs % BLOCK:
            return linear.take(torch.arange(first, first + outputs))
        bias = None if linear.bias is None else linear.bias[first : first + outputs]
        return PackedLinear(linear.packed.part(first // BLOCK, outputs), bias, linear.in_features)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Rows (n, E) of states (n, E), by the experts (n, k) of each with their weights (n, k)."""
        output = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            rows, ranks = (top_k_index == expert).nonzero(as_tuple=True)
            states = hidden_states[rows]
            gate, up = (
                self._matrix(self.gate, expert)(states),
                self._matrix(self.up, expert)(states),
            )
            inner = clamped_silu(gate, up) if self.act_fn is None else self.act_fn(gate) * up
            given = self._matrix(self.down, expert)(inner) * top_k_weights[rows, ranks, None]
            output.index_add_(0, rows, given.to(output.dtype))
        return output


def is_stacked(module: nn.Module) -> bool:
    """Whether a module of transformers holds the matrices of several experts, stacked."""
    parts = dict(module.named_parameters(recurse=False))
    return all(name in parts and parts[name].ndim == 3 for name in ("gate_up_proj", "down_proj"))


def pack_experts(hf_model: Any, format: str) -> int:
    """Packs the experts of every layer of a model; returns of how many."""
    stacked = [
        (parent, name, child)
        for parent in hf_model.modules()
        for name, child in parent.named_children()
        if is_stacked(child)
    ]
    for parent, name, child in stacked:
        setattr(parent, name, PackedExperts.of(child, format))
    return len(stacked)


def pack_router(module: Any) -> PackedLinear:
    """The matrix by which a router scores experts, packed in float32: near ties decide."""
    weight, bias = module.weight, getattr(module, "bias", None)
    linear = nn.Linear(weight.shape[1], weight.shape[0], False, "meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return PackedLinear.of(linear, "float32")
