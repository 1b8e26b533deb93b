"""The index of n-grams against its definition in loops."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.drafters.lookup.lookup import Index, copy_tokens

TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=30)


def places(tokens: list[int], n: int) -> list[int]:
    """Positions after the earlier occurrences of the last n tokens, oldest first."""
    return (
        [end for end in range(n, len(tokens)) if tokens[end - n : end] == tokens[-n:]]
        if n <= len(tokens)
        else []
    )


def grown(index: Index, tokens: list[int], cuts: list[int]) -> Index:
    """The index after the text has come in parts, which may be empty or overlap what it knows."""
    for cut in [*cuts, len(tokens)]:
        index.extend(tokens[:cut])
    return index


@given(TEXT, st.integers(0, 29), st.integers(1, 70))
def test_a_copy_goes_on_into_itself(tokens: list[int], place: int, size: int) -> None:
    place = min(place, len(tokens) - 1)
    text = list(tokens)
    for at in range(place, place + size):
        text.append(text[at])
    assert copy_tokens(tokens, place, size) == text[len(tokens) :]


@given(TEXT, st.integers(1, 5), st.booleans(), st.lists(st.integers(1, 30), max_size=4))
def test_finds_the_most_recent_or_the_first_place_however_the_text_came(
    tokens: list[int], most: int, first: bool, cuts: list[int]
) -> None:
    index = grown(Index(most, first), tokens, sorted(cuts))
    for n in range(1, most + 1):
        want = places(tokens, n)
        assert index.find_last(tokens, n) == (want[0 if first else -1] if want else -1)


@given(TEXT, st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_the_longest_match_wins_down_to_the_least(
    tokens: list[int], most: int, least: int, first: bool
) -> None:
    want = (-1, 0)
    for n in range(least, most + 1):
        if found := places(tokens, n):
            want = found[0 if first else -1], n
    assert grown(Index(most, first), tokens, []).find_longest(tokens, least) == want
    if least <= most:  # one that leaves shorter ones out answers the same, and does not know them
        lean = grown(Index(most, first, least), tokens, [])
        assert lean.find_longest(tokens, least) == want
        assert not any(lean.places[: least - 1]) and not any(lean.older)


@given(TEXT, st.integers(1, 4), st.integers(1, 6), st.lists(st.integers(1, 30), max_size=4))
def test_every_place_newest_first(tokens: list[int], n: int, most: int, cuts: list[int]) -> None:
    index = grown(Index(4, keep_all=True), tokens, sorted(cuts))
    assert index.all_positions(tokens, n, most) == places(tokens, n)[::-1][:most]
    assert index.find_last(tokens, n) == Index.find_last(grown(Index(4), tokens, []), tokens, n)


def test_a_text_that_is_not_the_newest_is_looked_up_too() -> None:
    index = grown(Index(2), [1, 2, 3, 1, 2], [])
    # after its only occurrence that has something after it
    assert index.find_last([9, 1, 2], 2) == 2
    assert index.find_last([2, 9], 2) == -1 and index.find_last([1], 2) == -1


def test_an_index_without_every_place_does_not_pretend_to_know_them() -> None:
    for index in (Index(2), Index(2, first_only=True, keep_all=True)):
        index.extend([1, 1, 1, 1])
        with pytest.raises(AssertionError, match="every place"):
            index.all_positions([1, 1, 1, 1], 1, 3)


def test_a_copy_goes_its_own_way() -> None:
    index = Index(2, keep_all=True)
    index.extend([1, 2, 1, 2, 1])
    twin = copy.deepcopy(index)
    twin.extend([1, 2, 1, 2, 1, 3, 2])
    assert (index.known, twin.known) == (5, 7)
    assert index.find_last([1, 3], 2) == -1 and twin.find_last([1, 3], 2) == 6
    assert index.all_positions([1], 1, 9) == [3, 1] and twin.all_positions([1], 1, 9) == [5, 3, 1]
