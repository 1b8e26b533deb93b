"""What was measured, for people: figures of every contender, tables and a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from foretell.bench.report import markup
from foretell.bench.report.plot import Point, lines
from foretell.bench.tasks import failures_of, more, told
from foretell.longbench.settings import FULL, PERPLEXITY, counted

Rows = list[list[str]]
GROUP = ("length", "task", "mode")  # what is compared
KEY = ("kv", "budget")  # of a contender
MODES = {  # in words
    "single": "the question known while the context is read",
    "requests": "the context read once, questions by themselves",
    "turns": "turns of one conversation",
    "text": "",
}


def name(one: dict[str, Any]) -> str:
    """Of a contender, as tables show it."""
    return f"{one['kv']} at {one['budget']}" if one["budget"] else str(one["kv"])


def failures(document: dict[str, Any]) -> list[str]:
    """A line for each unit that could not be measured."""

    def where(one: dict[str, Any]) -> str:
        place = f"{one['task']}, {one['mode']}, {one['length']} tokens, context {one['number']}"
        return f"{place}, {name(one)}"

    return failures_of(document, where)


def cells(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each task, mode, length and contender the means, and how much more they are than those of
    the whole cache, context by context with a 95 % interval.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in document["answers"]:
        if "error" not in one:
            groups.setdefault(tuple(one[key] for key in (*GROUP, *KEY)), []).append(one)
    found = []
    for key, own in groups.items():
        named = dict(zip((*GROUP, *KEY), key, strict=True))
        whole = {one["number"]: one for one in groups.get((*key[:3], FULL, ""), [])}
        figures = _texts(own, whole) if named["task"] == PERPLEXITY else _answers(own, whole)
        held = [one for answer in own for one in answer["held"]]
        figures["rows"] = fmean(one["rows"] for one in held)
        figures["bytes"] = fmean(one["bytes"] for one in held)
        found.append(named | {"contexts": len(own)} | figures)
    return found


def _answers(own: Sequence[dict[str, Any]], whole: dict[int, Any]) -> dict[str, Any]:
    scores = [fmean(one["scores"]) for one in own]
    figures: dict[str, Any] = {
        "score": fmean(scores),
        "turns": [fmean(turn) for turn in zip(*(one["scores"] for one in own), strict=False)],
        "first_s": mean(second for one in own for second in one["first_s"]),
        "token_s": mean(second for one in own for second in one["token_s"]),
    }
    places = sorted({one["place"] for one in own if one["place"] is not None})
    if places:
        figures["depths"] = {
            f"{place:.0%}": fmean(
                score for score, one in zip(scores, own, strict=True) if one["place"] == place
            )
            for place in places
        }
    pairs = [
        (score, fmean(whole[one["number"]]["scores"]))
        for score, one in zip(scores, own, strict=True)
        if one["number"] in whole
    ]
    return figures | _more(own, pairs)


def _texts(own: Sequence[dict[str, Any]], whole: dict[int, Any]) -> dict[str, Any]:
    bits = [fmean(one["bits"]) for one in own]
    parts = [fmean(part) for part in zip(*(one["bits"] for one in own), strict=True)]
    figures = {"bits": fmean(bits), "perplexity": 2 ** fmean(bits), "parts": parts}
    pairs = [
        (own_bits, fmean(whole[one["number"]]["bits"]))
        for own_bits, one in zip(bits, own, strict=True)
        if one["number"] in whole
    ]
    return figures | _more(own, pairs)


def _more(own: Sequence[dict[str, Any]], pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    if own[0]["kv"] == FULL or not pairs:
        return {}
    return {"more": more([one for one, _ in pairs], [other for _, other in pairs])}


def mean(values: Iterable[float | None]) -> float | None:
    """Of those that are known; None: none is."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


# --- tables


def tables(document: dict[str, Any]) -> list[tuple[str, Rows]]:
    """A title and rows, the head first, for each length, task and mode."""
    return [(title(own), _table(own)) for own in grouped(document)]


def grouped(document: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The cells of each length, task and mode together."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for cell in cells(document):
        groups.setdefault(tuple(cell[key] for key in GROUP), []).append(cell)
    return list(groups.values())


def title(own: Sequence[dict[str, Any]]) -> str:
    first = own[0]
    contexts = markup.count(first["contexts"], "context")
    if first["task"] == PERPLEXITY:
        return f"{PERPLEXITY} of the second half, {first['length']:,} tokens: {contexts}"
    return f"{first['task']}, {first['mode']}, {first['length']:,} tokens: {contexts}"


def _table(own: Sequence[dict[str, Any]]) -> Rows:
    first = own[0]
    if first["task"] == PERPLEXITY:
        head = ["", "perplexity", "bits", f"more than {FULL}"]
        head += [f"part {number}" for number in range(1, len(first["parts"]) + 1)]
        head += ["rows", "MB"]
        return [head, *(_text_row(cell) for cell in own)]
    head = ["", "score", f"more than {FULL}"]
    if first["mode"] == "turns" and len(first["turns"]) > 1:
        head += [f"turn {number}" for number in range(1, len(first["turns"]) + 1)]
    head += [f"at {depth}" for depth in first.get("depths", {})]
    head += ["first token", "a token", "rows", "MB"]
    return [head, *(_row(cell) for cell in own)]


def _row(cell: dict[str, Any]) -> list[str]:
    row = [name(cell), f"{cell['score']:.1%}", told(cell["more"]) if "more" in cell else ""]
    if cell["mode"] == "turns" and len(cell["turns"]) > 1:
        row += [f"{turn:.0%}" for turn in cell["turns"]]
    row += [f"{score:.0%}" for score in cell.get("depths", {}).values()]
    first, token = cell["first_s"], cell["token_s"]
    row.append("" if first is None else f"{first:.2f} s")
    row.append("" if token is None else f"{1000 * token:.1f} ms")
    return row + _held(cell)


def _text_row(cell: dict[str, Any]) -> list[str]:
    row = [name(cell), f"{cell['perplexity']:.2f}", f"{cell['bits']:.3f}"]
    row.append(told(cell["more"], "+.3f") if "more" in cell else "")
    return row + [f"{part:.3f}" for part in cell["parts"]] + _held(cell)


def _held(cell: dict[str, Any]) -> list[str]:
    return [f"{cell['rows']:,.0f}", f"{cell['bytes'] / 1e6:.2f}"]


# --- a page


def html(document: dict[str, Any]) -> str:
    """One self-contained file: of each length, task and mode the lines and the table."""
    parts = []
    for own in grouped(document):
        head, *rows = _table(own)
        shades = markup.colours(list(dict.fromkeys(cell["kv"] for cell in own)))
        body = [
            markup.name_cell(row[0], shades[cell["kv"]])
            + "".join(f"<td>{markup.escape(text)}</td>" for text in row[1:])
            for row, cell in zip(rows, own, strict=True)
        ]
        plots = _plots(own, shades)
        parts.append(
            markup.section(title(own), MODES[own[0]["mode"]], *plots, markup.table(head, body))
        )
    if failed := failures(document):
        parts.append(f"<section><h2>Failed</h2>{markup.items(failed, 'bad')}</section>")
    named = document | {"settings": {"models": [document["settings"]["model"]]}}
    return markup.page("foretell longbench", named, parts)


def _plots(own: Sequence[dict[str, Any]], shades: dict[str, str]) -> list[str]:
    """Scores by rows, and of conversations by turn; of texts the bits by part."""
    if own[0]["task"] == PERPLEXITY:
        return [_by_place(own, "parts", "part of the second half", "bits a token")]
    by_rows: dict[str, list[Point]] = {kv: [] for kv in shades}
    for cell in own:
        rows = counted(cell["budget"], cell["length"]) if cell["budget"] else cell["rows"]
        by_rows[cell["kv"]].append((float(round(rows)), cell["score"]))
    points = [sorted(line) for line in by_rows.values()]
    plots = [lines(list(by_rows), points, "rows", "score", [*shades.values()], top=1.0, log=True)]
    if own[0]["mode"] == "turns" and len(own[0]["turns"]) > 1:
        plots.append(_by_place(own, "turns", "turn", "score", top=1.0))
    return plots


def _by_place(
    own: Sequence[dict[str, Any]], figure: str, across: str, up: str, top: float | None = None
) -> str:
    names = [name(cell) for cell in own]
    points = [[(i + 1.0, value) for i, value in enumerate(cell[figure])] for cell in own]
    return lines(names, points, across, up, [*markup.colours(names).values()], top=top)
