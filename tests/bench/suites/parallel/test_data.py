"""Files in the benchmark's layout, with items of our own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretell.bench.suites.parallel.data import FILES, LISTS, read_folder
from foretell.bench.suites.parallel.tasks import TASKS, Question, format_list, make_items
from foretell.errors import BadConfig, BadFile


def row(task: str, question: Question) -> dict[str, Any]:
    """A question as the benchmark writes it."""
    given: dict[str, Any] = {}
    answer: Any = question.answer
    if task in LISTS:
        given["context"] = format_list(question.entries)
        if question.new:
            given["word"] = question.new
        if question.place is not None:
            given["index"] = question.place
        if task.endswith("random") or task == "shuffle":
            answer = {"input": list(question.entries), "example": question.answer}
    elif task == "latin_square":
        given = {"size": 4, "symbols": f"[{', '.join(question.entries)}]"}
        answer = {"symbols": list(question.entries), "example": question.answer}
    elif task == "sudoku":
        given["sudoku"] = "\n".join(question.entries)
    elif task.startswith("words"):
        given["words"] = ", ".join(question.entries)
        answer = {"words": list(question.entries), "example": question.answer}
    elif task == "paraphrase":
        given["text"] = question.text
        answer = {"text": question.text, "examples": str([question.answer, *question.others])}
    else:
        given["text"] = question.text
        answer = {"text": question.text, "summary": question.answer}
    return {"input": given, "answer": answer}


def put(root: Path, task: str, rows: list[Any]) -> Path:
    path = root / FILES[task]
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("\n".join(json.dumps(one) for one in rows) + "\n", "utf-8")
    return path


@pytest.mark.parametrize("task", TASKS)
def test_items_are_read_as_they_were_written(task: str, tmp_path: Path) -> None:
    made = make_items(task, 4)
    rows = [row(task, item.question) for item in made]
    for one, item in zip(rows, made, strict=True):
        if task in LISTS or task in ("latin_square", "sudoku"):
            assert item.example is not None
            one["input"]["icl_examples"] = [row(task, item.example)]
    put(tmp_path, task, rows)
    found = read_folder(tmp_path)
    assert list(found) == [task] == list(read_folder(tmp_path, [task]))
    for one, item in zip(found[task], made, strict=True):
        if "icl_examples" in rows[0]["input"]:
            assert one == item
        else:  # the first other one is the example
            assert one.example == found[task][0 if one is not found[task][0] else 1].question
            assert one.question.entries == item.question.entries
            assert one.question.text == item.question.text
        least = 0.3 if task == "paraphrase" else 1
        assert one.score(item.completion) >= least


def test_a_line_without_an_answer_is_asked_and_never_shown(tmp_path: Path) -> None:
    rows = [row("words_hard", item.question) for item in make_items("words_hard", 3)]
    for one in rows[1:]:
        del one["answer"]["example"]
    put(tmp_path, "words_hard", rows)
    first, second, third = read_folder(tmp_path)["words_hard"]
    assert first.example is None
    assert second.example == third.example == first.question


GOOD = {"input": {"context": '["a b", "c d"]', "index": 1}, "answer": '["a b"]'}


@pytest.mark.parametrize(
    ("task", "line", "said"),
    [
        ("remove_index", "{", "is no item of remove_index"),
        ("remove_index", "[]", "is no item of remove_index"),
        ("remove_index", json.dumps(GOOD | {"input": {}}), "is no item"),
        ("remove_index", json.dumps(GOOD | {"answer": '["c d"]'}), "is not right by the rule"),
        ("remove_index", json.dumps(GOOD | {"answer": 3}), "a text is missing"),
        (
            "remove_index",
            json.dumps(GOOD | {"input": {"context": '["a b"]', "index": 7}}),
            "its index is no position",
        ),
        (
            "remove_index",
            json.dumps(GOOD | {"input": {"context": "a, b", "index": 0}}),
            "its context is no list",
        ),
        (
            "copy",
            json.dumps({"input": {"context": '["a"]', "word": "x"}, "answer": '["a"]'}),
            "its word is no name",
        ),
        (
            "sudoku",
            json.dumps({"input": {"sudoku": "1"}, "answer": "1342\n4213\n2134\n3421"}),
            "does not solve",
        ),
        (
            "latin_square",
            json.dumps({"input": {}, "answer": {"symbols": list("abcd"), "example": "a,b"}}),
            "is no Latin square",
        ),
        ("words_easy", json.dumps({"input": {}, "answer": {"words": "a"}}), "a list of texts"),
        (
            "paraphrase",
            json.dumps({"input": {"text": "A b."}, "answer": {"examples": "[1 +"}}),
            "its examples are no list",
        ),
        (
            "paraphrase",
            json.dumps({"input": {"text": "A b."}, "answer": {"examples": "open('x')"}}),
            "is no item of paraphrase",
        ),
        ("summary", json.dumps({"input": {"text": "A b."}, "answer": {"summary": ""}}), "missing"),
    ],
)
def test_a_bad_line_is_named(task: str, line: str, said: str, tmp_path: Path) -> None:
    path = put(tmp_path, task, [])
    good = row(task, make_items(task, 1)[0].question)
    path.write_text(f"{json.dumps(good)}\n\n{line}\n", "utf-8")
    with pytest.raises(BadFile, match=said) as caught:
        read_folder(tmp_path)
    assert f"{path}, line 3: " in str(caught.value) and "\n" not in str(caught.value)


def test_folders_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="is no folder"):
        read_folder(tmp_path / "nowhere")
    with pytest.raises(BadConfig, match="has none of the benchmark's folders"):
        read_folder(tmp_path)
    path = put(tmp_path, "copy", [])
    with pytest.raises(BadFile, match="has no items"):
        read_folder(tmp_path)
    with pytest.raises(BadConfig, match=r"has no waiting_line/sort.jsonl; leave sort out"):
        read_folder(tmp_path, ["sort"])
    path.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(BadFile, match="cannot be read as text"):
        read_folder(tmp_path)
