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
GIVEN_NUMBERS = 12  # numbers of a sudoku that are given
TRIES = 1000  # in a row, to find an item that was not taken yet
LIST = re.compile(r"\[[^\[\]]*\]")
NUMBERS = re.compile(f"[1-{SIZE}]{{{SIZE}}}")
FIRST_NAMES = (
    "Alva Amina Anouk Astrid Basil Beatrix Bjorn Bruno Cecil Cleo Cosima Dante Delia Dmitri "
    "Edith Elio Elsa Enzo Esther Fabian Felix Fiona Flora Freya Gideon Greta Gustav Hana "
    "Harriet Hector Helga Hugo Ida Igor Ingrid Iris Ivan Jasper Jonas Judith Kira Klaus Lars "
    "Leila Leo Linus Lotte Magnus Maren Marta Miriam Nadia Nils Nora Olga Oscar Otto Petra "
    "Quentin Ruth Silas Sonja Thea Theo Ursula Vera Viktor Wanda Yara Zoe"
).split()
LAST_NAMES = (
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
    """Content of a question.

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
    """A question of a task after its instruction and one example, if there is one."""

    task: str
    question: Question
    example: Question | None = None

    @property
    def prompt(self) -> str:
        """Prompt that ends with `Answer:`, after which `completion` goes on."""
        wording = TASKS[self.task].wording
        parts = [wording]
        if self.example is not None:
            parts.append(question_text(self.task, self.example) + answer_text(self.example))
        return "\n\n".join([*parts, question_text(self.task, self.question)])

    @property
    def completion(self) -> str:
        """A right answer, with what stands between it and the prompt."""
        return answer_text(self.question)

    @property
    def stop(self) -> str:
        """Text with which a model that continues texts begins the next question."""
        return f"\n\n{TASKS[self.task].head}:"

    def score(self, text: str) -> float:
        """From 0 to 1, which is right."""
        return TASKS[self.task].score_answer(self.question, text)


@dataclass(frozen=True)
class Task:
    """`wording`: the instruction; `head`: what a question begins with; `score_answer`: from 0 to 1;
    `made`: a question of a split and a length; `ours`: whether scores are comparable with ours
    only.
    """

    wording: str
    head: str
    score_answer: Callable[[Question, str], float]
    made: Callable[[random.Random, str, int], Question]
    ours: bool = False


def question_text(task: str, question: Question) -> str:
    """The question, with `Answer:` at its end."""
    question_head = TASKS[task].head
    if question_head == "List":
        lines = [f"List: {format_list(question.entries)}"]
        if question.new:
            lines.append(f"New: {json.dumps(question.new, ensure_ascii=False)}")
        if question.place is not None:
            lines.append(f"Position: {question.place}")
    elif question_head == "Sudoku":
        lines = ["Sudoku:", *question.entries]
    elif question.text:
        lines = [f"{question_head}:{_after_colon(question.text)}"]
    else:
        lines = [f"{question_head}: {', '.join(question.entries)}"]
    return "\n".join([*lines, "Answer:"])


def answer_text(question: Question) -> str:
    """Text that goes on after `Answer:`."""
    return _after_colon(question.answer)


def _after_colon(text: str) -> str:
    """A text after a colon; several lines begin on a line of their own."""
    return f"\n{text}" if "\n" in text else f" {text}"


def format_list(entries: Sequence[str]) -> str:
    """A list as questions and answers have it."""
    return json.dumps(list(entries), ensure_ascii=False)


# --- items


def make_items(task: str, count: int, seed: int = 0, split: str = "test") -> list[Item]:
    """Makes `count` different items, always the same for a seed. Another seed may bring some of
    them again, the other split never.

    Raises BadConfig where there are fewer, or for an unknown task or split.
    """
    if task not in TASKS:
        raise BadConfig.field("task", task, f"one of {', '.join(TASKS)}")
    if split not in SPLITS:
        raise BadConfig.field("split", split, f"one of {', '.join(SPLITS)}")
    generator = random.Random(f"{task} {split} {seed}")
    make_question = TASKS[task].made
    items_by_text: dict[str, Item] = {}
    missed_draws = 0  # in a row
    while len(items_by_text) < count:
        question = make_question(generator, split, LENGTHS[len(items_by_text) % len(LENGTHS)])
        example = make_question(generator, split, generator.choice(LENGTHS))
        text = question_text(task, question)
        if text not in items_by_text and text != question_text(task, example):
            items_by_text[text] = Item(task, question, example)
            missed_draws = 0
            continue
        missed_draws += 1
        if missed_draws == TRIES:
            raise BadConfig(f"{task}: so many different items ({count}) cannot be made; take fewer")
    return list(items_by_text.values())


def split_of(subject: str) -> str:
    """Split that a name, a set of symbols or a text belongs to."""
    return "train" if zlib.crc32(subject.encode()) % TESTED else "test"


def _draw_of_split(split: str, draw_candidate: Callable[[], T], name_of: Callable[[T], str]) -> T:
    """The first that is drawn of those that belong to a split, by what they are named."""
    while True:
        candidate = draw_candidate()
        if split_of(name_of(candidate)) == split:
            return candidate


# --- lists


def read_list(text: str) -> list[str] | None:
    """The last [...] of a text, None where it is not a list of strings as JSON has it."""
    list_texts = LIST.findall(text)
    try:
        entries = json.loads(list_texts[-1]) if list_texts else None
    except ValueError:
        return None
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        return None
    return entries


Entries = list[str]
# All right answers of an operation on entries, by a new one and a place.
RIGHT_LISTS: dict[str, Callable[[Entries, str, int], list[Entries]]] = {
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


def score_list(operation: str, question: Question, text: str) -> float:
    """Whether the list in the answer is one of those that are right."""
    right_lists = RIGHT_LISTS[operation](list(question.entries), question.new, question.place or 0)
    return float(read_list(text) in right_lists)


def score_shuffle(question: Question, text: str) -> float:
    """Whether the list in the answer has the same entries in another order."""
    answer_entries = read_list(text)
    question_entries = list(question.entries)
    return float(
        answer_entries is not None
        and answer_entries != question_entries
        and Counter(answer_entries) == Counter(question_entries)
    )


def _draw_names(generator: random.Random, split: str, count: int) -> Entries:
    chosen_names: dict[str, None] = {}
    while len(chosen_names) < count:
        name = _draw_of_split(
            split, lambda: f"{generator.choice(FIRST_NAMES)} {generator.choice(LAST_NAMES)}", str
        )
        chosen_names[name] = None
    return list(chosen_names)


def _operation_question(
    operation: str, generator: random.Random, split: str, length: int
) -> Question:
    *entries, new_name = _draw_names(generator, split, length + 1)
    position = generator.randrange(length + (operation == "insert_index"))
    return Question(
        tuple(entries),
        new_name if operation.startswith(("insert", "replace")) else "",
        position if operation.endswith("index") else None,
        answer=format_list(generator.choice(RIGHT_LISTS[operation](entries, new_name, position))),
    )


def _shuffle_question(generator: random.Random, split: str, length: int) -> Question:
    entries = _draw_names(generator, split, length)
    shuffled_entries = entries
    while shuffled_entries == entries:
        shuffled_entries = generator.sample(entries, length)
    return Question(tuple(entries), answer=format_list(shuffled_entries))


# --- squares


def read_square(text: str, read_row: Callable[[str], Sequence[str] | None]) -> list[Sequence[str]]:
    """The last SIZE lines on end that are rows, as `read_row` reads them; [] if there are none."""
    rows = [read_row(line.strip()) for line in text.strip().split("\n")]
    for last_line in range(len(rows), SIZE - 1, -1):
        row_candidates = [
            parsed_row
            for parsed_row in rows[last_line - SIZE : last_line]
            if parsed_row is not None
        ]
        if len(row_candidates) == SIZE:
            return row_candidates
    return []


def is_latin(rows: Sequence[Sequence[str]], symbols: Sequence[str]) -> bool:
    """Whether every row and every column has each symbol once."""
    rows_and_columns = [*rows, *zip(*rows, strict=True)]
    return len(rows) == len(symbols) and all(
        sorted(line) == sorted(symbols) for line in rows_and_columns
    )


def score_latin(question: Question, text: str) -> float:
    """Whether the answer is a Latin square of the symbols, a line a row, with commas."""

    def row(line: str) -> list[str] | None:
        symbols = [symbol.strip() for symbol in line.split(",")]
        return symbols if len(symbols) == SIZE else None

    return float(is_latin(read_square(text, row), question.entries))


def score_sudoku(question: Question, text: str) -> float:
    """Whether the answer has the lines of the only solution."""
    rows = read_square(text, lambda line: line if NUMBERS.fullmatch(line) else None)
    return float(rows == question.answer.split("\n"))


@cache
def latin_squares() -> list[tuple[tuple[int, ...], ...]]:
    """All Latin squares of the numbers 0 to SIZE - 1."""
    row_orders = list(itertools.permutations(range(SIZE)))
    partial_squares: list[tuple[tuple[int, ...], ...]] = [()]
    for _ in range(SIZE):
        partial_squares = [
            (*rows, row_order)
            for rows in partial_squares
            for row_order in row_orders
            if all(
                upper != lower for row in rows for upper, lower in zip(row, row_order, strict=True)
            )
        ]
    return partial_squares


@cache
def sudoku_solutions() -> list[str]:
    """All sudokus of the numbers 1 to SIZE that are filled, their rows on end."""
    half_size = SIZE // 2
    solution_texts = []
    for rows in latin_squares():
        quarters = [
            {
                rows[i][column]
                for i in range(top_row, top_row + half_size)
                for column in range(left_column, left_column + half_size)
            }
            for top_row in range(0, SIZE, half_size)
            for left_column in range(0, SIZE, half_size)
        ]
        if all(len(quarter) == SIZE for quarter in quarters):
            solution_texts.append("".join(str(digit + 1) for row in rows for digit in row))
    return solution_texts


def _latin_question(generator: random.Random, split: str, length: int) -> Question:
    def name_symbols(symbol_sample: Sequence[str]) -> str:
        return "".join(sorted(symbol_sample))

    symbols = _draw_of_split(split, lambda: generator.sample(SYMBOLS, SIZE), name_symbols)
    square = generator.choice(latin_squares())
    answer = "\n".join(",".join(symbols[number] for number in row) for row in square)
    return Question(tuple(symbols), answer=answer)


def _sudoku_question(generator: random.Random, split: str, length: int) -> Question:
    """Draws a sudoku that has one solution only."""
    while True:
        solution = _draw_of_split(split, lambda: generator.choice(sudoku_solutions()), str)
        given_cells = set(generator.sample(range(SIZE * SIZE), GIVEN_NUMBERS))
        matching_solutions = [
            candidate
            for candidate in sudoku_solutions()
            if all(candidate[cell] == solution[cell] for cell in given_cells)
        ]
        if len(matching_solutions) == 1:
            puzzle = "".join(
                digit if cell in given_cells else "0" for cell, digit in enumerate(solution)
            )
            return Question(tuple(_square_lines(puzzle)), answer="\n".join(_square_lines(solution)))


def _square_lines(square: str) -> Entries:
    return [square[row_start : row_start + SIZE] for row_start in range(0, len(square), SIZE)]


# --- texts


def _words_question(
    draw_words: Callable[[random.Random], tuple[tuple[str, ...], str]],
    generator: random.Random,
    split: str,
    length: int,
) -> Question:
    words, sentence = _draw_of_split(
        split,
        lambda: draw_words(generator),
        lambda words_and_sentence: " ".join(sorted(words_and_sentence[0])),
    )
    return Question(words, answer=sentence)


def _paraphrase_question(generator: random.Random, split: str, length: int) -> Question:
    source, paraphrases = _draw_of_split(
        split,
        lambda: texts.draw_paraphrase(generator),
        lambda source_and_others: source_and_others[0],
    )
    return Question(text=source, answer=generator.choice(paraphrases), others=paraphrases)


def _summary_question(generator: random.Random, split: str, length: int) -> Question:
    text, summary = _draw_of_split(
        split,
        lambda: texts.draw_conversation(generator),
        lambda text_and_summary: text_and_summary[0],
    )
    return Question(text=text, answer=summary)


def _sentence_task(draw_words: Callable[[random.Random], tuple[tuple[str, ...], str]]) -> Task:
    return Task(
        "Write one sentence with all of these words in it.",
        "Words",
        lambda question, text: scores.sentence_score(text, question.entries),
        partial(_words_question, draw_words),
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
        score_shuffle if operation == "shuffle" else partial(score_list, operation),
        _shuffle_question if operation == "shuffle" else partial(_operation_question, operation),
    )
    for operation, wording in WORDINGS.items()
} | {
    "latin_square": Task(
        "Make a square of four lines with four symbols each, with commas between them. Every line "
        "and every column has each of these symbols once.",
        "Symbols",
        score_latin,
        _latin_question,
    ),
    "sudoku": Task(
        "Fill the gaps, which are written as 0. Every line, every column and every quarter has "
        "each of the numbers 1 to 4 once.",
        "Sudoku",
        score_sudoku,
        _sudoku_question,
    ),
    "words_easy": _sentence_task(texts.easy_sentence),
    "words_medium": _sentence_task(texts.medium_sentence),
    "words_hard": _sentence_task(texts.hard_sentence),
    "paraphrase": Task(
        "Say this in other words, in one sentence.",
        "Text",
        lambda question, text: scores.paraphrase_score(text, question.text, question.others),
        _paraphrase_question,
        ours=True,
    ),
    "summary": Task(
        "Say in one sentence what comes of this conversation.",
        "Conversation",
        lambda question, text: scores.summary_score(text, question.answer),
        _summary_question,
        ours=True,
    ),
}
