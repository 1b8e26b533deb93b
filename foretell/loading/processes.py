"""Modules in processes of their own, whose memory is given back, and what is said meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATIENCE = 2.0  # seconds before anything is said
POLL = 0.2  # seconds between two looks at what a process does


def run_module(
    arguments: list[str], folder: Path, tell: Callable[[int], None], **environment: str
) -> tuple[int, str]:
    """Runs a Python module, telling how many bytes lie in the folder. The exit code and errors."""
    with subprocess.Popen(
        [sys.executable, "-P", "-m", *arguments],  # -P: no modules from the working directory
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=os.environ | environment,
    ) as process:
        try:
            while True:
                try:
                    _, error_text = process.communicate(timeout=POLL)
                    return process.returncode, error_text
                except subprocess.TimeoutExpired:
                    tell(folder_bytes(folder))
        except BaseException:  # interrupted
            process.kill()
            raise


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder that others are writing to."""
    total_bytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total_bytes += os.path.getsize(os.path.join(parent, name))
            except OSError:
                continue  # it was moved away just now
    return total_bytes


def say(message: str) -> None:
    """One line on standard error."""
    _console().print(message, soft_wrap=True, markup=False)


@contextmanager
def report_progress(
    message: str, whole_bytes: int | None = None
) -> Iterator[Callable[[int], None]]:
    """Says on standard error what goes on if it takes more than two seconds: in a moving line on a
    terminal, in one plain line elsewhere. Yields a function that adds how many bytes are done, of
    `whole_bytes` if that is known.
    """
    console = _console()
    status = console.status(message)
    whole_text = "" if whole_bytes is None else f" of {whole_bytes / 1e6:.0f}"

    def show() -> None:
        if console.is_terminal:
            status.start()
        else:
            console.print(message, soft_wrap=True, markup=False)

    timer = threading.Timer(PATIENCE, show)
    timer.daemon = True
    timer.start()
    try:
        yield lambda done: status.update(f"{message}, {done / 1e6:.0f}{whole_text} MB")
    finally:
        timer.cancel()
        timer.join()
        status.stop()


def _console() -> Any:
    from rich.console import Console

    return Console(stderr=True, highlight=False)
