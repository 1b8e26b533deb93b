"""The suite on a tiny model: every method answers every task, and a run goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretell import cli
from foretell.bench.document import write_document
from foretell.bench.settings import Settings
from foretell.bench.suites import search
from foretell.bench.suites.search import functions, methods
from foretell.errors import BadConfig, BadFile
from tests import tiny


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """No program is run, questions fit the tiny model, and little is spent."""
    monkeypatch.setattr(
        functions, "judge_program", lambda program, tests, limits: [False] * len(tests)
    )
    monkeypatch.setattr(methods, "FORWARDS", 9)
    monkeypatch.setattr(tiny.foretell.LM, "prompt_ids", lambda self, prompt: [5, 6, 7])


def _settings(**more: Any) -> Settings:
    return Settings(models=("tiny",), max_new_tokens=4, **more)


def _run(settings: Settings, document: dict[str, Any], tasks: Any, **more: Any) -> list[str]:
    loaded: list[str] = []

    def load(model: str, dtype: str) -> Any:
        loaded.append(model)
        return tiny.lm(draft=False)

    search.run(settings, tasks, load, document, **more)
    return loaded


def test_every_method_answers_every_task_and_a_run_goes_on() -> None:
    settings = _settings(tasks=("functions", "sums"))
    tasks = search.prepare([], settings, 2)
    document = search.begin(settings, tasks)
    told: list[tuple[str, int, int]] = []
    saved: list[int] = []

    def save(so_far: dict[str, Any]) -> None:
        saved.append(len(so_far["answers"]))

    _run(settings, document, tasks, tell=lambda *about: told.append(about), save=save)
    sorts = ["functions", "functions", "sums", "sums"]
    assert told == [(f"tiny {sort}", n, 4) for n, sort in enumerate(sorts, 1)]
    assert saved[-1] == len(document["answers"]) == 2 * 4 + 2 * 3
    shown = search.tables(document)
    assert ["2 tasks" in title for title, _ in shown[:2]] == [True, True]
    assert [row[0] for row in shown[0][1]] == ["method", *methods.DEFAULTS["functions"]]
    assert [row[0] for row in shown[1][1]] == ["method", *methods.OTHERS]
    assert all(len(row) == len(rows[0]) for _, rows in shown for row in rows)
    whole = json.loads(json.dumps(document))
    # The first method's first answer is made last now, and differences are still to that method.
    del document["answers"][0]
    assert _run(settings, document, tasks) == ["tiny"]
    assert document["cells"] == whole["cells"]
    assert _run(settings, document, tasks) == [], "a model was loaded for nothing"


def test_a_file_is_continued_where_it_was_begun_the_same_way(tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    settings = _settings(tasks=("lists",), methods=("sampling", "icn:runs=1,each=2"))
    tasks = search.prepare([], settings, 2)
    document = search.begin(settings, tasks, path)
    _run(settings, document, tasks, save=lambda so_far: write_document(so_far, path))
    assert search.begin(settings, tasks, path)["answers"] == document["answers"]
    assert "right entries" in search.tables(document)[0][1][0]
    with pytest.raises(BadFile, match=r"another settings\.budget"):
        search.begin(
            _settings(tasks=("lists",), methods=settings.methods, budget="forwards=7"), tasks, path
        )


def test_what_it_has_no_use_for_is_refused() -> None:
    with pytest.raises(BadConfig, match=r"--data a[.]json: cannot be read"):
        search.prepare(["a.json"], Settings(), 0)
    with pytest.raises(BadConfig, match="at least 2 tasks"):
        search.prepare([], Settings(), 1)
    with pytest.raises(BadConfig, match="--tasks='sonnets': must be one of functions, pro"):
        search.prepare([], Settings(tasks=("sums", "sonnets")), 0)
    for settings in (Settings(rounds=2), Settings(requests=(2,)), Settings(contexts=(9,))):
        with pytest.raises(BadConfig, match="--suite search has no use for it"):
            search.begin(settings, [])
    with pytest.raises(BadConfig, match="takes one"):
        search.begin(Settings(temperatures=(0.5, 1.0)), [])
    with pytest.raises(BadConfig, match="sampling has no fields"):
        search.begin(Settings(methods=("sampling:n=2",)), [])
    with pytest.raises(BadConfig, match="budget='nothing'"):
        search.begin(Settings(budget="nothing"), [])


@pytest.mark.parametrize("more", [["--tasks", "sums"], ["--budget", "forwards=9"]])
def test_the_options_are_of_a_suite(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", *more]) == 2
    assert "--tasks and --budget: are of a suite; add --suite search" in capsys.readouterr().err


def test_the_command_line_knows_the_suites_own_methods(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["bench", "--suite", "search", "--tasks", "sums", "--methods"]
    assert cli.run([*asked, "samplings"]) == 2
    assert "unknown method 'samplings'" in capsys.readouterr().err
    assert cli.run([*asked, "sampling", "--limit", "1"]) == 2
    assert "--limit 1: --suite search compares at least 2 tasks" in capsys.readouterr().err
