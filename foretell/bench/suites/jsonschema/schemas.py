"""The schemas of the suite: of files, or generated."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.bench.settings import Settings
from foretell.errors import BadConfig

GENERATED = "generated"
COUNT = 24  # schemas that are generated
DEPTH = 2  # objects and lists inside each other
DRAFTS = {  # a folder's name says which version its schemas are of, where they do not
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
WORDS = "age city code color count date email kind label name note owner price size state title"


@dataclass(frozen=True)
class Item:
    """A schema, the set it counts in, and its name there."""

    set: str
    name: str
    schema: Any


def prepare(given: Sequence[str | Path], settings: Settings, limit: int = 0) -> list[Item]:
    """The schemas of these files and folders, or generated ones where there are none.

    `limit`: of each set, drawn by the seed and kept in their order; 0: all. Raises BadConfig.
    """
    if not given:
        return generated(settings.seed, limit or COUNT)
    items = [item for path in given for item in _read(Path(path))]
    names = [(item.set, item.name) for item in items]
    seen: set[tuple[str, str]] = set()
    for number, name in enumerate(names):
        if name in seen:  # two groups of tests may have one description
            items[number] = Item(name[0], f"{name[1]} ({number})", items[number].schema)
        seen.add(name)
    if not limit:
        return items
    kept: list[Item] = []
    for set_ in dict.fromkeys(item.set for item in items):
        own = [item for item in items if item.set == set_]
        places = random.Random(f"{settings.seed} {set_}").sample(range(len(own)), len(own))
        kept += [own[place] for place in sorted(places[:limit])]
    return kept


def _read(path: Path) -> list[Item]:
    if not path.exists():
        raise BadConfig(f"--schemas {path}: does not exist; name a file or a folder of schemas")
    if not path.is_dir():
        return list(_file(path))
    if (path / "tests").is_dir() and (path / "remotes").is_dir():
        path /= "tests"  # the official suite; remotes are what some of its schemas refer to
    files = [file for file in sorted(path.rglob("*")) if file.suffix in (".json", ".jsonl")]
    if not files:
        raise BadConfig(f"--schemas {path}: has no .json or .jsonl files; name another folder")
    return [item for file in files for item in _file(file)]


def _file(path: Path) -> Iterator[Item]:
    """A schema; or rows that have one, one a line or in a list; or one such row."""
    lines = path.suffix == ".jsonl"
    try:
        text = path.read_text("utf-8")
        rows = [json.loads(line) for line in text.split("\n") if line.strip()] if lines else None
        document = json.loads(text) if rows is None else rows
    except (OSError, ValueError, RecursionError) as error:
        what = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise BadConfig(f"--schemas {path}: cannot be read ({what}); give JSON files") from None
    draft = next((part for part in reversed(path.parts[:-1]) if part in DRAFTS), "")
    set_ = draft or (path.stem if lines or path.parent.name == "" else path.parent.name)
    if isinstance(document, dict) and "schema" not in document:
        yield Item(set_, path.stem, document)
        return
    rows = document if isinstance(document, list) else [document]
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or "schema" not in row:
            where = f"line {number}" if lines else f"entry {number}"
            raise BadConfig(f"--schemas {path}, {where}: has no `schema`; give one a row")
        told = row.get("name") or row.get("description") or str(number)
        name = path.stem if row is document else told if lines else f"{path.stem}: {told}"
        yield Item(str(row.get("split") or set_), str(name), _dated(row["schema"], draft))


def _dated(schema: Any, draft: str) -> Any:
    """The schema with the version that its folder says, unless it names one."""
    if not draft or not isinstance(schema, dict) or "$schema" in schema:
        return schema
    return {"$schema": DRAFTS[draft], **schema}


def generated(seed: int, count: int) -> list[Item]:
    """Schemas of objects, always the same for a seed; every text in them has a length limit."""
    items = []
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        items.append(Item(GENERATED, str(number), _object(rng, DEPTH, {})))
    return items


def _object(rng: random.Random, depth: int, shared: dict[str, Any]) -> dict[str, Any]:
    """An object of two to four properties; the outermost one has what others refer to."""
    outermost = depth == DEPTH
    names = rng.sample(WORDS.split(), rng.randint(2, 4))
    properties = {name: _value(rng, depth - 1, shared) for name in names}
    schema: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        "required": sorted(rng.sample(names, rng.randint(1, len(names)))),
        "additionalProperties": False,
    }
    if outermost and shared:
        schema["$defs"] = shared
    return schema


def _value(rng: random.Random, depth: int, shared: dict[str, Any]) -> dict[str, Any]:
    low = rng.randint(-20, 20)
    limited = {"type": "string", "minLength": 1, "maxLength": rng.randint(4, 16)}
    kinds: list[dict[str, Any]] = [
        limited,
        {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 400)},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 10**6},
        {"type": "boolean"},
        {"enum": rng.sample(WORDS.split(), 3)},
        {"const": rng.choice(WORDS.split())},
        {"type": "string", "pattern": rng.choice(["^[A-Z]{3}-[0-9]{2,4}$", "^#[0-9a-f]{6}$"])},
        {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])},
        {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        {"$ref": "#/$defs/short"},
    ]
    if depth > 0:
        most = rng.randint(1, 3)
        item = _value(rng, depth - 1, shared)
        kinds.append({"type": "array", "items": item, "minItems": 1, "maxItems": most})
        kinds.append(_object(rng, depth - 1, shared))
    chosen = rng.choice(kinds)
    if "$ref" in json.dumps(chosen):
        shared["short"] = {"type": "string", "maxLength": 8}
    return chosen
