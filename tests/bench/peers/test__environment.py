"""Where a peer's packages are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from foretell.bench.peers import Place, _environment, file_stem, peer_names
from foretell.bench.peers._environment import (
    Environment,
    find_environment,
    peer_folder,
    pinned_packages,
)
from foretell.errors import Unsupported

HERE = Place("demo", None, "bfloat16", "cpu")
NAMES = [name for name in peer_names() if name != "transformers"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_environment_is_one_line_with_the_cure(name: str) -> None:
    with pytest.raises(
        Unsupported,
        match=rf"^{name}: not installed; `python -m foretell.bench.peers setup {name}` makes",
    ):
        find_environment(name, ["json", "surely_no_such_module"], HERE)


def test_packages_that_can_be_imported_here_do_as_well() -> None:
    found = find_environment("llama.cpp", ["json"], HERE)
    assert found == Environment("llama.cpp", sys.executable, False)
    assert found.packages == []
    assert found.version("pytest") == pytest.__version__
    assert found.version("no-such-thing") == "of an unknown version"


def test_its_own_environment_comes_first_unless_it_is_an_old_one() -> None:
    python = peer_folder("llama.cpp") / "env" / "bin" / "python"
    packages = peer_folder("llama.cpp") / "env" / "lib" / "python3" / "site-packages"
    (packages / "some_thing-4.5.dist-info").mkdir(parents=True)
    (packages / "some_thing-4.5.dist-info" / "METADATA").write_text(
        "Name: some-thing\nVersion: 4.5\n"
    )
    python.parent.mkdir()
    python.touch()
    assert not find_environment("llama.cpp", ["json"], HERE).own, "it is not ready"
    (peer_folder("llama.cpp") / "ready").write_text(pinned_packages("llama.cpp"))
    found = find_environment("llama.cpp", ["surely_no_such_module"], HERE)
    assert found.own
    assert found.python == str(python)
    assert found.packages == [str(packages)]
    assert found.version("some-thing") == "4.5"
    (peer_folder("llama.cpp") / "ready").write_text("numpy==1.0\n")
    with pytest.raises(Unsupported, match="setup"):
        find_environment("llama.cpp", ["surely_no_such_module"], HERE)


def test_peers_are_measured_on_a_cpu() -> None:
    with pytest.raises(Unsupported, match=r"cuda:0.*pass --device cpu"):
        find_environment("llama.cpp", ["json"], Place("demo", None, "bfloat16", "cuda:0"))


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
    assert Path(rest[1]).name == "_process.py"
    assert rest[2:] == ["llama_cpp", "start", '{"threads": 2}']


@pytest.mark.parametrize("name", NAMES)
def test_versions_are_pinned(name: str) -> None:
    assert all(len(line.split("==")) == 2 for line in pinned_packages(name).splitlines())


def test_every_peer_but_transformers_says_what_it_needs() -> None:
    files = {path.stem for path in _environment.PEERS_FOLDER.glob("*.txt")}
    assert files == {file_stem(name) for name in NAMES}
