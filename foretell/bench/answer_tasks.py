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
        """What the text answers, None where it does not."""
        if not self.words:
            return last_number(text)
        return said(text, self.words)


def last_number(text: str) -> str | None:
    """The last number of a text, in its shortest form."""
    found = NUMBER.findall(text)
    if not found:
        return None
    number = Decimal(found[-1].replace(",", "").rstrip("."))
    return f"{number.normalize():f}"


def said(text: str, words: Sequence[str]) -> str | None:
    """Those of the words that are in the text, in the order in which they stand there last."""
    places = []
    for word in words:
        found = [m.start() for m in re.finditer(rf"\b{re.escape(word)}\b", text, re.IGNORECASE)]
        if found:
            places.append((found[-1], word))
    return " ".join(word for _, word in sorted(places)) or None


def read_tasks(path: str | Path) -> list[Task]:
    """The tasks of a file of prompts (see bench/prompts.py), whose rows may have `words`.

    Raises BadConfig, with the number of the line.
    """
    prompts = iter(read_prompts(path))
    tasks = []
    for number, line in enumerate(Path(path).read_text("utf-8").split("\n"), 1):
        if line.strip():
            words = json.loads(line).get("words", [])
            known = isinstance(words, list) and all(isinstance(word, str) for word in words)
            if not known or "" in words:
                raise BadConfig(f"{path}, line {number}: `words` must be a list of words")
            prompt = next(prompts)
            if isinstance(prompt, str):
                prompt = asked(prompt)
            tasks.append(Task(prompt, tuple(words)))
    return tasks


def asked(question: str) -> Prompt:
    """The question as what a user says."""
    return [{"role": "user", "content": question}]


def own_tasks(count: int, seed: int) -> list[Task]:
    """So many small tasks, each of them once. Raises BadConfig where there are fewer."""
    draw = random.Random(seed)
    found: dict[str, Task] = {}
    for _ in range(20 * count + 100):
        if len(found) == count:
            return list(found.values())
        form = draw.choice(FORMS)
        question, words = form(draw)
        found.setdefault(question, Task(asked(question), words))
    raise BadConfig(f"--own {count}: so many different tasks cannot be made; take fewer")


Made = tuple[str, tuple[str, ...]]  # a question, and the words of its answer


def _sum(draw: random.Random) -> Made:
    numbers = [draw.randint(2, 60) for _ in range(draw.randint(2, 4))]
    listed = ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"
    how = draw.choice(("Add {} step by step.", "What is the sum of {}? Show each step."))
    return how.format(listed), ()


def _story(draw: random.Random) -> Made:
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    first, more, fewer = draw.randint(10, 50), draw.randint(2, 30), draw.randint(1, 9)
    return (
        f"{name} has {first} {thing}, buys {more} more and gives {fewer} away. "
        f"How many {thing} does {name} have now?"
    ), ()


def _boxes(draw: random.Random) -> Made:
    thing, each, boxes = draw.choice(THINGS), draw.randint(2, 25), draw.randint(2, 12)
    other = draw.randint(1, 20)
    return (
        f"There are {boxes} boxes with {each} {thing} in each, and {other} {thing} beside them. "
        f"How many {thing} are there in all?"
    ), ()


def _list(draw: random.Random) -> tuple[str, tuple[str, ...]]:
    words = [word for kind in draw.sample(sorted(KINDS), 2) for word in KINDS[kind]]
    chosen = draw.sample(words, draw.randint(3, 5))
    return ", ".join(chosen), tuple(chosen)


def _place(draw: random.Random) -> Made:
    listed, words = _list(draw)
    place = draw.choice([*PLACES[: len(words)], "last"])
    return f"Here is a list: {listed}. Which word is the {place} one of the list?", words


def _count(draw: random.Random) -> Made:
    listed, _ = _list(draw)
    return f"How many words are in this list? Count them one by one: {listed}.", ()


def _turned(draw: random.Random) -> Made:
    listed, words = _list(draw)
    how = draw.choice(("in reverse order", "in alphabetical order", "with a number before each"))
    return f"Write these words {how}: {listed}.", words


def _odd(draw: random.Random) -> Made:
    kind, other = draw.sample(sorted(KINDS), 2)
    words = [*draw.sample(KINDS[kind], 3), draw.choice(KINDS[other])]
    draw.shuffle(words)
    return f"Which of these is a {other}, and why: {', '.join(words)}?", tuple(words)


FORMS = (_sum, _story, _boxes, _place, _count, _turned, _odd)
