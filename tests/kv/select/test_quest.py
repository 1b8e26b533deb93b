"""quest: its bounds, its pages, and what nodes read against plain loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell.errors import BadConfig
from foretell.kv.select.paging import page_extremes, upper_bounds
from foretell.kv.select.quest import Pages, Quest
from foretell.ops.row_attention import query_products
from tests.kv import driving
from tests.kv.driving import TIMES, WIDTH, differs, rows_of, text_of

# What laws of all policies use, see tests/kv/policies.py.
SMALL_SPEC = "quest:budget=12,page=4,dense=1"

PROMPT = 18
WHOLE = text_of(38, seed=7)
SMALL = Pages(1, 3, 4)  # 3 pages of 4 rows, the first layer dense


def loops(policy: Pages) -> driving.Twin:
    def reads(text: tuple[int, ...], layer: int, head: int) -> Sequence[int]:
        size = policy.page
        # The last token is not committed where it is computed: a page is whole after it.
        pages = [range(start, start + size) for start in range(0, len(text) - size, size)]
        if layer < policy.dense or len(pages) <= policy.count:
            return range(len(text))
        q = rows_of(text, layer)[0][head]

        def bound(page: range) -> float:
            keys = [rows_of(text[: place + 1], layer)[1][head // TIMES] for place in page]
            channels = range(WIDTH)
            return sum(max(float(q[d] * key[d]) for key in keys) for d in channels)

        best = sorted(pages, key=bound, reverse=True)[: policy.count]
        behind = range(len(pages) * size, len(text))
        return sorted([*(place for page in best for place in page), *behind])

    return reads


@pytest.mark.parametrize(
    ("depth", "wrong", "chunk"), [(0, False, 99), (6, False, 5), (6, True, 1), (2, True, 99)]
)
def test_every_node_reads_what_loops_say(depth: int, wrong: bool, chunk: int) -> None:
    assert differs(SMALL, PROMPT, WHOLE, loops(SMALL), depth, wrong, chunk) < 1e-9


@pytest.mark.parametrize("slip", ["no change", "lowest", "another count"])
def test_slips_are_seen(slip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SMALL
    if slip == "no change":  # pages are only noted late
        monkeypatch.setattr(Pages, "count_pages", lambda self, cache: max(0, cache.base // 4 - 1))
    elif slip == "lowest":  # the sign of the query is not looked at
        monkeypatch.setattr(
            "foretell.kv.select.quest.upper_bounds",
            lambda q, bounds: query_products(q, bounds[..., :WIDTH]),
        )
    else:
        made = replace(SMALL, count=2)
    assert differs(made, PROMPT, WHOLE, loops(SMALL), 4, True) > 1e-3


def test_the_bound_holds_for_every_key_and_is_reached() -> None:
    random = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 24, WIDTH, generator=random, dtype=torch.float64)
    q = torch.randn(4, 7, WIDTH, generator=random, dtype=torch.float64)
    above = upper_bounds(q, page_extremes(keys, 4))
    products = q @ keys.repeat_interleave(2, 0).transpose(1, 2)
    most = products.unflatten(-1, (-1, 4)).amax(-1)
    assert (above >= most - 1e-12).all() and (above > most + 0.1).any()
    one = upper_bounds(q, page_extremes(keys, 1))
    assert torch.allclose(one, products)


def test_pages_nest_in_the_budget() -> None:
    random = torch.Generator().manual_seed(1)
    bounds = page_extremes(torch.randn(2, 40, WIDTH, generator=random), 4)
    q = torch.randn(4, 6, WIDTH, generator=random)
    smaller = replace(SMALL, count=3).choose_pages(q, bounds)
    for count in range(4, 11):
        larger = replace(SMALL, count=count).choose_pages(q, bounds)
        assert larger.shape == (4, 6, count)
        assert (smaller[..., None] == larger[..., None, :]).any(-1).all()
        smaller = larger


def test_with_room_for_everything_it_is_the_full_cache_bit_by_bit() -> None:
    class Ends(driving.Full):
        """Whose forwards end as those of pages do."""

        def room_left(self, length: int) -> int:
            return self.prompt - length if length < self.prompt else 4 - length % 4

    ours = driving.drive(replace(SMALL, count=11), PROMPT, WHOLE, 4, True)
    for (_, _, mine), (_, _, full) in zip(
        ours, driving.drive(Ends(), PROMPT, WHOLE, 4, True), strict=True
    ):
        assert torch.equal(mine, full)


def test_one_row_at_a_time_is_a_tree() -> None:
    found: list[dict[Any, torch.Tensor]] = []
    for depth in (0, 3):
        drive = driving.drive(SMALL, PROMPT, WHOLE, depth, True)
        found.append({(text, layer): out for text, layer, out in drive})
    alone, tree = found
    both = alone.keys() & tree.keys()
    assert len(both) >= 2 * (len(WHOLE) - PROMPT)
    assert max(float((alone[node] - tree[node]).abs().max()) for node in both) < 1e-9


@pytest.mark.parametrize(
    ("fields", "said"), [({"budget": 47}, "quest:budget=47.*at least 48.*3 pages of 16")]
)
def test_bad_settings_are_named(fields: dict[str, int], said: str) -> None:
    with pytest.raises(BadConfig, match=said):
        Quest(**fields)
