"""What a draft model says of its exits: the field `foretell_exits` of its config.json.

layers   the numbers of layers after which it may stop, ascending, the last one all of them
targets  a table for each target that it was measured with: `norm` and `format` say which one,
         `thresholds` (one an exit but the last) from which probability of its best token on an exit
         drafts; above 1: it is left out
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.errors import BadConfig, BadFile, BadModel
from foretell.ops.files import write_text
from foretell.ops.fingerprint import norm_mark
from foretell.ops.parsing import parse_json

FIELD = "foretell_exits"
MAKE = "train it again with `foretell train draft --exits`"


@dataclass(frozen=True)
class Exits:
    """Exits of a model. `targets` are tables as above."""

    layers: tuple[int, ...]
    targets: tuple[Mapping[str, Any], ...] = ()

    def thresholds_for(self, target: Any) -> tuple[float, ...] | None:
        """Thresholds that were measured with this target, in its number format or else in another;
        None: they never were.
        """
        target_mark, format_name = norm_mark(target), number_format(target)
        same_norm = [
            table for table in self.targets if target_mark and table["norm"] == target_mark
        ]
        matching_table = next(
            (table for table in same_norm if table["format"] == format_name),
            next(iter(same_norm), None),
        )
        return None if matching_table is None else tuple(matching_table["thresholds"])


def exits_by_thirds(layers: int) -> tuple[int, ...]:
    """Exits after each third of so many layers."""
    return tuple(sorted({max(1, layers * part // 3) for part in (1, 2, 3)}))


def check_exits(name: str, exits: Sequence[int], layers: int) -> tuple[int, ...]:
    """The exits, with the last layer at the end. Raises BadConfig, for the field `name`."""
    all_exits = (*exits, *([layers] if layers not in exits else []))
    if list(all_exits) != sorted({*all_exits}) or not 1 <= all_exits[0] <= all_exits[-1] == layers:
        allowed_exits = f"numbers of layers from 1 to {layers}, ascending"
        raise BadConfig.field(name, " ".join(map(str, exits)), allowed_exits)
    return all_exits


def number_format(model: Any) -> str:
    """The number format of a model's matrices, as `dtype` names it."""
    return getattr(model, "matrices", None) or str(model.dtype).removeprefix("torch.")


def trained_exits(model: Any) -> Exits | None:
    """The exits that a model was trained with; None: it says nothing of any. Raises BadModel."""
    config = getattr(getattr(model, "hf", None), "config", None)
    return read_exits(getattr(config, FIELD, None), len(model.layout), model.name)


def read_exits(field_value: Any, layers: int, name: str) -> Exits | None:
    """The field's value. Raises BadModel, for the model `name`, where it is damaged."""
    if field_value is None:
        return None
    try:
        exits = check_exits("layers", [int(layer) for layer in field_value["layers"]], layers)
        tables = [dict(table) for table in field_value.get("targets", ())]
        for table in tables:
            table["thresholds"] = [float(value) for value in table["thresholds"]]
            are_thresholds = all(
                value >= 0 and math.isfinite(value) for value in table["thresholds"]
            )
            has_names = isinstance(table["norm"], str) and isinstance(table["format"], str)
            if not (are_thresholds and has_names and len(table["thresholds"]) == len(exits) - 1):
                raise ValueError("a target's table")
    except (BadConfig, AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadModel(
            f"{name}: {FIELD} of its config.json is damaged ({error}); {MAKE}"
        ) from error
    return Exits(exits, tuple(tables))


def write_exit_table(folder: Path, target: Any, name: str, measured: Mapping[str, Any]) -> None:
    """Writes what was `measured` for a target into the configuration of a draft model's folder, in
    the place of what stood there for it. Raises BadFile where there are no exits to add to.
    """
    path = folder / "config.json"
    try:
        config = parse_json(path.read_text("utf-8"))
        exits = config[FIELD]
        other_tables = list(exits.get("targets", ()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadFile(f"{path}: no configuration of a model with exits; {MAKE}") from error
    table_key = {"norm": norm_mark(target), "format": number_format(target)}
    other_tables = [
        table
        for table in other_tables
        if {part: table.get(part) for part in table_key} != table_key
    ]
    config[FIELD] = {**exits, "targets": [*other_tables, {"name": name, **table_key, **measured}]}
    write_text(path, json.dumps(config, indent=2) + "\n")
