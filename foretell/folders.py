"""Whether a folder holds a whole model whose weights can be read, told in one line where not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from foretell.errors import BadModel, first_line
from foretell.ops.parsing import json_of


def check_files(path: Path) -> None:
    """Raises BadModel where a folder does not hold a whole model in safetensors."""
    if not (path / "config.json").is_file():
        raise BadModel(f"{path}: has no config.json, so it is no transformers model folder")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        others = [p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt")]
        what = "no weights"
        if others:
            what = f"only {', '.join(others[:3])}, which can run code when read"
        raise BadModel(
            f"{path}: holds {what}; foretell reads safetensors: convert with save_pretrained()"
        )
    for index in sorted(path.glob("*.safetensors.index.json")):
        try:
            shards = set(json_of(index.read_text("utf-8"))["weight_map"].values())
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise BadModel(f"{index}: damaged ({first_line(error)}); fetch it again") from error
        missing = sorted(shards - {file.name for file in files})
        if missing:
            raise BadModel(
                f"{path}: lacks {', '.join(missing[:3])} of {len(shards)} shards; fetch them again"
            )
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                opened.keys()
        except (SafetensorError, OSError) as error:
            raise BadModel(
                f"{file}: damaged or cut off ({first_line(error)}); fetch it again"
            ) from error


def check_keys(name: str, report: dict[str, Any]) -> None:
    """Raises BadModel where weights are missing, which transformers makes up at random, or unknown,
    which it leaves out; both with no more than a warning.
    """
    for kind, meaning in (
        ("missing_keys", "lack"),
        ("unexpected_keys", "have, and its configuration does not,"),
    ):
        keys = sorted(report[kind])
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            raise BadModel(
                f"{name}: the weights {meaning} {', '.join(keys[:3])}{more}; "
                "config.json and the .safetensors files do not belong together"
            )
