"""Chunks: what key heads read, against plain loops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretell.kv.select.paged import Chunks
from foretell.ops.attention import Attention


def job(base: int) -> Any:
    return SimpleNamespace(cache=SimpleNamespace(base=base, length=base), start=base, tokens=[1, 2])


@pytest.mark.parametrize(("count", "base"), [(1, 90), (3, 90), (3, 50), (40, 97)])
def test_key_heads_read_the_chunks_that_their_queries_are_nearest_to(count: int, base: int) -> None:
    random = torch.Generator().manual_seed(base)
    keys = torch.randn(2, base + 2, 4, generator=random)
    q = torch.randn(6, 2, 4, generator=random)
    policy = Chunks(0, count, 8)
    cache = SimpleNamespace(base=40, k=[keys])
    policy.change_rows(cache)  # some of them first
    cache.base = base
    policy.change_rows(cache)
    assert policy.watches_job(job(base))
    read = policy.select_rows(job(base), Attention(0, q, keys, keys, None, 1.0)).mask_rows(base + 2)
    whole = base // 8
    for head in range(2):
        for node in range(2):
            scores = {}
            for chunk in range(1, whole):
                mean = sum(keys[head, 8 * chunk + i] for i in range(8)) / 8
                scores[chunk] = sum(float(q[3 * head + i, node] @ mean) for i in range(3))
            kept = min(count, max(1, whole // 4)) - 1
            best = {0, *sorted(scores, key=lambda c: -scores[c])[:kept]}
            want = [row // 8 in best or row >= whole * 8 for row in range(base + 2)]
            assert read[head, node].tolist() == want


def test_a_text_of_one_chunk_is_read_whole() -> None:
    assert not Chunks(0, 5, 8).watches_job(job(15))
    assert Chunks(0, 5, 8).watches_job(job(16))
