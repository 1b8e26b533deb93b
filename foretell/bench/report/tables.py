"""The cells of a bench's document as tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Cell = dict[str, Any]
UNTIMED = "all at once"  # no token came after the first ones


@dataclass
class Table:
    """All cells of one (model, dtype, temperature, requests, context): `rows[contender][set]`.

    `context`: tokens of the prompts, None: as they are; `computed_in`: the number format that
    `dtype` came to.
    """

    model: str
    dtype: str
    temperature: float
    requests: int
    context: int | None
    computed_in: str
    sets: list[str]
    rows: dict[str, dict[str, Cell]]

    @property
    def title(self) -> str:
        how = f"temperature {self.temperature:g}" if self.temperature else "greedy"
        many = "one request" if self.requests == 1 else f"{self.requests} requests at once"
        after = "" if self.context is None else f", behind {self.context:,} tokens"
        return f"{self.model}, {self.computed_in}, {how}, {many}{after}"

    def ratio(self, name: str, set_: str) -> dict[str, float] | None:
        """A contender's speed against the baseline's on one set, if it is known."""
        ratio: dict[str, float] | None = self.rows[name].get(set_, {}).get("ratio")
        return ratio

    def mean(self, name: str) -> float | None:
        """Geometric mean of the median ratios over the sets; None where one is missing."""
        logarithms = []
        for set_ in self.sets:
            median = (self.ratio(name, set_) or {}).get("median")
            if not median:
                return None
            logarithms.append(math.log(median))
        return math.exp(sum(logarithms) / len(logarithms))

    def finished(self, name: str) -> list[Cell]:
        """The cells of a contender that did not fail, a set each."""
        return [cell for cell in self.rows.get(name, {}).values() if cell["status"] == "ok"]

    def text(self) -> list[list[str]]:
        """For a terminal: a line a contender, with its ratio, range and MAT on each set."""
        lines = [["", *self.sets, "mean"]]
        for name, cells in self.rows.items():
            mean = self.mean(name)
            line = [name]
            line += [_cell_text(cells.get(set_)) for set_ in self.sets]
            line.append("" if mean is None else f"{mean:.2f}")
            lines.append(line)
        return lines


def tables(document: dict[str, Any]) -> list[Table]:
    """The tables of a document, in the order in which they were measured."""
    computed_in = {}
    for model in document["models"]:
        computed_in[model["model"], model["dtype"]] = model["computed_in"]
    made: dict[tuple[Any, ...], Table] = {}
    for cell in document["cells"]:
        place = cell["model"], cell["dtype"]
        key = (*place, cell["temperature"], cell["requests"], cell["context"])
        if key not in made:
            made[key] = Table(*key, computed_in.get(place, cell["dtype"]), [], {})
        table = made[key]
        if cell["set"] not in table.sets:
            table.sets.append(cell["set"])
        table.rows.setdefault(cell["contender"], {})[cell["set"]] = cell
    return list(made.values())


def failures(document: dict[str, Any]) -> list[str]:
    """A line for each thing that failed."""
    sets: dict[str, list[str]] = {}
    for cell in document["cells"]:
        if cell["status"] == "failed":
            what = f"{cell['contender']} on {cell['model']}: {cell['reason']}"
            sets.setdefault(what, []).append(cell["set"])
    return [f"{what} ({', '.join(dict.fromkeys(names))})" for what, names in sets.items()]


def drafted(cells: Sequence[Cell]) -> float | None:
    """Mean number of nodes drafted a step; None where that is not known."""
    nodes = 0
    steps = 0
    for cell in cells:
        for size, count in (cell.get("drafted_a_step") or {}).items():
            nodes += int(size) * count
            steps += count
    return nodes / steps if steps else None


def _cell_text(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell["status"] == "failed":
        return "failed"
    ratio = cell["ratio"]
    speed = cell["tokens_per_s"]
    if speed is None:
        return UNTIMED
    if cell["contender"] == cell["baseline"] or ratio is None:
        return f"{speed['median']:,.1f} tok/s"
    return f"{ratio['median']:.2f} MAT {cell['MAT']:.2f}\n{ratio['low']:.2f} to {ratio['high']:.2f}"
