"""Suites of `foretell bench`: tasks of one kind, with figures of their own, one module or
package a suite.

A suite is found by its name. It has `prepare(given, settings, limit)`, what it is run on;
`begin(settings, tasks, path)`, its document; `run(settings, tasks, load, document, tell, save)`;
`tables(document)` and `failures(document)`, what is shown of it. `given` is what was named by
`--prompts`, `--data` or `--schemas`, the first of these that its `TAKES` has: options of the
command, without dashes, that mean something to this suite (without it: schemas). Where `html` is
one, it has `html(document)`, a page. It may have `WAYS`, names that it compares beside those of
methods.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from foretell.errors import BadConfig


def suite_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load_suite(name: str) -> ModuleType:
    """The suite of this name. Raises BadConfig."""
    if name not in suite_names():
        raise BadConfig.field("--suite", name, f"one of {', '.join(suite_names())}")
    return importlib.import_module(f"{__name__}.{name}")
