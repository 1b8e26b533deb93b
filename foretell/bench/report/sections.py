"""The sections about one table: speeds, acceptance, where time goes, steps."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from foretell.bench.report import markup
from foretell.bench.report.markup import format_percent, render_section
from foretell.bench.report.plot import column_chart, line_chart, stacked_chart, track_chart
from foretell.bench.report.tables import UNTIMED, Cell, Table

Colours = Mapping[str, str]  # by contender
DEEPEST = 16  # position in a draft that is shown
FEWEST = 5  # drafted tokens that a point needs, and
FEWEST_SHARE = 1 / 100  # of those of the first position
PARTS = ("target", "draft", "host")  # of a step's time
PART_COLOURS = ("var(--s1)", "var(--s2)", "var(--s0)")
STEP_COLOURS = ("var(--s0)", "var(--s3)", "var(--bad)")  # own tokens, accepted, refused drafts


def headline_section(table: Table, colours: Colours) -> str:
    """The table itself, with all other numbers folded away below it."""
    best_contenders = {set_name: _best_contender(table, set_name) for set_name in table.sets}
    rows = []
    for name, cells in table.rows.items():
        row_cells = markup.name_cell(name, colours[name])
        for set_name in table.sets:
            class_attribute = " class=best" if best_contenders[set_name] == name else ""
            row_cells += f"<td{class_attribute}>{_figure_cell(cells.get(set_name))}</td>"
        mean_ratio = table.mean(name)
        row_cells += f"<td>{'' if mean_ratio is None else f'{mean_ratio:.2f}x'}</td>"
        rows.append(row_cells)
    return render_section(
        table.title,
        "Speed after the first token against the first line, prompt by prompt; below it the range "
        "from the 10th to the 90th percentile and the tokens committed a step (MAT).",
        markup.render_table(["", *table.sets, "mean"], rows),
        _details_element(table),
    )


def _best_contender(table: Table, set_name: str) -> str:
    """The quickest contender on a set, or ""."""
    best_name = ""
    highest_ratio = 0.0
    for name in table.rows:
        ratio = table.ratio(name, set_name)
        if ratio and ratio["median"] > highest_ratio:
            best_name = name
            highest_ratio = ratio["median"]
    return best_name


def _figure_cell(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell["status"] == "failed":
        return f'<span class="bad" title="{escape(cell["reason"])}">failed</span>'
    speed = cell["tokens_per_s"]
    ratio = cell["ratio"]
    if speed is None:
        return UNTIMED
    if cell["contender"] == cell["baseline"] or ratio is None:
        return f"<b>{speed['median']:,.1f}</b><small>tokens/s</small>"
    return (
        f"<b>{ratio['median']:.2f}x</b><small>{ratio['low']:.2f} to {ratio['high']:.2f}</small>"
        f"<small>MAT {cell['MAT']:.1f}</small>"
    )


def _details_element(table: Table) -> str:
    """Element with everything else that is known of a cell, folded away."""
    column_heads = (
        "contender",
        "set",
        "tokens/s",
        "first token",
        "a token",
        "MAT",
        "accepted of drafted",
        "MB read a token",
        "of the bandwidth",
        "host",
        "as plain",
    )
    rows = []
    for name, cells in table.rows.items():
        for set_name, cell in cells.items():
            if cell["status"] == "ok":
                texts = [name, set_name, *_detail_texts(cell)]
                rows.append("".join(f"<td>{escape(text)}</td>" for text in texts))
    all_numbers = markup.render_table(column_heads, rows)
    return f"<details><summary>All numbers</summary>{all_numbers}</details>"


def _detail_texts(cell: Cell) -> list[str]:
    """A cell's figures, from tokens/s on."""
    speed_range = cell["tokens_per_s"]
    seconds_per_token = cell["tpot_s"]
    bytes_read = cell.get("bytes_per_token")
    drafted_tokens = cell.get("drafted")
    return [
        f"{speed_range['median']:,.1f}" if speed_range else UNTIMED,
        f"{1000 * cell['ttft_s']['median']:.1f} ms",
        f"{1000 * seconds_per_token['median']:.2f} ms" if seconds_per_token else "",
        f"{cell['MAT']:.2f}",
        f"{cell['accepted']:,} of {drafted_tokens:,}" if drafted_tokens else "",
        "" if bytes_read is None else f"{bytes_read / 1e6:,.1f}",
        format_percent(cell.get("bandwidth_share")),
        format_percent(cell.get("host_share")),
        _describe_agreement(cell),
    ]


def _describe_agreement(cell: Cell) -> str:
    """How many answers were plain decoding's, and where the first other one differed."""
    identical_answers = cell["identical"]
    if not identical_answers:
        return ""
    text = f"{identical_answers['same']} of {identical_answers['of']}"
    if "position" in identical_answers:
        text += f"; first difference at token {identical_answers['position'] + 1}"
        if identical_answers["margin"] is not None:
            text += f", margin {identical_answers['margin']:.2g}"
    return text


def rate_section(table: Table, colours: Colours) -> str:
    """Tokens/s as bars."""
    names = []
    for name in table.rows:
        if any(cell["tokens_per_s"] for cell in table.finished(name)):
            names.append(name)
    return render_section(
        "Tokens per second by method and kind of text",
        "After the first token; bars are medians, whiskers the 10th to 90th percentile.",
        _figure_bars(table, names, "tokens_per_s", "tokens/s", colours, None),
    )


def speed_up_section(table: Table, colours: Colours) -> str:
    """Ratios to the baseline as bars; "" where there are none."""
    names = []
    baseline = ""
    for name in table.rows:
        cells = table.finished(name)
        if any(cell["ratio"] and cell["contender"] != cell["baseline"] for cell in cells):
            names.append(name)
            baseline = baseline or cells[0]["baseline"]
    if not names:
        return ""
    return render_section(
        f"Speed-up by method and workload: {table.title}",
        f"Bars are medians, whiskers the 10th to 90th percentile; the line is {baseline}.",
        _figure_bars(table, names, "ratio", "times", colours, 1.0),
    )


def _figure_bars(
    table: Table, names: list[str], figure: str, axis: str, colours: Colours, baseline: float | None
) -> str:
    values = []
    for set_name in table.sets:
        bar_ranges: list[tuple[float, float, float] | None] = []
        for name in names:
            figure_range = table.rows[name].get(set_name, {}).get(figure)
            bar_ranges.append(
                (figure_range["median"], figure_range["low"], figure_range["high"])
                if figure_range
                else None
            )
        values.append(bar_ranges)
    return column_chart(
        table.sets, names, values, axis, [colours[name] for name in names], baseline=baseline
    )


def acceptance_section(table: Table, colours: Colours) -> str:
    """The share of accepted drafts by their depth, as lines; "" where it is not known."""
    names = []
    curves = []
    for name in table.rows:
        if curve := _acceptance_curve(table.finished(name)):
            names.append(name)
            curves.append(curve)
    if not names:
        return ""
    curve_colours = [colours[name] for name in names]
    return render_section(
        f"Acceptance by position: {table.title}",
        "The share of tested drafted tokens that the model accepted, by how deep in the draft they "
        "stood; all sets together.",
        line_chart(names, curves, "position in the draft", "accepted", curve_colours, top=1.0),
    )


def _acceptance_curve(cells: list[Cell]) -> list[tuple[float, float]]:
    """(position, share) for positions that were tested often enough to tell something."""
    tested_counts: list[int] = []
    accepted_counts: list[int] = []
    for cell in cells:
        for depth, (tested_count, accepted_count) in enumerate(cell.get("by_depth") or ()):
            if depth == len(tested_counts):
                tested_counts.append(0)
                accepted_counts.append(0)
            tested_counts[depth] += tested_count
            accepted_counts[depth] += accepted_count
    curve = []
    for depth, (tested_count, accepted_count) in enumerate(
        zip(tested_counts, accepted_counts, strict=True)
    ):
        if tested_count >= max(FEWEST, tested_counts[0] * FEWEST_SHARE):
            curve.append((float(depth + 1), accepted_count / tested_count))
    return curve[:DEEPEST]


def step_time_section(table: Table) -> str:
    """Section on where a step's time goes, as bars of three parts; "" where it is not known."""
    groups = []
    values = []
    notes = []
    for name in table.rows:
        cells = [cell for cell in table.finished(name) if cell.get("step_s") and cell["steps"]]
        if not cells:
            continue
        step_count = sum(cell["steps"] for cell in cells)
        part_times = []
        for part in PARTS:
            seconds = sum(cell["step_s"][part] * cell["steps"] for cell in cells)
            part_times.append(1000 * seconds / step_count)
        groups.append(name)
        values.append(part_times)
        notes.append(
            f"(host {format_percent(part_times[2] / sum(part_times) if sum(part_times) else None)})"
        )
    if not groups:
        return ""
    return render_section(
        f"Where the time of a step goes: {table.title}",
        "Milliseconds a step after prefill: forwards of the model, forwards of a draft model, and "
        "all else (drafting, verifying, bookkeeping).",
        stacked_chart(groups, PARTS, values, "ms a step", PART_COLOURS, notes),
    )


def timeline_section(table: Table) -> str:
    """Section with a generation of each contender on the first set, below each other."""
    tracks = []
    for name in table.rows:
        cells = table.finished(name)
        if cells and cells[0]["timeline"]:
            tracks.append((name, cells[0]["timeline"]))
    if not tracks:
        return ""
    return render_section(
        f"One generation, step by step: {table.sets[0]}, first prompt, {table.title}",
        "Each block is a step, as wide as it took. Above the line the tokens it committed: the "
        "model's own (grey) and accepted drafts (green); below it drafts that were refused (red). "
        "The pale block at the left is the prefill. Of a peer's drafts nothing is known.",
        track_chart(tracks, STEP_COLOURS),
    )
