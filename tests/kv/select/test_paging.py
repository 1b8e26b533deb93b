"""Bounds of pages: they hold for every key, and finer pages never bound worse."""

from __future__ import annotations

import torch

from foretell.kv.select.paging import inherit_choices, page_extremes, upper_bounds

RANDOM = torch.Generator().manual_seed(0)
KEYS = torch.randn(2, 24, 8, generator=RANDOM, dtype=torch.float64)
QUERIES = torch.randn(4, 7, 8, generator=RANDOM, dtype=torch.float64)


def test_the_bound_holds_for_every_key_and_is_reached() -> None:
    keys, q = KEYS, QUERIES
    above = upper_bounds(q, page_extremes(keys, 4))
    products = q @ keys.repeat_interleave(2, 0).transpose(1, 2)
    most = products.unflatten(-1, (-1, 4)).amax(-1)
    assert (above >= most - 1e-12).all() and (above > most + 0.1).any()
    one = upper_bounds(q, page_extremes(keys, 1))
    assert torch.allclose(one, products)


def test_finer_pages_never_bound_worse() -> None:
    products = QUERIES @ KEYS.repeat_interleave(2, 0).transpose(1, 2)
    most = products.unflatten(-1, (-1, 8)).amax(-1)
    before = upper_bounds(QUERIES, page_extremes(KEYS, 8))
    for page in (4, 2, 1):
        finer = upper_bounds(QUERIES, page_extremes(KEYS, page)).unflatten(-1, (3, -1)).amax(-1)
        assert (finer <= before + 1e-12).all() and (finer < before - 0.1).any()
        assert (finer >= most - 1e-12).all()
        before = finer
    assert torch.allclose(before, most)


def test_choices_come_from_above() -> None:
    parents = [-1, 0, 0, 1, 2, -1]
    assert inherit_choices(parents, [False] * 6) == [-1] * 6
    assert inherit_choices(parents, [False, True, False, False, True, True]) == [-1, 1, -1, 1, 4, 5]
