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
from foretell.bench.suites.search.tasks import Task, make_distinct

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

    def score_answer(self, text: str) -> float:
        return float(last_number(text) == str(self.answer))

    def public(self, text: str) -> float:
        """(right + 1) / (equations + 2): a half where there are none, and the more right ones the
        better.
        """
        equation_results = [
            equation_holds(*equation.groups())
            for equation in EQUATION.finditer(text.replace("$", ""))
        ]
        return (sum(equation_results) + 1) / (len(equation_results) + 2)


def equation_holds(terms: str, value: str) -> bool:
    """Whether `3 + 4 * 5` is 23, products first; \u00d7 and \u00f7 are read too."""
    first_term = re.match(NUMBER, terms)
    assert first_term is not None, "terms begin with a number"
    summands = [_parse_number(first_term[0])]  # to be added up; the last may still be multiplied
    for sign, term_text in TERM.findall(terms[first_term.end() :]):
        number = _parse_number(term_text)
        if sign in "+-":
            summands.append(number if sign == "+" else -number)
        elif sign in "/\u00f7":
            if not number:
                return False
            summands[-1] /= number
        else:
            summands[-1] *= number
    return abs(sum(summands) - _parse_number(value)) < 0.005


def _parse_number(number_text: str) -> float:
    return float(number_text.replace(",", ""))


WorkedSum = tuple[str, str, int]  # a question, the equations of its answer, and the answer


def make_sums(count: int, seed: int) -> list[Sum]:
    """Makes `count` different sums. Raises BadConfig where there are fewer."""
    return make_distinct([partial(_draw_sum, *form) for form in FORMS.items()], count, seed, "sums")


def _draw_sum(
    kind: str, form: Callable[[random.Random], WorkedSum], generator: random.Random
) -> Sum:
    question, _, answer = form(generator)
    worked_examples: dict[str, str] = {}
    while len(worked_examples) < SHOWN:
        other_question, steps, value = form(generator)
        if other_question != question:
            worked_examples[other_question] = (
                f"Q: {other_question}\nA: {steps}. The answer is {value}.\n\n"
            )
    return Sum(kind, f"{''.join(worked_examples.values())}Q: {question}\nA:", answer)


def _draw_addition(generator: random.Random) -> WorkedSum:
    first_number, second_number, third_number = (generator.randint(2, 20) for _ in range(3))
    partial_sum = first_number + second_number
    total = partial_sum + third_number
    steps = f"{first_number} + {second_number} = {partial_sum}. "
    steps += f"{partial_sum} + {third_number} = {total}"
    return (
        f"What is the sum of {first_number}, {second_number} and {third_number}?",
        steps,
        partial_sum + third_number,
    )


def _draw_gain(generator: random.Random) -> WorkedSum:
    name, thing = generator.choice(NAMES), generator.choice(THINGS)
    initial_count, bought_count = generator.randint(3, 40), generator.randint(2, 20)
    question = (
        f"{name} has {initial_count} {thing} and buys {bought_count} more. "
        f"How many {thing} does {name} have?"
    )
    return (
        question,
        f"{initial_count} + {bought_count} = {initial_count + bought_count}",
        initial_count + bought_count,
    )


def _draw_loss(generator: random.Random) -> WorkedSum:
    name, thing = generator.choice(NAMES), generator.choice(THINGS)
    initial_count, given_count = generator.randint(10, 30), generator.randint(2, 9)
    question = (
        f"{name} has {initial_count} {thing} and gives {given_count} of them away. "
        f"How many {thing} are left?"
    )
    return (
        question,
        f"{initial_count} - {given_count} = {initial_count - given_count}",
        initial_count - given_count,
    )


def _draw_gain_and_loss(generator: random.Random) -> WorkedSum:
    name, thing = generator.choice(NAMES), generator.choice(THINGS)
    initial_count, bought_count, given_count = (
        generator.randint(4, 20),
        generator.randint(2, 9),
        generator.randint(1, 5),
    )
    question = (
        f"{name} has {initial_count} {thing}, buys {bought_count} more and then "
        f"gives {given_count} away. How many {thing} does {name} have now?"
    )
    bought_total = initial_count + bought_count
    steps = f"{initial_count} + {bought_count} = {bought_total}. "
    steps += f"{bought_total} - {given_count} = {bought_total - given_count}"
    return question, steps, bought_total - given_count


def _draw_boxes(generator: random.Random) -> WorkedSum:
    thing, box_content, box_count = (
        generator.choice(THINGS),
        generator.randint(2, 12),
        generator.randint(2, 9),
    )
    question = (
        f"There are {box_count} boxes with {box_content} {thing} in each. "
        f"How many {thing} are there?"
    )
    return (
        question,
        f"{box_count} * {box_content} = {box_count * box_content}",
        box_count * box_content,
    )


def _draw_boxes_and_more(generator: random.Random) -> WorkedSum:
    thing, box_content, box_count = (
        generator.choice(THINGS),
        generator.randint(2, 10),
        generator.randint(2, 6),
    )
    extra_count = generator.randint(1, 9)
    question = (
        f"There are {box_count} boxes with {box_content} {thing} in each, and "
        f"{extra_count} more {thing} on the table. How many {thing} are there in all?"
    )
    boxed_total = box_count * box_content
    steps = f"{box_count} * {box_content} = {boxed_total}. "
    steps += f"{boxed_total} + {extra_count} = {boxed_total + extra_count}"
    return question, steps, boxed_total + extra_count


def _draw_ages(generator: random.Random) -> WorkedSum:
    younger, older = generator.sample(NAMES, 2)
    age, years = generator.randint(5, 40), generator.randint(2, 12)
    question = (
        f"{younger} is {age} years old, and {older} is {years} years older. How old is {older}?"
    )
    return question, f"{age} + {years} = {age + years}", age + years


def _draw_sharing(generator: random.Random) -> WorkedSum:
    thing, equal_share, friend_count = (
        generator.choice(THINGS),
        generator.randint(2, 9),
        generator.randint(2, 6),
    )
    question = (
        f"{friend_count} friends share {equal_share * friend_count} {thing} equally. "
        f"How many {thing} does each of them get?"
    )
    return question, f"{equal_share * friend_count} / {friend_count} = {equal_share}", equal_share


def _draw_change(generator: random.Random) -> WorkedSum:
    price, count = generator.randint(2, 9), generator.randint(2, 5)
    cost = price * count
    paid = generator.choice([banknote for banknote in (20, 50, 100) if banknote > cost])
    question = (
        f"A book costs {price} dollars. {generator.choice(NAMES)} buys {count} of them and "
        f"pays with {paid} dollars. How many dollars come back?"
    )
    steps = f"{price} * {count} = {cost}. {paid} - {cost} = {paid - cost}"
    return question, steps, paid - cost


def _draw_days(generator: random.Random) -> WorkedSum:
    name, daily_pages, day_count, remaining_pages = (
        generator.choice(NAMES),
        generator.randint(3, 12),
        generator.randint(2, 6),
        generator.randint(2, 9),
    )
    question = (
        f"{name} reads {daily_pages} pages a day. After {day_count} days there are "
        f"{remaining_pages} pages left. How many pages does the book have?"
    )
    read_pages = daily_pages * day_count
    steps = f"{daily_pages} * {day_count} = {read_pages}. "
    steps += f"{read_pages} + {remaining_pages} = {read_pages + remaining_pages}"
    return question, steps, read_pages + remaining_pages


FORMS: dict[str, Callable[[random.Random], WorkedSum]] = {
    "added": _draw_addition,
    "gained": _draw_gain,
    "lost": _draw_loss,
    "both": _draw_gain_and_loss,
    "boxes": _draw_boxes,
    "beside": _draw_boxes_and_more,
    "older": _draw_ages,
    "shared": _draw_sharing,
    "change": _draw_change,
    "days": _draw_days,
}
