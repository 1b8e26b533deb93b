"""Writing: files whole or not at all, JSON that every reader takes, refusals with their place."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from foretell.cli import _output
from foretell.errors import BadConfig, BadFile

FULL = Path("/dev/full")  # a device that is always out of space


def process(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "foretell", *args], stderr=subprocess.PIPE, text=True, **options
    )


def test_json_has_no_numbers_that_other_readers_refuse() -> None:
    text = _output.json_text({"a": float("nan"), "b": [1.5, (float("-inf"), 2)], "c": "NaN"})
    assert json.loads(text) == {"a": None, "b": [1.5, [None, 2]], "c": "NaN"}


def test_a_warning_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with _output.warned_in_lines():
        warnings.simplefilter("default")
        warnings.warn("this head\n  drafts badly", stacklevel=1)
    assert capsys.readouterr().err == "warning: this head drafts badly\n"


def test_a_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    _output.write_file("--json", path, "first")
    assert path.read_text() == "first"

    def full(self: Path, text: str, encoding: str) -> int:
        with self.open("w") as file:
            file.write(text[:3])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(BadFile, match=r"--json .*out.json: No space left on device; free some"):
        _output.write_file("--json", path, "second")
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not FULL.exists(), reason="the system has no /dev/full")
def test_a_device_is_not_replaced() -> None:
    with pytest.raises(BadFile, match="--html /dev/full: No space left on device"):
        _output.write_file("--html", FULL, "text")
    assert FULL.is_char_device()


def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _output.check_writable("--json", None)
    _output.check_writable("--json", tmp_path / "new.json")
    with pytest.raises(BadConfig, match="a folder; name a file"):
        _output.check_writable("--json", tmp_path)
    with pytest.raises(BadConfig, match="its folder does not exist"):
        _output.check_writable("--json", tmp_path / "none" / "new.json")
    _output.check_writable("--out", tmp_path / "none" / "new.json", folders_are_made=True)
    assert not (tmp_path / "none").exists()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(BadConfig, match="cannot be written by you"):
        _output.check_writable("--json", tmp_path / "new.json")


@pytest.mark.skipif(not FULL.exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("args", [["methods"], ["methods", "--json"], ["--version"]])
def test_a_full_disk_under_standard_output_is_one_line(args: list[str]) -> None:
    with FULL.open("w") as full:
        done = process(*args, stdout=full)
    assert done.returncode == 2
    assert done.stderr.startswith("error: standard output: No space left on device; ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("args", [["methods"], ["methods", "--json"], ["--help"]])
def test_a_reader_that_leaves_is_no_error(args: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = process(*args, stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_closed_standard_output_is_no_error() -> None:
    code = "import sys; sys.stdout = None; from foretell.cli import run; sys.exit(run(['methods']))"
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_text_that_standard_output_cannot_hold_is_one_line() -> None:
    code = "from foretell.cli import _output; _output.emit('\\N{SLIGHTLY SMILING FACE}')"
    code = (
        f"import foretell.cli as c; c._invoke = lambda a: exec({code!r}); raise SystemExit(c.run())"
    )
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "takes ascii text, which has no '\\U0001f642'; set PYTHONIOENCODING=utf-8" in done.stderr


def test_tables_cut_no_digit(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """In a pipe, which has no width, and on a terminal that is too narrow."""
    figure, prose = "1.06 (0.98 to 1.10)", "what it is that this method does for whom"
    rows = _output.table("method", *("a title" for _ in range(5)), "about")
    rows.add_row("token-recycling", *(figure for _ in range(5)), prose)
    _output.show(rows)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[1].count(figure) == 5 and lines[1].endswith(prose)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(_output, "Console", partial(Console, force_terminal=True))
    _output.show(rows)
    out = capsys.readouterr().out
    assert "…" not in out and out.count(figure) == 5 and "token-recycling" in out
    assert set(prose.split()) <= set(out.split()) and prose not in out
