"""The JSON document of a bench: begun, continued, written."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

import foretell
from foretell.engine.cost_profile import processor_name
from foretell.errors import BadFile
from foretell.ops.files import write_text

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SCHEMA = "foretell.measure.bench/1"
# What a document must share to be continued.
SAME = ("schema", "version", "settings", "machine", "versions")


def begin_document(
    settings: DataclassInstance,
    sets: Mapping[str, Sequence[Any]],
    path: Path | None = None,
    schema: str = SCHEMA,
) -> dict[str, Any]:
    """A document without cells, or that of `path` if it was begun the same way.

    `settings`: a dataclass; `sets`: prompts, or what a suite is run on; `schema`: the suite's.
    Raises BadFile where it was not.
    """
    document = _new_document(settings, sets, schema)
    earlier_document = open_document(path, schema) if path else None
    if earlier_document is None:
        return document
    for field_name in SAME:
        earlier_value = earlier_document.get(field_name)
        new_value = document[field_name]
        if earlier_value == new_value:
            continue
        if isinstance(earlier_value, dict) and isinstance(new_value, dict):
            key = next(
                key
                for key in [*new_value, *earlier_value]
                if earlier_value.get(key) != new_value.get(key)
            )
            field_name = f"{field_name}.{key}"
            earlier_value = earlier_value.get(key)
            new_value = new_value.get(key)
        raise BadFile(
            f"{path}: was measured with another {field_name} ({earlier_value} there, "
            f"{new_value} here); name another file"
        )
    return earlier_document


def _new_document(
    settings: DataclassInstance, sets: Mapping[str, Sequence[Any]], schema: str
) -> dict[str, Any]:
    set_digests = {}
    for set_name, prompts in sets.items():
        set_digests[set_name] = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]
    document: dict[str, Any] = {
        "schema": schema,
        "version": foretell.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "machine": {
            "processor": processor_name(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "system": platform.system(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "settings": dataclasses.asdict(settings) | {"sets": set_digests},
        "bandwidth": None,
        "peak_memory": None,
        "memory_limit": None,
        "models": [],
        "cells": [],
    }
    stored_document: dict[str, Any] = json.loads(json.dumps(document))  # tuples become lists
    return stored_document


def open_document(path: Path, schema: str = SCHEMA) -> dict[str, Any] | None:
    """The document of an earlier run, or None where there is no file. Raises BadFile for anything
    else.
    """
    if not path.exists():
        return None
    try:
        document = json.loads(path.read_text("utf-8"))
        if document["schema"] != schema or not isinstance(document["cells"], list):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadFile(
            f"{path}: exists and is no document of foretell bench; name another file"
        ) from error
    return dict(document)


def write_document(document: Mapping[str, Any], path: Path) -> None:
    """Writes a document, whole or not at all. Raises BadFile."""
    write_text(path, json.dumps(document, indent=1) + "\n")
