"""Tasks that show what is lost where tokens are decoded in parallel, and who has solved them.

Ten operations on lists, a Latin square, a sudoku, sentences of given words, a paraphrase and a
summary. Some have one right answer, and nothing is lost; others have many, and tokens that are
drawn apart from each other belong to different ones. A question has one example before it.

Items of the split `train` share none with those of `test`: every name of a list, every set of
symbols, solution, set of words, sentence and conversation belongs to one of them alone.

Source: the tasks and metrics of Kang et al., ParallelBench, arXiv:2510.04767. Names, wording and
items are ours, and so are the scores of texts: see bench/suites/parallel/scores.py.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeVar

from foretell.bench.suites.parallel import scores, texts
from foretell.errors import BadConfig

T = TypeVar("T")
SPLITS = ("train", "test")
TESTED = 4  # one of so many names, symbols and so on is of the split test
LENGTHS = (3, 4, 5, 6)  # of lists, in turn
SYMBOLS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ123456789"
SIZE = 4  # of squares
GIVEN = 12  # numbers of a sudoku that are given
TRIES = 1000  # in a row, to find an item that was not taken yet
LIST = re.compile(r"\[[^\[\]]*\]")
NUMBERS = re.compile(f"[1-{SIZE}]{{{SIZE}}}")
FIRST = (
    "Alva Amina Anouk Astrid Basil Beatrix Bjorn Bruno Cecil Cleo Cosima Dante Delia Dmitri "
    "Edith Elio Elsa Enzo Esther Fabian Felix Fiona Flora Freya Gideon Greta Gustav Hana "
    "Harriet Hector Helga Hugo Ida Igor Ingrid Iris Ivan Jasper Jonas Judith Kira Klaus Lars "
    "Leila Leo Linus Lotte Magnus Maren Marta Miriam Nadia Nils Nora Olga Oscar Otto Petra "
    "Quentin Ruth Silas Sonja Thea Theo Ursula Vera Viktor Wanda Yara Zoe"
).split()
LAST = (
    "Abel Acker Alder Amsel Ash Aspen Barrow Beck Berg Birch Blum Bolt Brandt Brook Calder "
    "Cedar Clay Cliff Crane Dahl Dale Drake Dorn Eck Elm Esker Falk Fell Fern Finch Flint "
    "Frost Gale Garnet Glade Grove Haas Hawk Hazel Heath Heron Holm Horn Iver Jade Juniper "
    "Keller Kern Kite Kling Lake Lark Lind Linden Loch Maple Marsh Mayer Mohn Moor Moss "
    "North Oak Olive Otter Peak Pine Plum Quill Rabe Raven Reef Ridge Roth Rowan Sand "
    "Schilling Seal Shore Sommer Sparrow Stark Stein Storm Swan Tarn Thorn Tide Vale Vogel "
    "Wald Weber Willow Winter Wolf Wren Yew Zander"
).split()


@dataclass(frozen=True)
class Question:
    """What a task asks about.

    `entries`: of the list, symbols of the square, lines of the sudoku, words of the sentence;
    `new`: who is put into the list, `place`: where, or whom to remove; `text`: that is to be said
    otherwise or summed up. `answer`: one that is right, "" where none is known; `others`: more that
    are, of a paraphrase.
    """

    entries: tuple[str, ...] = ()
    new: str = ""
    place: int | None = None
    text: str = ""
    answer: str = ""
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Item:
    """A question of a task behind its instruction and one example, if there is one."""

    task: str
    question: Question
    example: Question | None = None

    @property
    def prompt(self) -> str:
        """It ends with `Answer:`, behind which `completion` goes on."""
        wording = TASKS[self.task].wording
        parts = [wording]
        if self.example is not None:
            parts.append(asked(self.task, self.example) + completion(self.example))
        return "\n\n".join([*parts, asked(self.task, self.question)])

    @property
    def completion(self) -> str:
        """A right answer, with what stands between it and the prompt."""
        return completion(self.question)

    @property
    def stop(self) -> str:
        """What a model that continues texts begins the next question with."""
        return f"\n\n{TASKS[self.task].head}:"

    def score(self, text: str) -> float:
        """From 0 to 1, which is right."""
        return TASKS[self.task].score(self.question, text)


@dataclass(frozen=True)
class Task:
    """`wording`: the instruction; `head`: what a question begins with; `score`: of an answer;
    `made`: a question of a split and a length; `ours`: whether scores are comparable with ours
    only.
    """

    wording: str
    head: str
    score: Callable[[Question, str], float]
    made: Callable[[random.Random, str, int], Question]
    ours: bool = False


def asked(task: str, question: Question) -> str:
    """The question, with `Answer:` at its end."""
    head = TASKS[task].head
    if head == "List":
        lines = [f"List: {written(question.entries)}"]
        if question.new:
            lines.append(f"New: {json.dumps(question.new, ensure_ascii=False)}")
        if question.place is not None:
            lines.append(f"Position: {question.place}")
    elif head == "Sudoku":
        lines = ["Sudoku:", *question.entries]
    elif question.text:
        lines = [f"{head}:{_behind(question.text)}"]
    else:
        lines = [f"{head}: {', '.join(question.entries)}"]
    return "\n".join([*lines, "Answer:"])


def completion(question: Question) -> str:
    """What goes on behind `Answer:`."""
    return _behind(question.answer)


def _behind(text: str) -> str:
    """A text behind a colon; several lines begin on a line of their own."""
    return f"\n{text}" if "\n" in text else f" {text}"


def written(entries: Sequence[str]) -> str:
    """A list as questions and answers have it."""
    return json.dumps(list(entries), ensure_ascii=False)


# --- items


def items(task: str, count: int, seed: int = 0, split: str = "test") -> list[Item]:
    """So many different items, always the same for a seed. Another seed may bring some of them
    again, the other split never.

    Raises BadConfig where there are fewer, or for an unknown task or split.
    """
    if task not in TASKS:
        raise BadConfig.field("task", task, f"one of {', '.join(TASKS)}")
    if split not in SPLITS:
        raise BadConfig.field("split", split, f"one of {', '.join(SPLITS)}")
    draw = random.Random(f"{task} {split} {seed}")
    made = TASKS[task].made
    found: dict[str, Item] = {}
    misses = 0  # in a row
    while len(found) < count:
        question = made(draw, split, LENGTHS[len(found) % len(LENGTHS)])
        example = made(draw, split, draw.choice(LENGTHS))
        text = asked(task, question)
        if text not in found and text != asked(task, example):
            found[text] = Item(task, question, example)
            misses = 0
            continue
        misses += 1
        if misses == TRIES:
            raise BadConfig(f"{task}: so many different items ({count}) cannot be made; take fewer")
    return list(found.values())


def split_of(what: str) -> str:
    """Where a name, a set of symbols or a text belongs."""
    return "train" if zlib.crc32(what.encode()) % TESTED else "test"


def _first_of(split: str, draw: Callable[[], T], named: Callable[[T], str]) -> T:
    """The first that is drawn of those that belong to a split, by what they are named."""
    while True:
        one = draw()
        if split_of(named(one)) == split:
            return one


# --- lists


def read_list(text: str) -> list[str] | None:
    """The last [...] of a text, None where it is not a list of strings as JSON has it."""
    found = LIST.findall(text)
    try:
        entries = json.loads(found[-1]) if found else None
    except ValueError:
        return None
    if not isinstance(entries, list) or not all(isinstance(one, str) for one in entries):
        return None
    return entries


Entries = list[str]
# All right answers of an operation on entries, by a new one and a place.
RIGHT: dict[str, Callable[[Entries, str, int], list[Entries]]] = {
    "copy": lambda old, new, at: [old],
    "reverse": lambda old, new, at: [old[::-1]],
    "sort": lambda old, new, at: [sorted(old)],
    "insert_index": lambda old, new, at: [[*old[:at], new, *old[at:]]],
    "insert_random": lambda old, new, at: [[*old[:i], new, *old[i:]] for i in range(len(old) + 1)],
    "remove_index": lambda old, new, at: [[*old[:at], *old[at + 1 :]]],
    "remove_random": lambda old, new, at: [[*old[:i], *old[i + 1 :]] for i in range(len(old))],
    "replace_index": lambda old, new, at: [[*old[:at], new, *old[at + 1 :]]],
    "replace_random": lambda old, new, at: [
        [*old[:i], new, *old[i + 1 :]] for i in range(len(old))
    ],
}


def listed(operation: str, question: Question, text: str) -> float:
    """Whether the list in the answer is one of those that are right."""
    right = RIGHT[operation](list(question.entries), question.new, question.place or 0)
    return float(read_list(text) in right)


def shuffled(question: Question, text: str) -> float:
    """Whether it has the same entries in another order."""
    found = read_list(text)
    old = list(question.entries)
    return float(found is not None and found != old and Counter(found) == Counter(old))


def _names(draw: random.Random, split: str, count: int) -> Entries:
    found: dict[str, None] = {}
    while len(found) < count:
        name = _first_of(split, lambda: f"{draw.choice(FIRST)} {draw.choice(LAST)}", str)
        found[name] = None
    return list(found)


def _operation(operation: str, draw: random.Random, split: str, length: int) -> Question:
    *entries, new = _names(draw, split, length + 1)
    place = draw.randrange(length + (operation == "insert_index"))
    return Question(
        tuple(entries),
        new if operation.startswith(("insert", "replace")) else "",
        place if operation.endswith("index") else None,
        answer=written(draw.choice(RIGHT[operation](entries, new, place))),
    )


def _shuffle(draw: random.Random, split: str, length: int) -> Question:
    entries = _names(draw, split, length)
    order = entries
    while order == entries:
        order = draw.sample(entries, length)
    return Question(tuple(entries), answer=written(order))


# --- squares


def read_square(text: str, row: Callable[[str], Sequence[str] | None]) -> list[Sequence[str]]:
    """The last SIZE lines on end that are rows, as `row` reads them; [] where there are none."""
    rows = [row(line.strip()) for line in text.strip().split("\n")]
    for end in range(len(rows), SIZE - 1, -1):
        found = [one for one in rows[end - SIZE : end] if one is not None]
        if len(found) == SIZE:
            return found
    return []


def is_latin(rows: Sequence[Sequence[str]], symbols: Sequence[str]) -> bool:
    """Whether every row and every column has each symbol once."""
    lines = [*rows, *zip(*rows, strict=True)]
    return len(rows) == len(symbols) and all(sorted(one) == sorted(symbols) for one in lines)


def latin(question: Question, text: str) -> float:
    """Whether the answer is such a square, a line a row, with commas."""

    def row(line: str) -> list[str] | None:
        found = [one.strip() for one in line.split(",")]
        return found if len(found) == SIZE else None

    return float(is_latin(read_square(text, row), question.entries))


def sudoku(question: Question, text: str) -> float:
    """Whether the answer has the lines of the only solution."""
    rows = read_square(text, lambda line: line if NUMBERS.fullmatch(line) else None)
    return float(rows == question.answer.split("\n"))


@cache
def squares() -> list[tuple[tuple[int, ...], ...]]:
    """All Latin squares of the numbers 0 to SIZE - 1."""
    orders = list(itertools.permutations(range(SIZE)))
    found: list[tuple[tuple[int, ...], ...]] = [()]
    for _ in range(SIZE):
        found = [
            (*rows, order)
            for rows in found
            for order in orders
            if all(one != other for row in rows for one, other in zip(row, order, strict=True))
        ]
    return found


@cache
def solutions() -> list[str]:
    """All sudokus of the numbers 1 to SIZE that are filled, their rows on end."""
    half = SIZE // 2
    found = []
    for rows in squares():
        quarters = [
            {rows[i][j] for i in range(a, a + half) for j in range(b, b + half)}
            for a in range(0, SIZE, half)
            for b in range(0, SIZE, half)
        ]
        if all(len(quarter) == SIZE for quarter in quarters):
            found.append("".join(str(number + 1) for row in rows for number in row))
    return found


def _latin(draw: random.Random, split: str, length: int) -> Question:
    def named(symbols: Sequence[str]) -> str:
        return "".join(sorted(symbols))

    symbols = _first_of(split, lambda: draw.sample(SYMBOLS, SIZE), named)
    square = draw.choice(squares())
    answer = "\n".join(",".join(symbols[number] for number in row) for row in square)
    return Question(tuple(symbols), answer=answer)


def _sudoku(draw: random.Random, split: str, length: int) -> Question:
    """One that has one solution only."""
    while True:
        solution = _first_of(split, lambda: draw.choice(solutions()), str)
        known = set(draw.sample(range(SIZE * SIZE), GIVEN))
        same = [other for other in solutions() if all(other[i] == solution[i] for i in known)]
        if len(same) == 1:
            given = "".join(one if i in known else "0" for i, one in enumerate(solution))
            return Question(tuple(_lines(given)), answer="\n".join(_lines(solution)))


def _lines(square: str) -> Entries:
    return [square[i : i + SIZE] for i in range(0, len(square), SIZE)]


# --- texts


def _words(
    form: Callable[[random.Random], tuple[tuple[str, ...], str]],
    draw: random.Random,
    split: str,
    length: int,
) -> Question:
    words, sentence = _first_of(split, lambda: form(draw), lambda made: " ".join(sorted(made[0])))
    return Question(words, answer=sentence)


def _paraphrase(draw: random.Random, split: str, length: int) -> Question:
    source, others = _first_of(split, lambda: texts.paraphrase(draw), lambda made: made[0])
    return Question(text=source, answer=draw.choice(others), others=others)


def _summary(draw: random.Random, split: str, length: int) -> Question:
    text, summary = _first_of(split, lambda: texts.conversation(draw), lambda made: made[0])
    return Question(text=text, answer=summary)


def _sentence(level: Callable[[random.Random], tuple[tuple[str, ...], str]]) -> Task:
    return Task(
        "Write one sentence with all of these words in it.",
        "Words",
        lambda question, text: scores.sentence(text, question.entries),
        partial(_words, level),
        ours=True,
    )


POSITIONS = "Positions are counted from 0."
WORDINGS = {
    "copy": "Copy the list.",
    "reverse": "Write the list from its end to its beginning.",
    "sort": "Put the list into alphabetical order.",
    "shuffle": "Put the list into another order, any you like.",
    "insert_index": f"Put the new name into the list, at this position of the result. {POSITIONS}",
    "insert_random": "Put the new name into the list, at any position you like.",
    "remove_index": f"Leave out the name at this position of the list. {POSITIONS}",
    "remove_random": "Leave out one name of the list, any you like.",
    "replace_index": f"Put the new name in the place of the one at this position. {POSITIONS}",
    "replace_random": "Put the new name in the place of one of the list, any you like.",
}
TASKS = {
    operation: Task(
        wording,
        "List",
        shuffled if operation == "shuffle" else partial(listed, operation),
        _shuffle if operation == "shuffle" else partial(_operation, operation),
    )
    for operation, wording in WORDINGS.items()
} | {
    "latin_square": Task(
        "Make a square of four lines with four symbols each, with commas between them. Every line "
        "and every column has each of these symbols once.",
        "Symbols",
        latin,
        _latin,
    ),
    "sudoku": Task(
        "Fill the gaps, which are written as 0. Every line, every column and every quarter has "
        "each of the numbers 1 to 4 once.",
        "Sudoku",
        sudoku,
        _sudoku,
    ),
    "words_easy": _sentence(texts.easy),
    "words_medium": _sentence(texts.medium),
    "words_hard": _sentence(texts.hard),
    "paraphrase": Task(
        "Say this in other words, in one sentence.",
        "Text",
        lambda question, text: scores.paraphrase(text, question.text, question.others),
        _paraphrase,
        ours=True,
    ),
    "summary": Task(
        "Say in one sentence what comes of this conversation.",
        "Conversation",
        lambda question, text: scores.summary(text, question.answer),
        _summary,
        ours=True,
    ),
}
