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
from foretell.bench.report.markup import format_percent, render_section
from foretell.bench.report.plot import line_chart
from foretell.bench.report.tables import Table, mean_draft_size

Colours = Mapping[str, str]  # by contender
CURVE_COLOURS = ("var(--s1)", "var(--s0)")  # after a short and after a long text


def costs_by_context(tables: Sequence[Table], colours: Colours) -> str:
    """Section on the cost of a token by context length; "" where there is nothing to compare."""
    chart_parts = []
    for group in _group_alike(table for table in tables if table.context is not None):
        group.sort(key=lambda table: (table.context or 0, table.requests))
        context_lengths = [float(table.context or 0) for table in group]
        group_title = group[0].title.partition(", after")[0]
        chart_parts += _cost_charts(
            group_title, group, context_lengths, "tokens of the prompt", colours
        )
    if not chart_parts:
        return ""
    explanation = (
        "After prompts of that many tokens, which end alike: texts of all sets, each after the "
        "others."
    )
    return render_section("Cost of a token by context", _explain_costs(explanation), *chart_parts)


def costs_by_requests(tables: Sequence[Table], colours: Colours) -> str:
    """Section on the cost of a token by requests at once; "" where there is nothing to compare."""
    chart_parts = []
    for group in _group_alike(table for table in tables if table.context is None):
        group.sort(key=lambda table: table.requests)
        request_counts = [float(table.requests) for table in group]
        group_title = group[0].title.rpartition(", ")[0]
        chart_parts += _cost_charts(group_title, group, request_counts, "requests at once", colours)
    if not chart_parts:
        return ""
    explanation = "All requests together, in one batch; geometric mean of the sets."
    return render_section(
        "Cost of a token by requests at once", _explain_costs(explanation), *chart_parts
    )


def _explain_costs(first_sentence: str) -> str:
    return (
        f"{first_sentence} After the first token; whiskers are the 10th to 90th percentile. "
        "Below it what was drafted a step, which the policy turns down where it does not pay."
    )


def _group_alike(tables: Any) -> list[list[Table]]:
    """Tables that differ in context and requests alone, together."""
    groups: dict[tuple[Any, ...], list[Table]] = {}
    for table in tables:
        groups.setdefault((table.model, table.dtype, table.temperature), []).append(table)
    return list(groups.values())


def _cost_charts(
    title: str,
    group: Sequence[Table],
    table_positions: Sequence[float],
    axis: str,
    colours: Colours,
) -> list[str]:
    """A heading, a chart and a table of contenders that are in at least two of these tables.

    `table_positions`: where each table lies on the axis.
    """
    names = []
    curves = []
    ranges = []
    for name in group[0].rows:
        token_costs = [_token_cost(table, name) for table in group]
        known_costs = [
            (position, cost)
            for position, cost in zip(table_positions, token_costs, strict=True)
            if cost is not None
        ]
        if len(known_costs) > 1:
            names.append(name)
            curves.append([(position, cost[0]) for position, cost in known_costs])
            ranges.append([cost[1:] for _, cost in known_costs])
    if not names:
        return []
    curve_colours = [colours[name] for name in names]
    chart = line_chart(
        names, curves, axis, "ms a token", curve_colours, logarithmic=True, ranges=ranges
    )
    return [f"<h3>{escape(title)}</h3>", chart, _size_table(group, names, colours, table_positions)]


def _token_cost(table: Table, name: str) -> tuple[float, float, float] | None:
    """Milliseconds a token of the whole batch, and their range: geometric means over the sets."""
    speed_ranges = []
    for cell in table.finished(name):
        if cell["tokens_per_s"]:
            speed_ranges.append(cell["tokens_per_s"])
    if not speed_ranges:
        return None
    cost_range = []
    for percentile in ("median", "high", "low"):
        mean_speed = math.exp(
            sum(math.log(speed[percentile]) for speed in speed_ranges) / len(speed_ranges)
        )
        cost_range.append(1000 / mean_speed)
    return cost_range[0], cost_range[1], cost_range[2]


def _size_table(
    group: Sequence[Table], names: Sequence[str], colours: Colours, table_positions: Sequence[float]
) -> str:
    """A row a contender: its cost, ratio to the baseline, nodes drafted a step, the host's
    share.
    """
    rows = []
    for name in names:
        row_cells = markup.name_cell(name, colours[name])
        for table in group:
            row_cells += f"<td>{_size_cell(table, name)}</td>"
        rows.append(row_cells)
    return markup.render_table(["", *(f"{position:,.0f}" for position in table_positions)], rows)


def _size_cell(table: Table, name: str) -> str:
    cells = table.finished(name)
    cell_text = ""
    if token_cost := _token_cost(table, name):
        cell_text += f"<b>{token_cost[0]:.2f} ms</b>"
    mean_ratio = table.mean(name) if name in table.rows else None
    if mean_ratio is not None:
        cell_text += f"<small>{mean_ratio:.2f}x</small>"
    draft_size = mean_draft_size(cells)
    if draft_size is not None:
        cell_text += f"<small>{draft_size:.1f} drafted</small>"
    host_shares = [cell["host_share"] for cell in cells if cell.get("host_share") is not None]
    if host_shares:
        cell_text += f"<small>host {format_percent(sum(host_shares) / len(host_shares))}</small>"
    return cell_text


def forward_costs(document: dict[str, Any], tables: Sequence[Table], colours: Colours) -> str:
    """Section on the cost of a forward and the sizes that methods chose; "" without models."""
    chart_parts = []
    for model in document["models"]:
        names = []
        curves = []
        for row_count, seconds in model["seconds"].items():
            names.append(f"after {row_count} tokens")
            curves.append(
                [
                    (float(token_count), 1000 * forward_seconds)
                    for token_count, forward_seconds in seconds.items()
                ]
            )
        model_and_dtype = model["model"], model["dtype"]
        model_tables = [table for table in tables if (table.model, table.dtype) == model_and_dtype]
        size_marks = _chosen_sizes(model_tables, curves[0], colours)
        model_title = f"{model['model']}, {model['computed_in']}"
        axis_titles = "tokens in a forward", "milliseconds"
        chart = line_chart(
            names, curves, *axis_titles, CURVE_COLOURS, marks=size_marks, logarithmic=True
        )
        chart_parts += [f"<h3>{escape(model_title)}</h3>", chart]
    if not chart_parts:
        return ""
    return render_section(
        "Cost of a forward, and the sizes chosen",
        "What a forward takes by its tokens; the dots are the mean size of each method's steps, "
        "the last committed token counted.",
        *chart_parts,
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
            draft_size = mean_draft_size(table.finished(name))
            if draft_size and name not in marks:
                marks[name] = (
                    draft_size + 1,
                    _interpolate(curve, draft_size + 1),
                    name,
                    colours[name],
                )
    return list(marks.values())


def _interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    for (left_x, left_y), (right_x, right_y) in itertools.pairwise(points):
        if left_x <= x <= right_x:
            return left_y + (right_y - left_y) * (x - left_x) / (right_x - left_x)
    return points[-1][1] if x > points[0][0] else points[0][1]
