"""Where a peer's packages and converted models are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from foretell.errors import Unsupported
from foretell.measure.peers import Place, _environment, names, stem
from foretell.measure.peers._environment import Environment, environment, home, pins, weights

HERE = Place("demo", None, "bfloat16", "cpu")
NAMES = [name for name in names() if name != "transformers"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_environment_is_one_line_with_the_cure(name: str) -> None:
    with pytest.raises(
        Unsupported,
        match=rf"^{name}: not installed; `python -m foretell.measure.peers setup {name}` makes",
    ):
        environment(name, ["json", "surely_no_such_module"], HERE)


def test_packages_that_can_be_imported_here_do_as_well() -> None:
    found = environment("llama.cpp", ["json"], HERE)
    assert found == Environment("llama.cpp", sys.executable, False)
    assert found.packages == []
    assert found.version("pytest") == pytest.__version__
    assert found.version("no-such-thing") == "of an unknown version"


def test_its_own_environment_comes_first_unless_it_is_an_old_one() -> None:
    python = home("llama.cpp") / "env" / "bin" / "python"
    packages = home("llama.cpp") / "env" / "lib" / "python3" / "site-packages"
    (packages / "some_thing-4.5.dist-info").mkdir(parents=True)
    (packages / "some_thing-4.5.dist-info" / "METADATA").write_text(
        "Name: some-thing\nVersion: 4.5\n"
    )
    python.parent.mkdir()
    python.touch()
    assert not environment("llama.cpp", ["json"], HERE).own, "it is not ready"
    (home("llama.cpp") / "ready").write_text(pins("llama.cpp"))
    found = environment("llama.cpp", ["surely_no_such_module"], HERE)
    assert found.own
    assert found.python == str(python)
    assert found.packages == [str(packages)]
    assert found.version("some-thing") == "4.5"
    (home("llama.cpp") / "ready").write_text("numpy==1.0\n")
    with pytest.raises(Unsupported, match="setup"):
        environment("llama.cpp", ["surely_no_such_module"], HERE)


def test_peers_are_measured_on_a_cpu() -> None:
    with pytest.raises(Unsupported, match=r"cuda:0.*pass --device cpu"):
        environment("llama.cpp", ["json"], Place("demo", None, "bfloat16", "cuda:0"))


def test_packages_of_two_environments_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setenv("PYTHONHOME", "/mine")
    monkeypatch.setenv("OTHER", "kept")
    own, ours = Environment("llama.cpp", "python", True), Environment("llama.cpp", "python", False)
    assert not {"PYTHONPATH", "PYTHONHOME"} & set(own.variables())
    assert own.variables()["OTHER"] == "kept"
    assert own.variables(here=True)["PYTHONPATH"] == ours.variables()["PYTHONPATH"] == "/mine"


def test_a_task_is_started_with_the_right_interpreter() -> None:
    found = Environment("llama.cpp", "its python", True)
    python, *rest = found.command("start", {"threads": 2})
    assert python == "its python"
    assert found.command("convert", {}, here=True)[0] == sys.executable
    assert rest[0] == "-P"
    assert Path(rest[1]).name == "_worker.py"
    assert rest[2:] == ["llama_cpp", "start", '{"threads": 2}']


@pytest.mark.parametrize("name", NAMES)
def test_versions_are_pinned(name: str) -> None:
    assert all(len(line.split("==")) == 2 for line in pins(name).splitlines())


# --- converted models


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_text("weights")
    return folder


class Converter:
    """Stands for the process that converts."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, code: int = 0, said: str = "", write: bool = True
    ):
        self.calls: list[dict[str, Any]] = []
        self.code, self.said, self.write = code, said, write
        monkeypatch.setattr(subprocess, "run", self.run)

    def run(self, command: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        options = json.loads(command[-1])
        self.calls.append(options)
        if self.write:
            Path(options["out"]).write_text("converted")
        return subprocess.CompletedProcess(command, self.code, "", self.said)


def test_a_model_is_converted_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, converter = Environment("llama.cpp", "python", False), Converter(monkeypatch)
    out = found.converted(str(model), "BF16", {"type": "bf16"})
    assert out.read_text() == "converted"
    assert out.parent == home("llama.cpp") / "models"
    assert out.name.startswith("model-BF16-")
    assert list(out.parent.iterdir()) == [out]
    assert converter.calls[0]["source"] == str(model)
    assert converter.calls[0]["type"] == "bf16"
    assert found.converted(str(model), "BF16", {"type": "bf16"}) == out
    assert len(converter.calls) == 1
    assert found.converted(str(model), "Q8_0", {}) != out
    assert len(converter.calls) == 2
    os.utime(model / "model.safetensors", ns=(1, 1))
    assert found.converted(str(model), "BF16", {}) != out and len(converter.calls) == 3, (
        "the weights are others"
    )


@pytest.mark.parametrize(
    ("code", "said", "write", "why"),
    [
        (
            1,
            "a traceback\n  ValueError: no such architecture\n\n",
            True,
            "ValueError: no such architecture",
        ),
        (2, "", True, "exit 2"),
        (0, "warning", False, "warning"),
    ],
)
def test_a_failed_conversion_leaves_nothing(
    code: int, said: str, write: bool, why: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Converter(monkeypatch, code, said, write)
    with pytest.raises(Unsupported, match=f"^llama.cpp cannot convert model to BF16: {why}$"):
        Environment("llama.cpp", "python", False).converted(str(model), "BF16", {})
    assert list((home("llama.cpp") / "models").iterdir()) == []


def test_a_hub_id_is_looked_up_among_what_was_loaded(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def download(name: str, local_files_only: bool) -> str:
        assert name == "owner/name"
        assert local_files_only
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert weights("owner/name") == model == weights(str(model))


def test_every_peer_but_transformers_says_what_it_needs() -> None:
    files = {path.stem for path in _environment.HERE.glob("*.txt")}
    assert files == {stem(name) for name in NAMES}
