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

Document = Sequence[
    tuple[str, str]
]  # of each turn: what came in since the last answer, what the model answered
GAP = "\n\n"  # between the questions and answers that FastChat's files keep apart


class Recordings:
    """The documents of a file. `questions`: the file that holds them, if the answers are in
    FastChat's shape.

    `size`: bytes of the file, None for a pipe; `read`: how many of them have been read; `skipped`:
    lines so far whose question the question file does not have. Raises BadConfig.
    """

    def __init__(self, path: str | Path, questions: str | Path | None = None):
        self.path, self.read, self.skipped = Path(path), 0, 0
        try:
            self.size = self.path.stat().st_size or None
        except OSError as error:
            raise _unreadable(self.path, error) from error
        self.questions = dict(_questions(Path(questions))) if questions is not None else None

    def __iter__(self) -> Iterator[Document]:
        self.read, self.skipped, lines = 0, 0, 0
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
                f"{where}: is an answer in FastChat's shape; give its question file with --questions"
            )
        for name in ("prompt", "text"):
            if not isinstance(row.get(name), str):
                raise BadConfig(
                    f"{where}: needs a text in the field `{name}`, and has {_fields(row)}"
                )
        return [(row["prompt"], row["text"])]

    def _answers(
        self, where: str, row: dict[str, Any], questions: dict[Any, list[str]]
    ) -> Iterator[Document]:
        number, choices = row.get("question_id"), row.get("choices")
        if (
            number is None
            or not isinstance(choices, list)
            or not all(_is_turns(choice) for choice in choices)
        ):
            raise BadConfig(
                f"{where}: is no answer in FastChat's shape: it needs `question_id` and `choices` with "
                f"lists of texts `turns`, and has {_fields(row)}"
            )
        asked = questions.get(str(number))
        if asked is None:
            self.skipped += 1
            return
        for choice in choices:
            turns = choice["turns"]
            if len(turns) > len(asked):
                raise BadConfig(
                    f"{where}: has {len(turns)} turns, and its question {len(asked)}; "
                    "give the question file it belongs to"
                )
            yield [((GAP if i else "") + asked[i] + GAP, turn) for i, turn in enumerate(turns)]


def _questions(path: Path) -> Iterator[tuple[str, list[str]]]:
    for where, row, _ in _lines(path):
        if row is None:
            continue
        if row.get("question_id") is None or not _is_turns(row):
            raise BadConfig(
                f"{where}: is no question in FastChat's shape: it needs `question_id` and a list of texts "
                f"`turns`, and has {_fields(row)}"
            )
        yield str(row["question_id"]), row["turns"]


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any] | None, int]]:
    """(where it is, its object or None if it is blank, its bytes) of each line."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise _unreadable(path, error) from error
    with file:
        for number, line in enumerate(file, 1):
            where, row = f"{path}, line {number}", None
            if line.strip():
                try:
                    row = json.loads(line.decode("utf-8").rstrip())
                    if (
                        b"\\ud" in line.lower()
                    ):  # half a character, which no tokenizer takes, is written so
                        json.dumps(row, ensure_ascii=False).encode("utf-8")
                except (UnicodeDecodeError, UnicodeEncodeError) as error:
                    raise BadConfig(
                        f"{where}: not UTF-8 ({error.reason}); write it as UTF-8"
                    ) from None
                except json.JSONDecodeError as error:
                    what = f"{error.msg} at column {error.colno}"
                    raise BadConfig(f"{where}: not JSON ({what}); one object a line") from None
                except (ValueError, RecursionError) as error:
                    raise BadConfig(
                        f"{where}: not usable JSON ({error}); one object a line"
                    ) from None
                if not isinstance(row, dict):
                    raise BadConfig(f"{where}: holds no JSON object; one object a line")
            yield where, row, len(line)


def _unreadable(path: Path, error: OSError) -> BadConfig:
    return BadConfig(f"{path}: cannot be read ({error.strerror}); give a file of JSON lines")


def _is_turns(row: Any) -> bool:
    turns = row.get("turns") if isinstance(row, dict) else None
    return isinstance(turns, list) and bool(turns) and all(isinstance(turn, str) for turn in turns)


def _fields(row: dict[str, Any]) -> str:
    return f"{', '.join(map(repr, row))}" if row else "none"
