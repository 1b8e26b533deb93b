"""The JSON document of a comparison, run by run, so that parts measured apart can be merged.

`settings` holds what all parts share, `contenders` describes who took part, and each of `parts` is
one start of the command: its machine, the memory's speed beside it, what loading took, the steps'
costs, `prefill` rows ([contender, round, seconds]) and `runs`, rows of COLUMNS by set.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foretell.errors import BadFile

SCHEMA = "foretell.compare/2"
COLUMNS = ("contender", "prompt", "round", "tokens_per_s", "MAT", "first_s", "digest")
SECTIONS = ("settings", "contenders", "parts")
Document = dict[str, Any]


def read(path: Path) -> Document:
    """Raises BadFile for anything else."""
    try:
        document = json.loads(path.read_text("utf-8"))
        if document["schema"] != SCHEMA or not all(document[name] for name in SECTIONS):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadFile(f"{path}: is no document of scripts/compare.py; measure it again") from error
    return dict(document)


def text(document: Document) -> str:
    """As it is written, a run a line."""
    whole = json.dumps(document, indent=1)
    return re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda found: _line(found[1]), whole) + "\n"


def _line(values: str) -> str:
    return "[" + re.sub(r",\n\s+", ", ", values) + "]"


def merge(documents: Sequence[Document], names: Sequence[str]) -> Document:
    """One document with the parts of all. `names`: of the files, for the error.

    Raises BadFile where they were measured with different settings.
    """
    first, *others = documents
    merged = {key: first[key] for key in ("schema", "settings")}
    merged["contenders"] = dict(first["contenders"])
    merged["parts"] = list(first["parts"])
    for document, name in zip(others, names[1:], strict=True):
        for key, value in first["settings"].items():
            other = document["settings"].get(key)
            if other != value:
                raise BadFile(
                    f"{name}: was measured with another {key} ({other} there, {value} in "
                    f"{names[0]}); measure it again"
                )
        merged["contenders"] |= document["contenders"]
        merged["parts"] += document["parts"]
    return merged
