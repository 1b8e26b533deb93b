"""Attention against a twin in plain loops."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell.ops.attention import (
    Attention,
    attend,
    attend_jointly,
    merge_parts,
    partial_attention,
    self_part,
)


def twin(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> list[list[list[float]]]:
    """(n, H, D): every head and query by itself, one sum at a time."""
    heads, new, _ = q.shape
    out: list[list[list[float]]] = []
    for i in range(new):
        out.append([])
        for h in range(heads):
            group = h // (heads // len(k))
            scores = []
            for j in range(k.shape[1]):
                score = scale * sum(
                    a * b for a, b in zip(q[h, i].tolist(), k[group, j].tolist(), strict=True)
                )
                score = softcap * math.tanh(score / softcap) if softcap else score
                scores.append(score + (float(mask[i, j]) if mask is not None else 0.0))
            weights = [math.exp(s) for s in scores]
            total = sum(weights) + (math.exp(float(sinks[h])) if sinks is not None else 0.0)
            row = [
                sum(w * float(v[group, j, d]) for j, w in enumerate(weights)) / total
                for d in range(v.shape[-1])
            ]
            out[-1].append(row)
    return out


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("softcap", "sunk"), [(None, False), (5.0, False), (None, True), (5.0, True)]
)
def test_equals_the_twin(
    heads: tuple[int, int], new: int, masked: bool, softcap: float | None, sunk: bool
) -> None:
    draw = torch.Generator().manual_seed(7)
    q = torch.randn(new, heads[0], 4, generator=draw, dtype=torch.float64).transpose(0, 1)
    k = torch.randn(heads[1], 6, 4, generator=draw, dtype=torch.float64)[
        :, :5
    ]  # rows of a longer buffer
    v = torch.randn(heads[1], 6, 3, generator=draw, dtype=torch.float64)[:, :5]
    mask = None
    if masked:
        mask = torch.zeros(new, 5, dtype=torch.float64)
        mask[0, 1] = mask[-1, 4] = -torch.inf
    sinks = torch.randn(heads[0], generator=draw, dtype=torch.float64) if sunk else None
    times = heads[0] // heads[1] if softcap is None and sinks is None else 1
    out = attend(q, k, v, mask if mask is None else mask.repeat(times, 1), 0.5, softcap, sinks)
    assert out.shape == (new, heads[0], 3)
    assert torch.allclose(
        out, torch.tensor(twin(q, k, v, mask, 0.5, softcap, sinks), dtype=torch.float64), atol=1e-12
    )


def test_attention_may_lie_by_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's memory-saving kernel on GPUs, which computes float32, lays its result."""
    whole = torch.nn.functional.scaled_dot_product_attention

    def by_positions(*parts: Any, **options: Any) -> torch.Tensor:
        return whole(*parts, **options).transpose(1, 2).contiguous().transpose(1, 2)

    q, k, v = torch.randn(6, 3, 4), torch.randn(2, 5, 4), torch.randn(2, 5, 4)
    before = attend(q, k, v, None, 0.5)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", by_positions)
    assert torch.equal(attend(q, k, v, None, 0.5), before)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
def test_a_key_of_each_nodes_own_is_one_more_row(heads: tuple[int, int]) -> None:
    draw = torch.Generator().manual_seed(7)

    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=draw, dtype=torch.float64)

    q, k, v = numbers(heads[0], 3, 4), numbers(heads[1], 5, 4), numbers(heads[1], 5, 2)
    own_k, own_v = numbers(heads[1], 3, 4), numbers(heads[1], 3, 2)
    mask = torch.zeros(3, 5, dtype=torch.float64)
    mask[0, 2:] = -torch.inf
    out = merge_parts([partial_attention(q, k, v, mask, 0.5), self_part(q, own_k, own_v, 0.5)])
    for node in range(3):
        here = slice(node, node + 1)
        keys, values = torch.cat([k, own_k[:, here]], 1), torch.cat([v, own_v[:, here]], 1)
        seen = torch.cat([mask[here], torch.zeros(1, 1, dtype=torch.float64)], 1)
        want = twin(q[:, here], keys, values, seen, 0.5, None, None)
        assert torch.allclose(out[here], torch.tensor(want, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("new", [1, 3, 8, 9])
def test_parts_are_weighed_alike_as_they_are_and_converted(new: int) -> None:
    """Few nodes read rows of bfloat16 as they are."""
    q, other = torch.randn(2, 6, new, 32).bfloat16()
    near_rows, far_rows = (torch.randn(2, 2, count, 32).bfloat16() for count in (40, 16))
    mask = torch.zeros(new, 40).bfloat16()
    mask[0, 30:] = -torch.inf
    near, far = Attention(0, q, *near_rows, mask, 0.2), Attention(0, other, *far_rows, None, 0.2)
    empty = replace(far, keys=far.keys[:, :0], values=far.values[:, :0])
    out, numbers, total = attend_jointly([near, far, empty])
    wide = [part.in_type(torch.float64) for part in (near, far)]
    want, given, whole = attend_jointly(wide)
    assert out.shape == want.shape == (new, 6, 32)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close((numbers / total).double(), given / whole, atol=1e-6, rtol=1e-4)
    assert float((numbers / total)[:, 0, 30:].max()) == 0


@pytest.mark.parametrize("sinks", [False, True])
def test_parts_with_other_queries_are_weighed_together(sinks: bool) -> None:
    """Rows of the second part, met by other queries, as if they were of other keys."""
    heads, shared, new, width = 4, 2, 3, 6
    q, other = torch.randn(2, heads, new, width, dtype=torch.float64)
    k, v = torch.randn(2, shared, 5, width, dtype=torch.float64)
    more_k, more_v = torch.randn(2, shared, 2, width, dtype=torch.float64)
    mask = torch.zeros(new, 5, dtype=torch.float64)
    mask[0, 3:] = -torch.inf
    sink = torch.randn(heads, dtype=torch.float64) if sinks else None
    near = Attention(0, q, k, v, mask, 0.3, 9.0, sink)
    far = Attention(0, other, more_k, more_v, None, 0.3, 9.0)
    out, numbers, total = attend_jointly([near, far])
    weights = numbers / total
    for head in range(heads):
        for node in range(new):
            scores = torch.cat(
                [q[head, node] @ k[head // 2].T, other[head, node] @ more_k[head // 2].T]
            )
            scores = 9.0 * torch.tanh(scores * 0.3 / 9.0)
            scores[:5] += mask[node]
            given = torch.cat([scores, sink[head : head + 1]]) if sink is not None else scores
            want = given.softmax(0)[:7]
            assert torch.allclose(weights[head, node], want[:5])
            values = torch.cat([v[head // 2], more_v[head // 2]])
            assert torch.allclose(out[node, head], want @ values)
