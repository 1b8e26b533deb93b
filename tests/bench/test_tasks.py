"""The loop that suites share: what is answered, what is tried again, what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from foretell.bench import tasks
from foretell.bench.document import write_document
from foretell.bench.settings import Settings
from foretell.errors import BadConfig, BadFile

SETTINGS = Settings(models=("a", "b"), methods=("plain",))


class Loop:
    """Five tasks, of which these break as long as `broken` has them."""

    def __init__(self, broken: Sequence[int] = ()) -> None:
        self.broken = set(broken)
        self.asked: list[list[int]] = []
        self.loaded: list[str] = []
        self.told: list[tuple[str, int, int]] = []
        self.saved = 0

    def load(self, model: str, dtype: str) -> Any:
        self.loaded.append(model)
        return model

    def work(self, lm: Any, numbers: Sequence[int]) -> list[tasks.Answer]:
        self.asked.append(list(numbers))
        if self.broken.intersection(numbers):
            raise BadConfig("will not")
        return [{"value": 10 * number} for number in numbers]

    def save(self, document: dict[str, Any]) -> None:
        self.saved += 1

    def run(self, document: dict[str, Any]) -> dict[str, Any]:
        def total(answers: Sequence[tasks.Answer]) -> dict[str, Any]:
            return {"total": sum(one["value"] for one in answers)}

        def tell(what: str, done: int, of: int) -> None:
            self.told.append((what, done, of))

        args = self.load, document, self.work, total, tell, self.save
        return tasks.answer_all(SETTINGS, 5, *args, batch_size=2)


def test_all_tasks_are_answered_several_together() -> None:
    loop = Loop()
    document = loop.run(tasks.begin_suite(SETTINGS, "x", [1, 2], None, ["methods"]))
    assert loop.asked == [[0, 1], [2, 3], [4]] * 2 and loop.loaded == ["a", "b"]
    done = [("a", 2), ("a", 4), ("a", 5), ("b", 7), ("b", 9), ("b", 10)]
    assert loop.told == [(model, count, 10) for model, count in done]
    assert [cell["total"] for cell in document["cells"]] == [100, 100] and loop.saved == 1
    again = Loop()
    again.run(document)
    assert not again.asked and not again.loaded, "a model was loaded for nothing"


def test_what_failed_is_named_counts_for_nothing_and_is_tried_again() -> None:
    loop = Loop(broken=[2])
    document = loop.run(tasks.begin_suite(SETTINGS, "x", [], None, ["methods"]))
    assert loop.asked[:5] == [[0, 1], [2, 3], [2], [3], [4]]
    assert [cell["tasks"] for cell in document["cells"]] == [4, 4]
    assert tasks.failure_lines(document) == [
        "a, auto, task 2: will not",
        "b, auto, task 2: will not",
    ]
    again = Loop()
    again.run(document)
    assert again.asked == [[2], [2]] and not tasks.failure_lines(document)
    assert [cell["total"] for cell in document["cells"]] == [100, 100]
    nothing = Loop(broken=range(5)).run(tasks.begin_suite(SETTINGS, "x", [], None, ["methods"]))
    assert nothing["cells"] == [] and len(tasks.failure_lines(nothing)) == 10


def test_settings_without_a_use_are_refused(tmp_path: Path) -> None:
    for name, option in tasks.OPTIONS.items():
        odd: Any = {"draft": "d", "rounds": 9, "requests": (2,), "contexts": (9,)}.get(name, ("y",))
        if name == "peers":
            odd = ("transformers",)
        settings = Settings(**{name: odd})
        with pytest.raises(BadConfig, match=f"^{option}: --suite x has no use for it"):
            tasks.begin_suite(settings, "x", [], None)
        tasks.begin_suite(settings, "x", [], None, [name])
    with pytest.raises(BadConfig, match="--temperature: --suite x takes one"):
        tasks.begin_suite(Settings(temperatures=(0.0, 1.0)), "x", [], None)
    path = tmp_path / "o.json"
    write_document(tasks.begin_suite(Settings(), "x", ["one"], path), path)
    assert tasks.begin_suite(Settings(), "x", ["one"], path)["answers"] == []
    with pytest.raises(BadFile, match=r"another settings\.sets"):
        tasks.begin_suite(Settings(), "x", ["two"], path)
    with pytest.raises(BadFile, match="no document"):
        tasks.begin_suite(Settings(), "y", ["one"], path)


def test_differences_are_of_pairs() -> None:
    found = tasks.compare_scores([1.0, 1.0, 0.0], [0.0, 0.0, -1.0])
    assert found == {"mean": 1.0, "low": 1.0, "high": 1.0}
    wide = tasks.compare_scores([1.0, 0.0, 1.0, 1.0], [0.0] * 4)
    assert wide["low"] < wide["mean"] == 0.75 < wide["high"]
    assert tasks.format_difference(found) == "+100.0% (+100.0% to +100.0%)"
