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
        sampling_words = f"temperature {self.temperature:g}" if self.temperature else "greedy"
        request_words = "one request" if self.requests == 1 else f"{self.requests} requests at once"
        context_words = "" if self.context is None else f", after {self.context:,} tokens"
        return f"{self.model}, {self.computed_in}, {sampling_words}, {request_words}{context_words}"

    def ratio(self, name: str, set_name: str) -> dict[str, float] | None:
        """A contender's speed against the baseline's on one set, if it is known."""
        ratio: dict[str, float] | None = self.rows[name].get(set_name, {}).get("ratio")
        return ratio

    def mean(self, name: str) -> float | None:
        """Geometric mean of the median ratios over the sets; None where one is missing."""
        logarithms = []
        for set_name in self.sets:
            median_ratio = (self.ratio(name, set_name) or {}).get("median")
            if not median_ratio:
                return None
            logarithms.append(math.log(median_ratio))
        return math.exp(sum(logarithms) / len(logarithms))

    def finished(self, name: str) -> list[Cell]:
        """The cells of a contender that did not fail, a set each."""
        return [cell for cell in self.rows.get(name, {}).values() if cell["status"] == "ok"]

    def text(self) -> list[list[str]]:
        """For a terminal: a line a contender, with its ratio, range and MAT on each set."""
        lines = [["", *self.sets, "mean"]]
        for name, cells in self.rows.items():
            mean_ratio = self.mean(name)
            row_texts = [name]
            row_texts += [_cell_text(cells.get(set_)) for set_ in self.sets]
            row_texts.append("" if mean_ratio is None else f"{mean_ratio:.2f}")
            lines.append(row_texts)
        return lines


def tables(document: dict[str, Any]) -> list[Table]:
    """The tables of a document, in the order in which they were measured."""
    computed_in = {}
    for model in document["models"]:
        computed_in[model["model"], model["dtype"]] = model["computed_in"]
    tables_by_key: dict[tuple[Any, ...], Table] = {}
    for cell in document["cells"]:
        model_and_dtype = cell["model"], cell["dtype"]
        table_key = (*model_and_dtype, cell["temperature"], cell["requests"], cell["context"])
        if table_key not in tables_by_key:
            tables_by_key[table_key] = Table(
                *table_key, computed_in.get(model_and_dtype, cell["dtype"]), [], {}
            )
        table = tables_by_key[table_key]
        if cell["set"] not in table.sets:
            table.sets.append(cell["set"])
        table.rows.setdefault(cell["contender"], {})[cell["set"]] = cell
    return list(tables_by_key.values())


def failures(document: dict[str, Any]) -> list[str]:
    """A line for each thing that failed."""
    sets_by_failure: dict[str, list[str]] = {}
    for cell in document["cells"]:
        if cell["status"] == "failed":
            failure_text = f"{cell['contender']} on {cell['model']}: {cell['reason']}"
            sets_by_failure.setdefault(failure_text, []).append(cell["set"])
    return [
        f"{failure_text} ({', '.join(dict.fromkeys(set_names))})"
        for failure_text, set_names in sets_by_failure.items()
    ]


def mean_draft_size(cells: Sequence[Cell]) -> float | None:
    """Mean number of nodes drafted a step; None where that is not known."""
    node_count = 0
    step_count = 0
    for cell in cells:
        for draft_size, count in (cell.get("drafted_a_step") or {}).items():
            node_count += int(draft_size) * count
            step_count += count
    return node_count / step_count if step_count else None


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
