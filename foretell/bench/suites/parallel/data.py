"""Reads a user's own copy of ParallelBench's files: items of the same tasks, with their examples.

A folder has a file of lines for each task, as the benchmark lays them out (FILES). A line has an
`input`, with `icl_examples` where the benchmark gives some, and an `answer`. Prompts are worded as
those of our own items are, so that scores of both can be compared.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foretell.bench.suites.parallel.tasks import (
    NUMBERS,
    RIGHT,
    SIZE,
    TASKS,
    Item,
    Question,
    is_latin,
    read_list,
)
from foretell.errors import BadConfig, BadFile

LISTS = (*RIGHT, "shuffle")
FILES = {task: f"waiting_line/{task}.jsonl" for task in TASKS if task in LISTS} | {
    "latin_square": "puzzle/latin_square_n4.jsonl",
    "sudoku": "puzzle/sudoku_n4_12.jsonl",
    "words_easy": "words_to_sentence/easy.jsonl",
    "words_medium": "words_to_sentence/medium.jsonl",
    "words_hard": "words_to_sentence/hard.jsonl",
    "paraphrase": "paraphrase_summarize/chatgpt-paraphrases.jsonl",
    "summary": "paraphrase_summarize/samsum.jsonl",
}


class Malformed(ValueError):
    """What a line lacks."""


def read(folder: str | Path, tasks: Sequence[str] = ()) -> dict[str, list[Item]]:
    """The items of these tasks, or of all that the folder has. Raises BadConfig or BadFile."""
    root = Path(folder)
    if not root.is_dir():
        raise BadConfig(f"--data {folder}: is no folder; name that of ParallelBench's files")
    there = [task for task in TASKS if (root / FILES[task]).is_file()]
    if not there:
        known = ", ".join(sorted({file.split("/")[0] for file in FILES.values()}))
        raise BadConfig(f"--data {folder}: has none of the benchmark's folders ({known})")
    for task in tasks:
        if task not in there:
            raise BadConfig(
                f"--data {folder}: has no {FILES[task]}; leave {task} out of --tasks, or add it"
            )
    return {task: read_file(root / FILES[task], task) for task in tasks or there}


def read_file(path: Path, task: str) -> list[Item]:
    """The items of a task's file. Raises BadFile, with the number of the line."""
    try:
        lines = path.read_text("utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise BadFile(f"{path}: cannot be read as text; copy it again") from error
    pairs: list[tuple[Question, Question | None]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            own = question(task, row)
            examples = row["input"].get("icl_examples") or [None]
            shown = None if examples[0] is None else question(task, examples[0])
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as why:
            what = str(why) if isinstance(why, Malformed) else f"is no item of {task}"
            raise BadFile(f"{path}, line {number}: {what}; copy the file again") from None
        pairs.append((own, shown))
    if not pairs:
        raise BadFile(f"{path}: has no items; copy the file again")
    # Where the lines give no examples, the first other question with an answer is one.
    known = [own for own, _ in pairs if own.answer]
    return [
        Item(task, own, shown or next((one for one in known if one is not own), None))
        for own, shown in pairs
    ]


def question(task: str, row: Any) -> Question:
    """Of a line, or of an example in one. Raises Malformed, or what reading it raises."""
    given, answer = row["input"], row["answer"]
    if task in LISTS:
        return _list(task, given, answer)
    if task == "latin_square":
        symbols = _texts(answer["symbols"])
        example = str(answer["example"])
        rows = [line.split(",") for line in example.split("\n")]
        if len(symbols) != SIZE or not is_latin(rows, symbols):
            raise Malformed(f"its example is no Latin square of {SIZE} symbols")
        return Question(symbols, answer=example)
    if task == "sudoku":
        lines, solution = (tuple(str(one).split("\n")) for one in (given["sudoku"], answer))
        if not is_solved(lines, solution):
            raise Malformed("its answer does not solve its sudoku")
        return Question(lines, answer="\n".join(solution))
    if task.startswith("words"):
        return Question(_texts(answer["words"]), answer=str(answer.get("example", "")))
    if task == "summary":
        return Question(text=_text(given["text"]), answer=_text(answer["summary"]))
    others = _texts(_written(answer.get("examples", "[]")))
    return Question(text=_text(given["text"]), answer=others[0] if others else "", others=others)


def _list(task: str, given: Any, answer: Any) -> Question:
    entries = read_list(_text(given["context"]))
    new, place = given.get("word") or "", given.get("index")
    right = _text(answer["example"] if isinstance(answer, dict) else answer)
    if entries is None:
        raise Malformed("its context is no list of names")
    if task.startswith(("insert", "replace")) != bool(new) or not isinstance(new, str):
        raise Malformed("its word is no name")
    if task.endswith("index") != isinstance(place, int) or not 0 <= (place or 0) <= len(entries):
        raise Malformed("its index is no position of its list")
    found = Question(tuple(entries), new, place, answer=right)
    if TASKS[task].score(found, right) != 1:
        raise Malformed(f"its answer is not right by the rule of {task}")
    return found


def is_solved(lines: Sequence[str], solution: Sequence[str]) -> bool:
    """Whether these are lines of a sudoku and a square that fills their gaps."""
    numbers = [str(number + 1) for number in range(SIZE)]
    return (
        all(NUMBERS.fullmatch(line) for line in solution)
        and is_latin(solution, numbers)
        and len(lines) == SIZE
        and all(
            len(line) == SIZE
            and re.fullmatch("[0-9]*", line) is not None
            and all(one in ("0", other) for one, other in zip(line, full, strict=True))
            for line, full in zip(lines, solution, strict=True)
        )
    )


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise Malformed("a text is missing")
    return value


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list | tuple) or not all(isinstance(one, str) for one in values):
        raise Malformed("a list of texts is missing")
    return tuple(values)


def _written(value: Any) -> Any:
    """A list that is written as Python writes it."""
    try:
        return ast.literal_eval(value) if isinstance(value, str) else value
    except (SyntaxError, MemoryError) as error:
        raise Malformed("its examples are no list") from error
