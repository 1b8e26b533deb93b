"""Tasks of the sort `instructions`: a text is to be written that keeps to demands which a program
can check.

Demands are about length, words, letters, signs and form. They stand in the question, so an answer
can be checked by whoever has read it: what a search may know is what decides. Right is an answer
that keeps to all.

Source: the idea is that of Zhou et al., Instruction-Following Evaluation for Large Language Models,
arXiv:2311.07911; demands and words are ours.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from foretell.bench.suites.search.tasks import Task, different

TOPICS = (
    "a walk in the rain",
    "a small town by the sea",
    "how bread is baked",
    "an old clock",
    "the first snow",
    "a market on Saturday",
    "why people keep gardens",
    "a train at night",
    "a lost umbrella",
    "learning to swim",
    "a cat and a window",
    "the smell of coffee",
    "a letter from a friend",
    "a broken bicycle",
    "bees in summer",
    "a library",
    "the colour blue",
    "a mountain path",
    "an empty theatre",
    "a birthday without a cake",
)
WORDS = "river candle orange winter pocket silver button harbour ladder music paper stone".split()
ENDINGS = ("That is all.", "Good night.", "So it goes.", "The end.", "And that was it.")
SENTENCE = re.compile(r"[^.!?\s][^.!?]*[.!?]+")
WORD = re.compile(r"\w+(?:['\u2019-]\w+)*")


@dataclass(frozen=True, eq=False)
class Demand:
    """What is asked of a text, and whether one keeps to it."""

    says: str
    holds: Callable[[str], bool]


@dataclass(frozen=True)
class Instruction(Task):
    """A text about something, with demands."""

    demands: tuple[Demand, ...]

    sort: ClassVar[str] = "instructions"
    partial: ClassVar[bool] = False  # most demands are about ends and lengths

    def score(self, text: str) -> float:
        """The share of demands that are kept; an empty text keeps none."""
        text = text.strip()
        kept = [bool(text) and demand.holds(text) for demand in self.demands]
        return sum(kept) / len(kept)

    def public(self, text: str) -> float:
        return self.score(text)


def instructions(count: int, seed: int) -> list[Instruction]:
    """Two of three have one demand, the others two. Raises BadConfig where there are fewer."""
    forms = [partial(_task, demands) for demands in (1, 1, 2)]
    return different(forms, count, seed, "instructions")


def _task(count: int, draw: random.Random) -> Instruction:
    kinds = draw.sample(sorted(DEMANDS), count)
    demands = tuple(draw.choice(DEMANDS[kind])(draw) for kind in kinds)
    said = " ".join(demand.says for demand in demands)
    question = f"Write a very short text about {draw.choice(TOPICS)}. {said}"
    return Instruction(" and ".join(sorted(kinds)), question, demands)


def _contains(draw: random.Random) -> Demand:
    words = draw.sample(WORDS, draw.choice((1, 1, 2)))
    listed = " and ".join(f'"{word}"' for word in words)
    plural = "s" if len(words) > 1 else ""
    says = f"Use the word{plural} {listed}."
    return Demand(says, lambda text: set(words) <= said(text))


def _avoids(draw: random.Random) -> Demand:
    word = draw.choice(("is", "was", "and", "with", "it", "in"))
    says = f'Do not use the word "{word}".'
    return Demand(says, lambda text: word not in said(text))


def _longest(draw: random.Random) -> Demand:
    most = draw.choice((20, 30, 40, 50, 60))
    says = f"Use at most {most} words."
    return Demand(says, lambda text: len(WORD.findall(text)) <= most)


def _shortest(draw: random.Random) -> Demand:
    least = draw.choice((30, 40, 50, 60))
    says = f"Use at least {least} words."
    return Demand(says, lambda text: len(WORD.findall(text)) >= least)


def _sentences(draw: random.Random) -> Demand:
    count = draw.randint(1, 4)
    plural = "s" if count > 1 else ""
    says = f"Write exactly {count} sentence{plural}."
    return Demand(says, lambda text: len(SENTENCE.findall(text)) == count)


def _ends(draw: random.Random) -> Demand:
    ending = draw.choice(ENDINGS)
    says = f'End with the words "{ending}"'
    return Demand(says, lambda text: text.rstrip('"*').endswith(ending))


def _begins(draw: random.Random) -> Demand:
    word = draw.choice(("Today", "Once", "Sometimes", "Perhaps", "Yesterday", "Everyone"))
    says = f'Begin with the word "{word}".'
    return Demand(says, lambda text: WORD.findall(text)[:1] == [word])


def _lower(draw: random.Random) -> Demand:
    says = "Use small letters only, no capital letters."
    return Demand(says, lambda text: text == text.lower())


def _upper(draw: random.Random) -> Demand:
    says = "Use CAPITAL LETTERS only."
    return Demand(says, lambda text: text == text.upper())


def _commas(draw: random.Random) -> Demand:
    return Demand("Do not use any commas.", lambda text: "," not in text)


def _question(draw: random.Random) -> Demand:
    says = "Ask a question in it."
    return Demand(says, lambda text: "?" in text)


def _bullets(draw: random.Random) -> Demand:
    count = draw.randint(2, 4)
    says = f'Write it as {count} lines, each of which begins with "* ".'

    def holds(text: str) -> bool:
        lines = [line for line in text.split("\n") if line.strip()]
        return len(lines) == count and all(line.startswith("* ") for line in lines)

    return Demand(says, holds)


def said(text: str) -> set[str]:
    """The words of a text, in small letters."""
    return {word.lower() for word in WORD.findall(text)}


# By what they are about: two of one kind may clash.
DEMANDS: dict[str, Sequence[Callable[[random.Random], Demand]]] = {
    "words": (_contains,),
    "avoided word": (_avoids,),
    "length": (_longest, _shortest, _sentences),
    "form": (_ends, _lower, _upper, _bullets),
    "beginning": (_begins,),
    "signs": (_commas, _question),
}
