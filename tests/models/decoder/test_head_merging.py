"""Bases that heads are merged on: what they lose, what they commute with, and the projection."""

from __future__ import annotations

import pytest
import torch

from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.head_merging import (
    commuting_basis,
    gather_products,
    leading_basis,
    left_out,
    pooled_basis,
    project_heads,
    side_by_side,
)
from tests.models.decoder.families import tiny

BASES = (leading_basis, commuting_basis, pooled_basis)


def rows(heads: int = 6, width: int = 8, count: int = 50) -> torch.Tensor:
    """(KV, n, D), of channels that go together and differ in size."""
    torch.manual_seed(3)
    mixed = torch.randn(heads * width, heads * width, dtype=torch.float64)
    states = torch.randn(count, heads * width, dtype=torch.float64).cumsum(-1) @ mixed
    return states.view(count, heads, width).transpose(0, 1)


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rows (..., n, D) turned by angles (n, D / 2), in halves as the llama family does."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


@pytest.mark.parametrize("merge", [2, 3, 6])
def test_no_basis_loses_less_than_the_first_singular_vectors(merge: int) -> None:
    x = side_by_side(rows(), merge)
    products = x.mT @ x
    basis = leading_basis(products, merge)
    flat = basis.flatten(-3, -2)
    found = torch.linalg.matrix_norm(x - x @ flat @ flat.mT)
    singular = torch.linalg.svdvals(x)[:, 8:]
    torch.testing.assert_close(found, singular.square().sum(-1).sqrt(), rtol=1e-6, atol=0)
    torch.testing.assert_close(left_out(products, basis).sqrt(), found, rtol=1e-6, atol=0)
    for other in (commuting_basis, pooled_basis):
        lost = left_out(products, other(products, merge))
        assert bool((lost > 1.1 * left_out(products, basis)).all())


def test_a_group_of_one_head_loses_nothing() -> None:
    x = side_by_side(rows(), 1)
    flat = leading_basis(x.mT @ x, 1).flatten(-3, -2)
    torch.testing.assert_close(x @ flat @ flat.mT, x)


@pytest.mark.parametrize("make", BASES)
def test_bases_are_orthonormal(make: object) -> None:
    x = side_by_side(rows(), 3)
    flat = make(x.mT @ x, 3).flatten(-3, -2)  # type: ignore[operator]
    torch.testing.assert_close(flat.mT @ flat, torch.eye(8, dtype=x.dtype).expand(2, 8, 8))


def test_those_that_commute_with_rotations_do_and_the_best_of_all_does_not() -> None:
    k = rows()
    angles = torch.rand(50, 4, dtype=torch.float64) * 6
    x, turned = side_by_side(k, 3), side_by_side(rotated(k, angles), 3)
    for make in BASES:
        flat = make(turned.mT @ turned, 3).flatten(-3, -2)
        alike = torch.allclose(rotated(x @ flat, angles), turned @ flat)
        assert alike == (make is not leading_basis)
    # Rotations change nothing of what the commuting basis is found by.
    before, after = (part.mT @ part for part in (x, turned))
    torch.testing.assert_close(
        left_out(before, commuting_basis(before, 3)), left_out(after, commuting_basis(after, 3))
    )


def test_a_basis_that_commutes_keeps_what_one_head_says_for_all() -> None:
    """Heads that are each other's complex multiples, frequency by frequency, lose nothing."""
    torch.manual_seed(1)
    base = torch.randn(40, 4, dtype=torch.complex128)
    heads = torch.stack([base * factor for factor in torch.randn(3, 4, dtype=torch.complex128)])
    x = side_by_side(torch.cat([heads.real, heads.imag], -1), 3)
    products = x.mT @ x
    size = products.diagonal(dim1=-2, dim2=-1).sum(-1)
    assert float(left_out(products, commuting_basis(products, 3)) / size) < 1e-12
    assert float(left_out(products, pooled_basis(products, 3)) / size) > 0.1


def test_products_of_what_is_projected_are_those_of_what_is_left() -> None:
    torch.manual_seed(0)
    k = rows(heads=4)
    q = torch.randn(8, 7, 8, dtype=torch.float64)  # two heads share a key head
    x = side_by_side(k, 2)
    basis = leading_basis(x.mT @ x, 2)
    queries, keys = project_heads(q, k, basis)
    assert queries.shape == (8, 7, 8) and keys.shape == (2, 50, 8)
    left = torch.zeros_like(k)
    for head in range(4):
        group, place = divmod(head, 2)
        for row in range(50):
            kept = sum(k[2 * group + i, row] @ basis[group, i] for i in range(2))
            torch.testing.assert_close(keys[group, row], kept)
            left[head, row] = basis[group, place] @ kept
    products = queries.view(2, 4, 7, 8) @ keys[:, None].mT
    wanted = q.view(4, 2, 7, 8) @ left[:, None].mT
    torch.testing.assert_close(products.reshape(8, 7, 50), wanted.reshape(8, 7, 50))
    batched = project_heads(q[None].expand(2, -1, -1, -1), k[None].expand(2, -1, -1, -1), basis)
    torch.testing.assert_close(batched[0][1], queries)
    torch.testing.assert_close(batched[1][1], keys)


def test_products_are_of_the_rows_that_caches_hold() -> None:
    """Keys are rotated there, and after their norms."""
    decoder = Decoder(tiny("qwen3"), "tiny")
    texts = [[5, 17, 3, 60, 42, 7], [8, 9, 10]]
    products, tokens = gather_products(decoder, texts, 2)
    assert tokens == 9 and products.shape == (3, 2, 1, 32, 32)
    wanted = torch.zeros_like(products)
    for text in texts:
        cache = decoder.cache()
        job, _ = cache.prepare(Ask(TokenTree(text[0]).chain(text[1:])), text[:1], 1)
        decoder.forward([job])
        for layer in range(3):
            for place, held in enumerate((cache.k[layer], cache.v[layer])):
                x = side_by_side(held[:, : len(text)], 2).double()
                wanted[layer, place] += x.mT @ x
    torch.testing.assert_close(products, wanted)
    assert gather_products(decoder, [], 2)[1] == 0
