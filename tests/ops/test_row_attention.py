"""Attention over listed rows: the library and torch are one, and both are what loops say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.native import rows as library
from foretell.ops.attention import Attention
from foretell.ops.row_attention import (
    Listed,
    attend_all,
    attend_listed,
    attend_noting,
    highest_positions,
    listed_by_torch,
    noting_by_torch,
    query_products,
)
from tests.native.machines import built, kernels, kinds, no_library

KINDS = kinds()
DTYPES = (torch.float32, torch.bfloat16)
sizes = {
    "heads": st.integers(1, 3),
    "times": st.integers(1, 5),
    "nodes": st.integers(1, 4),
    "rows": st.integers(1, 70),
    "width": st.integers(1, 50),
    "value_width": st.integers(1, 70),
    "seed": st.integers(0, 999),
}


def question(
    heads: int, times: int, nodes: int, rows: int, width: int, value_width: int, seed: int,
    dtype: torch.dtype = torch.float32, masked: str = "none",
) -> Attention:  # fmt: skip
    """A layer's attention over views of larger buffers."""
    random = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    keys = numbers(heads, rows + 5, width + 3)[:, 2 : rows + 2, :width]
    values = numbers(heads, rows + 4, value_width)[:, :rows]
    mask = None
    if masked != "none":
        shape = (nodes, rows) if masked == "shared" else (heads * times, nodes, rows)
        mask = numbers(*shape)
        mask[torch.rand(shape, generator=random) < 0.3] = -torch.inf
    return Attention(0, numbers(heads * times, nodes, width), keys, values, mask, width**-0.5)


def near(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> bool:
    tolerance = 1e-5 if dtype is torch.float32 else 0.04
    return ours.dtype == theirs.dtype and torch.allclose(
        ours.float(), theirs.float(), atol=tolerance, rtol=tolerance
    )


def loops(asked: Attention, read: torch.Tensor) -> torch.Tensor:
    """In float64, row by row."""
    heads, nodes, _ = asked.q.shape
    out = torch.zeros(nodes, heads, asked.values.shape[2], dtype=torch.float64)
    for head in range(heads):
        own = head // (heads // len(asked.keys))
        for node in range(nodes):
            scores = {}
            for row in range(asked.keys.shape[1]):
                who = head * len(read) // heads
                added = 0.0
                if asked.mask is not None:
                    mask = asked.mask if asked.mask.dim() == 2 else asked.mask[head]
                    added = float(mask[node, row])
                if read[who, node, row] and added > -torch.inf:
                    product = asked.q[head, node].double() @ asked.keys[own, row].double()
                    scores[row] = float(product) * asked.scale + added
            total = sum(torch.tensor(s).double().exp() for s in scores.values())
            for row, score in scores.items():
                share = torch.tensor(score).double().exp() / total
                out[node, head] += share * asked.values[own, row].double()
    return out


def reads(asked: Attention, seed: int, of_queries: bool) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed + 1)
    shape = (len(asked.q if of_queries else asked.keys), asked.q.shape[1], asked.keys.shape[1])
    share = torch.rand(shape[:2], generator=random)[..., None]  # of some nodes nothing
    return torch.rand(shape, generator=random) < share * 1.3 - 0.2


@settings(max_examples=25, deadline=None)
@given(**sizes, of_queries=st.booleans(), masked=st.sampled_from(("none", "shared", "own")))
def test_torch_is_what_loops_say(of_queries: bool, masked: str, **size: int) -> None:
    size["rows"] = min(size["rows"], 9)
    asked = question(**size, masked=masked)  # type: ignore[arg-type]
    read = reads(asked, size["seed"], of_queries)
    assert near(listed_by_torch(asked, read), loops(asked, read).float(), torch.float32)


@built
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=30, deadline=None)
@given(**sizes, of_queries=st.booleans(), masked=st.sampled_from(("none", "shared", "own")))
def test_the_library_is_torch(
    kind: str, dtype: torch.dtype, of_queries: bool, masked: str, **size: int
) -> None:
    asked = question(**size, dtype=dtype, masked=masked)  # type: ignore[arg-type]
    read = reads(asked, size["seed"], of_queries)
    with kernels(kind):
        ours = attend_listed(asked, read)
    assert near(ours, listed_by_torch(asked, read), dtype)
    assert not ours[(read.sum(-1) == 0).repeat_interleave(len(asked.q) // len(read), 0).t()].any()


@built
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, deadline=None)
@given(**sizes, masked=st.sampled_from(("none", "shared", "own")))
def test_a_part_by_the_library_is_torchs_over_the_same_rows(
    kind: str, masked: str, **size: int
) -> None:
    asked = question(**size, dtype=torch.bfloat16, masked=masked)  # type: ignore[arg-type]
    if asked.mask is not None:
        asked.mask[..., 0, :] = -torch.inf
    with kernels(kind):
        ours = asked.part()
    mask = None if asked.mask is None else asked.mask.float()
    wide = replace(asked, q=asked.q.float(), keys=asked.keys.float(), mask=mask)
    theirs = replace(wide, values=asked.values.float()).part()
    for own, other in zip(ours, theirs, strict=True):
        assert own.dtype == torch.float32
        assert torch.allclose(own, other, atol=1e-5, rtol=1e-5)
    assert bool((ours[1][0] == -torch.inf).all()) == (masked != "none")


@built
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=20, deadline=None)
@given(**sizes, page=st.integers(1, 9), of_queries=st.booleans())
def test_pages_are_their_rows(
    kind: str, dtype: torch.dtype, page: int, of_queries: bool, **size: int
) -> None:
    asked = question(**size, dtype=dtype)  # type: ignore[arg-type]
    whole = size["rows"] // page
    random = torch.Generator().manual_seed(size["seed"])
    scores = torch.rand(len(asked.q if of_queries else asked.keys), size["nodes"], whole or 1)
    count = int(torch.randint(whole + 1, (), generator=random)) or whole
    lists = highest_positions(scores, count) if whole else scores[..., :0].int()
    listed = Listed(lists, page, whole * page)
    read = listed.mask_rows(size["rows"])
    assert read.sum(-1).eq(count * page * bool(whole) + size["rows"] - whole * page).all()
    with kernels(kind):
        assert torch.equal(attend_listed(asked, listed), attend_listed(asked, read))


@built
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=20, deadline=None)
@given(**sizes, masked=st.sampled_from(("none", "shared", "own")))
def test_what_rows_are_given_is_that_of_torch(
    kind: str, dtype: torch.dtype, masked: str, **size: int
) -> None:
    asked = question(**size, dtype=dtype, masked=masked)  # type: ignore[arg-type]
    if asked.mask is not None:
        asked.mask[..., 0] = 0  # every node sees a row
    with kernels(kind):
        out, given = attend_noting(asked)
    theirs, twin = noting_by_torch(asked)
    assert near(out, theirs, dtype) and near(given, twin, dtype)
    assert torch.allclose(given.sum(-1), torch.ones(given.shape[:2]), atol=1e-5)
    with kernels(kind):
        assert near(attend_all(asked), out, dtype)


@built
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=20, deadline=None)
@given(**sizes)
def test_products_are_those_of_torch(kind: str, dtype: torch.dtype, **size: int) -> None:
    asked = question(**size, dtype=dtype)  # type: ignore[arg-type]
    with kernels(kind):
        ours = query_products(asked.q, asked.keys)
    with no_library():
        theirs = query_products(asked.q, asked.keys)
    assert near(ours, theirs, torch.float32)


@built
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=20, deadline=None)
@given(**sizes)
def test_rows_in_columns_and_a_part_of_the_result(
    kind: str, dtype: torch.dtype, **size: int
) -> None:
    asked = question(**{**size, "width": size["width"] + 1}, dtype=dtype)  # type: ignore[arg-type]
    columns = asked.keys.transpose(1, 2).contiguous().transpose(1, 2)
    rows = size["rows"]
    whole = torch.full((*asked.q.shape[:2], rows + 5), 7.0)
    with kernels(kind):
        assert library.lie_in_columns(columns) or rows == 1
        query_products(asked.q, columns, whole[..., 2 : rows + 2])
        beside = query_products(asked.q, asked.keys, torch.empty(*asked.q.shape[:2], rows))
    with no_library():
        theirs = query_products(asked.q, asked.keys)
    assert near(whole[..., 2 : rows + 2], theirs, torch.float32)
    assert near(beside, theirs, torch.float32)
    assert whole[..., :2].eq(7).all() and whole[..., rows + 2 :].eq(7).all()


@built
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(
    st.integers(1000, 3000),
    st.sampled_from((1, 7, 128, 999)),
    st.sampled_from(("drawn", "equal", "few", "infinite", "ascending", "one high", "tiny")),
    st.integers(0, 999),
)
def test_the_highest_of_many(kind: str, length: int, count: int, sort: str, seed: int) -> None:
    """Also where the scores that are looked at first say little of the others."""
    scores = torch.randn(2, length, generator=torch.Generator().manual_seed(seed))
    if sort == "equal":
        scores = torch.zeros(2, length)
    elif sort == "few":
        scores = (2 * scores).round()
    elif sort == "infinite":
        scores[:, ::7], scores[:, 1::5] = torch.inf, -torch.inf
    elif sort == "ascending":
        scores = scores.sort(-1).values
    elif sort == "one high":
        scores = torch.full((2, length), -torch.inf)
        scores[:, seed] = 1
    elif sort == "tiny":  # below the normal numbers, and zeros of both signs
        scores = (scores * 1e-40) * (torch.arange(length) % 3 - 1)
    with kernels(kind):
        found = highest_positions(scores, count).long()
    order = scores.argsort(dim=-1, descending=True, stable=True)
    assert torch.equal(found, order[:, :count].sort(-1).values)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 40), st.integers(1, 50), st.integers(0, 999), st.booleans()
)
def test_the_highest_are_the_highest(
    lists: int, length: int, count: int, seed: int, few: bool
) -> None:
    random = torch.Generator().manual_seed(seed)
    scores = torch.randn(lists, 2, length, generator=random)
    if few:  # values, so that many are equal, zeros of both signs among them
        scores = scores.round() * -1.0
    scores[:, :, ::7] = -torch.inf
    found = highest_positions(scores, count)
    for list, own in zip(found.flatten(0, 1).tolist(), scores.flatten(0, 1).tolist(), strict=True):
        order = sorted(range(length), key=lambda row: (-own[row], row))
        assert list == sorted(order[:count])
    with no_library():
        assert torch.equal(highest_positions(scores, count).long(), found.long())


@built
def test_threads_and_neighbours_change_no_bit() -> None:
    asked = question(3, 3, 5, 1500, 64, 64, 3, torch.bfloat16)
    read = reads(asked, 3, True)
    whole = attend_listed(asked, read)
    given = attend_noting(asked)[1]
    for threads in (2, 3):
        with library.library.limit_threads(threads):
            assert torch.equal(attend_listed(asked, read), whole)
            assert torch.equal(attend_noting(asked)[1], given)
            assert torch.equal(
                query_products(asked.q, asked.keys), query_products(asked.q[:, :], asked.keys)
            )
    alone = Attention(0, asked.q[:, 2:3], asked.keys, asked.values, None, asked.scale)
    assert torch.equal(attend_listed(alone, read[:, 2:3])[0], whole[2])


@built
def test_a_row_more_or_less_is_seen() -> None:
    """The comparison with torch has the power to tell."""
    asked = question(2, 2, 3, 30, 16, 16, 5)
    read = reads(asked, 5, True)
    ours = attend_listed(asked, read)
    read[1, 1, 7] ^= True
    assert not near(listed_by_torch(asked, read), ours, torch.float32)


def test_without_the_library_and_in_float64_it_is_torch() -> None:
    asked = question(2, 2, 3, 30, 16, 16, 5)
    read = reads(asked, 5, True)
    with no_library():
        assert torch.equal(attend_listed(asked, read), listed_by_torch(asked, read))
        assert torch.equal(attend_noting(asked)[1], noting_by_torch(asked)[1])
        assert torch.equal(attend_all(asked), asked.full_output())
    wide = Attention(
        0, asked.q.double(), asked.keys.double(), asked.values.double(), None, asked.scale, 2.0
    )
    assert torch.equal(attend_listed(wide, read), listed_by_torch(wide, read))
