"""Key heads that are merged into fewer: what they are projected on, told by keys and values of
texts.

Neighbouring heads are groups of t. What a token has in a group, side by side, is a row of t D
numbers, of which D stay: those along an orthonormal basis. Of all bases the first D right singular
vectors of the rows lose least (Eckart and Young). A basis is kept as one matrix a head, (G, t, D,
D) for G groups.

Source: Yu et al., "Effectively Compress KV Heads for LLM" (arXiv 2406.07056), where the rows are
those that caches hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from foretell.kv.base import CachePolicy
from foretell.kv.select.channels import read_under
from foretell.ops.attention import Attention

if TYPE_CHECKING:
    from foretell.core.model import Model

# In config.json of a model whose keys are projected after their rotation: {"heads": N} before.
FIELD = "key_projection"


@dataclass(eq=False)
class Gathered(CachePolicy):
    """Adds up X^T X of the rows X (n, t D) that caches hold, rotated keys and values, for all
    caches that are forked from it: of each layer (2, G, t D, t D), in float64.
    """

    merge: int  # heads of a group
    sums: dict[int, torch.Tensor] = field(default_factory=dict)

    plain = False

    def attend_job(self, job: Any, attention: Attention) -> torch.Tensor:
        group_rows = [side_by_side(rows[:, job.start :], self.merge).double()
                for rows in (attention.keys, attention.values)]  # fmt: skip
        products = torch.stack([rows.mT @ rows for rows in group_rows]).cpu()
        self.sums[attention.layer] = self.sums.get(attention.layer, 0) + products
        return attention.full_output()


def side_by_side(rows: torch.Tensor, group_size: int) -> torch.Tensor:
    """Rows (KV, n, D) of heads -> (G, n, t D) of groups."""
    return rows.unflatten(0, (-1, group_size)).transpose(1, 2).flatten(2)


@torch.inference_mode()
def gather_products(
    model: Model, texts: Iterable[Sequence[int]], group_size: int
) -> tuple[torch.Tensor, int]:
    """X^T X of a model's rows on these texts (L, 2, G, t D, t D), and how many tokens they have;
    without any it is empty.
    """
    policy = Gathered(group_size)
    token_count = read_under(model, policy, texts)
    layer_sums = [policy.sums[layer] for layer in range(len(model.layout))] if token_count else []
    return torch.stack(layer_sums) if layer_sums else torch.zeros(0), token_count


def leading_basis(products: torch.Tensor, group_size: int) -> torch.Tensor:
    """The basis (..., t, D, D) that loses least of rows with these X^T X (..., t D, t D): the
    eigenvectors with the largest eigenvalues, which are the right singular vectors of X.
    """
    width = products.shape[-1] // group_size
    vectors = torch.linalg.eigh(products).eigenvectors
    return vectors[..., -width:].flip(-1).unflatten(-2, (group_size, width))


def commuting_basis(products: torch.Tensor, group_size: int) -> torch.Tensor:
    """The basis that loses least among those that commute with rotations of positions, so that keys
    may be projected before they are rotated.

    A pair of channels that turns together, d and d + D / 2, is one complex number, which the same
    angle turns in every head; so what stays of it is one complex combination over the heads.
    """
    width = products.shape[-1] // group_size
    half = width // 2
    # (..., i, part, d, j, part, d): of each frequency d the products of heads i and j.
    pair_products = products.unflatten(-1, (group_size, 2, half)).unflatten(
        -4, (group_size, 2, half)
    )
    same_frequency = pair_products.diagonal(dim1=-4, dim2=-1)  # (..., i, part, j, part, d)
    (xx, xy), (yx, yy) = [
        same_frequency.select(-4, channel_part).unbind(-2) for channel_part in range(2)
    ]
    products_of = torch.complex(xx + yy, xy - yx).movedim(-1, -3)  # (..., d, i, j)
    best_vectors = (
        torch.linalg.eigh(products_of).eigenvectors[..., -1].movedim(-1, -2)
    )  # (..., i, d)
    real, imaginary = best_vectors.real.diag_embed(), best_vectors.imag.diag_embed()
    rows = [torch.cat([real, imaginary], -1), torch.cat([-imaginary, real], -1)]
    return torch.cat(rows, -2)


def pooled_basis(products: torch.Tensor, group_size: int) -> torch.Tensor:
    """The basis on which merged heads are the mean of their heads, times the root of t. It commutes
    with rotations too.

    Source: Ainslie et al., "GQA" (arXiv 2305.13245), section 2.1.
    """
    width = products.shape[-1] // group_size
    identity = torch.eye(width, dtype=products.dtype) / group_size**0.5
    return identity.expand(*products.shape[:-2], group_size, width, width).clone()


def left_out(products: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Sums of squares (...,) that rows with these X^T X lose on a basis."""
    flat = basis.flatten(-3, -2)
    total_squares = products.diagonal(dim1=-2, dim2=-1).sum(-1)
    basis_squares = (flat * (products @ flat)).sum((-2, -1))
    return (total_squares - basis_squares).clamp_min(0)


def project_heads(
    q: torch.Tensor, k: torch.Tensor, basis: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated queries (..., H, n, D) and keys (..., KV, n, D) on a basis (G, t, D, D) -> queries
    (..., H, n, D) and keys (..., G, n, D), whose products are those of what is left of the keys.
    """
    groups, group_size, _, _ = basis.shape
    queries = q.unflatten(-3, (groups, group_size, -1)) @ basis[:, :, None]
    keys = k.unflatten(-3, (groups, group_size)).transpose(-3, -2).flatten(-2)
    return queries.flatten(-5, -3), keys @ basis.flatten(1, 2)
