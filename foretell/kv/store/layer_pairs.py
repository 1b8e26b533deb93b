"""Rows of two neighbouring layers as one direction and two lengths.

What two layers hold of a token points to nearly the same side in the deeper half of a model. So the
directions are replaced by one between them, and the lengths are kept. Tokens whose directions lie
far apart are to be left out of that.

Source: Liu et al., "MiniCache" (arXiv 2405.14366), sections 4.1 and 4.2.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

PARALLEL = 1e-6  # a sine below it: the directions are the same, or opposite
OPPOSITE = 1e-3  # so near to half a turn the direction between two is anyone's
RULES = ("distant", "similar")


class Pair(NamedTuple):
    """Rows of two layers for each token of a unit, heads together or one: `directions` (U, n, W) of
    about length 1, the `sizes` of both layers (2, U, n), and the `angles` between them (U, n), in
    float32 or wider.
    """

    directions: torch.Tensor
    sizes: torch.Tensor
    angles: torch.Tensor


def merge_layers(shallow: torch.Tensor, deep: torch.Tensor, t: float) -> Pair:
    """Rows (U, n, W) of two layers; the direction is a share `t` of the way from the shallow one's
    to the deep one's along the arc (equation 3).
    """
    rows = torch.stack([shallow, deep])
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    sizes = rows.norm(dim=-1)
    shallow_directions, deep_directions = (
        rows / sizes.clamp_min(torch.finfo(rows.dtype).tiny)[..., None]
    )
    # An arc cosine would lose half of the digits of small angles.
    angles = 2 * torch.atan2(
        (shallow_directions - deep_directions).norm(dim=-1),
        (shallow_directions + deep_directions).norm(dim=-1),
    )
    sines = angles.sin()
    parallel_mask = sines.abs() < PARALLEL
    safe_sines = sines.masked_fill(parallel_mask, 1)
    shares = [
        torch.where(parallel_mask, share, (share * angles).sin() / safe_sines)[..., None]
        for share in (1 - t, t)
    ]
    return Pair(shares[0] * shallow_directions + shares[1] * deep_directions, sizes, angles)


def restore_layer(directions: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """A layer's rows: along directions (..., W) of any length, with these sizes (...)."""
    wide_directions = directions.to(sizes.dtype)
    lengths = wide_directions.norm(dim=-1).clamp_min(torch.finfo(wide_directions.dtype).tiny)
    return wide_directions * (sizes / lengths)[..., None]


def distant_tokens(angles: torch.Tensor, gamma: float, rule: str) -> torch.Tensor:
    """Which tokens are kept as they are, bool (U, n): those whose angle lies within the last share
    `gamma` of the range from the least to the largest of their unit, or for the rule `similar` in
    the first, as section 4.2 has it in print; and those with opposite directions.
    """
    min_angle, max_angle = angles.aminmax(dim=-1, keepdim=True)
    if gamma >= 1:
        return torch.ones_like(angles, dtype=torch.bool)
    if rule == "distant":
        kept_mask = angles > max_angle - gamma * (max_angle - min_angle)
    else:
        kept_mask = angles < min_angle + gamma * (max_angle - min_angle)
    return kept_mask | (angles > math.pi - OPPOSITE)
