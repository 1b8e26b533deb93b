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


@torch.library.custom_op("foretell::linear8", mutates_args=())
def linear8(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Stands for the product in a recording."""
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
        bias = (
            None
            if parts[0].bias is None
            else torch.cat([m.bias for m in parts if m.bias is not None])
        )
        whole = cls(
            torch.cat([m.weight.data for m in parts]), torch.cat([m.scale for m in parts]), bias
        )
        for part, weight, scale in zip(
            parts, whole.weight.data.split(sizes), whole.scale.split(sizes), strict=True
        ):
            part.weight.data, part.scale = weight, scale
        return whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.jit.is_tracing():  # whoever records it brings a product of its own
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
    """Replaces every linear layer of a model; returns how many. A head that shares the embedding's
    gets its own.

    The model's weights must be as they were read: pages of its files that hold linear layers leave
    the memory.
    """
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
        and child.in_features > 1  # for one, torch 2.13's product is wrong
    ]
    for parent, name, child in found:
        setattr(parent, name, Linear8.of(child))
        release([child.weight.data])
    return len(found)
