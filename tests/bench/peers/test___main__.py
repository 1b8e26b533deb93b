"""Setting up an environment: which commands, and what is left behind."""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path
from typing import Any

import pytest

from foretell.bench.peers import __main__ as command
from foretell.bench.peers import llama_cpp
from foretell.bench.peers._environment import peer_folder, pinned_packages


class Commands:
    """What was run, instead of running it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: bool = False):
        self.ran: list[list[str]] = []
        self.fails = fails
        monkeypatch.setenv("FORETELL_CACHE", str(tmp_path))
        monkeypatch.setattr(subprocess, "run", self.run)
        monkeypatch.setattr(venv, "create", self.create)

    def create(self, folder: Path, clear: bool, with_pip: bool) -> None:
        assert clear
        assert with_pip
        folder.mkdir(parents=True)
        self.ran.append(["venv", str(folder)])

    def run(self, args: list[str], check: bool) -> None:
        self.ran.append(args)
        assert check
        if self.fails:
            raise subprocess.CalledProcessError(3, args)


def test_torch_comes_first_and_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = Commands(monkeypatch, tmp_path)
    assert command.main(["setup", "openvino", "--find-links", "wheels"]) == 0
    made, torch, rest = commands.ran
    assert made == ["venv", str(peer_folder("openvino") / "env")]
    assert torch[0].startswith(made[1])
    assert torch[1:4] == ["-m", "pip", "install"]
    assert torch[-1].startswith("torch==")
    assert torch[-3:-1] == ["--find-links", "wheels"]
    assert "--no-deps" not in torch
    assert "--no-deps" in rest
    assert rest[rest.index("--no-deps") + 1 :] == pinned_packages("openvino").splitlines()
    assert (peer_folder("openvino") / "ready").read_text() == pinned_packages("openvino")


def test_the_converter_is_fetched_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands, prepared = Commands(monkeypatch, tmp_path), list[Any]()
    (peer_folder("llama.cpp") / "sources").mkdir(parents=True)
    monkeypatch.setattr(
        llama_cpp, "prepare", lambda python, folder: prepared.append((python, folder))
    )
    assert command.main(["setup", "llama.cpp"]) == 0
    assert len(commands.ran) == 2
    assert prepared == [(commands.ran[1][0], peer_folder("llama.cpp"))]
    assert not (peer_folder("llama.cpp") / "sources").exists()


def test_a_failure_leaves_it_unready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Commands(monkeypatch, tmp_path, fails=True)
    peer_folder("ctranslate2").mkdir(parents=True)
    (peer_folder("ctranslate2") / "ready").write_text(pinned_packages("ctranslate2"))
    assert command.main(["setup", "ctranslate2"]) == 1
    assert "ctranslate2: pip ended with exit code 3" in capsys.readouterr().err
    assert not (peer_folder("ctranslate2") / "ready").exists()


@pytest.mark.parametrize(
    ("name", "said"), [("llama", "did you mean llama.cpp"), ("transformers", "needs no environ")]
)
def test_a_wrong_name_is_one_line(name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["setup", name]) == 2
    assert said in capsys.readouterr().err
