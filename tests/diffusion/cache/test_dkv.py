"""Rows of committed tokens are kept one step late."""

from __future__ import annotations

import pytest

from foretell.errors import BadConfig
from foretell.testing.toy_canvas import ToyCanvas
from tests.diffusion.worlds import text
from tests.kv.test_canvas import counted


def test_rows_of_committed_tokens_are_kept_one_step_late() -> None:
    """The canvas's less the cached: a step after step i has i - 1 tokens less to compute, the
    prompt aside."""
    ours = [computed for computed, _, _ in counted("dkv:every=100", "confidence:block=0", 8)]
    assert ours == [9, 9, *[9 - 1 - step for step in range(1, 7)]]


def test_the_order_has_to_be_known_where_neighbours_are_computed() -> None:
    assert len(text(ToyCanvas(), "random:block=0", kv="dkv:mode=greedy")) == 8
    with pytest.raises(BadConfig, match="method=random"):
        text(ToyCanvas(), "confidence", kv="dkv:mode=greedy")


def test_near_computes_what_is_next_and_its_neighbours() -> None:
    """Every second step the whole; else what was committed, what is next, and four neighbours."""
    kv = "dkv:mode=greedy,every=2,window=4"
    ours = [computed for computed, _, _ in counted(kv, "random:block=0", 12)]
    assert ours[:2] == [13, 13] and ours[2::2] == [13] * 5
    assert all(computed <= 1 + 1 + 4 for computed in ours[3::2])
