"""How verdicts and refined answers are read."""

from __future__ import annotations

import pytest

from foretell.strategies.samples.refinement import (
    SETTLED,
    Node,
    refined,
    sort_best_first,
    tally_verdicts,
)

YES, NO = "All is met.\nFinal Judgement: Yes", "It lacks a b.\n**Final judgment**: [[No]], sorry"


@pytest.mark.parametrize(
    ("said", "share"),
    [
        ([YES, YES, NO], 2 / 3),
        ([YES, NO], None),
        ([YES, "Yes.", "no verdict"], 1.0),
        (["Final Judgement: Not yet. Yes", NO, NO], 1 / 3),  # `Not` is no No
        (["Final Judgement: Noted", "Yes, yes"], None),
        (["Yes. Final Judgement:\nNo. Yes!"], 0.0),
        ([], None),
    ],
)
def test_the_share_of_yes_among_verdicts(said: list[str], share: float | None) -> None:
    found = tally_verdicts(said)
    assert (None if found is None else found[0]) == share


def test_the_critique_is_the_first_of_the_majority_up_to_its_verdict() -> None:
    assert tally_verdicts([YES, NO, f"Other. {NO}"]) == (1 / 3, NO.removesuffix("]], sorry"))


def test_a_verdict_is_settled_when_its_word_cannot_become_longer() -> None:
    assert not SETTLED.search(YES) and SETTLED.search(f"{YES}.")
    assert not SETTLED.search("Final Judgement: Not") and not SETTLED.search("Yes. ")


def test_the_answer_between_the_marks() -> None:
    assert refined("So: [[start]]\n one\ntwo [[end]] [[start]]x[[end]]") == "one\ntwo"
    assert refined("[[start]] one") == refined("[[end]]") == refined("[[start]] [[end]]") == ""


def test_of_equal_scores_the_later_one_stands_first() -> None:
    nodes = [Node(number, "", score) for number, score in enumerate((0.5, 0.2, 0.5, 0.2))]
    assert [node.branch for node in sort_best_first(nodes)] == [2, 0, 3, 1]
