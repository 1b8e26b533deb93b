"""Demands: of each a text that keeps to it, and one that does not."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest

from foretell.bench.suites.search import instructions as module
from foretell.bench.suites.search.instructions import (
    DEMANDS,
    Demand,
    Instruction,
    make_instructions,
)


def _texts(says: str) -> tuple[str, list[str]]:
    """A text that keeps to a demand, by its words, and some that do not."""
    number = int((re.findall(r"\d+", says) or ["0"])[0])
    quoted = re.findall(r'"([^"]+)"', says)
    if says.startswith("Use the word"):
        return f"A {' '.join(quoted).upper()}!", [f"{quoted[0]}s", f"un{quoted[-1]}"]
    if says.startswith("Do not use the word"):
        return "nothing of that sort", [f"He said: {quoted[0].title()}."]
    if "at most" in says:
        return "Ten-year-old words.", ["word " * (number + 1)]
    if "at least" in says:
        return "word " * number, ["word " * (number - 1)]
    if "exactly" in says:
        return "One, two. " * number, ["One. " * (number + 1), "no sentence"]
    if says.startswith("End"):
        return f"It was so. {quoted[0]}", [f"{quoted[0]} And more.", quoted[0].lower()]
    if says.startswith("Begin"):
        return f'"{quoted[0]}, it rained.', [f"It rained {quoted[0]}.", quoted[0].lower()]
    if says.startswith("Use small"):
        return "all of it, 3 times.", ["Not all."]
    if says.startswith("Use CAPITAL"):
        return "ALL OF IT, 3 TIMES.", ["NOT ALl."]
    if "commas" in says:
        return "None at all.", ["One, at least."]
    if "question" in says:
        return "Is it?", ["It is."]
    return "* one\n\n" * number, ["* one\n" * (number + 1), "- one\n" * number, "* one"]


MAKERS = [make for makers in DEMANDS.values() for make in makers]


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__.strip("_"))
def test_a_demand_tells_texts_apart(make: Callable[[random.Random], Demand]) -> None:
    for seed in range(20):
        demand = make(random.Random(seed))
        good, bad = _texts(demand.says)
        assert demand.holds(good.strip()), (demand.says, good)
        for text in bad:
            assert not demand.holds(text.strip()), (demand.says, text)


def test_an_answer_is_scored_by_the_share_of_demands_that_it_keeps() -> None:
    no_commas = module._no_commas(random.Random(0))
    question = module._asks_question(random.Random(0))
    task = Instruction("signs", "?", (no_commas, question))
    assert (
        task.score_answer("Is it?") == 1
        and task.score_answer("Is it, or not?") == task.score_answer("Yes.") == 0.5
    )
    assert task.score_answer(" \n") == 0 and task.public("Yes, it is.") == 0


def test_tasks_are_different_and_their_demands_do_not_clash() -> None:
    tasks = make_instructions(300, 4)
    again = make_instructions(300, 4)
    assert [one.question for one in tasks] == [one.question for one in again]
    assert len({task.question for task in tasks}) == 300
    assert {len(task.demands) for task in tasks} == {1, 2}
    for task in tasks:
        kinds = task.kind.split(" and ")
        assert len(set(kinds)) == len(task.demands) and set(kinds) <= set(DEMANDS)
        assert all(demand.says in task.question for demand in task.demands)
