"""scripts/compare.py: from options to a document and its tables."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from comparison import document, runner
from comparison.sides import Contender, Sides

from foretell.bench.peers import Run
from foretell.errors import BadConfig, RequestFailed
from tests.scripts.comparison.documents import document as made
from tests.scripts.comparison.documents import part

ROOT = Path(__file__).resolve().parent.parent
QUICK = ["--quick", "--sets", "chat,random", "--tokens", "4"]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


compare = script("compare")
docs = script("docs")


class Process:
    """Stands for foretell's process: every prompt is 300 tokens of its own."""

    def __init__(self, name: str, fails: bool = False):
        self.name = name
        self.fails = fails
        self.closed = 0

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if "encode" in request:
            count = len(request["encode"])
            return {"ids": [list(range(300 * i, 300 * (i + 1))) for i in range(count)]}
        return {"seconds": {"1": 0.1} if "steps" in request else 0.5}

    def generation(self, request: dict[str, Any]) -> Run:
        if self.fails:
            raise RequestFailed(f"{self.name}: it fell")
        return Run(request["ids"][:3], [0.5, 1.5], [1, 2])

    def memory(self) -> tuple[int, int]:
        return 1, 2

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    """What the script opens in place of real sides."""
    opened = Process("foretell bfloat16")

    def open_all(
        args: Any, here: Sides, dtypes: Any, chosen: Any, hosts: list[Any], tell: Any
    ) -> Any:
        hosts.append(opened)
        here.opened[opened.name] = {}
        worker: Any = opened
        for method in args.methods.split(";"):
            name = f"foretell bfloat16 {method}"
            here.contenders.append(Contender(name, "", 16, method == "plain", worker, method))
        return opened

    monkeypatch.setattr(compare, "open_all", open_all)
    monkeypatch.setattr(runner, "measure_bandwidth", lambda: 1e9)
    monkeypatch.setattr(runner, "PAUSE", 0.0)
    return opened


def test_a_quick_run_ends_in_a_document_and_tables(
    process: Process, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.json"
    given = [*QUICK, "--methods", "plain;auto", "--json", str(out), "--page", f"{out}.md"]
    assert compare.main(given) == 0
    written = document.read(out)
    (one,) = written["parts"]
    assert {name: len(rows) for name, rows in one["runs"].items()} == {"chat": 2, "random": 2}
    assert written["settings"]["rounds"] == 1
    assert [row[1] for row in one["prefill"]] == [1]
    assert one["steps"] == {"foretell bfloat16": {"1": 0.1}}
    assert one["load"]["foretell bfloat16"] == {"first_token_s": 0.5, "peak_bytes": 2}
    assert process.closed
    assert "| foretell `auto`, 16 bits |" in capsys.readouterr().out
    assert "## Chat" in Path(f"{out}.md").read_text()


def test_documents_are_merged_without_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for name in ("chat", "code"):
        files.append(str(tmp_path / f"{name}.json"))
        Path(files[-1]).write_text(document.text(made(part(sets=(name,)))))
    assert compare.main(["--merge", *files, "--json", str(tmp_path / "both.json")]) == 0
    assert "| greedy | chat | code | mean |" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "both.json").read_text())["parts"]) == 2


def test_what_failed_is_said_and_ours_is_an_error(
    process: Process, capsys: pytest.CaptureFixture[str]
) -> None:
    process.fails = True
    assert compare.main([*QUICK, "--methods", "plain"]) == 1
    assert "absent: foretell bfloat16 plain: foretell bfloat16: it fell" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--dtypes", "int3"], "--dtypes"),
        (["--contenders", "transformer"], "did you mean transformers"),
        (["--sets", "chats"], "chats"),
        (["--methods", "plain;sufix"], "did you mean suffix"),
        (["--merge", "missing.json"], "is no document"),
    ],
)
def test_wrong_options_are_one_line(
    given: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main(given) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert why in line


def test_sides_are_opened_in_turn_and_nobody_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[str, str]] = []

    def open_host(model: str, dtype: str, threads: int) -> tuple[Any, dict[str, Any]]:
        told = {"path": "/m", "eos": [2], "opened": 1.0, "ready_s": 1.0, "executor": "torch"}
        return Process(f"foretell {dtype}"), told | {"weights": 1}

    def add_peer(here: Sides, name: str, place: Any) -> None:
        assert (place.model, place.eos) == ("/m", (2,))
        opened.append((name, place.dtype))
        here.absent[name] = "not installed"

    monkeypatch.setattr(compare.sides, "open_host", open_host)
    monkeypatch.setattr(compare.sides, "add_peer", add_peer)
    args = compare.parsed(["--methods", "plain"])
    here, hosts = Sides(), list[Any]()
    chosen = ["foretell", "transformers", "openvino"]
    host = compare.open_all(args, here, ["bfloat16", "int8"], chosen, hosts, print)
    assert host is hosts[0]
    assert len(hosts) == 2
    assert [c.name for c in here.contenders] == ["foretell bfloat16 plain", "foretell int8 plain"]
    pairs = [("transformers", "bfloat16"), ("openvino", "bfloat16"), ("openvino", "int8")]
    assert opened == pairs
    with pytest.raises(BadConfig, match="none of them can run here"):
        compare.open_all(args, Sides(), ["int8"], ["openvino"], [], print)


def test_the_documentation_shows_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs, "real", lambda: made(part(sets=("chat", "code"))))
    pages = docs.pages()
    assert "foretell `auto`, 16 bits" in pages[ROOT / "README.md"]
    assert "`auto`, 16 bits" in pages[ROOT / "docs" / "choose.md"]
    assert "## Code" in pages[ROOT / "docs" / "figures.md"]
    assert "  - Figures: figures.md" in pages[ROOT / "mkdocs.yml"]
    plain = pages[ROOT / "docs" / "methods" / "strategies.md"]
    assert "| code | 16 bits | 45.0 (30.0 to 60.0) |" in plain
    assert "| code |" not in pages[ROOT / "docs" / "methods" / "lookup-drafters.md"]
