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
    """Computes iSwiGLU: x times silu(x), never below 0."""
    return x * F.silu(x)


def curvature(
    a_matrix: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    power: torch.Tensor,
    coupling: torch.Tensor,
    coupling_bias: torch.Tensor,
) -> torch.Tensor:
    """The metric G (..., H, D, D) of what the residual units left of A (..., H, D, D).

    It is computed in float32 at least: in float16 what keeps A_LM positive would be 0.
    """
    wide_dtype = torch.promote_types(a_matrix.dtype, torch.float32)
    all_parts = (a_matrix, weight, bias, power, coupling, coupling_bias)
    a_matrix, weight, bias, power, coupling, coupling_bias = (
        part.to(wide_dtype) for part in all_parts
    )
    positive_matrix = gated_square(weight @ a_matrix + bias) + POSITIVE
    return coupling @ positive_matrix**power + coupling_bias


def metric_spread(metrics: Sequence[torch.Tensor]) -> dict[str, float]:
    """Measures how far metrics (L, H, D, D) of several texts are from each other.

    `rmse`: the root of the mean square distance from their mean, in parts of the root mean square
    of that; `determinant`: the largest relative difference of a head's determinant. Both are 0 for
    a metric that does not depend on the text.
    """
    all_metrics = torch.stack([metric.double() for metric in metrics])
    mean_metric = all_metrics[0] + (all_metrics - all_metrics[:1]).mean(
        0
    )  # without rounding where all are the same
    distance = (all_metrics - mean_metric).square().mean().sqrt()
    mean_size = mean_metric.square().mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    signs, logs = torch.linalg.slogdet(all_metrics)
    determinant_gaps = torch.expm1((logs - logs[:1]).abs())
    determinant_gaps = torch.where(signs == signs[:1], determinant_gaps, torch.inf)
    is_same = (all_metrics == all_metrics[:1]).flatten(-2).all(-1)  # of singular ones too
    return {
        "rmse": float(distance / mean_size),
        "determinant": float(torch.where(is_same, 0.0, determinant_gaps).max()),
    }
