"""Following a changed copy: what is learnt from its gaps, however the text comes."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.drafters.lookup.aligned import AGAIN, SPAN, TOP, Aligned

NOBODY = frozenset[int]()


def anchored(
    source: list[int], least: int = 2, kept: frozenset[int] = NOBODY
) -> tuple[Aligned, list[int]]:
    """Follows the source, which stands twice: the second copy is to be continued from its 20th
    token on.
    """
    text = [*source, *source[:20]]
    aligned = Aligned(least, kept)
    aligned.follow_lag(text, len(source), (1 << 20) - 1)
    return aligned, text


def grown(aligned: Aligned, text: list[int], more: list[int], cuts: list[int]) -> None:
    """The rest of the text comes in pieces."""
    done = 0
    for cut in [*sorted(c for c in cuts if c < len(more)), len(more)]:
        text += more[done:cut]
        aligned.follow_text(text, cut - done)
        done = cut


WORDS = st.lists(st.integers(100, 140), min_size=1, max_size=SPAN).map(tuple)
CUTS = st.lists(st.integers(0, 400), max_size=30)


@given(
    st.dictionaries(WORDS, WORDS, min_size=1, max_size=4),
    st.lists(st.integers(0, 3), max_size=12),
    CUTS,
)
def test_names_of_any_length_are_learnt_where_they_are_replaced(
    names: dict[tuple[int, ...], tuple[int, ...]], order: list[int], cuts: list[int]
) -> None:
    # What a name and its replacement, or two names, have in common would be learnt otherwise: the
    # names are told apart.
    names = {
        (500 + 2 * i, *old, 600 + 2 * i): (501 + 2 * i, *(200 + t for t in to), 601 + 2 * i)
        for i, (old, to) in enumerate(names.items())
        if max(len(old), len(to)) <= SPAN - 2
    }
    filler, source, copy, seen = (
        count(1000),
        list(range(20)),
        list[int](),
        dict[tuple[int, ...], int](),
    )
    for which in order:
        if not names:
            break
        old = list(names)[which % len(names)]
        around = [next(filler) for _ in range(16)]
        source += [*around[:8], *old, *around[8:]]
        copy += [*around[:8], *names[old], *around[8:]]
        seen[old] = seen.get(old, 0) + 1
    aligned, text = anchored([*source, 999])
    grown(aligned, text, copy, cuts)
    assert aligned.names == {old: names[old] for old, times in seen.items() if times >= 2}
    assert aligned.held == len(text) and text[aligned.held - aligned.lag] == 999
    for old in aligned.names:
        place = source.index(old[0])
        assert aligned.find_replacement(source, place) == (len(old), names[old])
        for part in range(1, len(names[old])):  # within a name it is known what comes
            half = Aligned(2, NOBODY)
            half.votes, half.sizes, half.names = aligned.votes, aligned.sizes, aligned.names
            half.lag, half.held = len(source), len(source) + place
            assert half.find_begun([*source, *source[:place], *names[old][:part]]) == (
                len(old),
                names[old][part:],
            )


@given(st.lists(st.integers(0, 3), min_size=25, max_size=90), st.integers(1, 20), CUTS)
def test_whatever_comes_it_does_not_matter_in_what_pieces(
    text: list[int], lag: int, cuts: list[int]
) -> None:
    found = []
    for pieces in (cuts, []):
        aligned, so_far = Aligned(1, frozenset((3,))), list(text[:20])
        aligned.follow_lag(so_far, lag, -1 & (1 << 20) - 1)
        grown(aligned, so_far, text[20:], pieces)
        found.append((aligned.lag, aligned.held, aligned.agreement, aligned.votes, aligned.names))
        assert (
            aligned.lag > 0
            and aligned.lag <= aligned.held <= len(text)
            and aligned.agreement < 1 << TOP
        )
        for old, to in aligned.names.items():
            assert (
                1 <= len(old) <= SPAN
                and 1 <= len(to) <= SPAN
                and old != to
                and 3 not in (*old, *to)
            )
        if aligned.held == len(text):
            assert text[-1] == text[-1 - aligned.lag] and not aligned.is_lost(len(text))
        size, rest = aligned.find_begun(text)
        gap = tuple(text[aligned.held :])
        old = tuple(text[aligned.held - aligned.lag :][:size])
        assert not size or (*gap, *rest) in aligned.votes[old]
    assert found[0] == found[1]


def test_votes_decide_by_number_and_majority() -> None:
    aligned = Aligned(2, frozenset((9,)))
    for to in ((7, 8), (5,), (7, 8)):
        assert not aligned.names
        aligned._count_vote((5,), to)
    assert aligned.names == {(5,): (7, 8)}
    aligned._count_vote((5,), (5,))
    assert not aligned.names, "as often left as it is"
    for _ in range(3):
        aligned._count_vote((9, 1), (2,))
        aligned._count_vote((1,), (2, 9))
    assert not aligned.names, "what is kept is neither replaced nor put in"
    never = Aligned(0, NOBODY)
    never._count_vote((5,), (7,))
    assert not never.votes


def test_what_stands_there_unchanged_speaks_against_a_replacement() -> None:
    source = [
        *range(20),
        1,
        50,
        51,
        2,
        3,
        4,
        50,
        51,
        5,
        6,
        7,
        50,
        51,
        8,
        9,
        10,
        50,
        51,
        11,
        12,
        999,
    ]
    aligned, text = anchored(source)
    grown(aligned, text, [1, 70, 2, 3, 4, 70, 5, 6], [])
    assert aligned.names == {(50, 51): (70,)}
    grown(aligned, text, [7, 50, 51, 8, 9, 10, 50, 51, 11, 12], [])
    assert not aligned.names


@pytest.mark.parametrize(("least", "held"), [(1, 15), (1, 16)])
def test_little_that_held_teaches_nothing(least: int, held: int) -> None:
    source = [*range(20), 50, 20, 21, 999]
    aligned, text = anchored(source, least)
    aligned.agreement = (1 << held) - 1
    grown(aligned, text, [60, 20, 21], [])
    assert bool(aligned.names) == (held == 16)


def test_after_a_long_gap_nothing_is_followed() -> None:
    aligned, text = anchored([*range(60), 999])
    grown(aligned, text, [70] * (SPAN + AGAIN), [3, 5])
    assert not aligned.is_lost(len(text))
    grown(aligned, text, [70], [])
    assert aligned.is_lost(len(text))
    held = aligned.held
    grown(aligned, text, [*range(20, 30)], [])
    assert aligned.held == held and aligned.is_lost(len(text)) and Aligned(2, NOBODY).is_lost(1)
