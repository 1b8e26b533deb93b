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

from foretell.bench.peers import Place, file_stem
from foretell.errors import Unsupported

PEERS_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Environment:
    """The interpreter that can import a peer's packages. `own`: not the one that runs this."""

    name: str
    python: str
    own: bool

    @property
    def folder(self) -> Path:
        return peer_folder(self.name)

    @property
    def packages(self) -> list[str]:
        """Folders of the packages, for look-ups by a path; empty where this process has them."""
        if not self.own:
            return []
        return [str(path) for path in (self.folder / "env").rglob("site-packages")]

    def version(self, distribution: str) -> str:
        distributions = importlib.metadata.distributions(
            name=distribution, path=self.packages or sys.path
        )
        return next((package.version for package in distributions), "of an unknown version")

    def command(self, task: str, options: dict[str, Any], here: bool = False) -> list[str]:
        """Command that starts a task of the peer's file (see foretell/bench/peers/_process.py)."""
        python = sys.executable if here else self.python
        # -P: the folder of a script comes first otherwise, and there are files in it with the names
        # of libraries.
        return [
            python,
            "-P",
            str(PEERS_FOLDER / "_process.py"),
            file_stem(self.name),
            task,
            json.dumps(options),
        ]

    def variables(self, here: bool = False) -> dict[str, str]:
        """The process's environment variables: those of ours that do not mix packages."""
        return {
            name: value
            for name, value in os.environ.items()
            if here or not self.own or not name.startswith("PYTHON")
        }


def peer_folder(name: str) -> Path:
    from foretell.engine.cost_profile import folder  # imports torch, which a worker does without

    return folder() / "peers" / file_stem(name)


def pinned_packages(name: str) -> str:
    """Packages of a peer with their versions, a line each."""
    return (PEERS_FOLDER / f"{file_stem(name)}.txt").read_text("utf-8")


def find_environment(name: str, modules: Sequence[str], place: Place) -> Environment:
    """Finds an environment that can import these modules. Raises Unsupported with the cure."""
    if place.device != "cpu":
        raise Unsupported.missing_capability(
            name, place.device, "a CPU, where it is measured", "pass --device cpu"
        )
    folder = peer_folder(name)
    python = folder / "env" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    ready_file = folder / "ready"
    if (
        python.exists()
        and ready_file.is_file()
        and ready_file.read_text("utf-8") == pinned_packages(name)
    ):
        return Environment(name, str(python), True)
    if all(importlib.util.find_spec(module) for module in modules):
        return Environment(name, sys.executable, False)
    raise Unsupported(
        f"{name}: not installed; `python -m foretell.bench.peers setup {name}` "
        "makes an environment for it"
    )
