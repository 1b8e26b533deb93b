"""Functions and free programs: what is public and what decides, and where the code stands."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from foretell.bench.suites.search import functions as module
from foretell.bench.suites.search.functions import make_free_programs, make_functions


def _linear(tasks: Any) -> Any:
    (task,) = [one for one in tasks if one.kind == "linear"]
    a, b = [word for word in task.program.says.strip(".").split() if word.isdigit()]
    return task, f"\n    return {a} * x - {b}"


def test_public_and_hidden_tests_are_shares_and_programs_run_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task, good = _linear(make_functions(15, 0))
    runs: list[str] = []

    def verdicts(code: str, tests: list[Any], limits: Any) -> list[bool]:
        runs.append(code)
        return [good in code or place in (0, 3) for place in range(len(tests))]

    monkeypatch.setattr(module, "judge_program", verdicts)
    begin = task.answer_prefix(task.opening)
    assert task.public(begin + good) == task.score_answer(begin + good) == 1
    assert task.public("bad") == 1 / 3 and task.score_answer("bad") == 1 / 5
    assert len(runs) == 2 and runs[0] == f"{task.program.begins}{good}"


def test_they_are_run_for_real() -> None:
    task, good = _linear(make_functions(15, 0))
    assert task.score_answer(task.answer_prefix(task.opening) + good) == 1
    free, _ = _linear(make_free_programs(15, 0))
    told = f"Here it is:\n```python\n{free.program.begins}{good}\n```\nIt multiplies x."
    assert free.score_answer(told) == free.public(told) == 1 and free.score_answer("I cannot.") == 0


class Chatting:
    tokenizer = SimpleNamespace(chat_template="there is one")

    def prompt_ids(self, prompt: Any) -> list[Any]:
        return [prompt]

    def encode(self, text: str, special: bool = True) -> list[Any]:
        return [text]


def test_a_chat_model_is_given_the_first_line_and_others_go_on_with_a_program() -> None:
    task, _ = _linear(make_functions(15, 0))
    free, _ = _linear(make_free_programs(15, 0))
    lm: Any = Chatting()
    asked, before = task.encode_prompt(lm)
    assert asked == [[{"role": "user", "content": task.question}], task.opening]
    assert task.opening.endswith(before) and before == task.program.begins
    assert free.encode_prompt(lm) == (asked[:1], "")
    lm.tokenizer = SimpleNamespace(chat_template=None)
    for one in (task, free):
        assert one.encode_prompt(lm) == ([task.program.head], task.program.head)
