"""Modules in processes of their own, and what is said meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from foretell.loading import processes


def test_a_module_is_run_and_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process itself: arguments, environment, standard error, and how much it has written."""
    (tmp_path / "helper.py").write_text(
        "import os, sys, time\n"
        "open(sys.argv[1], 'wb').write(bytes(3_000_000))\n"
        "time.sleep(0.3)\n"
        "sys.exit(os.environ['SAID'] + ' and done')\n"
    )
    monkeypatch.setattr(processes, "POLL", 0.05)
    told: list[int] = []
    written = tmp_path / "written"
    written.mkdir()
    code, said = processes.run_module(
        ["helper", str(written / "file")],
        written,
        told.append,
        PYTHONPATH=str(tmp_path),
        SAID="this",
    )
    assert (code, said) == (1, "this and done\n") and told[-1] == 3_000_000


def test_an_interrupted_process_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "helper.py").write_text("import time\ntime.sleep(60)\n")
    started: list[Any] = []
    real = processes.subprocess.Popen

    def noted(*args: Any, **options: Any) -> Any:
        started.append(real(*args, **options))
        return started[-1]

    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(processes.subprocess, "Popen", noted)
    with pytest.raises(KeyboardInterrupt):
        processes.run_module(["helper"], tmp_path, interrupted, PYTHONPATH=str(tmp_path))
    assert started[0].poll() is not None


def test_nothing_is_said_of_what_is_quick(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with processes.report_progress("a: doing [something]", 2_000_000) as tell:
        tell(1_000_000)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(processes, "PATIENCE", 0.0)
    with processes.report_progress("a: doing [something]"):
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.join()
    assert capsys.readouterr().err == "a: doing [something]\n"
