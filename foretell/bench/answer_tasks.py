"""Tasks whose answers can be compared: two texts of one task say the same, or they do not.

The answer is the last number of the text, or which of the task's words it says in which order.
Whether it is right plays no part. Tasks come from files, such as GSM8K's, or are made here: sums
and products in steps, stories with numbers, and lists to choose from, count and turn round.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from foretell.bench.prompts import Prompt, read_prompts
from foretell.errors import BadConfig

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
NAMES = ("Anna", "Ben", "Carla", "David", "Ella", "Frank", "Grace", "Henry", "Ivy", "Jack")
KINDS = {
    "fruit": ("apple", "pear", "banana", "cherry", "grape", "mango", "peach", "plum"),
    "animal": ("horse", "rabbit", "tiger", "sheep", "eagle", "dolphin", "camel", "fox"),
    "tool": ("hammer", "saw", "drill", "wrench", "chisel", "shovel", "axe", "rake"),
    "colour": ("red", "blue", "green", "yellow", "purple", "orange", "brown", "pink"),
    "country": ("France", "Japan", "Brazil", "Egypt", "Canada", "India", "Kenya", "Peru"),
}
THINGS = ("apples", "books", "coins", "marbles", "stickers", "pencils", "shells", "cookies")
PLACES = ("first", "second", "third", "fourth", "fifth")


@dataclass(frozen=True)
class Task:
    """A prompt, and the words of which the answer is made; none: it is a number."""

    prompt: Prompt
    words: tuple[str, ...] = ()

    def answer(self, text: str) -> str | None:
        """Returns the answer that the text gives, None where it gives none."""
        if not self.words:
            return last_number(text)
        return find_words(text, self.words)


def last_number(text: str) -> str | None:
    """The last number of a text, in its shortest form."""
    numbers = NUMBER.findall(text)
    if not numbers:
        return None
    last_value = Decimal(numbers[-1].replace(",", "").rstrip("."))
    return f"{last_value.normalize():f}"


def find_words(text: str, words: Sequence[str]) -> str | None:
    """Returns the words that are in the text, in the order in which they stand there last."""
    positions = []
    for word in words:
        occurrences = [
            m.start() for m in re.finditer(rf"\b{re.escape(word)}\b", text, re.IGNORECASE)
        ]
        if occurrences:
            positions.append((occurrences[-1], word))
    return " ".join(word for _, word in sorted(positions)) or None


def read_tasks(path: str | Path) -> list[Task]:
    """The tasks of a file of prompts (see bench/prompts.py), whose rows may have `words`.

    Raises BadConfig, with the number of the line.
    """
    prompts = iter(read_prompts(path))
    tasks = []
    for line_number, line in enumerate(Path(path).read_text("utf-8").split("\n"), 1):
        if line.strip():
            words = json.loads(line).get("words", [])
            is_word_list = isinstance(words, list) and all(isinstance(word, str) for word in words)
            if not is_word_list or "" in words:
                raise BadConfig(f"{path}, line {line_number}: `words` must be a list of words")
            prompt = next(prompts)
            if isinstance(prompt, str):
                prompt = user_message(prompt)
            tasks.append(Task(prompt, tuple(words)))
    return tasks


def user_message(question: str) -> Prompt:
    """The question as what a user says."""
    return [{"role": "user", "content": question}]


def make_tasks(count: int, seed: int) -> list[Task]:
    """Makes `count` different small tasks. Raises BadConfig where there are fewer."""
    generator = random.Random(seed)
    tasks_by_question: dict[str, Task] = {}
    for _ in range(20 * count + 100):
        if len(tasks_by_question) == count:
            return list(tasks_by_question.values())
        make_question = generator.choice(FORMS)
        question, words = make_question(generator)
        tasks_by_question.setdefault(question, Task(user_message(question), words))
    raise BadConfig(f"--own {count}: so many different tasks cannot be made; take fewer")


QuestionWords = tuple[str, tuple[str, ...]]  # a question, and the words of its answer


def _sum_question(generator: random.Random) -> QuestionWords:
    numbers = [generator.randint(2, 60) for _ in range(generator.randint(2, 4))]
    number_list = ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"
    wording = generator.choice(("Add {} step by step.", "What is the sum of {}? Show each step."))
    return wording.format(number_list), ()


def _story_question(generator: random.Random) -> QuestionWords:
    name, thing = generator.choice(NAMES), generator.choice(THINGS)
    initial_count, bought_count, given_count = (
        generator.randint(10, 50),
        generator.randint(2, 30),
        generator.randint(1, 9),
    )
    return (
        f"{name} has {initial_count} {thing}, buys {bought_count} more and "
        f"gives {given_count} away. How many {thing} does {name} have now?"
    ), ()


def _box_question(generator: random.Random) -> QuestionWords:
    thing, box_content, box_count = (
        generator.choice(THINGS),
        generator.randint(2, 25),
        generator.randint(2, 12),
    )
    extra_count = generator.randint(1, 20)
    return (
        f"There are {box_count} boxes with {box_content} {thing} in each, and "
        f"{extra_count} {thing} beside them. How many {thing} are there in all?"
    ), ()


def _draw_list(generator: random.Random) -> tuple[str, tuple[str, ...]]:
    words = [word for kind in generator.sample(sorted(KINDS), 2) for word in KINDS[kind]]
    listed_words = generator.sample(words, generator.randint(3, 5))
    return ", ".join(listed_words), tuple(listed_words)


def _place_question(generator: random.Random) -> QuestionWords:
    word_list, words = _draw_list(generator)
    position = generator.choice([*PLACES[: len(words)], "last"])
    return f"Here is a list: {word_list}. Which word is the {position} one of the list?", words


def _count_question(generator: random.Random) -> QuestionWords:
    word_list, _ = _draw_list(generator)
    return f"How many words are in this list? Count them one by one: {word_list}.", ()


def _reorder_question(generator: random.Random) -> QuestionWords:
    word_list, words = _draw_list(generator)
    requested_order = generator.choice(
        ("in reverse order", "in alphabetical order", "with a number before each")
    )
    return f"Write these words {requested_order}: {word_list}.", words


def _odd_question(generator: random.Random) -> QuestionWords:
    kind, odd_kind = generator.sample(sorted(KINDS), 2)
    words = [*generator.sample(KINDS[kind], 3), generator.choice(KINDS[odd_kind])]
    generator.shuffle(words)
    return f"Which of these is a {odd_kind}, and why: {', '.join(words)}?", tuple(words)


FORMS = (
    _sum_question,
    _story_question,
    _box_question,
    _place_question,
    _count_question,
    _reorder_question,
    _odd_question,
)
