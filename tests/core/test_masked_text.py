"""Canvases while they are filled."""

from __future__ import annotations

import pytest

from foretell.core.masked_text import MASKED, OWN, Sheet


def test_blocks_follow_the_first_mask() -> None:
    sheet = Sheet([5, 6, *[MASKED] * 7], 2)
    assert sheet.block(3) == (2, 5) and sheet.block(0) == (2, 9)
    for place in (2, 3, 4, 6):
        sheet.commit(place, 1, 0.5)
    assert sheet.masked == [5, 7, 8] and sheet.block(3) == (5, 8)
    assert sheet.block(4) == (2, 6)


def test_blocks_of_a_model_that_sees_whole_ones_are_counted_from_the_beginning() -> None:
    sheet = Sheet([5, 6, 7, 8, *[MASKED] * 7], 4, own_block=5)
    assert sheet.block(3) == (4, 6) and sheet.block(0) == (4, 11)
    for place in (4, 5):
        sheet.commit(place, 1, 0.5)
    assert sheet.block(3) == (6, 9) and sheet.block(8) == (4, 8)
    assert [sheet.block_number(place, 3) for place in (4, 6, 10)] == [1, 2, 3]
    assert sheet.size_of(OWN) == 5 and sheet.size_of(3) == 3 and sheet.size_of(0) == 0
    assert Sheet([5, MASKED], 1).size_of(OWN) == 32


def test_a_committed_token_is_not_changed_but_may_be_taken_back() -> None:
    sheet = Sheet([5, MASKED], 1)
    sheet.commit(1, 7, 0.5)
    with pytest.raises(AssertionError):
        sheet.commit(1, 8, 0.5)
    twin = sheet.copy()
    twin.mask(1)
    assert sheet.canvas == [5, 7] and twin.canvas == [5, MASKED]
    assert twin.commits == 1 and not twin.known
