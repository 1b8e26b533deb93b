"""Files of recorded answers: JSON lines, read one at a time, so that a file may have any size.

A line is `{"prompt": ..., "text": ...}`, the text being what a model answered, or an answer in
FastChat's shape, whose questions stand in a file beside it. Whatever is wrong with a line is said
with its number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from foretell.errors import BadConfig
from foretell.ops.parsing import json_of

# Of each turn: what came in since the last answer, and what the model answered.
Document = Sequence[tuple[str, str]]
GAP = "\n\n"  # between the questions and answers that FastChat's files keep apart


class Recordings:
    """The documents of a file.

    `questions`: the question file, if the answers are in FastChat's shape; `size`: bytes of the
    file, None for a pipe; `read`: how many of them have been read; `skipped`: lines so far whose
    question the question file does not have. Raises BadConfig.
    """

    def __init__(self, path: str | Path, questions: str | Path | None = None):
        self.path = Path(path)
        self.read = 0
        self.skipped = 0
        try:
            self.size = self.path.stat().st_size or None
        except OSError as error:
            raise _unreadable(self.path, error) from error
        self.questions: dict[str, list[str]] | None = None
        if questions is not None:
            self.questions = dict(_questions(Path(questions)))

    def __iter__(self) -> Iterator[Document]:
        self.read = 0
        self.skipped = 0
        lines = 0
        for where, row, size in _lines(self.path):
            self.read += size
            if row is None:
                continue
            lines += 1
            if self.questions is None:
                yield self._pair(where, row)
            else:
                yield from self._answers(where, row, self.questions)
        if lines == self.skipped:
            if lines:
                raise BadConfig(
                    f"{self.path}: none of its answers has its question in the question file"
                )
            raise BadConfig(
                f"{self.path}: has no recordings; give JSON lines with `prompt` and `text`"
            )

    def _pair(self, where: str, row: dict[str, Any]) -> Document:
        if "choices" in row and "text" not in row:
            raise BadConfig(
                f"{where}: is an answer in FastChat's shape; "
                "give its question file with --questions"
            )
        for name in ("prompt", "text"):
            if not isinstance(row.get(name), str):
                raise BadConfig(
                    f"{where}: needs a text in the field `{name}`, and has {_fields(row)}"
                )
        return [(row["prompt"], row["text"])]

    def _answers(
        self, where: str, row: dict[str, Any], questions: dict[str, list[str]]
    ) -> Iterator[Document]:
        number = row.get("question_id")
        choices = row.get("choices")
        if number is None or not isinstance(choices, list) or not all(map(_has_turns, choices)):
            raise BadConfig(
                f"{where}: is no answer in FastChat's shape: it needs `question_id` and "
                f"`choices` with lists of texts `turns`, and has {_fields(row)}"
            )
        question = questions.get(str(number))
        if question is None:
            self.skipped += 1
            return
        for choice in choices:
            answers = choice["turns"]
            if len(answers) > len(question):
                raise BadConfig(
                    f"{where}: has {len(answers)} turns, and its question {len(question)}; "
                    "give the question file it belongs to"
                )
            document = []
            for i, answer in enumerate(answers):
                gap = GAP if i else ""
                document.append((gap + question[i] + GAP, answer))
            yield document


def _questions(path: Path) -> Iterator[tuple[str, list[str]]]:
    for where, row, _ in _lines(path):
        if row is None:
            continue
        if row.get("question_id") is None or not _has_turns(row):
            raise BadConfig(
                f"{where}: is no question in FastChat's shape: it needs `question_id` and a list "
                f"of texts `turns`, and has {_fields(row)}"
            )
        yield str(row["question_id"]), row["turns"]


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any] | None, int]]:
    """Of each line: where it is, its object (None if it is blank), its bytes."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise _unreadable(path, error) from error
    with file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            yield where, _object(line, where) if line.strip() else None, len(line)


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json_of(line.decode("utf-8").rstrip())
        if b"\\ud" in line.lower():  # may be half a character, which no tokenizer takes
            json.dumps(row, ensure_ascii=False).encode("utf-8")
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise BadConfig(f"{where}: not UTF-8 ({error.reason}); write it as UTF-8") from None
    except json.JSONDecodeError as error:
        what = f"{error.msg} at column {error.colno}"
        raise BadConfig(f"{where}: not JSON ({what}); one object a line") from None
    except (ValueError, RecursionError) as error:
        raise BadConfig(f"{where}: not usable JSON ({error}); one object a line") from None
    if not isinstance(row, dict):
        raise BadConfig(f"{where}: holds no JSON object; one object a line")
    return row


def _unreadable(path: Path, error: OSError) -> BadConfig:
    return BadConfig(f"{path}: cannot be read ({error.strerror}); give a file of JSON lines")


def _has_turns(row: Any) -> bool:
    turns = row.get("turns") if isinstance(row, dict) else None
    if not isinstance(turns, list) or not turns:
        return False
    return all(isinstance(turn, str) for turn in turns)


def _fields(row: dict[str, Any]) -> str:
    return ", ".join(map(repr, row)) or "none"
