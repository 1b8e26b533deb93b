"""The command `foretell longbench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import tiny

GIVEN = ["--lengths", "500", "--tasks", "needles", "--modes", "requests", "--limit", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("long")
    return str(tiny.save(tiny.llama(max_position_embeddings=600), path))


def test_it_prints_tables_and_writes_files(run: Any, model: str, tmp_path: Path) -> None:
    out_json, out_html = tmp_path / "o.json", tmp_path / "o.html"
    given = ["longbench", "--model", model, *GIVEN, "--kv", "snapkv", "--budgets", "50"]
    given += ["--json", str(out_json), "--html", str(out_html)]
    code, out, err = run(*given)
    assert (code, err) == (0, "")
    assert "needles, requests, 500 tokens: 1 context" in out and "snapkv" in out
    document = json.loads(out_json.read_text("utf-8"))
    assert [one["kv"] for one in document["answers"]] == ["none", "snapkv"]
    assert "<svg" in out_html.read_text("utf-8")
    assert run(*given)[0] == 0
    assert json.loads(out_json.read_text("utf-8")) == document  # nothing was measured again
    code, out, err = run(*given, "--seed", "3")
    assert (code, out, err.count("\n")) == (2, "", 1) and "settings.seed" in err


def test_the_document_goes_to_standard_output(run: Any, model: str) -> None:
    code, out, _ = run("longbench", "--model", model, *GIVEN, "--json", "-")
    assert code == 0 and json.loads(out)["schema"] == "foretell.measure.longbench/1"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--kv", "snapvk"], "unknown kv 'snapvk'; did you mean snapkv"),
        (["--kv", "snapkv", "--budgets", "1%"], "snapkv:budget=5: must be at least 33"),
        (["--lengths", "x"], "--lengths x: write numbers separated by commas"),
        (["--json", "/nowhere/o.json"], "its folder does not exist"),
        (["--lengths", "601"], "holds 600 tokens; take fewer"),
    ],
)
def test_a_slip_is_one_line(run: Any, model: str, given: list[str], said: str) -> None:
    code, out, err = run("longbench", "--model", model, *GIVEN, *given)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ") and said in err
