"""What a draft model says of its exits: the field `foretell_exits` of its config.json.

layers   the numbers of layers behind which it may stop, ascending, the last one all of them
targets  a table for each target that it was measured with: `norm` and `format` say which one,
         `thresholds` (one an exit but the last) from which chance of its best token on an exit
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
from foretell.ops.parsing import json_of

FIELD = "foretell_exits"
MAKE = "train it again with `foretell train draft --exits`"


@dataclass(frozen=True)
class Exits:
    """Of a model. `targets` are tables as above."""

    layers: tuple[int, ...]
    targets: tuple[Mapping[str, Any], ...] = ()

    def thresholds(self, target: Any) -> tuple[float, ...] | None:
        """What was measured with this target, in its number format or else in another; None: it
        never was.
        """
        mark, kind = norm_mark(target), number_format(target)
        same = [table for table in self.targets if mark and table["norm"] == mark]
        found = next((table for table in same if table["format"] == kind), next(iter(same), None))
        return None if found is None else tuple(found["thresholds"])


def thirds(layers: int) -> tuple[int, ...]:
    """Exits behind each third of so many layers."""
    return tuple(sorted({max(1, layers * part // 3) for part in (1, 2, 3)}))


def checked(name: str, exits: Sequence[int], layers: int) -> tuple[int, ...]:
    """The exits, with the last layer at the end. Raises BadConfig, for the field `name`."""
    found = (*exits, *([layers] if layers not in exits else []))
    if list(found) != sorted({*found}) or not 1 <= found[0] <= found[-1] == layers:
        allowed = f"numbers of layers from 1 to {layers}, ascending"
        raise BadConfig.field(name, " ".join(map(str, exits)), allowed)
    return found


def number_format(model: Any) -> str:
    """Of a model's matrices, as `dtype` names it."""
    return getattr(model, "matrices", None) or str(model.dtype).removeprefix("torch.")


def trained(model: Any) -> Exits | None:
    """The exits that a model was trained with; None: it says nothing of any. Raises BadModel."""
    config = getattr(getattr(model, "hf", None), "config", None)
    return read(getattr(config, FIELD, None), len(model.layout), model.name)


def read(told: Any, layers: int, name: str) -> Exits | None:
    """The field's value. Raises BadModel, for the model `name`, where it is damaged."""
    if told is None:
        return None
    try:
        exits = checked("layers", [int(layer) for layer in told["layers"]], layers)
        tables = [dict(table) for table in told.get("targets", ())]
        for table in tables:
            table["thresholds"] = [float(value) for value in table["thresholds"]]
            right = all(value >= 0 and math.isfinite(value) for value in table["thresholds"])
            named = isinstance(table["norm"], str) and isinstance(table["format"], str)
            if not (right and named and len(table["thresholds"]) == len(exits) - 1):
                raise ValueError("a target's table")
    except (BadConfig, AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadModel(
            f"{name}: {FIELD} of its config.json is damaged ({error}); {MAKE}"
        ) from error
    return Exits(exits, tuple(tables))


def keep(folder: Path, target: Any, name: str, found: Mapping[str, Any]) -> None:
    """Writes what was `found` for a target into the configuration of a draft model's folder, in the
    place of what stood there for it. Raises BadFile where there are no exits to add to.
    """
    path = folder / "config.json"
    try:
        config = json_of(path.read_text("utf-8"))
        exits = config[FIELD]
        others = list(exits.get("targets", ()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadFile(f"{path}: no configuration of a model with exits; {MAKE}") from error
    key = {"norm": norm_mark(target), "format": number_format(target)}
    others = [table for table in others if {part: table.get(part) for part in key} != key]
    config[FIELD] = {**exits, "targets": [*others, {"name": name, **key, **found}]}
    write_text(path, json.dumps(config, indent=2) + "\n")
