"""The arithmetic of costs and payoffs, on numbers set by hand: nothing here is timed."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.speculation.costs import (
    CLEARLY,
    LONGEST_PAUSE,
    LOOKED,
    LOSS,
    SIZES,
    UNKNOWN,
    Costs,
    Payoff,
    Promise,
)


@given(
    st.dictionaries(st.sampled_from(SIZES), st.floats(1e-4, 1), max_size=7),
    st.dictionaries(st.sampled_from(SIZES), st.floats(0, 1e-5), max_size=7),
    st.integers(0, 5000),
)
def test_costs_never_fall_with_size(
    seconds: dict[int, float], slope: dict[int, float], rows: int
) -> None:
    costs = Costs()
    costs.seconds = seconds
    costs.slope = slope
    curve = costs.curve(130, rows)
    assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(curve))
    assert curve[0] > 0
    assert curve.shape == (130,)


def test_costs_follow_what_is_noted_and_forgive_a_hiccup() -> None:
    costs = Costs()
    for _ in range(100):
        costs.note_forward(1, 0.010)
        costs.note_forward(8, 0.014)
    curve = costs.curve(8)
    assert curve[0] == pytest.approx(0.010)
    assert curve[7] == pytest.approx(0.014)
    assert 0.010 < curve[3] < 0.014
    costs.note_forward(1, 5.0)
    assert costs.one_token_seconds() < 0.0125
    for _ in range(100):
        costs.note_forward(1, 0.020)
    assert costs.one_token_seconds() == pytest.approx(0.020, rel=0.01)


def test_a_single_token_costs_what_the_curve_begins_with() -> None:
    costs = Costs()
    assert costs.one_token_seconds() == costs.curve(1)[0] == costs.curve(8)[0] == 1.0
    costs.seconds = {1: 0.010, 8: 0.012}
    costs.slope = {1: 1e-6}
    assert (
        costs.one_token_seconds(500) == costs.curve(1, 500)[0] == costs.curve(8, 500)[0] == 0.0105
    )


def test_a_machine_that_becomes_slower_or_quicker_is_so_for_every_size() -> None:
    costs = Costs()
    costs.seconds = {1: 0.010, 8: 0.012, 16: 0.016}
    costs.slope = {1: 1e-6, 8: 2e-6, 16: 2e-6}
    for speed in (2.0, 0.5):  # only single tokens are computed meanwhile
        ratio = costs.curve(16, 500) / costs.curve(1, 500)
        for _ in range(60):
            costs.note_forward(1, 0.0105 * speed, cache_rows=500)
        now = costs.curve(16, 500)
        assert now[0] == pytest.approx(0.0105 * speed, rel=0.01)
        assert now / now[0] == pytest.approx(ratio, rel=0.4), (
            "drafts are priced by the speed of another time"
        )
    for _ in range(300):  # a size that was measured wrongly is corrected where both are used
        costs.note_forward(1, 0.010)
        costs.note_forward(16, 0.040)
    assert costs.curve(16)[[0, 15]] == pytest.approx([0.010, 0.040], rel=0.05)


def test_a_chunk_of_a_prompt_says_nothing_of_other_sizes() -> None:
    costs = Costs()
    costs.seconds = {1: 0.010, 16: 0.016}
    before = costs.curve(16)
    costs.note_forward(512, 1.0)
    costs.note_forward(300, 0.5)
    assert (costs.curve(16) == before).all()


def test_requests_that_share_a_forward_share_its_cost() -> None:
    costs = Costs()
    costs.seconds = {1: 1.0, 8: 1.5, 16: 3.0, 32: 6.0}
    whole = costs.curve(32)
    assert costs.share(4, 0, 8).tolist() == [whole[8 * n - 1] / 8 for n in (1, 2, 3, 4)]
    alone = costs.curve(4).tolist()
    assert costs.share(4, 0, 1).tolist() == costs.share(4, 0, 0).tolist() == alone


def test_where_prompts_fill_a_forward_a_draft_costs_what_it_delays_them_by() -> None:
    costs = Costs()
    costs.seconds = {1: 1.0, 8: 1.0, 16: 2.0, 32: 4.0, 64: 8.0}
    idle = costs.share(3, 0, 1)
    assert idle.tolist() == [1.0] * 3, "a forward has room"
    filled = costs.share(3, 0, 1, prompt_tokens=31)
    assert filled == pytest.approx([0.125, 0.25, 0.375]), "every token costs the same"
    assert costs.share(3, 0, 4, prompt_tokens=0).tolist() == costs.share(3, 0, 4).tolist()


def test_a_chunk_counts_by_its_tokens() -> None:
    costs = Costs()
    costs.note_forward(80, 0.8)
    costs.note_forward(120, 1.2)
    assert costs.seconds == {128: pytest.approx(1.28)}


def test_a_forward_that_is_filled_up_costs_as_much_as_a_full_one() -> None:
    costs = Costs()
    costs.seconds = {1: 1.0, 4: 4.0, 16: 16.0}
    costs.sizes = (1, 4, 16)
    assert costs.curve(17).tolist() == pytest.approx([1, 4, 4, 4, *[16] * 12, 16 * (1 + 1 / 64)])


def test_rows_before_the_tokens_are_taken_into_account() -> None:
    costs = Costs()
    costs.seconds = {1: 1.0, 2: 1.0}
    costs.slope = {1: 0.001, 2: 0.002}
    assert costs.curve(2, 1000) == pytest.approx([2.0, 3.0])
    assert costs.curve(2) == pytest.approx([1.0, 1.0])
    for _ in range(100):
        costs.note_forward(1, 4.0, cache_rows=1000)
    assert costs.one_token_seconds(1000) == pytest.approx(4.0, rel=0.01)
    assert costs.one_token_seconds() == pytest.approx(2.0, rel=0.2)


def test_an_attempt_that_pays_well_is_repeated_at_once() -> None:
    payoff = Payoff()
    for _ in range(24):
        payoff.note_attempt(0.0, 1.0, 1.0)
    assert payoff.pause == payoff.wait == 32
    payoff.note_attempt(1.9, 1.0, 1.0)
    assert payoff.pause == payoff.wait == 32, "a little more than its price is no windfall"
    payoff.note_attempt(2.0, 1.0, 1.0)
    assert payoff.pause == 32
    assert payoff.is_due()
    payoff.note_attempt(0.0, 1.0, 1.0)
    assert payoff.wait == 32


def test_attempts_in_vain_are_paid_for_by_waiting() -> None:
    payoff = Payoff()
    spent = 0.0
    attempts = 0
    for _ in range(3000):
        if payoff.is_due():
            attempts += 1
            spent += 0.1
            payoff.note_attempt(0.0, 0.1, 1.0)
    assert spent <= 0.012 * 3000
    assert attempts > 100
    for _ in range(20):
        payoff.note_attempt(2.0, 0.1, 1.0)
    assert payoff.is_due()
    assert payoff.is_due()


@pytest.mark.parametrize(
    ("token_seconds", "last"),
    [(20.0, [31, 32, 32]), (2.0, [31, 63, 90]), (0.01, [31, 63, 127])],
    ids=["32 steps at most", "a twentieth of the time at most", "expensive"],
)
def test_pauses_double_so_that_one_bad_draft_costs_little(
    token_seconds: float, last: list[int]
) -> None:
    payoff = Payoff()
    payoff.gain = 0.0
    pauses = []
    for _ in range(7):
        payoff.note_attempt(0.0, 9.0, token_seconds)
        pauses.append(payoff.wait)
    assert pauses == [1, 3, 7, 15, *last]


def test_of_requests_that_ask_at_once_only_one_asks_in_vain() -> None:
    """What the first one's draft came to is known after the forward that all of them share."""
    payoff = Payoff()
    assert all(payoff.is_due() for _ in range(16)), "nothing has failed yet"
    for _ in range(40):
        payoff.note_attempt(0.0, 0.1, 1.0)
    pause, asked = payoff.pause, []
    assert pause > 16
    for _ in range(50):  # steps of sixteen requests
        due = [payoff.is_due() for _ in range(16)]
        for _ in range(sum(due)):
            payoff.note_attempt(0.0, 0.1, 1.0)
        asked.append(sum(due))
    assert max(asked) == 1 and 20 < sum(asked) <= 50 * 16 // (pause + 1)


def test_the_longest_pause_is_one_of_each_request() -> None:
    """Of sixteen that take steps together each is asked every 32 steps: an attempt costs more than
    a step where many tokens fill the forward, and would lose a twentieth of the time.
    """
    for live in (1, 16):
        payoff = Payoff()
        for _ in range(60):
            payoff.note_attempt(0.0, 1.5, 1.0, live)
        assert payoff.pause == min(LONGEST_PAUSE * live, int((1.5 - payoff.gain) / LOSS))


def test_after_a_good_time_pauses_begin_anew() -> None:
    payoff = Payoff()
    for _ in range(8):
        payoff.note_attempt(0.0, 9.0, 1.0)
    for _ in range(60):
        payoff.note_attempt(9.0, 0.01, 1.0)
    assert payoff.wait == 0
    payoff.spent = 1e9
    payoff.note_attempt(0.0, 1e9, 1.0)
    assert payoff.wait == 1


def test_seconds_follow_the_work_that_a_model_knows() -> None:
    """Between known sizes by work and not by tokens, and beyond them in its proportion."""

    class Knows:
        known = np.array([10.0, 18, 19, 20, 30, 40, 40, 40, 60])

        def work(self, size: int) -> np.ndarray:
            return np.pad(self.known, (0, max(0, size - 9)), "edge")[:size]

    model = Knows()
    costs = Costs(model)
    assert costs.curve(4).tolist() == pytest.approx([1, 1.8, 1.9, 2.0])  # nothing was measured
    costs.seconds = {1: 1.0, 4: 3.0, 8: 5.0}
    assert costs.curve(9).tolist() == pytest.approx([1, 2.6, 2.8, 3, 4, 5, 5, 5, 7.5])
    assert costs.curve(2).tolist() == pytest.approx([1, 2.6])
    costs.freeze_curve()
    model.known = np.arange(1.0, 10)  # what was frozen is not followed
    assert costs.curve(2).tolist() == pytest.approx([1, 1 + 2 / 3])
    fixed = costs.fixed_curve(4)
    assert fixed is not None and fixed.tolist() == pytest.approx([1, 2.6, 2.8, 3])
    other = Costs()
    other.seconds = dict(costs.seconds)
    assert other.curve(2).tolist() == pytest.approx([1, 1 + 2 / 3])  # by tokens


# --- what a drafter promises


def line(single: float, more: float) -> Callable[[int], np.ndarray]:
    """Seconds of steps of 1, 2, ... tokens."""
    return lambda size: single + more * np.arange(size)


def asks(
    promise: Promise, shares: Callable[[int], np.ndarray], reading: float = 0.0, steps: int = 9
) -> bool:
    return any(promise.pays(shares, lambda: reading, steps) for _ in range(LOOKED))


def test_a_promise_pays_by_the_load_of_the_moment() -> None:
    """The same trees: worth a second token's time where a forward of two costs as one, and not
    where each token has its price. Nothing has to be tried for it.
    """
    promise = Promise()
    promise.note_tree([0.8, 0.4])
    promise.note_seconds(0.5)
    assert asks(promise, line(1.0, 0.1))  # 1.2 - 0.2 saved
    assert not asks(promise, line(1.0, 0.7))  # 0.8 - 0.7
    assert asks(promise, line(1.0, 0.1)), "the load has fallen"
    promise.note_seconds(9.0)
    assert not asks(promise, line(1.0, 0.1)), "asking takes longer"


def test_what_is_read_before_has_to_pay_in_the_steps_that_are_left() -> None:
    promise = Promise()
    promise.note_tree([0.8, 0.4])
    promise.note_seconds(0.2)
    assert asks(promise, line(1.0, 0.1), reading=3.0, steps=9)
    assert not asks(promise, line(1.0, 0.1), reading=3.0, steps=4)
    assert asks(promise, line(1.0, 0.1), steps=4), "it has begun"


def test_what_was_measured_of_a_head_is_its_first_promise() -> None:
    promise = Promise([0.8, 0.5], 0.5)
    assert list(promise.expected[:4]) == pytest.approx([0, 0.8, 1.2, 1.2])
    assert asks(promise, line(1.0, 0.1)) and not asks(promise, line(1.0, 0.7))
    promise.note_tree([0.0])
    assert list(promise.expected[:3]) == pytest.approx([0, 0.4, 0.6]), "one tree weighs as much"
    promise.note_seconds(0.1)
    assert promise.seconds == pytest.approx(0.1), "what was seen replaces what was guessed"


def test_where_nothing_is_known_one_asks_and_the_others_wait_for_it() -> None:
    promise = Promise()
    shares = line(1.0, 0.1)
    assert promise.pays(shares, lambda: 0.0, 9)
    assert not any(promise.pays(shares, lambda: 0.0, 9) for _ in range(UNKNOWN))
    assert promise.pays(shares, lambda: 0.0, 9), "its request may have ended before it had a tree"
    promise.note_tree([0.9])
    assert promise.pays(shares, lambda: 0.0, 9)


@pytest.mark.parametrize("reading", [0.0, 4.0])
def test_what_does_not_pay_is_tried_for_a_small_share_of_the_time(reading: float) -> None:
    promise = Promise()
    promise.note_tree([0.1])
    promise.note_seconds(1.0)
    steps = 20_000
    tried = sum(promise.pays(line(1.0, 0.5), lambda: reading, 9) for _ in range(steps))
    assert tried == pytest.approx(LOSS * steps / (1.0 + reading), rel=0.1)
    assert CLEARLY > 1


def test_shares_are_kept_for_some_forwards_only() -> None:
    costs = Costs()
    costs.seconds = {1: 1.0, 16: 2.0}
    before = costs.share(4, 10, 2)
    assert costs.share(4, 20, 2) is before, "texts of nearly the same length"
    for _ in range(50):
        costs.note_forward(1, 3.0)
    assert costs.share(4, 10, 2)[0] > 1.5 * before[0]


def test_tokens_between_two_known_sizes_are_counted_as_what_they_are() -> None:
    """Where each has its price: five tokens that are noted do not make eight cheaper."""
    costs = Costs()
    costs.seconds = {1: 0.010, 4: 0.040, 8: 0.080}
    for _ in range(300):
        costs.note_forward(5, 0.050)
    assert costs.curve(8)[[0, 3, 7]] == pytest.approx([0.010, 0.040, 0.080])
    for _ in range(300):
        costs.note_forward(5, 0.100)
    assert costs.curve(8)[4] == pytest.approx(0.100, rel=0.01)
