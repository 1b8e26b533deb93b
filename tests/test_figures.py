"""Figures expire when what they rest on has changed, and one command knows which to take."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from foretell import spec
from tests.test_project import docs, script

figures = script("figures")
basis, tables = figures.basis, figures.tables
AUTO = "suffix+eagle3:depth=5"


@pytest.fixture
def records() -> dict[str, dict[str, Any]]:
    rests = {what: basis.basis()[what] for what in basis.RESTS["batch"]}
    record = {"command": "python x.py", "commit": "abc", "date": "2026-11-28", "default": AUTO}
    return {"batch": record | {"rests": rests}}


def test_every_figure_on_a_page_still_holds() -> None:
    assert not basis.expired(basis.taken(), basis.basis())


@pytest.mark.parametrize("what", ["auto", "policy", "heads", "executors", "server"])
def test_a_figure_expires_with_what_it_rests_on(
    what: str, records: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not basis.expired(records, basis.basis())
    now = basis.basis() | {what: "another"}
    (sentence,) = basis.expired(records, now)
    assert f"rest on {what}" in sentence and "scripts/figures.py batch" in sentence
    del records["batch"]["rests"][what]
    (sentence,) = basis.expired(records, basis.basis())
    assert "as it was (not looked at)" in sentence
    records["kv"] = records.pop("batch")
    assert basis.expired(records, now) == [] or what == "executors", "it does not rest on that"


def test_a_changed_default_a_head_and_an_backend_are_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = basis.auto(), basis.heads(), basis.backends(), basis.server()
    monkeypatch.setattr(spec, "HEAD_STEP", 1e-3)
    assert basis.auto() != before[0]
    (tmp_path / "smollm2-eagle3").mkdir(parents=True)
    (tmp_path / "backends").mkdir()
    (tmp_path / "serve").mkdir()
    (tmp_path / "serve" / "settings.py").write_text("class Settings:\n    prefixes: int = 3\n")
    (tmp_path / "smollm2-eagle3" / "config.json").write_text("{}")
    weights = tmp_path / "smollm2-eagle3" / "model.safetensors"
    (tmp_path / "backends" / "quick.py").write_text('DEVICE = "cpu"\n\nPRIORITY = 7\n')
    (tmp_path / "backends" / "slow.py").write_text('DEVICE = "cpu"\n\nPRIORITY = 2\n')
    (tmp_path / "backends" / "other.py").write_text('DEVICE = "cuda"\nPRIORITY = 9\n')
    monkeypatch.setattr(basis, "PACKAGE", tmp_path)
    monkeypatch.setattr(basis, "MODELS", tmp_path)
    told = []
    for content in (b"one", b"two"):
        weights.write_bytes(content)
        told.append(basis.heads())
    assert told[0] != told[1]
    assert basis.backends() == "quick, slow" and basis.server() != before[3]


def test_the_numbers_of_the_policy_are_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And not what is written about them."""
    for file in basis.POLICY.values():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("RATE = 1 / 8  # often\n")
    monkeypatch.setattr(basis, "PACKAGE", tmp_path)
    before = basis.policy()
    changed = tmp_path / "speculation" / "costs.py"
    changed.write_text("RATE = 1 / 8  # rarely\n\n\ndef wait() -> int:\n    return 3\n")
    assert basis.policy() == before
    changed.write_text("RATE = 1 / 4\n")
    assert basis.policy() != before


def test_the_check_of_the_pages_fails_where_figures_have_expired(
    records: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(docs, "pages", dict)
    monkeypatch.setattr(Path, "rglob", lambda *_: [])
    records["batch"]["rests"]["auto"] = "plain"
    monkeypatch.setattr(docs.basis, "taken", lambda: records)
    assert docs.main(["--check"]) == 1
    assert "figures 'batch' of 2026-11-28 rest on auto as it was (plain)" in capsys.readouterr().err


def test_what_is_due_was_never_taken_or_has_expired(
    records: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "taken.toml"
    monkeypatch.setattr(basis, "TAKEN", path)
    every = [*figures.FIGURES]
    assert figures.due(every, False) == every
    path.write_text(figures.written(records))
    assert tomllib.loads(path.read_text()) == records
    monkeypatch.setattr(basis, "taken", lambda: records)
    assert figures.due(every, False) == [name for name in every if name != "batch"]
    assert figures.due(["batch", "kv"], True) == ["batch", "kv"]
    records["batch"]["rests"]["heads"] = "others"
    assert figures.due(["batch"], False) == ["batch"]


def test_a_figure_is_taken_again_where_it_was_interrupted_and_from_the_beginning_on_another_basis(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun: list[bool] = []

    def measure(folder: Path) -> dict[str, Any]:
        begun.append((folder / "part").exists())
        (folder / "part").touch()
        return {"about": {}, "runs": {}}

    monkeypatch.setattr(figures, "FIGURES", {"batch": measure})
    monkeypatch.setattr(basis, "RESTS", {"batch": ("auto",)})
    monkeypatch.setattr(figures, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(tables, "MEASURED", tmp_path)
    monkeypatch.setattr(basis, "TAKEN", tmp_path / "taken.toml")
    monkeypatch.setattr(basis, "taken", lambda: tomllib.loads(basis.TAKEN.read_text()))
    for fresh in (False, False, True):
        figures.take("batch", fresh)
    assert begun == [False, True, False]
    monkeypatch.setattr(basis, "basis", lambda: {"auto": "something else"})
    figures.take("batch", False)
    assert begun[-1] is False
    assert basis.taken()["batch"]["rests"] == {"auto": "something else"}
    assert tables.document("batch") == {"about": {}, "runs": {}}


def test_tables_show_what_a_document_holds() -> None:
    about = {"model": "m", "threads": 2, "cores": 2, "processor": "P", "how": "Twice."}
    ratio = {"median": 0.96, "low": 0.9, "high": 0.965}
    good = {"median": 1.2, "low": 1.2, "high": 1.2}
    cell = {"dtype": "int8", "temperature": 0.7, "requests": 4, "contender": "auto"}
    cells = [cell | {"set": "chat", "ratio": ratio}, cell | {"set": "code", "ratio": good}]
    shown = tables.never_slower({"about": about, "cells": cells})
    assert "| T = 0.7, 4 | **0.96 (0.90 to 0.96)** |" in shown and "| 1.20 |" in shown
    assert "1 of 2 cells reach 0.97 within their range; 1 do not." in shown
    assert "| `auto` | 0.96 | 1.20 |" in tables.beside_plain({"about": about, "cells": cells})
    runs = {"auto": [{"tokens_per_s": 70.04, "shared": 0.926}] * 2}
    assert "| `auto` | 70.0, 70.0 | 92.6 % |" in tables.batch({"about": about, "runs": runs})
    seconds = {"int8": {"": [0.02, 0.01, 0.03], "snapkv": [0.01, 0.01]}}
    kept = tables.kv({"about": about, "seconds": seconds})
    assert "| full cache | 20.0 | 1.00 |" in kept and "| `snapkv` | 10.0 | 2.00 |" in kept
    level = {"as": "`auto`", "clients": 4, "tokens_per_s": 99.6, "between_tokens_ms": {"p99": 31.2}}
    levels = {"8 bits": [level, level | {"tokens_per_s": 90.2}]}
    assert "| `auto` | 100, 90 (31 ms) |" in tables.serving({"about": about, "levels": levels})


def test_the_last_line_of_a_batch_is_understood() -> None:
    said = (
        "loading\n24 requests in 69 s: 990 tokens, 1,014.3 tokens/s; 92.6% of 8,570 prompt tokens "
        "were shared and not computed again\n24 of 24 answered, 0 failed\n"
    )
    assert figures.told_of(said) == {"tokens_per_s": 1014.3, "shared": pytest.approx(0.926)}
    alone = figures.told_of("3 requests in 1 s: 9 tokens, 9.0 tokens/s\n")
    assert alone == {"tokens_per_s": 9.0, "shared": 0.0}
