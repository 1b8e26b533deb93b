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
    RIGHT_LISTS,
    SIZE,
    TASKS,
    Item,
    Question,
    is_latin,
    read_list,
)
from foretell.errors import BadConfig, BadFile

LISTS = (*RIGHT_LISTS, "shuffle")
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
    """Raised with what a line lacks."""


def read_folder(folder: str | Path, tasks: Sequence[str] = ()) -> dict[str, list[Item]]:
    """The items of these tasks, or of all that the folder has. Raises BadConfig or BadFile."""
    root_folder = Path(folder)
    if not root_folder.is_dir():
        raise BadConfig(f"--data {folder}: is no folder; name that of ParallelBench's files")
    present_tasks = [task for task in TASKS if (root_folder / FILES[task]).is_file()]
    if not present_tasks:
        known_folders = ", ".join(sorted({file.split("/")[0] for file in FILES.values()}))
        raise BadConfig(f"--data {folder}: has none of the benchmark's folders ({known_folders})")
    for task in tasks:
        if task not in present_tasks:
            raise BadConfig(
                f"--data {folder}: has no {FILES[task]}; leave {task} out of --tasks, or add it"
            )
    return {
        task: read_task_file(root_folder / FILES[task], task) for task in tasks or present_tasks
    }


def read_task_file(path: Path, task: str) -> list[Item]:
    """The items of a task's file. Raises BadFile, with the number of the line."""
    try:
        lines = path.read_text("utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise BadFile(f"{path}: cannot be read as text; copy it again") from error
    pairs: list[tuple[Question, Question | None]] = []
    for line_number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            own_question = parse_question(task, row)
            examples = row["input"].get("icl_examples") or [None]
            example_question = None if examples[0] is None else parse_question(task, examples[0])
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as why:
            cause = str(why) if isinstance(why, Malformed) else f"is no item of {task}"
            raise BadFile(f"{path}, line {line_number}: {cause}; copy the file again") from None
        pairs.append((own_question, example_question))
    if not pairs:
        raise BadFile(f"{path}: has no items; copy the file again")
    # Where the lines give no examples, the first other question with an answer is one.
    answered_questions = [own_question for own_question, _ in pairs if own_question.answer]
    return [
        Item(
            task,
            own_question,
            example_question
            or next(
                (
                    answered_question
                    for answered_question in answered_questions
                    if answered_question is not own_question
                ),
                None,
            ),
        )
        for own_question, example_question in pairs
    ]


def parse_question(task: str, row: Any) -> Question:
    """Reads the question of a line, or of an example in one. Raises Malformed, or what reading it
    raises."""
    task_input, answer = row["input"], row["answer"]
    if task in LISTS:
        return _list_question(task, task_input, answer)
    if task == "latin_square":
        symbols = _check_texts(answer["symbols"])
        example = str(answer["example"])
        rows = [line.split(",") for line in example.split("\n")]
        if len(symbols) != SIZE or not is_latin(rows, symbols):
            raise Malformed(f"its example is no Latin square of {SIZE} symbols")
        return Question(symbols, answer=example)
    if task == "sudoku":
        lines, solution = (
            tuple(str(square_text).split("\n")) for square_text in (task_input["sudoku"], answer)
        )
        if not is_solved(lines, solution):
            raise Malformed("its answer does not solve its sudoku")
        return Question(lines, answer="\n".join(solution))
    if task.startswith("words"):
        return Question(_check_texts(answer["words"]), answer=str(answer.get("example", "")))
    if task == "summary":
        return Question(text=_check_text(task_input["text"]), answer=_check_text(answer["summary"]))
    paraphrases = _check_texts(_parse_list(answer.get("examples", "[]")))
    return Question(
        text=_check_text(task_input["text"]),
        answer=paraphrases[0] if paraphrases else "",
        others=paraphrases,
    )


def _list_question(task: str, task_input: Any, answer: Any) -> Question:
    entries = read_list(_check_text(task_input["context"]))
    new_name, position = task_input.get("word") or "", task_input.get("index")
    right_answer = _check_text(answer["example"] if isinstance(answer, dict) else answer)
    if entries is None:
        raise Malformed("its context is no list of names")
    if task.startswith(("insert", "replace")) != bool(new_name) or not isinstance(new_name, str):
        raise Malformed("its word is no name")
    if task.endswith("index") != isinstance(position, int) or not 0 <= (position or 0) <= len(
        entries
    ):
        raise Malformed("its index is no position of its list")
    list_question = Question(tuple(entries), new_name, position, answer=right_answer)
    if TASKS[task].score_answer(list_question, right_answer) != 1:
        raise Malformed(f"its answer is not right by the rule of {task}")
    return list_question


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
            and all(
                given_digit in ("0", solved_digit)
                for given_digit, solved_digit in zip(line, solved_line, strict=True)
            )
            for line, solved_line in zip(lines, solution, strict=True)
        )
    )


def _check_text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise Malformed("a text is missing")
    return value


def _check_texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list | tuple) or not all(isinstance(text, str) for text in values):
        raise Malformed("a list of texts is missing")
    return tuple(values)


def _parse_list(value: Any) -> Any:
    """A list that is written as Python writes it."""
    try:
        return ast.literal_eval(value) if isinstance(value, str) else value
    except (SyntaxError, MemoryError) as error:
        raise Malformed("its examples are no list") from error
