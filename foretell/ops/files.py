"""Files that are written whole or not at all, and the folder that foretell keeps its own in."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from foretell.errors import BadFile

CURE = "free some space or name another place"


def cache_folder() -> Path:
    """The folder of foretell's cache: $FORETELL_CACHE, else the user's cache folder."""
    if named_folder := os.environ.get("FORETELL_CACHE"):
        return Path(named_folder)
    cache_base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache_base) / "foretell"


@contextmanager
def replace_file(path: Path, cure: str = CURE) -> Iterator[Path]:
    """Yields an empty file beside `path`, which takes its place when the block has ended.

    If the block raises, that file is removed and `path` stays as it was. Missing folders are made.
    Raises BadFile, which ends with the cure, where the system refuses to write (a full disk, a
    folder that is read-only); so no other file should be opened in the block.
    """
    partial_file = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial_file.touch()  # so that a wrong place is found out before the work
        file_mode = partial_file.stat().st_mode
        yield partial_file
        partial_file.chmod(file_mode)  # safetensors makes files that other users cannot read
        os.replace(partial_file, path)
    except (OSError, SafetensorError) as error:
        raise BadFile(f"{path}: cannot be written ({_failure_reason(error)}); {cure}") from error
    finally:
        with contextlib.suppress(OSError):  # where nothing can be written nothing is left either
            partial_file.unlink()


def _failure_reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(error).rpartition("I/O error: ")[2]  # safetensors wraps what the system said


def write_text(path: Path, text: str, cure: str = CURE) -> None:
    """Writes a UTF-8 text file, whole or not at all. Raises BadFile, which ends with the cure."""
    with replace_file(path, cure) as partial_file:
        partial_file.write_text(text, "utf-8")
