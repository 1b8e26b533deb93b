"""`foretell bench --suite`: tasks with answers that can be judged, instead of speed."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from foretell.cli._loading import load_model
from foretell.cli._options import ModelOptions, several
from foretell.cli._output import (
    check_writable,
    emit_json,
    json_text,
    progress_bar,
    show,
    table,
    write_file,
)
from foretell.errors import BadConfig, UnknownMethod

SUITES = Path(__file__).parents[1] / "measure" / "suites"


def suites() -> list[str]:
    """Their names."""
    return sorted(path.stem for path in SUITES.glob("*.py") if path.stem != "__init__")


def run_suite(
    name: str, models: ModelOptions, given: Mapping[str, Any], json_out: Path | None
) -> int:
    """Measures a suite on one model. `given`: the command's other options that are not as usual.

    Raises UnknownMethod or BadConfig.
    """
    if name not in suites():
        raise UnknownMethod.near("suite", name, suites())
    for option, value in (("--model", models.model), ("--dtype", models.dtype)):
        if len(several(value)) != 1:
            raise BadConfig(f"{option} {value}: a suite is measured on one at a time; name one")
    suite = importlib.import_module(f"foretell.measure.suites.{name}")
    fields = {field.name: field for field in dataclasses.fields(suite.Settings)}
    for option in given.keys() - fields.keys():
        shown = "--" + option.replace("_", "-")
        raise BadConfig(f"{shown}: is not for the suite {name!r}; leave it out")
    settings = suite.Settings(**given)
    to_stdout = json_out is not None and str(json_out) == "-"
    file = None if to_stdout else json_out
    check_writable("--json", file)
    lm = load_model(models)
    with progress_bar() as progress:
        bar = progress.add_task(name, total=None)

        def tell(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)

        document = suite.run(lm, settings, tell)
    if file is not None:
        write_file("--json", file, json_text(document))
    if to_stdout:
        emit_json(document)
        return 0
    title, head, rows = suite.shown(document)
    made = table(*head)
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    show(Text(title, "bold"), soft_wrap=True)
    show(made)
    return 0
