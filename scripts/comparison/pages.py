"""The tables of the documentation, in Markdown, from a document of figures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from comparison.document import Document
from comparison.figures import BASE, Figures, Spread, figures

MEGA = 1e6
AUTO = "auto"


def summary(document: Document) -> str:
    """The README's table: speeds relative to transformers on every set.

    Of each number format: every peer in the way that is its quickest over all sets, our plain
    decoding and our `auto`, and how `auto` stands to the best peer of each set.
    """
    made = figures(document)
    rows = [_baseline(made)]
    for bits in made.bits():
        names = _shown(made, bits)
        best = [_most(made, names, name) for name in made.cells]
        for name in names:
            if name == BASE:
                continue
            row = [f"{_title(made, name)}, {bits} bits"]
            for set_name, most in zip(made.cells, best, strict=True):
                shown = _number(_ratio_of(made, set_name, name, BASE))
                row.append(f"**{shown}**" if name == most else shown)
            row.append(_times(made.mean(name, BASE)))
            rows.append(row)
        auto = [n for n in names if made.contenders[n]["method"] == AUTO]
        for name in auto:
            against = [_number(_ratio_of(made, s, name, "best")) for s in made.cells]
            rows.append([f"`auto` to the best peer, {bits} bits", *against])
            rows[-1].append(_times(made.mean(name, "best")))
    head = ["greedy" if not _settings(made)["temperature"] else "sampled", *made.cells, "mean"]
    return f"{table(head, rows)}\n\n{circumstances(document)}"


def short(document: Document) -> str:
    """What the site begins with: the mean speed of our `auto` over all sets, by number format."""
    made = figures(document)
    rows = []
    for bits in made.bits():
        for name in made.of(bits):
            if made.is_ours(name) and made.contenders[name]["method"] == AUTO:
                rows.append(
                    [str(bits), _times(made.mean(name, BASE)), _times(made.mean(name, "best"))]
                )
    head = ["bits", "times transformers' `generate` in bfloat16", "times the best other engine"]
    return f"{table(head, rows)}\n\n{circumstances(document)}"


def methods(document: Document) -> str:
    """Our methods on every set, by number format: times our plain decoding, and tokens a step."""
    made = figures(document)
    rows = []
    for bits in made.bits():
        for name in made.of(bits):
            if not made.is_ours(name) or made.contenders[name]["plain"]:
                continue
            row = [f"`{made.contenders[name]['method']}`, {bits} bits"]
            for cells in made.cells.values():
                cell = cells.get(name)
                ratio = _range(cell.ratios.get("plain")) if cell else ""
                row.append(f"**{ratio}**, MAT {cell.mat:.2f}" if cell and ratio else "")
            rows.append([*row, _times(made.mean(name, "plain"))])
    head = ["times `plain`", *made.cells, "mean"]
    return f"{table(head, rows)}\n\n{circumstances(document)}"


def page(document: Document) -> str:
    """The whole report: every contender on every set, prefill, loading, memory and steps."""
    made = figures(document)
    parts = ["# Figures", circumstances(document), READING]
    for set_name in made.cells:
        parts += [f"## {set_name.capitalize()}", _set_table(made, set_name)]
    parts += ["## Over all sets", _means(made)]
    if made.prefill():
        parts += [f"## A prompt of {_settings(made)['long_prompt']} tokens", _prefill(made)]
    parts += ["## Loading and memory", _loading(made)]
    if made.by_part("steps"):
        parts += ["## What a step costs", _steps(made)]
    parts += ["## Who took part", _who(made)]
    return "\n\n".join(parts) + "\n"


READING = """Every number is a median, with the range from the 10th to the 90th percentile over
prompts and rounds in brackets. Speeds are tokens/s after the first token. Ratios are taken prompt
by prompt within a round: to transformers' `generate` in bfloat16, to the quickest peer in the same
number of bits on that set (its own drafting on), and to the contender's own plain decoding; the
means have those to the quickest peer that drafts nothing, too. MAT is tokens a step. *Same* counts
the answers that have the tokens of our plain decoding in that format."""


def circumstances(document: Document) -> str:
    """Model, machine, versions, dates and the memory's speed, in one sentence."""
    made = figures(document)
    settings = _settings(made)
    first = document["parts"][0]
    temperature = settings["temperature"]
    how = f"temperature {temperature:g}" if temperature else "greedy"
    dates = sorted({part["date"] for part in document["parts"]})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    text = (
        f"`{settings['model']}`, {how}, {settings['max_new_tokens']} tokens, "
        f"rounds: {settings['rounds']}, {settings['threads']} threads of {first['cores']} cores "
        f"({first['machine']}), {versions}, {when}"
    )
    if rate := made.memory_rate():
        gigabytes = [f"{value / 1e9:.1f}" for value in (rate.median, rate.low, rate.high)]
        text += f", memory read at {gigabytes[0]} GB/s ({gigabytes[1]} to {gigabytes[2]})"
    return f"{text}, `python scripts/compare.py`."


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def method_rows(document: Document, method: str) -> tuple[list[str], list[list[str]]]:
    """Head and rows of one of our methods with its defaults, by set and number format."""
    made = figures(document)
    head = ["prompts", "format", "tokens/s", "times transformers", "times plain", "MAT", "same"]
    rows = []
    for set_name, cells in made.cells.items():
        for name in (name for bits in made.bits() for name in made.of(bits) if name in cells):
            if made.contenders[name]["method"] == method:
                cell = cells[name]
                row = [set_name, f"{made.contenders[name]['bits']} bits", _range(cell.speed, 1)]
                row += [_range(cell.ratios.get(BASE)), _range(cell.ratios.get("plain"))]
                rows.append([*row, f"{cell.mat:.2f}", _same(cell.same)])
    return head, rows


def _settings(made: Figures) -> dict[str, Any]:
    settings: dict[str, Any] = made.document["settings"]
    return settings


def _title(made: Figures, name: str) -> str:
    """As a row is headed: our methods in code, without the number format."""
    method = made.contenders[name]["method"]
    return f"foretell `{method}`" if method is not None else name


def _baseline(made: Figures) -> list[str]:
    row = ["transformers `generate`, 16 bits"]
    for cells in made.cells.values():
        speed = cells[BASE].speed if BASE in cells else None
        row.append(f"{speed.median:.1f} tokens/s" if speed else "")
    return [*row, "1.00"]


def _shown(made: Figures, bits: int) -> list[str]:
    """The rows of the summary: each library's quickest way, our plain decoding, our `auto`."""
    quickest: dict[str, str] = {}
    ours = []
    for name in made.of(bits):
        if made.is_ours(name):
            if made.contenders[name]["method"] in ("plain", AUTO):
                ours.append(name)
            continue
        library = re.split(r"\s", name)[0]
        other = quickest.get(library)
        if other is None or (made.mean(name, BASE) or 0) > (made.mean(other, BASE) or 0):
            quickest[library] = name
    return [*quickest.values(), *ours]


def _most(made: Figures, names: Sequence[str], set_name: str) -> str | None:
    ratios = {}
    for name in names:
        if found := _ratio_of(made, set_name, name, BASE):
            ratios[name] = found.median
    return max(ratios, key=ratios.__getitem__, default=None)


def _ratio_of(made: Figures, set_name: str, name: str, other: str) -> Spread | None:
    cell = made.cells[set_name].get(name)
    return cell.ratios.get(other) if cell else None


def _number(found: Spread | None) -> str:
    return _times(found.median if found else None)


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _range(found: Spread | None, digits: int = 2) -> str:
    if found is None:
        return ""
    shown = [f"{value:.{digits}f}" for value in (found.median, found.low, found.high)]
    if len(set(shown)) == 1:
        return shown[0]
    return f"{shown[0]} ({shown[1]} to {shown[2]})"


def _same(counts: tuple[int, int] | None) -> str:
    return "" if counts is None else f"{counts[0]} of {counts[1]}"


def _set_table(made: Figures, set_name: str) -> str:
    head = ["", "bits", "tokens/s", "transformers", "best peer", "own plain"]
    rows = []
    cells = made.cells[set_name]
    for bits in made.bits():
        for name in made.of(bits):
            if name not in cells:
                continue
            cell = cells[name]
            title = _title(made, name)
            if made.best.get((set_name, bits)) == name:
                title += ", the best peer"
            row = [title, str(bits), _range(cell.speed, 1)]
            for other in (BASE, "best", "plain"):
                row.append(_range(cell.ratios.get(other)))
            rows.append([*row, f"{cell.mat:.2f}", _same(cell.same)])
    return table([*head, "MAT", "same"], rows)


def _means(made: Figures) -> str:
    rows = []
    for bits in made.bits():
        for name in made.of(bits):
            row = [_title(made, name), str(bits)]
            for other in (BASE, "best", "best_plain", "plain"):
                row.append(_times(made.mean(name, other)))
            rows.append(row)
    head = ["geometric mean", "bits", "transformers", "best peer", "best plain peer", "own plain"]
    return table(head, rows)


def _prefill(made: Figures) -> str:
    found = made.prefill()
    tokens = _settings(made)["long_prompt"]
    rows = []
    for bits in made.bits():
        names = [name for name in made.of(bits) if name in found]
        peers = [found[name].median for name in names if not made.is_ours(name)]
        for name in names:
            seconds = found[name]
            row = [_title(made, name), str(bits), _range(seconds), f"{tokens / seconds.median:.0f}"]
            rows.append([*row, _times(min(peers) / seconds.median if peers else None)])
    return table(["", "bits", "seconds", "tokens/s", "speed to the best peer's"], rows)


def _loading(made: Figures) -> str:
    rows = []
    for process, found in made.by_part("load").items():
        row = [process]
        for key in ("load_s", "ready_s", "first_token_s"):
            row.append(_times(found.get(key)))
        for key in ("loaded_bytes", "loading_peak_bytes", "peak_bytes", "weight_bytes"):
            size = found.get(key)
            row.append("" if size is None else f"{size / MEGA:.0f}")
        rows.append(row)
    head = ["process", "load s", "start to ready s", "first token s", "loaded MB"]
    note = (
        "Sizes are of the whole process: resident after loading, the most while loading, the most "
        "ever, and the weights that a step reads. The first token is that of the first request "
        "after loading, a short prompt. A peer's *load* includes importing it."
    )
    return f"{note}\n\n{table([*head, 'peak of loading MB', 'peak MB', 'weights MB'], rows)}"


def _steps(made: Figures) -> str:
    loaded = made.by_part("load")
    rate = made.memory_rate()
    rows = []
    sizes: list[str] = []
    for process, seconds in made.by_part("steps").items():
        sizes = sizes or list(seconds)
        one = seconds["1"]
        row = [process]
        for size in sizes:
            value = seconds.get(size)
            row.append("" if value is None else f"{1000 * value:.1f} ms ({value / one:.2f})")
        weights = loaded.get(process, {}).get("weight_bytes")
        share = weights / one / rate.median if weights and rate else None
        rows.append([*row, _times(share)])
    head = ["rows", *sizes, "share of the memory's rate, 1 row"]
    return f"In brackets: times a step of one row.\n\n{table(head, rows)}"


def _who(made: Figures) -> str:
    rows = [[name, about["about"]] for name, about in made.contenders.items()]
    absent = made.by_part("absent")
    rows += [[name, f"absent: {why}"] for name, why in absent.items()]
    return table(["contender", "how"], rows)
