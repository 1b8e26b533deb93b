"""How far something is: on a terminal it moves, elsewhere a line comes every so often."""

from __future__ import annotations

import time
from io import StringIO

import pytest
from rich.console import Console

from foretell import progress
from foretell.progress import COLUMNS, EVERY, Bar, show_working


def test_where_there_is_no_terminal_a_bar_is_a_line_every_so_often() -> None:
    out, now = StringIO(), [5.0]
    console = Console(file=out)
    with Bar(*COLUMNS, console=console, clock=lambda: now[0]) as bar:
        task = bar.add_task("audit", total=None)
        bar.update(task, description="audit [ngram]", completed=1, total=40)
        assert not out.getvalue()
        for _ in range(2):
            now[0] += EVERY
            bar.advance(task)
            bar.advance(task)
    assert out.getvalue() == "audit [ngram]: 2 of 40, 10 s\naudit [ngram]: 4 of 40, 20 s\n"


def test_a_terminal_has_no_lines_and_a_quiet_bar_says_nothing() -> None:
    for quiet in (False, True):
        out, now = StringIO(), [0.0]
        console = Console(file=out, force_terminal=not quiet)
        bar = Bar(*COLUMNS, console=console, quiet=quiet, clock=lambda now=now: now[0])
        task = bar.add_task("audit", total=2)
        now[0] += EVERY
        bar.advance(task)
        assert out.getvalue() == "" and bar.tasks[0].completed == 1


def test_work_without_steps_says_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    out = StringIO()
    monkeypatch.setattr(progress, "EVERY", 0.001)
    with show_working("loading a model", Console(file=out)):
        while out.getvalue().count("\n") < 2:
            time.sleep(0.001)
    said = out.getvalue()
    assert said.startswith("loading a model, 0 s\n")
    time.sleep(0.01)
    assert out.getvalue() == said, "it ends with the work"
    with pytest.raises(ValueError), show_working("loading", Console(file=StringIO())):
        raise ValueError
