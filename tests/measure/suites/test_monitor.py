"""The suite `monitor`: a tiny model and a small server, with and without the constraint."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from typing import Any

import pytest

from foretell.constraints.monitor import Monitor
from foretell.errors import BadConfig, Unsupported
from foretell.measure.bench.settings import Settings
from foretell.measure.suites import monitor
from tests import tiny
from tests.ops import lsp_server

SETTINGS = Settings(models=("tiny",), methods=("plain",), max_new_tokens=12)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    command = f"{sys.executable} -I {lsp_server.__file__}"
    monkeypatch.setattr(monitor, "Monitor", partial(Monitor, server=command, limit=20.0))


def wordy(*_: str) -> Any:
    """A model that writes names behind dots and ends lines often."""
    lm: Any = tiny.lm(draft=False)
    real = lm.generate

    def generate(prompt: Any, method: Any, **options: Any) -> Any:
        ids = [tiny.tokenizer()(text)["input_ids"][0] for text in (".", "\n", "a", "b")]
        bias = dict(zip(ids, (5.0, 4.0, 4.0, 4.0), strict=True))
        # The prompts are cut, since the tiny model holds few tokens.
        cut = [lm.encode(one)[-30:] for one in prompt]
        return real(cut, method, logit_bias=bias, ignore_eos=True, **options)

    lm.generate = generate
    return lm


@pytest.mark.usefixtures("served")
def test_names_and_clean_programs_are_counted_on_both_sides() -> None:
    modules = monitor.prepare([], SETTINGS, 2)
    document = monitor.begin(SETTINGS, modules)
    monitor.run(SETTINGS, modules, wordy, document)
    assert not monitor.failures(document)
    (cell,) = document["cells"]
    assert cell["questions"]["answered"] > 0
    way = cell["ways"]["plain"]
    for side in monitor.SIDES:
        programs = [one for answer in document["answers"] for one in answer["ways"]["plain"][side]]
        names = [known for one in programs for _, known in one["names"]]
        clean = sum(all(known for _, known in one["names"]) for one in programs)
        assert way[side] == {
            "names": len(names),
            "exist": sum(names),
            "programs": 6,
            "clean": clean,
        }
    assert way["without"]["names"] and way["without"]["exist"] < way["without"]["names"]
    share = (way["with"]["clean"] - way["without"]["clean"]) / 6
    assert way["more"]["mean"] == pytest.approx(share)
    (title, rows), (_, questions) = monitor.tables(document)
    assert "2 modules" in title and [row[1] for row in rows[1:]] == [
        "without monitor",
        "with monitor",
    ]
    assert ["answered", str(cell["questions"]["answered"])] in questions


def test_a_program_with_an_unknown_name_is_not_clean() -> None:
    one = {"without": [{"names": [("a", True), ("b", False)]}], "with": [{"names": [("a", True)]}]}
    answers = [{"ways": {"plain": one}, "questions": {"answered": 2}}] * 3
    found = monitor.summary(answers)
    assert found["ways"]["plain"]["without"] == {
        "names": 6,
        "exist": 3,
        "programs": 3,
        "clean": 0,
    }
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
