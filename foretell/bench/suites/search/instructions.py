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

from foretell.bench.suites.search.tasks import Task, make_distinct

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
    """A demand on a text: its words, and a check whether a text keeps to it."""

    says: str
    holds: Callable[[str], bool]


@dataclass(frozen=True)
class Instruction(Task):
    """A text about something, with demands."""

    demands: tuple[Demand, ...]

    sort: ClassVar[str] = "instructions"
    partial: ClassVar[bool] = False  # most demands are about ends and lengths

    def score_answer(self, text: str) -> float:
        """The share of demands that are kept; an empty text keeps none."""
        text = text.strip()
        kept_demands = [bool(text) and demand.holds(text) for demand in self.demands]
        return sum(kept_demands) / len(kept_demands)

    def public(self, text: str) -> float:
        return self.score_answer(text)


def make_instructions(count: int, seed: int) -> list[Instruction]:
    """Makes tasks: two of three have one demand, the others two. Raises BadConfig where there are
    fewer.
    """
    task_forms = [partial(_draw_instruction, demands) for demands in (1, 1, 2)]
    return make_distinct(task_forms, count, seed, "instructions")


def _draw_instruction(demand_count: int, generator: random.Random) -> Instruction:
    demand_kinds = generator.sample(sorted(DEMANDS), demand_count)
    demands = tuple(
        generator.choice(DEMANDS[demand_kind])(generator) for demand_kind in demand_kinds
    )
    demand_texts = " ".join(demand.says for demand in demands)
    question = f"Write a very short text about {generator.choice(TOPICS)}. {demand_texts}"
    return Instruction(" and ".join(sorted(demand_kinds)), question, demands)


def _contains_words(generator: random.Random) -> Demand:
    words = generator.sample(WORDS, generator.choice((1, 1, 2)))
    word_list = " and ".join(f'"{word}"' for word in words)
    plural = "s" if len(words) > 1 else ""
    says = f"Use the word{plural} {word_list}."
    return Demand(says, lambda text: set(words) <= lower_words(text))


def _avoids_word(generator: random.Random) -> Demand:
    word = generator.choice(("is", "was", "and", "with", "it", "in"))
    says = f'Do not use the word "{word}".'
    return Demand(says, lambda text: word not in lower_words(text))


def _word_maximum(generator: random.Random) -> Demand:
    max_words = generator.choice((20, 30, 40, 50, 60))
    says = f"Use at most {max_words} words."
    return Demand(says, lambda text: len(WORD.findall(text)) <= max_words)


def _word_minimum(generator: random.Random) -> Demand:
    min_words = generator.choice((30, 40, 50, 60))
    says = f"Use at least {min_words} words."
    return Demand(says, lambda text: len(WORD.findall(text)) >= min_words)


def _sentence_count(generator: random.Random) -> Demand:
    sentence_count = generator.randint(1, 4)
    plural = "s" if sentence_count > 1 else ""
    says = f"Write exactly {sentence_count} sentence{plural}."
    return Demand(says, lambda text: len(SENTENCE.findall(text)) == sentence_count)


def _ends_with(generator: random.Random) -> Demand:
    ending = generator.choice(ENDINGS)
    says = f'End with the words "{ending}"'
    return Demand(says, lambda text: text.rstrip('"*').endswith(ending))


def _begins_with(generator: random.Random) -> Demand:
    word = generator.choice(("Today", "Once", "Sometimes", "Perhaps", "Yesterday", "Everyone"))
    says = f'Begin with the word "{word}".'
    return Demand(says, lambda text: WORD.findall(text)[:1] == [word])


def _small_letters(generator: random.Random) -> Demand:
    says = "Use small letters only, no capital letters."
    return Demand(says, lambda text: text == text.lower())


def _capital_letters(generator: random.Random) -> Demand:
    says = "Use CAPITAL LETTERS only."
    return Demand(says, lambda text: text == text.upper())


def _no_commas(generator: random.Random) -> Demand:
    return Demand("Do not use any commas.", lambda text: "," not in text)


def _asks_question(generator: random.Random) -> Demand:
    says = "Ask a question in it."
    return Demand(says, lambda text: "?" in text)


def _bullet_lines(generator: random.Random) -> Demand:
    line_count = generator.randint(2, 4)
    says = f'Write it as {line_count} lines, each of which begins with "* ".'

    def holds(text: str) -> bool:
        lines = [line for line in text.split("\n") if line.strip()]
        return len(lines) == line_count and all(line.startswith("* ") for line in lines)

    return Demand(says, holds)


def lower_words(text: str) -> set[str]:
    """The words of a text, in small letters."""
    return {word.lower() for word in WORD.findall(text)}


# By what they are about: two of one kind may clash.
DEMANDS: dict[str, Sequence[Callable[[random.Random], Demand]]] = {
    "words": (_contains_words,),
    "avoided word": (_avoids_word,),
    "length": (_word_maximum, _word_minimum, _sentence_count),
    "form": (_ends_with, _small_letters, _capital_letters, _bullet_lines),
    "beginning": (_begins_with,),
    "signs": (_no_commas, _asks_question),
}
