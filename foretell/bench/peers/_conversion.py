"""A peer's models in its own format, made where they are missing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from foretell.bench.peers._environment import Environment, pinned_packages
from foretell.errors import Unsupported


def convert_model(
    peer_environment: Environment,
    source: str,
    model_format: str,
    options: dict[str, Any],
    here: bool = False,
) -> Path:
    """The model of a folder in the peer's format `model_format`, made by the peer's
    `convert(options)` if it is not there yet.

    `options` gets `source` and `out`. `here`: converting needs our torch and transformers beside
    the peer's packages. Raises Unsupported, with the converter's last line, where it fails.
    """
    folder = model_folder(source)
    digest = _model_digest(peer_environment.name, folder, model_format)
    model_path = peer_environment.folder / "models" / f"{folder.name}-{model_format}-{digest}"
    if model_path.exists():
        return model_path
    partial_path = model_path.with_name(f"{model_path.name}.{os.getpid()}.part")
    partial_path.parent.mkdir(parents=True, exist_ok=True)
    packages = peer_environment.packages if here else []
    task_options = options | {"source": str(folder), "out": str(partial_path), "packages": packages}
    command = peer_environment.command("convert", task_options, here)
    variables = peer_environment.variables(here)
    try:
        finished = subprocess.run(command, env=variables, capture_output=True, text=True)
        if finished.returncode or not partial_path.exists():
            lines = finished.stderr.strip().splitlines()
            failure_reason = lines[-1].strip() if lines else f"exit {finished.returncode}"
            raise Unsupported(
                f"{peer_environment.name} cannot convert {folder.name} to {model_format}: "
                f"{failure_reason}"
            )
        os.replace(partial_path, model_path)
    finally:
        if partial_path.is_dir():
            shutil.rmtree(partial_path)
        else:
            partial_path.unlink(missing_ok=True)
    return model_path


def _model_digest(name: str, folder: Path, model_format: str) -> str:
    """Digest of everything that the converted model depends on."""
    file_records = []
    for path in sorted(folder.iterdir()):
        if path.is_file():
            file_status = path.stat()
            file_records.append((path.name, file_status.st_size, file_status.st_mtime_ns))
    digest_input = json.dumps(
        [str(folder.resolve()), model_format, pinned_packages(name), file_records]
    )
    return hashlib.sha256(digest_input.encode()).hexdigest()[:12]


def model_folder(source: str) -> Path:
    """The folder of a model that has been loaded before, be it a folder or a hub id. Raises
    Unsupported for a .gguf file, which only llama.cpp reads.
    """
    path = Path(source).expanduser()
    if source.endswith(".gguf"):
        raise Unsupported(f"{source}: is no folder to convert; of .gguf files, compare llama.cpp")
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, local_files_only=True))
