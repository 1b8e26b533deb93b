"""Commands are found by their files, and the command line is quick to start."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

import foretell
from foretell import cli
from foretell.cli._commands import command_group, with_fields

FOLDER = Path(cli.__file__).parent


@dataclass(frozen=True)
class Size:
    """A group of options."""

    width: Annotated[int, typer.Option(help="In steps.")] = 3
    deep: bool = False


def sized(size: Size) -> int:
    """Draw."""
    return 0


def test_a_file_is_a_command_and_a_folder_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "tools" / "make"
    inner.mkdir(parents=True)
    (tmp_path / "tools" / "__init__.py").write_text("")
    (tmp_path / "tools" / "say_hello.py").write_text(
        "def say_hello(name: str) -> int:\n    print('hello', name)\n    return 0\n"
    )
    (tmp_path / "tools" / "many.py").write_text(
        "def walk() -> int:\n    print('far')\n    return 0\n"
        "def run_fast() -> int:\n    return 0\ndef _hide() -> int:\n    return 0\n"
    )
    (tmp_path / "tools" / "_shared.py").write_text("raise RuntimeError('no command')\n")
    (tmp_path / "tools" / "notes.txt").write_text("")
    (inner / "__init__.py").write_text('"""Make things."""')
    (inner / "one.py").write_text("def one() -> int:\n    print('made')\n    return 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    group = command_group("tools", tmp_path / "tools", "About.")
    invoke = CliRunner().invoke
    assert invoke(group, ["say-hello", "you"]).output == "hello you\n"
    assert invoke(group, ["make", "one"]).output == "made\n"
    assert invoke(group, ["walk"]).output == "far\n"
    assert {*typer.main.get_command(group).commands} == {  # type: ignore[attr-defined]
        "make",
        "run-fast",
        "say-hello",
        "walk",
    }
    listed = invoke(group, ["--help"]).output
    assert "About." in listed and "Make things." in listed and "shared" not in listed


def test_every_file_of_the_folder_is_a_command() -> None:
    files = {path.stem.replace("_", "-") for path in FOLDER.glob("[!_]*.py")}
    listed = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    assert files | {"train"} == set(listed)
    trainers = "".join(path.read_text() for path in FOLDER.glob("train/[!_]*.py"))
    names = re.findall(r"^@trainer\(.*\)\ndef (\w+)", trainers, re.M)
    assert set(listed["train"].commands) == {name.replace("_", "-") for name in names}


def test_a_dataclass_is_a_group_of_options() -> None:
    def draw(name: str, size: Size, colour: str = "red") -> int:
        print(name, size, colour)
        return 0

    command = with_fields(draw)
    names = list(inspect.signature(command).parameters)
    assert names == ["name", "width", "deep", "colour"]
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, ["it", "--width", "5", "--colour", "blue"])
    assert result.output == f"it {dataclasses.replace(Size(), width=5)} blue\n"
    assert "In steps." in CliRunner().invoke(app, ["--help"]).output


def test_a_docstring_has_the_help_of_options() -> None:
    def draw(
        size: Size, of_what: str, colour: Annotated[str, typer.Option("--hue")] = "red"
    ) -> int:
        """Draw something.

        It takes a while.

        --of-what: The thing
            itself.
        --width: In miles.
        --colour: A hue.
        """
        return 0

    command = with_fields(draw)
    assert command.__doc__ == "Draw something.\n\nIt takes a while."
    app = typer.Typer()
    app.command()(command)
    options = {option.name: option for option in typer.main.get_command(app).params}
    helps = {name: getattr(options[name], "help", None) for name in ("width", "of_what", "colour")}
    assert helps == {"width": "In miles.", "of_what": "The thing itself.", "colour": "A hue."}
    assert options["colour"].opts == ["--hue"] and options["of_what"].required
    other = typer.Typer()
    other.command()(with_fields(sized))
    assert "In steps." in CliRunner().invoke(other, ["--help"]).output  # each has its own words
    sized.__doc__ = "Draw.\n\n--height: In steps."
    with pytest.raises(AssertionError, match="height"):
        with_fields(sized)


@pytest.mark.parametrize("arguments", ["['--help']", "['generate', '--help']", "['nothing']"])
def test_help_does_not_import_torch(arguments: str) -> None:
    code = (
        f"import sys; from foretell.cli import run; run({arguments}); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_listing_methods_does_not_import_torch() -> None:
    code = (
        "import sys; from foretell.cli import run; run(['methods']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "foretell", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"foretell {foretell.__version__}\n"


def test_the_end_of_a_process_looks_through_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import gc

    from foretell import cli

    order: list[str] = []
    monkeypatch.setattr(cli, "run", lambda: order.append("run") or 3)
    monkeypatch.setattr(gc, "freeze", lambda: order.append("freeze"))
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 3 and order == ["run", "freeze"]


def test_commands_of_a_group_are_built_when_they_are_asked_for() -> None:
    code = (
        "import sys; from foretell import cli; group = cli._build_command();"
        "inner = group.commands['train'];"
        "print('foretell.cli.train.run_folders' in sys.modules, len(inner.commands) > 20)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
