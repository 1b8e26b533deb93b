"""The sections about several tables: what a token costs by context and by requests, and what a
forward costs by its tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from foretell.bench.report import markup
from foretell.bench.report.markup import percent, section
from foretell.bench.report.plot import lines
from foretell.bench.report.tables import Table, drafted

Colours = Mapping[str, str]  # by contender
CURVE_COLOURS = ("var(--s1)", "var(--s0)")  # after a short and after a long text


def by_context(tables: Sequence[Table], colours: Colours) -> str:
    """What a token costs by the length of the context; "" where there is nothing to compare."""
    parts = []
    for group in _alike(table for table in tables if table.context is not None):
        group.sort(key=lambda table: (table.context or 0, table.requests))
        at = [float(table.context or 0) for table in group]
        title = group[0].title.partition(", behind")[0]
        parts += _curves(title, group, at, "tokens of the prompt", colours)
    if not parts:
        return ""
    what = (
        "Behind prompts of that many tokens, which end alike: texts of all sets, each behind the "
        "others."
    )
    return section("Cost of a token by context", _explanation(what), *parts)


def by_requests(tables: Sequence[Table], colours: Colours) -> str:
    """What a token costs by the number of requests at once; "" where there is nothing to
    compare.
    """
    parts = []
    for group in _alike(table for table in tables if table.context is None):
        group.sort(key=lambda table: table.requests)
        at = [float(table.requests) for table in group]
        title = group[0].title.rpartition(", ")[0]
        parts += _curves(title, group, at, "requests at once", colours)
    if not parts:
        return ""
    what = "All requests together, in one batch; geometric mean of the sets."
    return section("Cost of a token by requests at once", _explanation(what), *parts)


def _explanation(what: str) -> str:
    return (
        f"{what} After the first token; whiskers are the 10th to 90th percentile. Below it what "
        "was drafted a step, which the policy turns down where it does not pay."
    )


def _alike(tables: Any) -> list[list[Table]]:
    """Tables that differ in context and requests alone, together."""
    groups: dict[tuple[Any, ...], list[Table]] = {}
    for table in tables:
        groups.setdefault((table.model, table.dtype, table.temperature), []).append(table)
    return list(groups.values())


def _curves(
    title: str, group: Sequence[Table], at: Sequence[float], axis: str, colours: Colours
) -> list[str]:
    """A heading, a chart and a table of contenders that are in at least two of these tables.

    `at`: where each table lies on the axis.
    """
    names = []
    curves = []
    ranges = []
    for name in group[0].rows:
        costs = [_token_cost(table, name) for table in group]
        known = [(x, cost) for x, cost in zip(at, costs, strict=True) if cost is not None]
        if len(known) > 1:
            names.append(name)
            curves.append([(x, cost[0]) for x, cost in known])
            ranges.append([cost[1:] for _, cost in known])
    if not names:
        return []
    shades = [colours[name] for name in names]
    chart = lines(names, curves, axis, "ms a token", shades, log=True, ranges=ranges)
    return [f"<h3>{escape(title)}</h3>", chart, _sizes(group, names, colours, at)]


def _token_cost(table: Table, name: str) -> tuple[float, float, float] | None:
    """Milliseconds a token of the whole batch, and their range: geometric means over the sets."""
    speeds = []
    for cell in table.finished(name):
        if cell["tokens_per_s"]:
            speeds.append(cell["tokens_per_s"])
    if not speeds:
        return None
    costs = []
    for key in ("median", "high", "low"):
        mean = math.exp(sum(math.log(speed[key]) for speed in speeds) / len(speeds))
        costs.append(1000 / mean)
    return costs[0], costs[1], costs[2]


def _sizes(
    group: Sequence[Table], names: Sequence[str], colours: Colours, at: Sequence[float]
) -> str:
    """A row a contender: its cost, ratio to the baseline, nodes drafted a step, the host's
    share.
    """
    rows = []
    for name in names:
        row = markup.name_cell(name, colours[name])
        for table in group:
            row += f"<td>{_size(table, name)}</td>"
        rows.append(row)
    return markup.table(["", *(f"{x:,.0f}" for x in at)], rows)


def _size(table: Table, name: str) -> str:
    cells = table.finished(name)
    text = ""
    if cost := _token_cost(table, name):
        text += f"<b>{cost[0]:.2f} ms</b>"
    mean = table.mean(name) if name in table.rows else None
    if mean is not None:
        text += f"<small>{mean:.2f}x</small>"
    size = drafted(cells)
    if size is not None:
        text += f"<small>{size:.1f} drafted</small>"
    shares = [cell["host_share"] for cell in cells if cell.get("host_share") is not None]
    if shares:
        text += f"<small>host {percent(sum(shares) / len(shares))}</small>"
    return text


def forward_costs(document: dict[str, Any], tables: Sequence[Table], colours: Colours) -> str:
    """What a forward of each model costs, and the sizes that methods chose; "" without models."""
    parts = []
    for model in document["models"]:
        names = []
        curves = []
        for rows, seconds in model["seconds"].items():
            names.append(f"behind {rows} tokens")
            curves.append([(float(n), 1000 * value) for n, value in seconds.items()])
        place = model["model"], model["dtype"]
        own = [table for table in tables if (table.model, table.dtype) == place]
        marks = _chosen_sizes(own, curves[0], colours)
        title = f"{model['model']}, {model['computed_in']}"
        axes = "tokens in a forward", "milliseconds"
        chart = lines(names, curves, *axes, CURVE_COLOURS, marks=marks, log=True)
        parts += [f"<h3>{escape(title)}</h3>", chart]
    if not parts:
        return ""
    return section(
        "Cost of a forward, and the sizes chosen",
        "What a forward takes by its tokens; the dots are the mean size of each method's steps, "
        "the last committed token counted.",
        *parts,
    )


def _chosen_sizes(
    tables: Sequence[Table], curve: Sequence[tuple[float, float]], colours: Colours
) -> list[tuple[float, float, str, str]]:
    """(tokens, milliseconds, name, colour) of the mean step of each method that drafts."""
    marks: dict[str, tuple[float, float, str, str]] = {}
    for table in tables:
        if table.requests > 1 or table.context:
            continue
        for name in table.rows:
            size = drafted(table.finished(name))
            if size and name not in marks:
                marks[name] = size + 1, _interpolated(curve, size + 1), name, colours[name]
    return list(marks.values())


def _interpolated(points: Sequence[tuple[float, float]], x: float) -> float:
    for (left, low), (right, high) in itertools.pairwise(points):
        if left <= x <= right:
            return low + (high - low) * (x - left) / (right - left)
    return points[-1][1] if x > points[0][0] else points[0][1]
