"""Tasks whose answers can be compared, from files and made here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretell.bench.answer_tasks import (
    FORMS,
    Task,
    find_words,
    last_number,
    make_tasks,
    read_tasks,
    user_message,
)
from foretell.errors import BadConfig


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2 + 2 = 4", "4"),
        ("so it costs $1,250.50.", "1250.5"),
        ("#### 1,000,000", "1000000"),
        ("from 7 to -3.0, in the end", "-3"),
        ("12.", "12"),
        ("1,2,", "12"),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number_is_the_answer(text: str, number: str | None) -> None:
    assert last_number(text) == number


def test_of_words_the_last_places_count() -> None:
    words = ("red", "blue", "green")
    assert find_words("Green and red. So: RED, green.", words) == "red green"
    assert find_words("reddish, bluer", words) is None
    task = Task("?", words)
    assert task.answer("blue it is") == "blue" and Task("?").answer("blue 3") == "3"


def test_files_of_questions_are_read(tmp_path: Path) -> None:
    rows = [
        {"question": "1 + 1?", "answer": "#### 2"},
        {"prompt": "Which, a or b?", "words": ["a", "b"]},
        {"messages": [{"role": "user", "content": "3?"}]},
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert read_tasks(path) == [
        Task(user_message("1 + 1?")),
        Task(user_message("Which, a or b?"), ("a", "b")),
        Task([{"role": "user", "content": "3?"}]),
    ]


@pytest.mark.parametrize("words", ["ab", [1], ["a", ""], {"a": 1}])
def test_words_that_are_none_are_refused(tmp_path: Path, words: object) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt": "x"}\n' + json.dumps({"prompt": "y", "words": words}))
    with pytest.raises(BadConfig, match=r"line 2: `words` must be a list of words"):
        read_tasks(path)


def test_own_tasks_are_different_ones_of_every_form_and_the_same_for_a_seed() -> None:
    made = make_tasks(300, 5)
    questions = [str(task.prompt) for task in made]
    assert len(set(questions)) == 300 and made == make_tasks(300, 5) != make_tasks(300, 6)
    beginnings = {question[30:38] for question in questions}
    assert len(beginnings) >= len(FORMS) - 2
    for task in made:
        assert all(word in str(task.prompt) for word in task.words)
    assert any(task.words for task in made) and not all(task.words for task in made)


def test_more_than_can_be_made_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretell.bench.answer_tasks.FORMS", (lambda draw: ("the same", ()),))
    with pytest.raises(BadConfig, match="--own 2: so many different tasks cannot be made"):
        make_tasks(2, 0)
