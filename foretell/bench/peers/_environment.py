"""Where a peer's packages are.

The packages want other versions than ours, so each peer has an environment of its own, which
`python -m foretell.bench.peers setup NAME` makes in the cache folder; where they can be imported
here, this one does as well.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.bench.peers import Place, stem
from foretell.errors import Unsupported

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Environment:
    """The interpreter that can import a peer's packages. `own`: not the one that runs this."""

    name: str
    python: str
    own: bool

    @property
    def folder(self) -> Path:
        return home(self.name)

    @property
    def packages(self) -> list[str]:
        """Where packages are looked up by a path: nothing where this process's own do."""
        if not self.own:
            return []
        return [str(path) for path in (self.folder / "env").rglob("site-packages")]

    def version(self, distribution: str) -> str:
        found = importlib.metadata.distributions(name=distribution, path=self.packages or sys.path)
        return next((d.version for d in found), "of an unknown version")

    def command(self, task: str, options: dict[str, Any], here: bool = False) -> list[str]:
        """What starts a task of the peer's file (see foretell/bench/peers/_process.py)."""
        python = sys.executable if here else self.python
        # -P: the folder of a script comes first otherwise, and there are files in it with the names
        # of libraries.
        return [python, "-P", str(HERE / "_process.py"), stem(self.name), task, json.dumps(options)]

    def variables(self, here: bool = False) -> dict[str, str]:
        """The process's environment variables: those of ours that do not mix packages."""
        return {
            k: v
            for k, v in os.environ.items()
            if here or not self.own or not k.startswith("PYTHON")
        }


def home(name: str) -> Path:
    from foretell.engine.cost_profile import folder  # imports torch, which a worker does without

    return folder() / "peers" / stem(name)


def pins(name: str) -> str:
    """Its packages with their versions, a line each."""
    return (HERE / f"{stem(name)}.txt").read_text("utf-8")


def environment(name: str, modules: Sequence[str], place: Place) -> Environment:
    """Where these modules can be imported. Raises Unsupported with the cure."""
    if place.device != "cpu":
        raise Unsupported.missing(
            name, place.device, "a CPU, where it is measured", "pass --device cpu"
        )
    folder = home(name)
    python = folder / "env" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    ready = folder / "ready"
    if python.exists() and ready.is_file() and ready.read_text("utf-8") == pins(name):
        return Environment(name, str(python), True)
    if all(importlib.util.find_spec(module) for module in modules):
        return Environment(name, sys.executable, False)
    raise Unsupported(
        f"{name}: not installed; `python -m foretell.bench.peers setup {name}` "
        "makes an environment for it"
    )
