"""The modules of transformers that multiply by a matrix: linear layers, and GPT-2's `Conv1D`, whose
weights lie the other way round.
"""

from __future__ import annotations

from torch import nn


def is_matrix(module: nn.Module) -> bool:
    """Whether a module does nothing but multiply by a matrix of floats, and add a bias."""
    return type(module) is nn.Linear or is_turned(module)


def is_turned(module: nn.Module) -> bool:
    """Whether a module's weights are (inputs, outputs), not (outputs, inputs) as a linear
    layer's.
    """
    from transformers.pytorch_utils import Conv1D

    return type(module) is Conv1D


def as_linear(module: nn.Module) -> nn.Linear:
    """A module for which `is_matrix` holds as a linear layer, which shares its memory."""
    if isinstance(module, nn.Linear):
        return module
    weight, bias = module.get_parameter("weight"), module.get_parameter("bias")
    inputs, outputs = weight.shape
    linear = nn.Linear(inputs, outputs, bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach().t(), requires_grad=False)
    linear.bias = bias
    return linear
