"""Tasks of the sort `sums`: small stories and sums in steps, whose answer is a number.

Before each question stand others of the same form with their answers, worked out step by step. The
last number of an answer counts. What can be known without knowing it is whether the equations
hold that the answer writes down on its way.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from foretell.bench.answer_tasks import NAMES, THINGS, last_number
from foretell.bench.suites.search.tasks import Task, different

SHOWN = 2  # worked ones of the same form before the question
NUMBER = r"\d[\d,]*(?:\.\d+)?"
TERMS = rf"{NUMBER}(?:\s*[-+*/x\u00d7\u00f7]\s*{NUMBER})+"
EQUATION = re.compile(rf"({TERMS})\s*=\s*\$?({NUMBER})")
TERM = re.compile(rf"([-+*/x\u00d7\u00f7])\s*({NUMBER})")


@dataclass(frozen=True)
class Sum(Task):
    """A question whose answer is a whole number."""

    answer: int

    sort: ClassVar[str] = "sums"
    stop: ClassVar[tuple[str, ...]] = ("\n\n", "\nQ:")

    @property
    def head(self) -> str:
        return self.question

    def score(self, text: str) -> float:
        return float(last_number(text) == str(self.answer))

    def public(self, text: str) -> float:
        """(right + 1) / (equations + 2): a half where there are none, and the more right ones the
        better.
        """
        found = [holds(*one.groups()) for one in EQUATION.finditer(text.replace("$", ""))]
        return (sum(found) + 1) / (len(found) + 2)


def holds(terms: str, value: str) -> bool:
    """Whether `3 + 4 * 5` is 23, products first; \u00d7 and \u00f7 are read too."""
    first = re.match(NUMBER, terms)
    assert first is not None, "terms begin with a number"
    totals = [_number(first[0])]  # to be added up; the last may still be multiplied
    for sign, written in TERM.findall(terms[first.end() :]):
        number = _number(written)
        if sign in "+-":
            totals.append(number if sign == "+" else -number)
        elif sign in "/\u00f7":
            if not number:
                return False
            totals[-1] /= number
        else:
            totals[-1] *= number
    return abs(sum(totals) - _number(value)) < 0.005


def _number(written: str) -> float:
    return float(written.replace(",", ""))


Made = tuple[str, str, int]  # a question, the equations of its answer, and the answer


def sums(count: int, seed: int) -> list[Sum]:
    """Raises BadConfig where there are fewer."""
    return different([partial(_task, *form) for form in FORMS.items()], count, seed, "sums")


def _task(kind: str, form: Callable[[random.Random], Made], draw: random.Random) -> Sum:
    question, _, answer = form(draw)
    shown: dict[str, str] = {}
    while len(shown) < SHOWN:
        other, steps, value = form(draw)
        if other != question:
            shown[other] = f"Q: {other}\nA: {steps}. The answer is {value}.\n\n"
    return Sum(kind, f"{''.join(shown.values())}Q: {question}\nA:", answer)


def _added(draw: random.Random) -> Made:
    first, second, third = (draw.randint(2, 20) for _ in range(3))
    half = first + second
    steps = f"{first} + {second} = {half}. {half} + {third} = {half + third}"
    return f"What is the sum of {first}, {second} and {third}?", steps, half + third


def _gained(draw: random.Random) -> Made:
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    first, more = draw.randint(3, 40), draw.randint(2, 20)
    question = (
        f"{name} has {first} {thing} and buys {more} more. How many {thing} does {name} have?"
    )
    return question, f"{first} + {more} = {first + more}", first + more


def _lost(draw: random.Random) -> Made:
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    first, fewer = draw.randint(10, 30), draw.randint(2, 9)
    question = (
        f"{name} has {first} {thing} and gives {fewer} of them away. How many {thing} are left?"
    )
    return question, f"{first} - {fewer} = {first - fewer}", first - fewer


def _both(draw: random.Random) -> Made:
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    first, more, fewer = draw.randint(4, 20), draw.randint(2, 9), draw.randint(1, 5)
    question = (
        f"{name} has {first} {thing}, buys {more} more and then gives {fewer} away. "
        f"How many {thing} does {name} have now?"
    )
    most = first + more
    steps = f"{first} + {more} = {most}. {most} - {fewer} = {most - fewer}"
    return question, steps, most - fewer


def _boxes(draw: random.Random) -> Made:
    thing, each, boxes = draw.choice(THINGS), draw.randint(2, 12), draw.randint(2, 9)
    question = f"There are {boxes} boxes with {each} {thing} in each. How many {thing} are there?"
    return question, f"{boxes} * {each} = {boxes * each}", boxes * each


def _beside(draw: random.Random) -> Made:
    thing, each, boxes = draw.choice(THINGS), draw.randint(2, 10), draw.randint(2, 6)
    other = draw.randint(1, 9)
    question = (
        f"There are {boxes} boxes with {each} {thing} in each, and {other} more {thing} on the "
        f"table. How many {thing} are there in all?"
    )
    inside = boxes * each
    steps = f"{boxes} * {each} = {inside}. {inside} + {other} = {inside + other}"
    return question, steps, inside + other


def _older(draw: random.Random) -> Made:
    one, other = draw.sample(NAMES, 2)
    age, years = draw.randint(5, 40), draw.randint(2, 12)
    question = f"{one} is {age} years old, and {other} is {years} years older. How old is {other}?"
    return question, f"{age} + {years} = {age + years}", age + years


def _shared(draw: random.Random) -> Made:
    thing, each, people = draw.choice(THINGS), draw.randint(2, 9), draw.randint(2, 6)
    question = (
        f"{people} friends share {each * people} {thing} equally. "
        f"How many {thing} does each of them get?"
    )
    return question, f"{each * people} / {people} = {each}", each


def _change(draw: random.Random) -> Made:
    price, count = draw.randint(2, 9), draw.randint(2, 5)
    cost = price * count
    paid = draw.choice([note for note in (20, 50, 100) if note > cost])
    question = (
        f"A book costs {price} dollars. {draw.choice(NAMES)} buys {count} of them and pays with "
        f"{paid} dollars. How many dollars come back?"
    )
    steps = f"{price} * {count} = {cost}. {paid} - {cost} = {paid - cost}"
    return question, steps, paid - cost


def _days(draw: random.Random) -> Made:
    name, pages, days, more = (
        draw.choice(NAMES),
        draw.randint(3, 12),
        draw.randint(2, 6),
        draw.randint(2, 9),
    )
    question = (
        f"{name} reads {pages} pages a day. After {days} days there are {more} pages left. "
        "How many pages does the book have?"
    )
    read = pages * days
    steps = f"{pages} * {days} = {read}. {read} + {more} = {read + more}"
    return question, steps, read + more


FORMS: dict[str, Callable[[random.Random], Made]] = {
    "added": _added,
    "gained": _gained,
    "lost": _lost,
    "both": _both,
    "boxes": _boxes,
    "beside": _beside,
    "older": _older,
    "shared": _shared,
    "change": _change,
    "days": _days,
}
