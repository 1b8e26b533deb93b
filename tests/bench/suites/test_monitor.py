"""The suite `monitor`: what becomes of names, by a small server, and a run on a tiny model."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretell.bench.settings import Settings
from foretell.bench.suites import monitor
from foretell.constraints.monitor import Monitor
from foretell.errors import BadConfig, Unsupported
from tests import tiny
from tests.constraints import lsp_server
from tests.constraints.lsp_server import drawn

SETTINGS = Settings(models=("tiny",), methods=("plain",), max_new_tokens=12)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    command = f"{sys.executable} -I {lsp_server.__file__}"
    monkeypatch.setattr(monitor, "Monitor", partial(Monitor, server=command, limit=20.0))


class Scripted:
    """Writes a name that no server has said, or one that it has where it has the constraint."""

    def __init__(self) -> None:
        self.modules: list[str] = []

    def generate(self, prompts: Sequence[str], method: str, **options: Any) -> list[Any]:
        constraint = options["constraint"]
        outs = []
        for prompt in prompts:
            head = "" if prompt.endswith(".") else "."
            name = "zz"
            if constraint is not None:
                self.modules += [path.name for path in Path(constraint.root).rglob("mod_*.py")]
                name = next(iter(drawn(prompt + head)), "zz")
            stats = SimpleNamespace(outside={"answered": 1} if constraint else {})
            text = f"{head}{name}(1)\nlast.zz"
            outs.append(SimpleNamespace(text=text, error=None, stats=stats))
        return outs


@pytest.mark.usefixtures("served")
def test_names_and_clean_programs_are_counted_on_both_sides() -> None:
    modules = monitor.prepare([], SETTINGS, 4)
    known = sum(
        bool(drawn(prompt if prompt.endswith(".") else f"{prompt}."))
        for module in modules
        for prompt in module.prompts
    )
    assert 3 <= known < 12
    document = monitor.begin(SETTINGS, modules)
    lm = Scripted()
    monitor.run(SETTINGS, modules, lambda *_: lm, document)  # type: ignore[arg-type, return-value]
    assert not monitor.failures(document) and set(lm.modules) == {f"mod_{n}.py" for n in range(4)}
    (cell,) = document["cells"]
    way = cell["ways"]["plain"]
    counts = {"names": known, "programs": 12}
    assert way["without"] == {**counts, "exist": 0, "clean": 12 - known}
    assert way["with"] == {**counts, "exist": known, "clean": 12}
    assert way["more"]["mean"] == pytest.approx(known / 12)
    assert cell["questions"] == {"answered": 12}
    (title, rows), (_, questions) = monitor.tables(document)
    assert "4 modules" in title and [row[1] for row in rows[1:]] == [
        "without monitor",
        "with monitor",
    ]
    assert questions[1:] == [["answered", "12"]]


@pytest.mark.usefixtures("served")
def test_it_runs_on_a_model() -> None:
    modules = [replace(one, prompts=("a.", "b = a")) for one in monitor.prepare([], SETTINGS, 1)]
    document = monitor.begin(SETTINGS, modules)
    monitor.run(SETTINGS, modules, lambda *_: tiny.lm(draft=False), document)
    assert not monitor.failures(document) and document["cells"][0]["questions"]["answered"] >= 1


def test_a_program_with_an_unknown_name_is_not_clean() -> None:
    one = {"without": [{"names": [("a", True), ("b", False)]}], "with": [{"names": [("a", True)]}]}
    answers = [{"ways": {"plain": one}, "questions": {"answered": 2}}] * 3
    found = monitor.summarise_modules(answers)
    assert found["ways"]["plain"]["without"] == {"names": 6, "exist": 3, "programs": 3, "clean": 0}
    assert found["ways"]["plain"]["more"] == {"mean": 1, "low": 1, "high": 1}
    assert found["questions"] == {"answered": 6}


def test_without_a_server_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=r"pip install 'foretell\[monitor\]'"):
        monitor.begin(SETTINGS, [])


@pytest.mark.usefixtures("served")
def test_what_it_has_no_use_for_is_refused() -> None:
    with pytest.raises(BadConfig, match="--rounds: --suite monitor has no use for it"):
        monitor.begin(Settings(rounds=2), [])
    assert len(monitor.prepare([], Settings())) == monitor.MODULES
