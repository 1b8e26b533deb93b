"""A peer's models in its own format, made where they are missing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from foretell.bench.peers._environment import Environment, pins
from foretell.errors import Unsupported


def converted(
    where: Environment, source: str, kind: str, options: dict[str, Any], here: bool = False
) -> Path:
    """The model of a folder in the peer's format `kind`, made by the peer's `convert(options)` if
    it is not there yet.

    `options` gets `source` and `out`. `here`: converting needs our torch and transformers beside
    the peer's packages. Raises Unsupported, with the converter's last line, where it fails.
    """
    folder = weights(source)
    out = where.folder / "models" / f"{folder.name}-{kind}-{_digest(where.name, folder, kind)}"
    if out.exists():
        return out
    part = out.with_name(f"{out.name}.{os.getpid()}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    packages = where.packages if here else []
    given = options | {"source": str(folder), "out": str(part), "packages": packages}
    command = where.command("convert", given, here)
    variables = where.variables(here)
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
        if done.returncode or not part.exists():
            lines = done.stderr.strip().splitlines()
            why = lines[-1].strip() if lines else f"exit {done.returncode}"
            raise Unsupported(f"{where.name} cannot convert {folder.name} to {kind}: {why}")
        os.replace(part, out)
    finally:
        if part.is_dir():
            shutil.rmtree(part)
        else:
            part.unlink(missing_ok=True)
    return out


def _digest(name: str, folder: Path, kind: str) -> str:
    """Of everything that the converted model depends on."""
    files = []
    for path in sorted(folder.iterdir()):
        if path.is_file():
            stat = path.stat()
            files.append((path.name, stat.st_size, stat.st_mtime_ns))
    key = json.dumps([str(folder.resolve()), kind, pins(name), files])
    return hashlib.sha256(key.encode()).hexdigest()[:12]


def weights(source: str) -> Path:
    """The folder of a model that has been loaded before, be it a folder or a hub id."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, local_files_only=True))
