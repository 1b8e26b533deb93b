"""Recipes: all settings of a training run in a TOML file, found by name or path.

A field has the name of the command's option: `answer-tokens = 224` is `--answer-tokens 224`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretell.errors import BadConfig, BadFile, UnknownMethod
from foretell.ops.assets import ASSETS
from foretell.ops.files import write_text
from foretell.ops.parsing import parse_toml

FOLDER = ASSETS / "recipes"
KEPT = "recipe.toml"  # in a run's folder: all of its settings, wherever they came from


SIZE = (1, 1 << 40)
RATE = (0, 10)
OF_RUNS = {  # what all trainers' settings have, and the least and the most of each
    "window": (16, 1 << 20),
    "tokens": SIZE,
    "batch": SIZE,
    "micro": SIZE,
    "warmup": SIZE,
    "decay": (0, 1),
    "seed": (0, 1 << 31),
}


def check_ranges(settings: Any, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Raises BadConfig for the first field that is outside its range."""
    for name, (lower, upper) in ranges.items():
        value = getattr(settings, name)
        if not lower <= value <= upper:
            raise BadConfig.field(name, value, f"between {lower:,} and {upper:,}")


def check_batches(settings: Any) -> None:
    """Raises BadConfig where a step is no whole number of forwards, or a forward holds no text."""
    if settings.micro < settings.window:
        allowed_values = f"at least window={settings.window}, which a lower --window allows"
        raise BadConfig.field("micro", settings.micro, allowed_values)
    if settings.batch % settings.micro:
        allowed_values = f"a multiple of micro={settings.micro}"
        raise BadConfig.field("batch", settings.batch, allowed_values)


def shipped_recipes() -> dict[str, Path]:
    """Recipes that come with the package, by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}


def find_recipe(name: str) -> Path:
    """The file of a recipe that ships, or the one of this path. Raises BadConfig."""
    if name in shipped_recipes():
        return shipped_recipes()[name]
    path = Path(name)
    if path.suffix == ".toml" or path.is_file():
        return path
    if path.is_dir():
        raise BadConfig(f"--recipe {name}: a folder; name a .toml file")
    raise UnknownMethod.suggest_names("recipe", name, shipped_recipes())


def read_recipe(path: Path) -> dict[str, Any]:
    """The fields of a file, `-` in their names as `_`. Raises BadFile."""
    try:
        table = parse_toml(path.read_text("utf-8-sig"))
    except OSError as error:
        raise BadFile(f"{path}: cannot be read ({error.strerror}); name a recipe's file") from error
    except ValueError as error:
        raise BadFile(f"{path}: is no TOML file ({error}); correct it") from error
    return {name.replace("-", "_"): value for name, value in table.items()}


def write_recipe(fields: Mapping[str, Any], folder: Path) -> None:
    """Keeps a run's settings in its folder, as a recipe that repeats it. Raises BadFile."""
    # Texts, numbers, booleans and lists of them are written alike in JSON and in TOML.
    lines = [
        f"{name.replace('_', '-')} = {json.dumps(value, ensure_ascii=False)}"
        for name, value in fields.items()
    ]
    write_text(folder / KEPT, "\n".join(lines) + "\n")
