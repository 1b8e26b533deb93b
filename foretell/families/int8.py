"""Linear layers with weights of 8 bits: half the memory of 16, and on a CPU most of the time of a
step.

Weights have one scale for each output channel, and each row of activations gets its own scale when
it comes, so that a token's result depends on no other row of its forward. What is summed are
integers: that sum is exact in any order. The product is torch's `_int_mm`, which torchao builds on
too and which calls oneDNN; of the operators that torch has for this it was the quickest, up to
twice as quick as its product of 16-bit numbers (dev/LOG.md).
"""

from __future__ import annotations

import torch
from torch import nn

from foretell.ops.memory import release

SMALLEST = 2  # inputs: for one, torch 2.13's product is wrong


@torch.library.custom_op("foretell::linear8", mutates_args=())
def linear8(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Stands for the product in a recording, whose runtime has its own."""
    return x.new_zeros(*x.shape[:-1], len(weight))


class Linear8(nn.Module):
    """x (..., in) -> (..., out). `weight` (out, in) int8, `scale` (out,) float32: the matrix is
    weight * scale.
    """

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("scale", scale)
        self.scale: torch.Tensor
        self.bias = bias
        self.out_features, self.in_features = weight.shape

    @classmethod
    def of(cls, linear: nn.Linear) -> Linear8:
        """Each channel's largest weight becomes 127 or -127."""
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(1).clamp_min_(1e-12) / 127
        return cls((weight / scale[:, None]).round_().to(torch.int8), scale, linear.bias)

    @classmethod
    def join(cls, parts: list[Linear8]) -> Linear8:
        """One layer for several with the same input; the parts become views of it."""
        sizes = [m.out_features for m in parts]
        biases = [part.bias for part in parts if part.bias is not None]
        weight = torch.cat([part.weight.data for part in parts])
        scale = torch.cat([part.scale for part in parts])
        joined = cls(weight, scale, torch.cat(biases) if biases else None)
        weights = joined.weight.data.split(sizes)
        scales = joined.scale.split(sizes)
        for part, part_weight, part_scale in zip(parts, weights, scales, strict=True):
            part.weight.data = part_weight
            part.scale = part_scale
        return joined

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.jit.is_tracing():
            y = torch.ops.foretell.linear8(x, self.weight, self.scale)
            return y if self.bias is None else y + self.bias
        rows = x.reshape(-1, self.in_features).float()
        scale = rows.abs().amax(-1, keepdim=True).clamp_min_(1e-12) / 127
        sums = torch._int_mm((rows / scale).round_().to(torch.int8), self.weight.t())
        y = sums.float().mul_(scale).mul_(self.scale)
        if self.bias is not None:
            y += self.bias
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)


def quantize(model: nn.Module) -> int:
    """Replaces every linear layer of a model; returns how many.

    A head that shares the embedding's weight gets its own. The model's weights must be as they were
    read: pages of its files that hold linear layers leave the memory.
    """
    linears = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child.in_features >= SMALLEST
    ]
    for parent, name, linear in linears:
        setattr(parent, name, Linear8.of(linear))
        release([linear.weight.data])
    return len(linears)
