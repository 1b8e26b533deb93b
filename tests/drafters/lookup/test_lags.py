"""How a text agrees with itself, against counting by hand."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.drafters.lookup import lags
from foretell.drafters.lookup.lags import WIDTH, Lags

TEXTS = st.one_of(
    st.lists(st.integers(0, 2), min_size=1, max_size=200),
    st.lists(st.integers(0, 70000), min_size=1, max_size=40),
)


def agreement(text: list[int], lag: int) -> list[bool]:
    """Newest first: whether each of the last WIDTH tokens equals the one `lag` before it."""
    ends = range(len(text) - 1, len(text) - 1 - WIDTH, -1)
    return [at - lag >= 0 and text[at] == text[at - lag] for at in ends]


def check(known: Lags, text: list[int]) -> None:
    same = {lag: agreement(text, lag) for lag in range(1, len(text) + 1)}
    run = {lag: [*bits, False].index(False) for lag, bits in same.items()}
    score = {
        lag: sum(w * sum(bits[:n]) for w, n in ((4, 4), (2, 8), (1, 16), (1, 32)))
        for lag, bits in same.items()
    }
    for lag, bits in same.items():
        assert known.agreement(lag) == sum(bit << back for back, bit in enumerate(bits))
    for found, of in ((known.longest_lag(), run), (known.closest_lag(), score)):
        assert found == (max(of, key=lambda lag: (of[lag], -lag)) if any(of.values()) else 0)


@given(TEXTS, st.lists(st.integers(1, 200), max_size=6), st.integers(0, 9))
def test_agreements_and_best_lags_however_the_text_came(
    text: list[int], cuts: list[int], often: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lags, "OFTEN", often)
        grown, known = Lags(), 0
        for end in [*sorted(min(cut, len(text)) for cut in cuts), len(text)]:
            assert grown.extend(text[:end]) == end - known
            known = end
            check(grown, text[:end])


def test_a_run_longer_than_what_is_compared() -> None:
    grown = Lags()
    grown.extend([7] * 100)
    check(grown, [7] * 100)
    assert grown.longest_lag() == grown.closest_lag() == 1 and grown.agreement(36) == 2**64 - 1
    grown.extend([7] * 100 + [8])
    assert not grown.longest_lag() and grown.closest_lag() == 1 and grown.agreement(1) == 2**64 - 2


def test_a_copy_goes_its_own_way() -> None:
    text = [1, 2, 3, 1, 2]
    grown = Lags()
    grown.extend(text)
    other = copy.deepcopy(grown)
    other.extend([*text, 3, 1])
    grown.extend([*text, 4])
    check(other, [*text, 3, 1])
    check(grown, [*text, 4])


def test_an_empty_text_has_no_lags() -> None:
    empty = Lags()
    assert empty.extend([]) == empty.longest_lag() == empty.closest_lag() == 0
