"""The sections about one table: speeds, acceptance, where time goes, steps."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from foretell.bench.report import markup
from foretell.bench.report.markup import percent, section
from foretell.bench.report.plot import columns, lines, stacked, track
from foretell.bench.report.tables import UNTIMED, Cell, Table

Colours = Mapping[str, str]  # by contender
DEEPEST = 16  # position in a draft that is shown
FEWEST = 5  # drafted tokens that a point needs, and
FEWEST_SHARE = 1 / 100  # of those of the first position
PARTS = ("target", "draft", "host")  # of a step's time
PART_COLOURS = ("var(--s1)", "var(--s2)", "var(--s0)")
STEP_COLOURS = ("var(--s0)", "var(--s3)", "var(--bad)")  # own tokens, accepted, refused drafts


def headline(table: Table, colours: Colours) -> str:
    """The table itself, with all other numbers folded away below it."""
    best = {set_: _best(table, set_) for set_ in table.sets}
    rows = []
    for name, cells in table.rows.items():
        row = markup.name_cell(name, colours[name])
        for set_ in table.sets:
            kind = " class=best" if best[set_] == name else ""
            row += f"<td{kind}>{_figure(cells.get(set_))}</td>"
        mean = table.mean(name)
        row += f"<td>{'' if mean is None else f'{mean:.2f}x'}</td>"
        rows.append(row)
    return section(
        table.title,
        "Speed after the first token against the first line, prompt by prompt; below it the range "
        "from the 10th to the 90th percentile and the tokens committed a step (MAT).",
        markup.table(["", *table.sets, "mean"], rows),
        _details(table),
    )


def _best(table: Table, set_: str) -> str:
    """The quickest contender on a set, or ""."""
    best = ""
    highest = 0.0
    for name in table.rows:
        ratio = table.ratio(name, set_)
        if ratio and ratio["median"] > highest:
            best = name
            highest = ratio["median"]
    return best


def _figure(cell: Cell | None) -> str:
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


def _details(table: Table) -> str:
    """Everything else that is known of a cell, folded away."""
    head = (
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
        for set_, cell in cells.items():
            if cell["status"] == "ok":
                texts = [name, set_, *_detail_texts(cell)]
                rows.append("".join(f"<td>{escape(text)}</td>" for text in texts))
    return f"<details><summary>All numbers</summary>{markup.table(head, rows)}</details>"


def _detail_texts(cell: Cell) -> list[str]:
    """A cell's figures, from tokens/s on."""
    speed = cell["tokens_per_s"]
    token = cell["tpot_s"]
    read = cell.get("bytes_per_token")
    drafted = cell.get("drafted")
    return [
        f"{speed['median']:,.1f}" if speed else UNTIMED,
        f"{1000 * cell['ttft_s']['median']:.1f} ms",
        f"{1000 * token['median']:.2f} ms" if token else "",
        f"{cell['MAT']:.2f}",
        f"{cell['accepted']:,} of {drafted:,}" if drafted else "",
        "" if read is None else f"{read / 1e6:,.1f}",
        percent(cell.get("bandwidth_share")),
        percent(cell.get("host_share")),
        _agreement(cell),
    ]


def _agreement(cell: Cell) -> str:
    """How many answers were plain decoding's, and where the first other one differed."""
    same = cell["identical"]
    if not same:
        return ""
    text = f"{same['same']} of {same['of']}"
    if "position" in same:
        text += f"; first difference at token {same['position'] + 1}"
        if same["margin"] is not None:
            text += f", margin {same['margin']:.2g}"
    return text


def rates(table: Table, colours: Colours) -> str:
    """Tokens/s as bars."""
    names = []
    for name in table.rows:
        if any(cell["tokens_per_s"] for cell in table.finished(name)):
            names.append(name)
    return section(
        "Tokens per second by method and kind of text",
        "After the first token; bars are medians, whiskers the 10th to 90th percentile.",
        _bars(table, names, "tokens_per_s", "tokens/s", colours, None),
    )


def speed_ups(table: Table, colours: Colours) -> str:
    """Ratios to the baseline as bars; "" where there are none."""
    names = []
    base = ""
    for name in table.rows:
        cells = table.finished(name)
        if any(cell["ratio"] and cell["contender"] != cell["baseline"] for cell in cells):
            names.append(name)
            base = base or cells[0]["baseline"]
    if not names:
        return ""
    return section(
        f"Speed-up by method and workload: {table.title}",
        f"Bars are medians, whiskers the 10th to 90th percentile; the line is {base}.",
        _bars(table, names, "ratio", "times", colours, 1.0),
    )


def _bars(
    table: Table, names: list[str], key: str, axis: str, colours: Colours, base: float | None
) -> str:
    values = []
    for set_ in table.sets:
        row: list[tuple[float, float, float] | None] = []
        for name in names:
            value = table.rows[name].get(set_, {}).get(key)
            row.append((value["median"], value["low"], value["high"]) if value else None)
        values.append(row)
    return columns(table.sets, names, values, axis, [colours[name] for name in names], base=base)


def acceptance(table: Table, colours: Colours) -> str:
    """The share of accepted drafts by their depth, as lines; "" where it is not known."""
    names = []
    curves = []
    for name in table.rows:
        if curve := _acceptance_curve(table.finished(name)):
            names.append(name)
            curves.append(curve)
    if not names:
        return ""
    shades = [colours[name] for name in names]
    return section(
        f"Acceptance by position: {table.title}",
        "The share of tested drafted tokens that the model accepted, by how deep in the draft they "
        "stood; all sets together.",
        lines(names, curves, "position in the draft", "accepted", shades, top=1.0),
    )


def _acceptance_curve(cells: list[Cell]) -> list[tuple[float, float]]:
    """(position, share) for positions that were tested often enough to tell something."""
    tested: list[int] = []
    accepted: list[int] = []
    for cell in cells:
        for i, (n, good) in enumerate(cell.get("by_depth") or ()):
            if i == len(tested):
                tested.append(0)
                accepted.append(0)
            tested[i] += n
            accepted[i] += good
    curve = []
    for i, (n, good) in enumerate(zip(tested, accepted, strict=True)):
        if n >= max(FEWEST, tested[0] * FEWEST_SHARE):
            curve.append((float(i + 1), good / n))
    return curve[:DEEPEST]


def time_of_a_step(table: Table) -> str:
    """Where the time of a step goes, as bars of three parts; "" where it is not known."""
    groups = []
    values = []
    notes = []
    for name in table.rows:
        cells = [cell for cell in table.finished(name) if cell.get("step_s") and cell["steps"]]
        if not cells:
            continue
        steps = sum(cell["steps"] for cell in cells)
        row = []
        for part in PARTS:
            seconds = sum(cell["step_s"][part] * cell["steps"] for cell in cells)
            row.append(1000 * seconds / steps)
        groups.append(name)
        values.append(row)
        notes.append(f"(host {percent(row[2] / sum(row) if sum(row) else None)})")
    if not groups:
        return ""
    return section(
        f"Where the time of a step goes: {table.title}",
        "Milliseconds a step after prefill: forwards of the model, forwards of a draft model, and "
        "all else (drafting, verifying, bookkeeping).",
        stacked(groups, PARTS, values, "ms a step", PART_COLOURS, notes),
    )


def timelines(table: Table) -> str:
    """One generation of each contender on the first set, one below the other."""
    tracks = []
    for name in table.rows:
        cells = table.finished(name)
        if cells and cells[0]["timeline"]:
            tracks.append((name, cells[0]["timeline"]))
    if not tracks:
        return ""
    return section(
        f"One generation, step by step: {table.sets[0]}, first prompt, {table.title}",
        "Each block is a step, as wide as it took. Above the line the tokens it committed: the "
        "model's own (grey) and accepted drafts (green); below it drafts that were refused (red). "
        "The pale block at the left is the prefill. Of a peer's drafts nothing is known.",
        track(tracks, STEP_COLOURS),
    )
