"""Files of recorded answers: both shapes, one line at a time, and one line for whatever is wrong
with them.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from foretell.bench.recordings import Recordings
from foretell.errors import BadConfig


def write(path: Path, *rows: Any) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8"
    )
    return path


def answer(number: Any, *choices: list[str]) -> dict[str, Any]:
    return {
        "question_id": number,
        "model_id": "m",
        "choices": [{"index": 0, "turns": turns} for turns in choices],
    }


def test_pairs_are_documents_of_one_turn(tmp_path: Path) -> None:
    rows = [{"prompt": "a\u2028b", "text": "c", "time": 3}, "", {"prompt": "", "text": ""}]
    recordings = Recordings(write(tmp_path / "r.jsonl", *rows))
    assert list(recordings) == [[("a\u2028b", "c")], [("", "")]] == list(recordings)
    assert recordings.read == recordings.size == (tmp_path / "r.jsonl").stat().st_size


def test_the_prompt_of_a_later_turn_is_what_came_in_since(tmp_path: Path) -> None:
    questions = write(
        tmp_path / "q.jsonl",
        {"question_id": 7, "turns": ["q1", "q2", "q3"]},
        {"question_id": "x", "turns": ["p1"], "category": "math"},
    )
    rows = [answer(7, ["a1", "a2"], ["b1", "b2"]), answer(8, ["?"]), answer("x", ["c1"])]
    recordings = Recordings(write(tmp_path / "r.jsonl", *rows), questions)
    assert list(recordings) == [
        [("q1\n\n", "a1"), ("\n\nq2\n\n", "a2")],
        [("q1\n\n", "b1"), ("\n\nq2\n\n", "b2")],
        [("p1\n\n", "c1")],
    ]
    assert recordings.skipped == 1


def test_lines_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    first = json.dumps({"prompt": "a", "text": "b"}) + "\n"
    recordings = Recordings(write(tmp_path / "r.jsonl", first.strip(), *["{" * 100] * 10_000))
    documents = iter(recordings)
    assert next(documents) == [("a", "b")]
    assert recordings.read == len(first)
    with pytest.raises(BadConfig, match="line 2: not JSON"):
        next(documents)


def test_a_pipe_is_read_while_it_is_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    asked = threading.Event()

    def feed() -> None:
        with (tmp_path / "pipe").open("w") as pipe:
            pipe.write('{"prompt": "a", "text": "b"}\n')
            pipe.flush()
            if asked.wait(20):
                pipe.write('{"prompt": "c", "text": "d"}\n')

    writer = threading.Thread(target=feed)
    writer.start()
    recordings = Recordings(tmp_path / "pipe")
    documents = iter(recordings)
    assert recordings.size is None
    assert next(documents) == [("a", "b")]
    asked.set()
    assert list(documents) == [[("c", "d")]]
    writer.join()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "{",
            "not JSON (Expecting property name enclosed in double quotes at column 2); one object",
        ),
        ("[1]", "holds no JSON object"),
        ("[" * 100_000, "not JSON (it is nested too deeply"),
        ('{"prompt": ' + "1" * 5000 + "}", "not usable JSON"),
        ('{"answer": 1}', "needs a text in the field `prompt`, and has 'answer'"),
        ("{}", "and has none"),
        ('{"prompt": "a", "text": 5}', "needs a text in the field `text`"),
        ('{"prompt": "a", "text": "\\uD83d"}', "surrogates"),
        ('{"question_id": 1, "choices": []}', "--questions"),
        (b'{"prompt": "\xff"}', "not UTF-8 (invalid start byte)"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str | bytes, said: str) -> None:
    path = tmp_path / "r.jsonl"
    raw = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(b'{"prompt": "fine", "text": "\\uD83D\\uDE42"}\n\n' + raw + b"\n")
    with pytest.raises(BadConfig) as raised:
        list(Recordings(path))
    assert str(raised.value).startswith(f"{path}, line 3: ")
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "text": "b"}, "line 1: is no answer in FastChat's shape"),
        ({"question_id": 1}, "and has 'question_id'"),
        (answer(1, []), "lists of texts `turns`"),
        (answer(1, ["a"], "b"), "lists of texts `turns`"),  # type: ignore[arg-type]
        (answer(1, ["a", "b"]), "line 1: has 2 turns, and its question 1"),
        (answer(2, ["a"]), "none of its answers has its question in the question file"),
    ],
    ids=str,
)
def test_a_bad_answer_is_named(tmp_path: Path, row: Any, said: str) -> None:
    questions = write(tmp_path / "q.jsonl", {"question_id": 1, "turns": ["q"]})
    with pytest.raises(BadConfig) as raised:
        list(Recordings(write(tmp_path / "r.jsonl", row), questions))
    assert said in str(raised.value)
    assert str(tmp_path / "r.jsonl") in str(raised.value)


@pytest.mark.parametrize(
    "row", [{"question_id": 1}, {"turns": ["a"]}, {"question_id": 1, "turns": "a"}], ids=str
)
def test_a_bad_question_is_named(tmp_path: Path, row: Any) -> None:
    recorded = write(tmp_path / "r.jsonl", answer(1, ["a"]))
    with pytest.raises(BadConfig, match=r"q\.jsonl, line 2: is no question in FastChat's shape"):
        Recordings(recorded, write(tmp_path / "q.jsonl", {"question_id": 1, "turns": ["q"]}, row))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    recorded = write(tmp_path / "r.jsonl", answer(1, ["a"]))
    for name, said in (("none", "No such file"), (".", "directory")):
        with pytest.raises(BadConfig, match=said):
            list(Recordings(tmp_path / name))
        with pytest.raises(BadConfig, match=said):
            Recordings(recorded, tmp_path / name)
    for text in ("", "\n \n"):
        (tmp_path / "empty").write_text(text)
        with pytest.raises(BadConfig, match="has no recordings"):
            list(Recordings(tmp_path / "empty"))
