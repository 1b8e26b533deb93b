"""Stores of drafters, written to a folder and read again.

Every store of an engine is one safetensors file, whose header has the format, the method's config,
the vocabulary and a checksum. A store is any shared object with `tensors()`, `restore(tensors)` and
`nbytes`. It may change speed, never output: a store of another model is useless rather than wrong.
A damaged one is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from foretell import registry
from foretell.core.context import Context
from foretell.core.drafter import Drafter
from foretell.core.request import Request
from foretell.engine.engine import Engine
from foretell.errors import BadFile, ForetellError, first_message_line
from foretell.ops.parsing import parse_json
from foretell.speculation.strategy import Speculative

SCHEMA = "foretell.store/1"


@runtime_checkable
class Store(Protocol):
    """A shared object that can be kept in a file."""

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything it has learnt; at least one tensor, an empty one if need be."""

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Learns that instead of what it knows. Raises ValueError where the tensors do not fit
        together.
        """


def iterate_stores(engine: Engine) -> Iterator[tuple[str, Drafter, str, Store]]:
    """(tenant, drafter, name, store) of everything that can be kept."""
    for key, store in engine.stores.items():
        tenant, owner, name = key
        if isinstance(owner, Drafter) and isinstance(store, Store):
            yield tenant, owner, name, store


def _digest_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return digest.hexdigest()


def save_stores(engine: Engine, folder: Path) -> list[Path]:
    """Writes every store into the folder, each file replaced as a whole; returns the files.

    Raises BadFile where they cannot be written: then no file of the folder was changed.
    """
    parts: dict[Path, Path] = {}  # each file, and what it is written to first
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for tenant, owner, name, store in iterate_stores(engine):
            metadata = _describe_store(engine, tenant, owner, name)
            path = folder / _file_name(metadata)
            parts[path] = path.with_suffix(".part")
            tensors = {}
            for key, value in store.tensors().items():
                tensors[key] = value.detach().cpu().contiguous()
            save_file(tensors, parts[path], metadata | {"sha256": _digest_tensors(tensors)})
        for path, part in parts.items():
            os.replace(part, path)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or first_message_line(error)
        raise BadFile(
            f"{folder}: what drafters learnt cannot be written there ({reason}); "
            "make room, or give another folder"
        ) from error
    finally:
        for part in parts.values():
            with suppress(OSError):
                part.unlink(missing_ok=True)
    return list(parts)


def _describe_store(engine: Engine, tenant: str, owner: Drafter, name: str) -> dict[str, str]:
    """The header of a store's file, but for the checksum."""
    return {
        "schema": SCHEMA,
        "tenant": tenant,
        "method": type(owner).__module__.rpartition(".")[2].replace("_", "-"),
        "name": name,
        "fields": json.dumps(dataclasses.asdict(owner)),  # type: ignore[call-overload]
        "vocab": str(engine.models["target"].vocab),
    }


def _file_name(metadata: Mapping[str, str]) -> str:
    identity = [metadata["tenant"], metadata["method"], metadata["fields"], metadata["name"]]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]
    return f"{metadata['method']}-{key}.safetensors"


def load_stores(engine: Engine, folder: Path) -> list[Path]:
    """Gives the engine every store of the folder; returns the files. Raises BadFile, then nothing
    was taken in.
    """
    if not folder.is_dir():
        raise BadFile(f"{folder}: no such folder of stores; save one first")
    paths = sorted(folder.glob("*.safetensors"))
    previous_stores = dict(engine.stores)
    try:
        for path in paths:
            _restore_store(engine, path)
    except BaseException:
        engine.stores.clear()
        engine.stores.update(previous_stores)
        raise
    return paths


def _restore_store(engine: Engine, path: Path) -> None:
    cure = "delete it, or save it again"
    try:
        with safe_open(path, "pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise BadFile(f"{path}: damaged or cut off ({_one_line(error)}); {cure}") from error
    if metadata.get("schema") != SCHEMA:
        raise BadFile(
            f"{path}: no store of drafts (its header lacks {SCHEMA}); take it out of the folder"
        )
    vocab = engine.models["target"].vocab
    if metadata.get("vocab") != str(vocab):
        raise BadFile(
            f"{path}: of a model with {metadata.get('vocab')} tokens, this one has {vocab}; "
            "use another folder"
        )
    if metadata.get("sha256") != _digest_tensors(tensors):
        raise BadFile(f"{path}: damaged (its checksum is not that of its content); {cure}")
    try:
        fields: dict[str, Any] = parse_json(metadata["fields"])
        values = {}
        for key, value in fields.items():
            values[key] = tuple(value) if isinstance(value, list) else value
        owner = registry.load_method(metadata["method"], "drafter")(**values)
        ctx = Context(engine, Request([0], Speculative(owner), tenant=metadata["tenant"]))
        store_key = metadata["tenant"], owner, metadata["name"]
        engine.stores.pop(store_key, None)
        owner.start(ctx.scope_to(owner))  # makes an empty store
        engine.stores[store_key].restore(tensors)
    except (ForetellError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise BadFile(f"{path}: does not fit this version ({_one_line(error)}); {cure}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
