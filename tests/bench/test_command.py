"""The command `foretell bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretell import cli, registry
from tests import tiny
from tests.bench.fakes import PROMPTS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench")
    tiny.save(tiny.llama(), path / "model")
    (path / "mine.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], folder: Path) -> Any:
    def call(*args: str) -> tuple[int, str, str]:
        words = [
            "--model",
            f"{folder}/model",
            "--prompts",
            f"{folder}/mine.jsonl",
            "--rounds",
            "1",
            "--threads",
            "1",
            "--max-new-tokens",
            "4",
            *args,
        ]
        code = cli.run(["bench", *words])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return call


def test_the_command_prints_a_table_and_writes_files(run: Any, tmp_path: Path) -> None:
    files = ["--json", f"{tmp_path}/o.json", "--html", f"{tmp_path}/o.html"]
    methods = ["--methods", "ngram:n=2,k=4,nodes=3,copyspec:nodes=2"]
    code, out, err = run(*methods, *files)
    assert code == 0
    assert err == ""
    assert ", float32, greedy, one request\n" in out
    assert "mine" in out
    assert "tok/s" in out
    assert "ngram:n=2,k=4,nodes=3" in out
    assert "copyspec:nodes=2" in out
    assert "MAT" in out
    document = json.loads((tmp_path / "o.json").read_text("utf-8"))
    assert [c["contender"] for c in document["cells"]] == [
        "plain",
        "ngram:n=2,k=4,nodes=3",
        "copyspec:nodes=2",
    ]
    assert "<svg" in (tmp_path / "o.html").read_text("utf-8")
    assert run(*methods, *files)[0] == 0
    assert json.loads((tmp_path / "o.json").read_text("utf-8")) == document
    code, out, err = run(*methods, *files, "--seed", "3")
    assert code == 2
    assert out == ""
    assert "settings.seed (0 there, 3 here)" in err
    assert err.count("\n") == 1


def test_contexts_are_an_option(run: Any, tmp_path: Path) -> None:
    code, out, err = run(
        "--methods",
        "plain",
        "--contexts",
        "6,12",
        "--requests",
        "1,2",
        "--html",
        f"{tmp_path}/o.html",
    )
    assert code == 0
    assert err == ""
    assert "after 6 tokens" in out
    assert "after 12 tokens" in out
    assert "mixed" in out
    page = (tmp_path / "o.html").read_text("utf-8")
    assert "Cost of a token by context" in page
    assert "Cost of a token by requests at once" in page
    code, out, err = run("--contexts", "1k")
    assert code == 2
    assert err == "error: --contexts 1k: write numbers separated by commas\n"


def test_a_failed_cell_is_exit_1(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ArithmeticError("overflow")

    monkeypatch.setattr(registry.load_method("ngram", "drafter"), "propose", broken)
    code, out, err = run("--methods", "ngram:nodes=3,draft", "--json", "-")
    document = json.loads(out)
    assert code == 1
    assert {c["contender"]: c["status"] for c in document["cells"]} == {
        "plain": "ok",
        "ngram:nodes=3": "failed",
        "draft": "failed",
    }
    assert "ArithmeticError: overflow (mine)" in err
    assert err.count("failed: ") == err.count("\n") == 2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--methods", ","], "--methods is empty"),
        (["--methods", "ngrm"], "did you mean ngram"),
        (["--peers", "llama"], "unknown peer 'llama'"),
        (["--temperature", "hot"], "--temperature hot"),
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--requests", "0"], "requests=0"),
        (["--requests", ","], "requests=()"),
        (["--rounds", "0"], "rounds=0"),
        (["--threads", "0"], "--threads"),
        (["--model", "./nowhere"], "no such folder"),
        (["--dtype", "int3"], "dtype='int3'"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--json", "./no/such.json"], "folder does not exist"),
        (["--html", "."], "a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(run: Any, args: list[str], said: str) -> None:
    code, out, err = run(*args)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err
