"""Power law graph attention: the metric of each head that stands between queries and keys.

A head attends with softmax(Q G K^T / sqrt(D)). G (D, D) is made of the text's own queries:

    A = LN(Q^T Q)              how often channels are large together, over the whole text
    A = unit(...unit(A))       residual units of gated linear layers (the family has them)
    A_LM = iSwiGLU(W A + b) + 1e-9
    G = a A_LM^pw + b_a        the power by elements, the products of matrices

All of W, b, pw, a and b_a are (H, D, D). G = I is ordinary attention.

Source: Gokden, "PLDR-LLMs Learn A Generalizable Tensor Operator That Can Replace Its Own Deep
Neural Net At Inference" (arXiv 2502.13502), and its published code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

POSITIVE = 1e-9  # keeps A_LM above 0, so that any power of it is finite


def gated_square(x: torch.Tensor) -> torch.Tensor:
    """iSwiGLU: x times silu(x), never below 0."""
    return x * F.silu(x)


def curvature(
    a_matrix: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    power: torch.Tensor,
    coupling: torch.Tensor,
    coupling_bias: torch.Tensor,
) -> torch.Tensor:
    """G (..., H, D, D) of what the residual units left of A (..., H, D, D).

    It is computed in float32 at least: in float16 what keeps A_LM positive would be 0.
    """
    wide = torch.promote_types(a_matrix.dtype, torch.float32)
    parts = (a_matrix, weight, bias, power, coupling, coupling_bias)
    a_matrix, weight, bias, power, coupling, coupling_bias = (part.to(wide) for part in parts)
    positive = gated_square(weight @ a_matrix + bias) + POSITIVE
    return coupling @ positive**power + coupling_bias


def spread(metrics: Sequence[torch.Tensor]) -> dict[str, float]:
    """How far metrics (L, H, D, D) of several texts are from each other.

    `rmse`: the root of the mean square distance from their mean, in parts of the root mean square
    of that; `determinant`: the largest relative difference of a head's determinant. Both are 0 for
    a metric that does not depend on the text.
    """
    every = torch.stack([metric.double() for metric in metrics])
    mean = every[0] + (every - every[:1]).mean(0)  # without rounding where all are the same
    distance = (every - mean).square().mean().sqrt()
    size = mean.square().mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    signs, logs = torch.linalg.slogdet(every)
    apart = torch.expm1((logs - logs[:1]).abs())
    apart = torch.where(signs == signs[:1], apart, torch.inf)
    same = (every == every[:1]).flatten(-2).all(-1)  # of singular ones too
    return {
        "rmse": float(distance / size),
        "determinant": float(torch.where(same, 0.0, apart).max()),
    }
