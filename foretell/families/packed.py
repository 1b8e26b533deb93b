"""Linear layers and embeddings whose weights are packed: 8 or 4 bits in groups of 32 with a scale
each, or bfloat16.

Each row of activations is rounded by itself, to 8 bits with a scale for every 32 numbers where
weights are whole numbers, and the sums of a row have one order. So a token's result depends on no
other row of its forward, to the last bit. The C library computes the product where it is built;
elsewhere torch does, with the same whole numbers and more slowly.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from foretell.native import library
from foretell.native.packing import BLOCK, GROUP, Packed, by_group, numbers, quantize, unpack
from foretell.ops.memory import release

SMALLEST = 2  # inputs of a layer that is packed
WHOLE_NUMBERS = ("int8", "int4")


@torch.library.custom_op("foretell::grouped_linear", mutates_args=())
def grouped_linear(
    x: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor
) -> torch.Tensor:
    """Stands for the product in a recording, whose runtime has its own.

    x (..., in), numbers (out, groups, 32), scales (out, groups), minima the same, or (0, 0) for
    numbers around zero.
    """
    return x.new_zeros(*x.shape[:-1], len(numbers))


class PackedLinear(nn.Module):
    """x (..., in) -> (..., out)."""

    def __init__(self, packed: Packed, bias: torch.Tensor | None, in_features: int):
        super().__init__()
        self.packed = packed
        self.in_features = in_features
        self.out_features = packed.outputs
        self.bias = bias
        self.wide_bias = None if bias is None else bias.detach().float().contiguous()
        self._matrix: Any = None

    @classmethod
    def of(cls, linear: nn.Linear, format: str) -> PackedLinear:
        packed = quantize(linear.weight.detach(), format)
        return cls(packed, linear.bias, linear.in_features)

    @classmethod
    def join(cls, parts: list[PackedLinear]) -> PackedLinear | None:
        """One layer for several with the same input; the parts become views of it.

        None where their outputs are no multiples of 16.
        """
        sizes = [part.out_features for part in parts]
        if any(size % BLOCK for size in sizes):
            return None
        biases = [part.bias for part in parts if part.bias is not None]
        joined = cls(
            Packed.join([part.packed for part in parts]),
            torch.cat(biases) if biases else None,
            parts[0].in_features,
        )
        for part, packed in zip(parts, joined.packed.split(sizes), strict=True):
            part.packed = packed
            part._matrix = None
        return joined

    @property
    def matrix(self) -> Any:
        """The C library's structure of it."""
        if self._matrix is None:
            self._matrix = library.matrix(self.packed, self.wide_bias)
        return self._matrix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.jit.is_tracing():
            return self._recorded(x)
        rows = x.reshape(-1, self.in_features).float()
        rows = F.pad(rows, (0, self.packed.inputs - self.in_features)).contiguous()
        if library.available():
            y = library.product(self.matrix, rows, torch.get_num_threads())
        else:
            y = product_by_torch(self.packed, rows)
            if self.wide_bias is not None:
                y += self.wide_bias
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def _recorded(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed.format == "bfloat16":
            return F.linear(x, unpack(self.packed)[:, : self.in_features].to(x.dtype), self.bias)
        assert self.packed.scales is not None
        x = F.pad(x, (0, self.packed.inputs - self.in_features))
        minima = torch.empty(0, 0)
        if self.packed.minima is not None:
            minima = by_group(self.packed, self.packed.minima)
        y = torch.ops.foretell.grouped_linear(
            x, numbers(self.packed), by_group(self.packed, self.packed.scales), minima
        )
        return y if self.bias is None else y + self.bias


class PackedEmbedding(nn.Module):
    """Embeddings that are the head's rows: ids (...) -> (..., E), in the model's number format."""

    def __init__(self, head: PackedLinear, dtype: torch.dtype):
        super().__init__()
        self.head = [head]  # a list, so that it is no part of this module
        self.dtype = dtype

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """ids (n,) -> (n, E) float32."""
        head = self.head[0]
        if library.available():
            return library.rows_of(head.matrix, ids)[:, : head.in_features]
        packed = head.packed
        parts = [packed.split([BLOCK * packed.blocks])[0]] if not len(ids) else []
        for i in ids.tolist():
            parts.append(_block_of(packed, i // BLOCK))
        rows = [unpack(part)[i % BLOCK] for part, i in zip(parts, ids.tolist(), strict=True)]
        return torch.stack(rows)[:, : head.in_features].float()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids.reshape(-1)).to(self.dtype).view(*ids.shape, -1)


def _block_of(packed: Packed, block: int) -> Packed:
    """The 16 outputs of one block."""
    size = len(packed.weights) // packed.blocks
    part = Packed(
        packed.format, BLOCK, packed.inputs, packed.weights[block * size : (block + 1) * size]
    )
    if packed.scales is not None:
        part.scales = packed.scales[block : block + 1]
    if packed.minima is not None:
        part.minima = packed.minima[block : block + 1]
    return part


def product_by_torch(packed: Packed, x: torch.Tensor) -> torch.Tensor:
    """x (rows, inputs) float32 -> (rows, outputs) float32, without the bias.

    Sums of a group are whole numbers below 2**24, so float32 holds them whatever their order.
    """
    if packed.format == "bfloat16":
        # One product a row: those of several rows may be summed in other orders.
        weight = unpack(packed).float()
        rounded = x.bfloat16().float()
        return (
            torch.stack([weight @ row for row in rounded])
            if len(x)
            else x.new_empty(0, len(weight))
        )
    assert packed.scales is not None
    groups = x.view(len(x), -1, GROUP)
    top = groups.abs().amax(-1, keepdim=True)
    scale = top / 127
    whole = (groups * torch.where(top > 0, 127 / top, torch.zeros_like(top))).round()
    weights = numbers(packed).float()
    if packed.format == "int4" and packed.minima is None:
        weights -= 8
    weight_scale = by_group(packed, packed.scales).float()
    total = x.new_zeros(len(x), packed.outputs)
    for group in range(groups.shape[1]):
        dots = whole[:, group] @ weights[:, group].t()
        total = total + dots * (scale[:, group] * weight_scale[:, group])
        if packed.minima is not None:
            least = by_group(packed, packed.minima)[:, group].float()
            total = total + (scale[:, group] * whole[:, group].sum(-1, keepdim=True)) * least
    return total


def pack(hf: Any, format: str) -> int:
    """Replaces every linear layer of a model, and embeddings that are the head's weight.

    Returns how many layers. Of 4 bits the head keeps 8. The model's weights must be as they were
    read: pages of its files that hold them leave the memory.
    """
    head = hf.get_output_embeddings() if hasattr(hf, "get_output_embeddings") else None
    embedding = hf.get_input_embeddings() if head is not None else None
    tied = (
        type(head) is nn.Linear
        and type(embedding) is nn.Embedding
        and head.weight.data_ptr() == embedding.weight.data_ptr()
    )
    linears = [
        (parent, name, child)
        for parent in hf.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child.in_features >= SMALLEST
    ]
    for parent, name, linear in linears:
        narrow = "int8" if linear is head and format == "int4" else format
        packed = PackedLinear.of(linear, narrow)
        setattr(parent, name, packed)
        if linear is head and tied:
            hf.set_input_embeddings(PackedEmbedding(packed, linear.weight.dtype))
        release([linear.weight.data])
    return len(linears)
