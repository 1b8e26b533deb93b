"""Simulated rounds against closed forms."""

from __future__ import annotations

from itertools import islice

import pytest
from comparison import overlap
from comparison.overlap import Case, Times, predict

from foretell.errors import BadConfig

SEPARATE = Times(target=8.0, draft=1.5, target_token=0.1, draft_token=0.05)
CHANCES = (0.0, 0.7, 0.95, 1.0)


def speeds(case: Case) -> dict[str, float]:
    return {one.method: one.tokens_per_second for one in predict(case)}


def run_length(chance: float, tokens: int) -> float:
    """Mean of what a chain commits: 1 + a + a^2 + ... with `tokens` terms after the first."""
    return sum(chance**i for i in range(tokens + 1))


@pytest.mark.parametrize("chance", CHANCES)
@pytest.mark.parametrize("gamma", [1, 4])
def test_ordinary_speculation(chance: float, gamma: int) -> None:
    seconds = gamma * 1.5 + 8.0 + gamma * 0.1
    want = run_length(chance, gamma) / seconds
    found = speeds(Case(SEPARATE, chance, gamma))
    assert found["draft"] == pytest.approx(want, rel=0.02)
    assert found["plain"] == pytest.approx(1 / 8.0)


@pytest.mark.parametrize("chance", CHANCES)
@pytest.mark.parametrize("gamma", [1, 4])
def test_pearl_is_a_chain_of_two_states(chance: float, gamma: int) -> None:
    """Without a tail a round gives one token, and a tail follows with the probability of one; with
    a tail it gives a run of up to gamma, and keeps one where all of them hold.
    """
    begins, ends = chance, 1 - chance**gamma
    with_tail = begins / (begins + ends) if begins + ends else 1.0
    tokens = (1 - with_tail) + with_tail * run_length(chance, gamma - 1)
    drafting = gamma * 1.5
    short, long = max(drafting, 8.0), max(drafting, 8.0 + (gamma - 1) * 0.1)
    seconds = (1 - with_tail) * short + with_tail * long
    found = speeds(Case(SEPARATE, chance, gamma))["pearl"]
    assert found == pytest.approx(tokens / seconds, rel=0.02)


@pytest.mark.parametrize("recall", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("chance", [0.3, 0.95])
def test_mirror_drafts_in_the_open_where_nothing_was_guessed(chance: float, recall: float) -> None:
    gamma, kappa, early = 3, 2, 0.25
    verifying = 8.0 + gamma * 0.1
    branches = gamma * (1.5 + ((gamma + 1) * kappa - 1) * 0.05)
    seconds = early * verifying + max((1 - early) * verifying, branches)
    seconds += (1 - recall) * gamma * 1.5
    case = Case(SEPARATE, chance, gamma, kappa, early, recall)
    want = run_length(chance, gamma) / seconds
    assert speeds(case)["mirror"] == pytest.approx(want, rel=0.02)


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_easyspec_divides_the_attention_of_all_steps_but_the_first(devices: int) -> None:
    gamma, attention = 4, 0.4
    rough = 1.5 * (0.6 + 0.4 / min(4, devices))
    seconds = 1.5 + (gamma - 1) * rough + 8.0 + gamma * 0.1
    case = Case(SEPARATE, 0.8, gamma, rough_chance=0.7, attention=attention, devices=devices)
    want = run_length(0.7, gamma) / seconds
    assert speeds(case)["easyspec"] == pytest.approx(want, rel=0.02)


def test_one_device_for_both_is_as_slow_as_one_after_the_other() -> None:
    for lane, slowdown in (("inline", 1.0), ("beside", 2.0)):
        times = Times(8.0, 1.5, lane=lane, slowdown=slowdown)
        assert times.together(8.0, 6.0) == 14.0
    times = Times(8.0, 1.5, slowdown=1.5, handover=0.25)
    assert times.together(8.0, 6.0) == times.together(6.0, 8.0) == 8.0 + 3.0 + 0.25


def test_a_perfect_draft_model_of_its_own_hides_all_drafting() -> None:
    """Gamma draft steps in the time of one of the target: gamma times as fast as plain."""
    case = Case(Times(target=8.0, draft=2.0), chance=1.0, gamma=4)
    rounds = list(islice(overlap.pearl(case.times, lambda tokens: tokens, 4), 5))
    assert rounds == [(8.0, 1), (8.0, 4), (8.0, 4), (8.0, 4), (8.0, 4)]
    assert speeds(case)["pearl"] == pytest.approx(4 / 8.0, rel=0.001)


def test_what_pays_depends_on_the_lane() -> None:
    """Beside the target pearl wins over ordinary drafts; in turns what it throws away costs."""
    apart = Case(Times(8.0, 2.0), chance=0.8, gamma=4)
    shared = Case(Times(8.0, 2.0, lane="inline"), chance=0.8, gamma=4)
    assert speeds(apart)["pearl"] > speeds(apart)["draft"]
    assert speeds(shared)["pearl"] < speeds(shared)["draft"]
    assert predict(apart)[-1].method == "plain" or predict(apart)[-1].speedup < 1


def test_a_seed_gives_its_numbers_again() -> None:
    case = Case(SEPARATE, 0.7)
    assert predict(case) == predict(case) != predict(case, seed=1)
    lines = overlap.table(predict(case)).splitlines()
    assert len(lines) == 6 and lines[0].split() == ["method", "tokens/s", "speed-up"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("target", 0.0), ("draft", -1.0), ("handover", -1.0), ("slowdown", 3.0), ("lane", "wire")],
)
def test_times_that_no_clock_measures_are_refused(field: str, value: object) -> None:
    given: dict[str, object] = {"target": 1.0, "draft": 1.0, field: value}
    with pytest.raises(BadConfig, match=f"{field}={value!r}: must be"):
        Times(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "value"), [("chance", 1.5), ("recall", -0.1), ("gamma", 0)])
def test_a_case_that_cannot_be_is_refused(field: str, value: float) -> None:
    given: dict[str, object] = {"chance": 0.5, field: value}
    with pytest.raises(BadConfig, match=f"{field}={value!r}: must be"):
        Case(SEPARATE, **given)  # type: ignore[arg-type]
