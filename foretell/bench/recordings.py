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
from foretell.ops.parsing import parse_json

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
            raise _unreadable_error(self.path, error) from error
        self.questions: dict[str, list[str]] | None = None
        if questions is not None:
            self.questions = dict(_read_questions(Path(questions)))

    def __iter__(self) -> Iterator[Document]:
        self.read = 0
        self.skipped = 0
        line_count = 0
        for location, row, line_bytes in _read_lines(self.path):
            self.read += line_bytes
            if row is None:
                continue
            line_count += 1
            if self.questions is None:
                yield self._read_pair(location, row)
            else:
                yield from self._read_answers(location, row, self.questions)
        if line_count == self.skipped:
            if line_count:
                raise BadConfig(
                    f"{self.path}: none of its answers has its question in the question file"
                )
            raise BadConfig(
                f"{self.path}: has no recordings; give JSON lines with `prompt` and `text`"
            )

    def _read_pair(self, location: str, row: dict[str, Any]) -> Document:
        if "choices" in row and "text" not in row:
            raise BadConfig(
                f"{location}: is an answer in FastChat's shape; "
                "give its question file with --questions"
            )
        for field_name in ("prompt", "text"):
            if not isinstance(row.get(field_name), str):
                raise BadConfig(
                    f"{location}: needs a text in the field `{field_name}`, "
                    f"and has {_field_names(row)}"
                )
        return [(row["prompt"], row["text"])]

    def _read_answers(
        self, location: str, row: dict[str, Any], questions: dict[str, list[str]]
    ) -> Iterator[Document]:
        question_id = row.get("question_id")
        choices = row.get("choices")
        if (
            question_id is None
            or not isinstance(choices, list)
            or not all(map(_has_turns, choices))
        ):
            raise BadConfig(
                f"{location}: is no answer in FastChat's shape: it needs `question_id` and "
                f"`choices` with lists of texts `turns`, and has {_field_names(row)}"
            )
        user_turns = questions.get(str(question_id))
        if user_turns is None:
            self.skipped += 1
            return
        for choice in choices:
            answers = choice["turns"]
            if len(answers) > len(user_turns):
                raise BadConfig(
                    f"{location}: has {len(answers)} turns, and its question {len(user_turns)}; "
                    "give the question file it belongs to"
                )
            document = []
            for turn_index, answer in enumerate(answers):
                gap = GAP if turn_index else ""
                document.append((gap + user_turns[turn_index] + GAP, answer))
            yield document


def _read_questions(path: Path) -> Iterator[tuple[str, list[str]]]:
    for location, row, _ in _read_lines(path):
        if row is None:
            continue
        if row.get("question_id") is None or not _has_turns(row):
            raise BadConfig(
                f"{location}: is no question in FastChat's shape: it needs `question_id` and "
                f"a list of texts `turns`, and has {_field_names(row)}"
            )
        yield str(row["question_id"]), row["turns"]


def _read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any] | None, int]]:
    """Yields of each line where it is, its object (None if it is blank) and its bytes."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise _unreadable_error(path, error) from error
    with file:
        for line_number, line in enumerate(file, 1):
            location = f"{path}, line {line_number}"
            yield location, _parse_object(line, location) if line.strip() else None, len(line)


def _parse_object(line: bytes, location: str) -> dict[str, Any]:
    try:
        row = parse_json(line.decode("utf-8").rstrip())
        if b"\\ud" in line.lower():  # may be half a character, which no tokenizer takes
            json.dumps(row, ensure_ascii=False).encode("utf-8")
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise BadConfig(f"{location}: not UTF-8 ({error.reason}); write it as UTF-8") from None
    except json.JSONDecodeError as error:
        cause = f"{error.msg} at column {error.colno}"
        raise BadConfig(f"{location}: not JSON ({cause}); one object a line") from None
    except (ValueError, RecursionError) as error:
        raise BadConfig(f"{location}: not usable JSON ({error}); one object a line") from None
    if not isinstance(row, dict):
        raise BadConfig(f"{location}: holds no JSON object; one object a line")
    return row


def _unreadable_error(path: Path, error: OSError) -> BadConfig:
    return BadConfig(f"{path}: cannot be read ({error.strerror}); give a file of JSON lines")


def _has_turns(row: Any) -> bool:
    turns = row.get("turns") if isinstance(row, dict) else None
    if not isinstance(turns, list) or not turns:
        return False
    return all(isinstance(turn, str) for turn in turns)


def _field_names(row: dict[str, Any]) -> str:
    return ", ".join(map(repr, row)) or "none"
