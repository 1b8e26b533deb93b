"""Where a peer's packages are, and its models in its own format.

The packages want other versions than ours, so each peer has an environment of its own, which
`python -m foretell.measure.peers setup NAME` makes in the cache folder; where they can be imported
here, this one does as well.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.errors import Unsupported
from foretell.measure.peers import Place, stem

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
        return (
            [str(path) for path in (self.folder / "env").rglob("site-packages")] if self.own else []
        )

    def version(self, distribution: str) -> str:
        found = importlib.metadata.distributions(name=distribution, path=self.packages or sys.path)
        return next((d.version for d in found), "of an unknown version")

    def converted(
        self, source: str, kind: str, options: dict[str, Any], here: bool = False
    ) -> Path:
        """The model of a folder in this peer's format `kind`, converted if need be by the peer's
        `convert(options)`.

        `options` gets `source` and `out`. `here`: converting needs our torch and transformers
        beside its packages. Raises Unsupported with the converter's last line where it fails.
        """
        folder = weights(source)
        files = [
            (p.name, (s := p.stat()).st_size, s.st_mtime_ns)
            for p in sorted(folder.iterdir())
            if p.is_file()
        ]
        key = json.dumps([str(folder.resolve()), kind, pins(self.name), files])
        out = (
            self.folder
            / "models"
            / f"{folder.name}-{kind}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
        )
        if not out.exists():
            part = out.with_name(f"{out.name}.{os.getpid()}.part")
            part.parent.mkdir(parents=True, exist_ok=True)
            options = options | {
                "source": str(folder),
                "out": str(part),
                "packages": self.packages if here else [],
            }
            try:
                command = self.command("convert", options, here)
                done = subprocess.run(
                    command, env=self.variables(here), capture_output=True, text=True
                )
                if done.returncode or not part.exists():
                    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
                    why = said[-1] if said else f"exit {done.returncode}"
                    raise Unsupported(f"{self.name} cannot convert {folder.name} to {kind}: {why}")
                os.replace(part, out)
            finally:
                shutil.rmtree(part) if part.is_dir() else part.unlink(missing_ok=True)
        return out

    def command(self, task: str, options: dict[str, Any], here: bool = False) -> list[str]:
        """What starts a task of the peer's file (see foretell/measure/peers/_worker.py)."""
        python = sys.executable if here else self.python
        # -P: the folder of a script comes first otherwise, and there are files in it with the names
        # of libraries.
        return [python, "-P", str(HERE / "_worker.py"), stem(self.name), task, json.dumps(options)]

    def variables(self, here: bool = False) -> dict[str, str]:
        """The process's environment variables: those of ours that do not mix packages."""
        return {
            k: v
            for k, v in os.environ.items()
            if here or not self.own or not k.startswith("PYTHON")
        }


def home(name: str) -> Path:
    from foretell.measure.profiling import folder  # imports torch, which a worker does without

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
        f"{name}: not installed; `python -m foretell.measure.peers setup {name}` "
        "makes an environment for it"
    )


def weights(source: str) -> Path:
    """The folder of a model that has been loaded before, be it a folder or a hub id."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, local_files_only=True))
