"""What `foretell bench` found, for people: tables, and one HTML file that needs nothing from
anywhere else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from foretell.measure.plot import columns, lines, stacked, track

Cell = dict[str, Any]
SERIES = 8  # colours of the page
UNTIMED = "all at once"  # no token came after the first ones
STYLE = """
:root { color-scheme: light dark; --page: #fafaf8; --card: #fff; --ink: #22252a; --soft: #6a7078; --line: #dfe1e4;
  --good: #1f7a4a; --bad: #b4412f; --s0: #8a9099; --s1: #2f6fbb; --s2: #dd7f22; --s3: #3c9a63; --s4: #8a5fb0;
  --s5: #b8479a; --s6: #2a9d9d; --s7: #a4862a; }
@media (prefers-color-scheme: dark) { :root { --page: #16181c; --card: #1e2126; --ink: #e4e6ea; --soft: #9aa1ab;
  --line: #363b43; --good: #61c48d; --bad: #ef8573; --s0: #8b929c; --s1: #6aa5ec; --s2: #f0a04f; --s3: #68c48d;
  --s4: #b491dc; --s5: #e184c4; --s6: #5cc9c9; --s7: #d2b552; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, "Helvetica Neue", Arial,
  sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 28px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 0 0 4px; } h3 { font-size: 15px; margin: 16px 0
  4px; }
p { margin: 4px 0 12px; } .soft, small { color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 20px 22px;
  margin-top: 20px; overflow-x: auto; }
.tiles { display: flex; flex-wrap: wrap; gap: 14px; margin-top: 20px; }
.tile { flex: 1 1 170px; background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px
  18px; } .tile b { display: block; font-size: 26px; line-height: 1.25; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 6px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } td small { display: block; line-height: 1.2; }
thead th { color: var(--soft); font-weight: 500; } td.best b { color: var(--good); } .bad { color: var(--bad); }
.dot { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 8px; }
svg { display: block; max-width: 100%; height: auto;
  margin-top: 8px; } svg text { fill: var(--ink); paint-order: stroke;
  stroke: var(--card); stroke-width: 3px; stroke-linejoin: round; }
svg .soft { fill: var(--soft); } details { margin-top: 8px; } summary { cursor: pointer; }
details th, details td { font-size: 13px; padding: 4px 8px; }
details th, details td:last-child { white-space: normal; }
"""


@dataclass
class Table:
    """All cells of one (model, dtype, temperature, requests, context): `rows[contender][set]`."""

    model: str
    dtype: str
    temperature: float
    requests: int
    context: int | None  # tokens of the prompts; None: as they are
    computed: str  # the number format that `dtype` came to
    sets: list[str]
    rows: dict[str, dict[str, Cell]]

    @property
    def title(self) -> str:
        how = f"temperature {self.temperature:g}" if self.temperature else "greedy"
        many = "one request" if self.requests == 1 else f"{self.requests} requests at once"
        behind = "" if self.context is None else f", behind {self.context:,} tokens"
        return f"{self.model}, {self.computed}, {how}, {many}{behind}"

    def mean(self, name: str) -> float | None:
        """Geometric mean of the median ratios over the sets; None where one is missing."""
        ratios = [(self.rows[name].get(s, {}).get("ratio") or {}).get("median") for s in self.sets]
        known = [r for r in ratios if r]
        return (
            math.exp(sum(map(math.log, known)) / len(known))
            if len(known) == len(self.sets)
            else None
        )

    def text(self) -> list[list[str]]:
        """For a terminal: a line a contender, its ratio with range and MAT on each set."""
        out = [["", *self.sets, "mean"]]
        for name, cells in self.rows.items():
            mean = self.mean(name)
            out.append(
                [
                    name,
                    *(_words(cells.get(s)) for s in self.sets),
                    "" if mean is None else f"{mean:.2f}",
                ]
            )
        return out


def tables(document: dict[str, Any]) -> list[Table]:
    computed = {(m["model"], m["dtype"]): m["computed_in"] for m in document["models"]}
    found: dict[tuple[Any, ...], Table] = {}
    for cell in document["cells"]:
        key = cell["model"], cell["dtype"], cell["temperature"], cell["requests"], cell["context"]
        table = found.setdefault(key, Table(*key, computed.get(key[:2], cell["dtype"]), [], {}))
        if cell["set"] not in table.sets:
            table.sets.append(cell["set"])
        table.rows.setdefault(cell["contender"], {})[cell["set"]] = cell
    return list(found.values())


def failures(document: dict[str, Any]) -> list[str]:
    """A line for each thing that failed."""
    found: dict[str, list[str]] = {}
    for cell in document["cells"]:
        if cell["status"] == "failed":
            found.setdefault(
                f"{cell['contender']} on {cell['model']}: {cell['reason']}", []
            ).append(cell["set"])
    return [f"{what} ({', '.join(dict.fromkeys(sets))})" for what, sets in found.items()]


def drafted(cells: Sequence[Cell]) -> float | None:
    """Mean nodes drafted a step; None where that is not known."""
    sizes: dict[int, int] = {}
    for cell in cells:
        for size, count in (cell.get("drafted_a_step") or {}).items():
            sizes[int(size)] = sizes.get(int(size), 0) + count
    return (
        sum(size * count for size, count in sizes.items()) / sum(sizes.values()) if sizes else None
    )


def _words(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell["status"] == "failed":
        return "failed"
    ratio, speed = cell["ratio"], cell["tokens_per_s"]
    if speed is None:
        return UNTIMED
    if cell["contender"] == cell["baseline"] or ratio is None:
        return f"{speed['median']:,.1f} tok/s"
    return f"{ratio['median']:.2f} MAT {cell['MAT']:.2f}\n{ratio['low']:.2f} to {ratio['high']:.2f}"


# --- the page


def _shade(i: int) -> str:
    """The colour of the i-th contender: the page's own, then the same ones paler."""
    own = f"var(--s{i % SERIES})"
    return (
        own
        if i < SERIES
        else f"color-mix(in srgb, {own} {max(30, 70 - 20 * (i // SERIES))}%, var(--card))"
    )


def html(document: dict[str, Any]) -> str:
    """One self-contained page: no script, nothing fetched."""
    every = tables(document)
    names = list(dict.fromkeys(cell["contender"] for cell in document["cells"]))
    # Our own come last, and have the strong colours where these do not suffice for all.
    colour = {name: _shade(i) for i, name in enumerate([*names[:1], *names[:0:-1]])}
    parts = [_tiles(every)]
    fewest = min((table.requests for table in every), default=1)
    for table in every:
        if table.context is None:
            parts.append(_headline(table, colour))
        if table.context is None and table.requests == fewest:
            parts += [_speed(table, colour), _depth(table, colour), _split(table)]
    parts += [_scaling(every, colour, across) for across in ("context", "requests")]
    parts += [_costs(document, every, colour), *(_timelines(table) for table in every[:1])]
    parts.append(_failed(document))
    return _page("foretell bench", document, [*parts, _how(document)])


def _page(title: str, document: dict[str, Any], parts: Sequence[str]) -> str:
    machine, band = document["machine"], document["bandwidth"]
    memory = (
        f"{band['bytes_per_s'] / 1e9:.0f} GB/s read from memory" if band else "memory not measured"
    )
    about = (
        f"{machine['processor']} ({machine['cores']} cores), {_count(machine['threads'], 'thread')}, {memory} · "
        f"foretell {document['version']}, torch {document['versions']['torch']}, transformers "
        f"{document['versions']['transformers']} · {document['date']}"
    )
    models = escape(", ".join(document["settings"]["models"]))
    whole = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}: {models}</title><style>{STYLE}</style></head>",
        f"<body><main><h1>{title}</h1>",
        f'<p class="soft">{escape(about)}</p>',
        *parts,
        "</main></body></html>",
    ]
    return "\n".join(p for p in whole if p) + "\n"


def tuned(profile: dict[str, Any]) -> str:
    """The page of `foretell tune`: what was chosen, the speeds it was chosen by, and what a forward
    costs.
    """
    document = profile["bench"]
    every = tables(document)
    names = list(every[0].rows)
    colour = {name: _shade(i) for i, name in enumerate(names)}
    tiles = [
        (f"{every[0].rows[best][kind]['ratio']['median']:.2f}x", f"best on {kind}: {best}")
        for kind, best in profile["best"].items()
    ]
    return _page(
        "foretell tune",
        document,
        [
            _section(f"auto stands for {profile['chosen']}", reasons(profile)),
            _boxes(tiles),
            _headline(every[0], colour),
            _rates(every[0], colour),
            _costs(document, every, colour),
            _split(every[0]),
            _failed(document),
            _how(document),
        ],
    )


def reasons(profile: dict[str, Any]) -> str:
    """Why `auto` stands for what it does."""
    usual, chosen, means = profile["default"], profile["chosen"], profile["means"]
    against = "against plain decoding, geometric mean over the kinds of text"
    if profile["final"] is None:
        said = (
            f"It is the default, which nothing was ahead of: {means.get(usual, 0.0):.2f}x {against}"
        )
    else:
        first, second = profile["final"]["means"], profile["final"]["challenger"]
        what = f"{second} {first.get(second, 0.0):.2f}x, the default {usual} {first.get(usual, 0.0):.2f}x {against}"
        won = (
            "It won a second measurement on more prompts"
            if chosen == second
            else (
                "It is the default, which a second measurement on more prompts did not find behind"
            )
        )
        said = f"{won}: {what}"
    more = [name for name in profile["shown_only"] if name in means]
    return f"{said}." + (
        f" Never taken for auto, since they cannot decide by cost at every temperature or are not "
        f"exact: {', '.join(more)}."
        if more
        else ""
    )


def _rates(table: Table, colour: dict[str, str]) -> str:
    names = [name for name in table.rows if any(c["tokens_per_s"] for c in _ok(table, name))]
    speeds = [
        [table.rows[name].get(s, {}).get("tokens_per_s") for name in names] for s in table.sets
    ]
    values = [[(v["median"], v["low"], v["high"]) if v else None for v in row] for row in speeds]
    return _section(
        "Tokens per second by method and kind of text",
        "After the first token; bars are medians, whiskers the 10th to 90th percentile.",
        columns(table.sets, names, values, "tokens/s", [colour[n] for n in names], base=None),
    )


def _failed(document: dict[str, Any]) -> str:
    rows = "".join(f'<li class="bad">{escape(line)}</li>' for line in failures(document))
    return f"<section><h2>Failed</h2><ul>{rows}</ul></section>" if rows else ""


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _section(title: str, why: str, *inside: str) -> str:
    return f'<section><h2>{escape(title)}</h2><p class="soft">{escape(why)}</p>{"".join(inside)}</section>'


def _tiles(every: Sequence[Table]) -> str:
    tiles = []
    for table in every:
        if table.context is not None:
            continue
        means = {name: mean for name in table.rows if (mean := table.mean(name)) is not None}
        cells = [c for row in table.rows.values() for c in row.values() if c["status"] == "ok"]
        if not means or not cells:
            continue
        best = max(means, key=lambda name: means[name])
        tiles.append(
            (
                f"{means[best]:.2f}x",
                f"{best} against {cells[0]['baseline']}, mean of {len(table.sets)} sets; "
                f"{table.title}",
            )
        )
    return _boxes(tiles[:4])


def _boxes(tiles: Sequence[tuple[str, str]]) -> str:
    inside = "".join(
        f'<div class="tile"><b>{escape(a)}</b><span class="soft">{escape(b)}</span></div>'
        for a, b in tiles
    )
    return f'<div class="tiles">{inside}</div>' if inside else ""


def _headline(table: Table, colour: dict[str, str]) -> str:
    best = {
        s: max(
            (name for name in table.rows if (table.rows[name].get(s, {}).get("ratio"))),
            default="",
            key=lambda name, s=s: table.rows[name][s]["ratio"]["median"],
        )
        for s in table.sets
    }  # type: ignore[misc]
    head = "".join(f"<th>{escape(s)}</th>" for s in (*table.sets, "mean"))
    rows = []
    for name, cells in table.rows.items():
        line = [
            f'<td><span class="dot" style="background:{colour[name]}"></span>{escape(name)}</td>'
        ]
        for s in table.sets:
            line.append(
                f"<td{' class=best' if best[s] == name else ''}>{_figure(cells.get(s))}</td>"
            )
        mean = table.mean(name)
        line.append(f"<td>{'' if mean is None else f'{mean:.2f}x'}</td>")
        rows.append(f"<tr>{''.join(line)}</tr>")
    why = (
        "Speed after the first token against the first line, prompt by prompt; below it the range from the 10th to "
        "the 90th percentile and the tokens committed a step (MAT)."
    )
    return _section(
        table.title,
        why,
        f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>",
        _details(table),
    )


def _figure(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell["status"] == "failed":
        return f'<span class="bad" title="{escape(cell["reason"])}">failed</span>'
    speed, ratio = cell["tokens_per_s"], cell["ratio"]
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
        for s, c in cells.items():
            if c["status"] != "ok":
                continue
            same, read, share = c["identical"], c.get("bytes_per_token"), c.get("bandwidth_share")
            alike = f"{same['same']} of {same['of']}" if same else ""
            if same and "position" in same:
                margin = "" if same["margin"] is None else f", margin {same['margin']:.2g}"
                alike += f"; first difference at token {same['position'] + 1}{margin}"
            rows.append(
                [
                    name,
                    s,
                    f"{c['tokens_per_s']['median']:,.1f}" if c["tokens_per_s"] else UNTIMED,
                    f"{1000 * c['ttft_s']['median']:.1f} ms",
                    f"{1000 * c['tpot_s']['median']:.2f} ms" if c["tpot_s"] else "",
                    f"{c['MAT']:.2f}",
                    f"{c['accepted']:,} of {c['drafted']:,}" if c.get("drafted") else "",
                    "" if read is None else f"{read / 1e6:,.1f}",
                    _percent(share),
                    _percent(c.get("host_share")),
                    alike,
                ]
            )
    body = "".join("<tr>" + "".join(f"<td>{escape(x)}</td>" for x in row) + "</tr>" for row in rows)
    return (
        "<details><summary>All numbers</summary><table><thead><tr>"
        + "".join(f"<th>{h}</th>" for h in head)
        + f"</tr></thead><tbody>{body}</tbody></table></details>"
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def _ok(table: Table, name: str) -> list[Cell]:
    return [c for c in table.rows[name].values() if c["status"] == "ok"]


def _speed(table: Table, colour: dict[str, str]) -> str:
    names = [
        name
        for name in table.rows
        if any(c["ratio"] and c["contender"] != c["baseline"] for c in _ok(table, name))
    ]
    if not names:
        return ""
    values = []
    for s in table.sets:
        ratios = [table.rows[name].get(s, {}).get("ratio") for name in names]
        values.append([(r["median"], r["low"], r["high"]) if r else None for r in ratios])
    base = _ok(table, names[0])[0]["baseline"]
    return _section(
        f"Speed-up by method and workload: {table.title}",
        f"Bars are medians, whiskers the 10th to 90th percentile; the line is {base}.",
        columns(table.sets, names, values, "times", [colour[n] for n in names]),
    )


def _depth(table: Table, colour: dict[str, str]) -> str:
    names, points = [], []
    for name in table.rows:
        depths: list[list[int]] = []
        for cell in _ok(table, name):
            for i, (tested, accepted) in enumerate(cell.get("by_depth") or ()):
                depths += [[0, 0]] * (i == len(depths))
                depths[i] = [depths[i][0] + tested, depths[i][1] + accepted]
        # Few tries tell little: a point needs a hundredth of those of the first position.
        line = [
            (float(i), good / n)
            for i, (n, good) in enumerate(depths, 1)
            if n >= max(5, depths[0][0] / 100)
        ]
        if line:
            names.append(name)
            points.append(line[:16])
    if not names:
        return ""
    return _section(
        f"Acceptance by position: {table.title}",
        "The share of tested drafted tokens that the model accepted, by how deep in the draft they stood; "
        "all sets together.",
        lines(
            names, points, "position in the draft", "accepted", [colour[n] for n in names], top=1.0
        ),
    )


def _split(table: Table) -> str:
    groups, values, notes = [], [], []
    for name in table.rows:
        known = [c for c in _ok(table, name) if c.get("step_s") and c["steps"]]
        if known:
            groups.append(name)
            total = sum(c["steps"] for c in known)
            values.append(
                [
                    1000 * sum(c["step_s"][part] * c["steps"] for c in known) / total
                    for part in ("target", "draft", "host")
                ]
            )
            notes.append(
                f"(host {_percent(values[-1][2] / sum(values[-1]) if sum(values[-1]) else None)})"
            )
    if not groups:
        return ""
    return _section(
        f"Where the time of a step goes: {table.title}",
        "Milliseconds a step after prefill: forwards of the model, forwards of a draft model, and all else "
        "(drafting, verifying, bookkeeping).",
        stacked(
            groups,
            ["target", "draft", "host"],
            values,
            "ms a step",
            ["var(--s1)", "var(--s2)", "var(--s0)"],
            notes,
        ),
    )


def _scaling(every: Sequence[Table], colour: dict[str, str], across: str) -> str:
    """What a token costs by the length of the context, or by the number of requests at once; "":
    nothing to compare.
    """
    alike: dict[tuple[Any, ...], list[Table]] = {}
    for table in every:
        if (table.context is None) == (across == "requests"):
            alike.setdefault((table.model, table.dtype, table.temperature), []).append(table)
    parts = []
    for group in alike.values():
        found = sorted(group, key=lambda table: (table.context or 0, table.requests))
        names = [
            name for name in found[0].rows if sum(_cost(t, name) is not None for t in found) > 1
        ]
        if not names:
            continue
        at = [float(t.requests if t.context is None else t.context) for t in found]
        costs = [
            [(x, c) for x, t in zip(at, found, strict=True) if (c := _cost(t, name)) is not None]
            for name in names
        ]
        title = found[0].title if across == "context" else found[0].title.rpartition(", ")[0]
        parts += [
            f"<h3>{escape(title.partition(', behind')[0])}</h3>",
            lines(
                names,
                [[(x, c[0]) for x, c in line] for line in costs],
                "tokens of the prompt" if across == "context" else "requests at once",
                "ms a token",
                [colour[n] for n in names],
                log=True,
                ranges=[[c[1:] for _, c in line] for line in costs],
            ),
            _sizes(found, names, colour, at),
        ]
    if not parts:
        return ""
    what = (
        "Behind prompts of that many tokens, which end alike: texts of all sets, each behind the others."
        if across == "context"
        else "All requests together, in one batch; geometric mean of the sets."
    )
    return _section(
        "Cost of a token by context"
        if across == "context"
        else "Cost of a token by requests at once",
        f"{what} After the first token; whiskers are the 10th to 90th percentile. Below it what was "
        "drafted a step, which the policy turns down where it does not pay.",
        *parts,
    )


def _cost(table: Table, name: str) -> tuple[float, float, float] | None:
    """Milliseconds a token of the whole batch, with its range: the geometric means over the
    sets.
    """
    speeds = (
        [c["tokens_per_s"] for c in _ok(table, name) if c["tokens_per_s"]]
        if name in table.rows
        else []
    )
    if not speeds:
        return None
    means = [
        math.exp(sum(math.log(v[key]) for v in speeds) / len(speeds))
        for key in ("median", "high", "low")
    ]
    return 1000 / means[0], 1000 / means[1], 1000 / means[2]


def _sizes(
    found: Sequence[Table], names: Sequence[str], colour: dict[str, str], at: Sequence[float]
) -> str:
    """A row a contender: ratio to the baseline, nodes drafted a step and the host's share."""
    rows = []
    for name in names:
        line = [
            f'<td><span class="dot" style="background:{colour[name]}"></span>{escape(name)}</td>'
        ]
        for table in found:
            cells, cost = _ok(table, name) if name in table.rows else [], _cost(table, name)
            mean, size = table.mean(name) if name in table.rows else None, drafted(cells)
            shares = [c["host_share"] for c in cells if c.get("host_share") is not None]
            what = [f"<b>{cost[0]:.2f} ms</b>" if cost else ""]
            what += [f"<small>{mean:.2f}x</small>"] if mean is not None else []
            what += [f"<small>{size:.1f} drafted</small>"] if size is not None else []
            what += [f"<small>host {_percent(sum(shares) / len(shares))}</small>"] if shares else []
            line.append(f"<td>{''.join(what)}</td>")
        rows.append(f"<tr>{''.join(line)}</tr>")
    head = "".join(f"<th>{x:,.0f}</th>" for x in at)
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _costs(document: dict[str, Any], every: Sequence[Table], colour: dict[str, str]) -> str:
    parts = []
    for model in document["models"]:
        names = [f"behind {rows} tokens" for rows in model["seconds"]]
        points = [
            [(float(n), 1000 * s) for n, s in line.items()] for line in model["seconds"].values()
        ]
        near, marks = points[0], list[tuple[float, float, str, str]]()
        for table in every:
            if (
                (table.model, table.dtype) != (model["model"], model["dtype"])
                or table.requests > 1
                or table.context
            ):
                continue
            for name in table.rows:
                size = drafted(_ok(table, name))
                if size and name not in [m[2] for m in marks]:
                    marks.append((size + 1, _between(near, size + 1), name, colour[name]))
        parts += [
            f"<h3>{escape(model['model'])}, {escape(model['computed_in'])}</h3>",
            lines(
                names,
                points,
                "tokens in a forward",
                "milliseconds",
                ["var(--s1)", "var(--s0)"],
                marks=marks,
                log=True,
            ),
        ]
    return (
        _section(
            "Cost of a forward, and the sizes chosen",
            "What a forward takes by its tokens; the dots are the mean size of each method's steps, the last "
            "committed token counted.",
            *parts,
        )
        if parts
        else ""
    )


def _between(points: Sequence[tuple[float, float]], x: float) -> float:
    for (a, low), (b, high) in itertools.pairwise(points):
        if a <= x <= b:
            return low + (high - low) * (x - a) / (b - a)
    return points[-1][1] if x > points[0][0] else points[0][1]


def _timelines(table: Table) -> str:
    """Of the first set, one contender below the other."""
    found = [
        (name, cell["timeline"])
        for name in table.rows
        for cell in _ok(table, name)[:1]
        if cell["timeline"]
    ]
    if not found:
        return ""
    colours = ("var(--s0)", "var(--s3)", "var(--bad)")
    return _section(
        f"One generation, step by step: {table.sets[0]}, first prompt, {table.title}",
        "Each block is a step, as wide as it took. Above the line the tokens it committed: the model's own "
        "(grey) and accepted drafts (green); below it drafts that were refused (red). The pale block at "
        "the left is the prefill. Of a peer's drafts nothing is known.",
        track(found, colours),
    )


def _how(document: dict[str, Any]) -> str:
    s = document["settings"]
    peak = document["peak_memory"]
    threads = _count(document["machine"]["threads"], "thread")
    peers = {
        c["contender"]: c["about"] for c in document["cells"] if c["about"] not in ("", "foretell")
    }
    lines = [
        f"{_count(s['rounds'], 'round')} after one that is not counted; prompt by prompt, contenders in an order "
        f"shuffled each time (seed {s['seed']}), {threads} for all; in one process, but for peers with other packages.",
        f"{s['max_new_tokens']} new tokens at most. Prefill and first token are apart from all speeds.",
        "Nobody learns from another contender's text or from an earlier round.",
        "Bytes read count every weight once a forward; a cache that holds weights can raise a share above 100 %.",
        *(f"{name}: {about}." for name, about in peers.items()),
    ]
    if peak:
        said, limit = f"{peak / 1e6:,.0f} MB", document["memory_limit"]
        if limit:
            parts = [f"{limit[kind] / 1e6:,.0f} MB of {kind}" for kind in ("weights", "caches")]
            said += f"; {parts[0]} x 1.15, {parts[1]} and 300 MB are {limit['bytes'] / 1e6:,.0f} MB"
        lines.append(
            f"Peak memory of the measuring process, all contenders in it together: {said}."
        )
    return f"<section><h2>How it was measured</h2><ul>{''.join(f'<li>{escape(x)}</li>' for x in lines)}</ul></section>"
