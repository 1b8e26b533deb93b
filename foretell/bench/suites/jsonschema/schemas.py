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


def prepare(paths: Sequence[str | Path], settings: Settings, limit: int = 0) -> list[Item]:
    """The schemas of these files and folders, or generated ones where there are none.

    `limit`: of each set, drawn by the seed and kept in their order; 0: all. Raises BadConfig.
    """
    if not paths:
        return generate_schemas(settings.seed, limit or COUNT)
    items = [item for path in paths for item in _read_path(Path(path))]
    names = [(item.set, item.name) for item in items]
    seen_names: set[tuple[str, str]] = set()
    for number, name in enumerate(names):
        if name in seen_names:  # two groups of tests may have one description
            items[number] = Item(name[0], f"{name[1]} ({number})", items[number].schema)
        seen_names.add(name)
    if not limit:
        return items
    chosen_items: list[Item] = []
    for set_name in dict.fromkeys(item.set for item in items):
        set_items = [item for item in items if item.set == set_name]
        shuffled_indices = random.Random(f"{settings.seed} {set_name}").sample(
            range(len(set_items)), len(set_items)
        )
        chosen_items += [set_items[item_index] for item_index in sorted(shuffled_indices[:limit])]
    return chosen_items


def _read_path(path: Path) -> list[Item]:
    if not path.exists():
        raise BadConfig(f"--schemas {path}: does not exist; name a file or a folder of schemas")
    if not path.is_dir():
        return list(_read_file(path))
    if (path / "tests").is_dir() and (path / "remotes").is_dir():
        path /= "tests"  # the official suite; remotes are what some of its schemas refer to
    files = [file for file in sorted(path.rglob("*")) if file.suffix in (".json", ".jsonl")]
    if not files:
        raise BadConfig(f"--schemas {path}: has no .json or .jsonl files; name another folder")
    return [item for file in files for item in _read_file(file)]


def _read_file(path: Path) -> Iterator[Item]:
    """A schema; or rows that have one, one a line or in a list; or one such row."""
    is_jsonl = path.suffix == ".jsonl"
    try:
        file_text = path.read_text("utf-8")
        rows = (
            [json.loads(line) for line in file_text.split("\n") if line.strip()]
            if is_jsonl
            else None
        )
        document = json.loads(file_text) if rows is None else rows
    except (OSError, ValueError, RecursionError) as error:
        cause = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise BadConfig(f"--schemas {path}: cannot be read ({cause}); give JSON files") from None
    schema_draft = next((part for part in reversed(path.parts[:-1]) if part in DRAFTS), "")
    set_name = schema_draft or (
        path.stem if is_jsonl or path.parent.name == "" else path.parent.name
    )
    if isinstance(document, dict) and "schema" not in document:
        yield Item(set_name, path.stem, document)
        return
    rows = document if isinstance(document, list) else [document]
    for row_number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or "schema" not in row:
            location = f"line {row_number}" if is_jsonl else f"entry {row_number}"
            raise BadConfig(f"--schemas {path}, {location}: has no `schema`; give one a row")
        row_name = row.get("name") or row.get("description") or str(row_number)
        name = (
            path.stem if row is document else row_name if is_jsonl else f"{path.stem}: {row_name}"
        )
        yield Item(
            str(row.get("split") or set_name), str(name), _add_version(row["schema"], schema_draft)
        )


def _add_version(schema: Any, draft: str) -> Any:
    """The schema with the version that its folder says, unless it names one."""
    if not draft or not isinstance(schema, dict) or "$schema" in schema:
        return schema
    return {"$schema": DRAFTS[draft], **schema}


def generate_schemas(seed: int, count: int) -> list[Item]:
    """Schemas of objects, always the same for a seed; every text in them has a length limit."""
    items = []
    for schema_number in range(count):
        generator = random.Random(f"{seed} {schema_number}")
        items.append(Item(GENERATED, str(schema_number), _draw_object(generator, DEPTH, {})))
    return items


def _draw_object(
    generator: random.Random, depth: int, shared_definitions: dict[str, Any]
) -> dict[str, Any]:
    """An object of two to four properties; the outermost one has what others refer to."""
    is_outermost = depth == DEPTH
    names = generator.sample(WORDS.split(), generator.randint(2, 4))
    properties = {name: _draw_value(generator, depth - 1, shared_definitions) for name in names}
    schema: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        "required": sorted(generator.sample(names, generator.randint(1, len(names)))),
        "additionalProperties": False,
    }
    if is_outermost and shared_definitions:
        schema["$defs"] = shared_definitions
    return schema


def _draw_value(
    generator: random.Random, depth: int, shared_definitions: dict[str, Any]
) -> dict[str, Any]:
    minimum = generator.randint(-20, 20)
    limited_text = {"type": "string", "minLength": 1, "maxLength": generator.randint(4, 16)}
    candidates: list[dict[str, Any]] = [
        limited_text,
        {"type": "integer", "minimum": minimum, "maximum": minimum + generator.randint(0, 400)},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 10**6},
        {"type": "boolean"},
        {"enum": generator.sample(WORDS.split(), 3)},
        {"const": generator.choice(WORDS.split())},
        {
            "type": "string",
            "pattern": generator.choice(["^[A-Z]{3}-[0-9]{2,4}$", "^#[0-9a-f]{6}$"]),
        },
        {"type": "string", "format": generator.choice(["date", "uuid", "ipv4"])},
        {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        {"$ref": "#/$defs/short"},
    ]
    if depth > 0:
        max_items = generator.randint(1, 3)
        item_schema = _draw_value(generator, depth - 1, shared_definitions)
        candidates.append(
            {"type": "array", "items": item_schema, "minItems": 1, "maxItems": max_items}
        )
        candidates.append(_draw_object(generator, depth - 1, shared_definitions))
    chosen_schema = generator.choice(candidates)
    if "$ref" in json.dumps(chosen_schema):
        shared_definitions["short"] = {"type": "string", "maxLength": 8}
    return chosen_schema
