"""What the trainers that learn from a target's answers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from foretell.cli._output import progress_bar
from foretell.errors import BadConfig

if TYPE_CHECKING:
    from pathlib import Path

    from foretell.train.processes import Processes

Tell = Callable[[str, int, int | None], None]


def asked(files: Sequence[str] | None, own: int, answers: Path) -> list[Any]:
    """The prompts of these files; none are needed where `answers` are there already. Raises
    BadConfig where there is nothing to answer.
    """
    from foretell.bench.prompts import read_prompts
    from foretell.train.answers import known

    found = [prompt for name in files or () for prompt in read_prompts(name)]
    if not found and own < 1 and not known(answers):
        raise BadConfig(
            f"there is nothing to answer, and {answers} holds no answers: give --prompts, or --own "
            "questions"
        )
    return found


@contextmanager
def first_alone(processes: Processes) -> Iterator[Tell]:
    """The first process runs the block before all others; yields what moves its bar."""
    with processes.first_alone(), progress_bar() as progress:
        bar = progress.add_task("", total=None)

        def tell(what: str, done: int, total: int | None) -> None:
            progress.update(bar, description=what, completed=done, total=total)

        yield tell
