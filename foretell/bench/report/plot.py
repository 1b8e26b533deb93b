"""Charts as SVG, which every browser shows and which needs no library to write.

`bars` is a file of its own; the others are parts of a page, whose style sheet gives the colours
(var(--ink), var(--line)) in light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

COLOURS = ("#3b6fb6", "#e08a2c", "#4a9a62", "#8d65b0")  # of series, told apart by lightness too
# Pixels:
BAR = 16  # height of a bar
GAP = 14  # between groups of bars
WIDTH = 460  # of the axis
CHAR = 6.9  # width of a letter
PAGE = 1040  # width of a chart of a page
HIGH = 260.0  # of its axis
NAME_BOX = 12  # of a legend, each side
Point = tuple[float, float]


# --- a file of its own


def bars(
    title: str,
    groups: Sequence[str],
    series: Sequence[str],
    values: Sequence[Sequence[float | None]],
    axis: str,
) -> str:
    """Horizontal bars: values[g][s] of group g and series s, at least 0; None: no bar."""
    legend = len(series) > 1
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(series))]
    left = round(CHAR * max(map(len, groups))) + 24
    top = 78 if legend else 52
    height = top + len(groups) * (BAR * len(series) + GAP) + 46
    width = left + WIDTH + 56
    bottom = height - 46
    ticks = _ticks(max([v for row in values for v in row if v is not None], default=0.0))
    end = ticks[-1]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        _text(16, 28, title, ' font-size="15" font-weight="bold"'),
    ]
    if legend:
        parts += _bar_legend(series, colours)
    for tick in ticks:
        at = left + WIDTH * tick / end
        ends = f'x1="{at:.1f}" y1="{top - 6}" x2="{at:.1f}" y2="{bottom}"'
        parts.append(f'<line {ends} stroke="#ddd"/>')
        parts.append(_text(at, bottom + 16, f"{tick:g}", ' text-anchor="middle" fill="#666"'))
    parts.append(_text(left + WIDTH / 2, bottom + 36, axis, ' text-anchor="middle" fill="#666"'))
    y = top
    for group, row in zip(groups, values, strict=True):
        parts.append(_text(left - 8, y + BAR * len(series) / 2 + 4, group, ' text-anchor="end"'))
        for value, colour in zip(row, colours, strict=True):
            if value is not None:
                size = WIDTH * value / end
                place = f'x="{left}" y="{y + 1}" width="{size:.1f}" height="{BAR - 2}"'
                parts.append(f'<rect {place} fill="{colour}"/>')
                parts.append(_text(left + size + 5, y + BAR - 4, f"{value:.2f}"))
            y += BAR
        y += GAP
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bar_legend(series: Sequence[str], colours: Sequence[str]) -> list[str]:
    parts = []
    x = 16.0
    for name, colour in zip(series, colours, strict=True):
        place = f'x="{x:.1f}" y="44" width="{NAME_BOX}" height="{NAME_BOX}"'
        parts.append(f'<rect {place} fill="{colour}"/>')
        parts.append(_text(x + 17, 54, name))
        x += 17 + CHAR * len(name) + 20
    return parts


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(text)}</text>'


def _ticks(high: float, count: int = 6) -> list[float]:
    """About `count` round numbers from 0 to at least `high`, which may be 0."""
    high = high if high > 1e-9 else 1.0
    ten: float = 10.0 ** math.floor(math.log10(high))
    step = next(s for s in (ten / 5, ten / 2, ten, 2 * ten) if high / s <= count)
    return [i * step for i in range(math.ceil(high / step - 1e-9) + 1)]


# --- parts of a page


def _chart(height: float, parts: Sequence[str], about: str) -> str:
    size = f'width="{PAGE}" height="{height:.0f}" viewBox="0 0 {PAGE} {height:.0f}" font-size="12"'
    label = f'role="img" aria-label="{escape(about)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {label}>{"".join(parts)}</svg>'


def _label(x: float, y: float, text: str, anchor: str = "start", soft: bool = False) -> str:
    kind = ' class="soft"' if soft else ""
    return _text(x, y, text, f' text-anchor="{anchor}"{kind}')


def _line(
    x1: float, y1: float, x2: float, y2: float, colour: str = "var(--line)", width: float = 1
) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width:g}"/>'


def _whisker(x: float, y1: float, y2: float, colour: str) -> list[str]:
    """A range: an upright line with its two ends."""
    parts = [_line(x, y1, x, y2, colour, 1.2)]
    parts += [_line(x - 3, y, x + 3, y, colour, 1.2) for y in (y1, y2)]
    return parts


def _box(x: float, y: float, width: float, height: float, colour: str, attributes: str = "") -> str:
    size = f'width="{max(0.0, width):.1f}" height="{max(0.0, height):.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{colour}"{attributes}/>'


def _legend(names: Sequence[str], colours: Sequence[str]) -> tuple[list[str], float]:
    """Boxes with names in rows, and where the rows end."""
    parts = []
    x = 0.0
    y = 12.0
    for name, colour in zip(names, colours, strict=True):
        width = 18 + CHAR * len(name) + 20
        if x and x + width > PAGE:
            x = 0.0
            y += 20
        parts.append(_box(x, y - 10, NAME_BOX, NAME_BOX, colour, ' rx="2"'))
        parts.append(_label(x + 18, y, name))
        x += width
    return parts, y + 18


def columns(
    groups: Sequence[str],
    series: Sequence[str],
    values: Sequence[Sequence[tuple[float, float, float] | None]],
    axis: str,
    colours: Sequence[str],
    *,
    base: float | None = 1.0,
) -> str:
    """Upright bars with ranges: values[g][s] is (middle, low, high) or None; a line is drawn at
    `base`.
    """
    parts, top = _legend(series, colours)
    ticks = _ticks(max([v[2] for row in values for v in row if v] + [base or 0.0]))
    left = 44.0
    bottom = top + 22 + HIGH
    room = (PAGE - left) / len(groups)
    width = min(46.0, (room - 26) / len(series))

    def at(value: float) -> float:
        return bottom - HIGH * value / ticks[-1]

    for tick in ticks:
        parts.append(_line(left, at(tick), PAGE, at(tick)))
        parts.append(_label(left - 8, at(tick) + 4, f"{tick:g}", "end", True))
    parts.append(_label(0, top + 4, axis, soft=True))
    for g, (group, row) in enumerate(zip(groups, values, strict=True)):
        x = left + room * g + (room - width * len(series)) / 2
        parts.append(_label(left + room * (g + 0.5), bottom + 20, group, "middle"))
        for value, colour in zip(row, colours, strict=True):
            if value is not None:
                height = bottom - at(value[0])
                centre = x + width / 2
                parts.append(_box(x + 1, at(value[0]), width - 2, height, colour, ' rx="2"'))
                parts += _whisker(centre, at(value[1]), at(value[2]), "var(--ink)")
                if width >= 30:
                    figure = f"{value[0]:.2f}" if value[0] < 100 else f"{value[0]:.0f}"
                    parts.append(_label(centre, at(value[2]) - 5, figure, "middle"))
            x += width
    if base is not None:
        parts.append(_line(left, at(base), PAGE, at(base), "var(--ink)", 1.4))
    return _chart(bottom + 30, parts, f"{axis} by group")


def lines(
    series: Sequence[str],
    points: Sequence[Sequence[Point]],
    across: str,
    up: str,
    colours: Sequence[str],
    *,
    top: float | None = None,
    log: bool = False,
    marks: Sequence[tuple[float, float, str, str]] = (),
    ranges: Sequence[Sequence[Point]] = (),
) -> str:
    """Lines through points.

    `across`, `up`: names of the axes; `top`: end of the upright one; `log`: the other one is
    logarithmic; `marks`: dots (x, y, name, colour); `ranges`: (low, high) of each point.
    """
    parts, above = _legend(series, colours)
    heights = [y for line in points for _, y in line]
    heights += [high for whiskers in ranges for _, high in whiskers]
    ticks = _ticks(top or max(heights))
    left = 54.0
    right = float(PAGE - 20)
    bottom = above + 22 + HIGH
    xs = sorted({x for line in points for x, _ in line})
    start = xs[0]
    end = max([xs[-1], *(mark[0] for mark in marks)])

    def scale(x: float) -> float:
        return math.log(x) if log else x

    def at(x: float, y: float) -> Point:
        share = (scale(x) - scale(start)) / ((scale(end) - scale(start)) or 1)
        return left + share * (right - left), bottom - HIGH * y / ticks[-1]

    for tick in ticks:
        y = at(start, tick)[1]
        parts.append(_line(left, y, right, y))
        parts.append(_label(left - 8, y + 4, f"{tick:g}", "end", True))
    free = -math.inf  # where the next number has room
    for x in xs:
        place, name = at(x, 0)[0], f"{x:.3g}" if x < 1000 else f"{x:g}"
        half = CHAR * len(name) / 2
        if place - half >= free:
            parts.append(_label(place, bottom + 18, name, "middle", True))
            free = place + half + 4
    parts.append(_label(0, above + 4, up, soft=True))
    parts.append(_label((left + right) / 2, bottom + 38, across, "middle", True))
    for line, colour in zip(points, colours, strict=True):
        places = [at(x, y) for x, y in line]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for a, b in places:
            parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{colour}"/>')
    for i, (line, whiskers) in enumerate(zip(points, ranges, strict=False)):
        aside = 5.0 * (i - (len(ranges) - 1) / 2)  # so that those of two lines do not overlap
        for (x, _), (low, high) in zip(line, whiskers, strict=True):
            a = at(x, 0)[0] + aside
            parts += _whisker(a, at(x, low)[1], at(x, high)[1], colours[i])
    dots = [(*at(x, y), f"{name}: {x:.1f}", colour) for x, y, name, colour in marks]
    parts += _dots(dots, right)
    return _chart(bottom + 46, parts, f"{up} by {across}")


def _dots(dots: Sequence[tuple[float, float, str, str]], right: float) -> list[str]:
    """Dots (x, y, text, colour) with their texts above them, where they do not overlap."""
    parts = []
    taken: list[Point] = []
    # From right to left, so that a text further left is higher and no line crosses a text.
    for x, y, text, colour in sorted(dots, reverse=True):
        width = CHAR * len(text)
        label = y - 12.0
        while any(a - x < width + 12 and b - label < 14 for a, b in taken):
            label -= 14
        taken.append((x, label))
        parts.append(_line(x, y, x, label + 4, colour))
        place = f'cx="{x:.1f}" cy="{y:.1f}"'
        parts.append(f'<circle {place} r="5" fill="{colour}" stroke="var(--card)"/>')
        parts.append(_label(x, label, text, "end" if x + width > right else "start"))
    return parts


def stacked(
    groups: Sequence[str],
    series: Sequence[str],
    values: Sequence[Sequence[float]],
    axis: str,
    colours: Sequence[str],
    notes: Sequence[str] = (),
) -> str:
    """Horizontal bars of parts: values[g][s], at least 0; `notes`: a text after each bar's sum."""
    parts, top = _legend(series, colours)
    left = CHAR * max(map(len, groups)) + 16
    ticks = _ticks(max(sum(row) for row in values))
    room = PAGE - left - 60 - CHAR * max(map(len, notes), default=0)
    bottom = top + 6 + 26 * len(groups)
    for tick in ticks:
        x = left + room * tick / ticks[-1]
        parts.append(_line(x, top, x, bottom))
        parts.append(_label(x, bottom + 16, f"{tick:g}", "middle", True))
    parts.append(_label(left + room / 2, bottom + 34, axis, "middle", True))
    for g, (group, row) in enumerate(zip(groups, values, strict=True)):
        x = left
        y = top + 6 + 26 * g
        parts.append(_label(left - 8, y + 13, group, "end"))
        for value, colour in zip(row, colours, strict=True):
            width = room * value / ticks[-1]
            parts.append(_box(x, y, width, 18, colour))
            x += width
        note = notes[g] if notes else ""
        parts.append(_label(x + 6, y + 13, f"{sum(row):.2f} {note}".strip()))
    return _chart(bottom + 42, parts, axis)


def track(rows: Sequence[tuple[str, Sequence[Sequence[float]]]], colours: Sequence[str]) -> str:
    """Generations on one clock: each row has steps [tokens, drafted, accepted, seconds], the first
    of which is the prefill.

    `colours`: of the model's own tokens, of accepted and of refused drafts.
    """
    later = [step for _, steps in rows for step in steps[1:]]
    end = max(sum(step[3] for step in steps) for _, steps in rows) or 1.0
    most_tokens = max([step[0] for step in later] + [1.0])
    most_refused = max([step[1] - step[2] for step in later] + [1.0])
    left = CHAR * max(len(name) for name, _ in rows) + 16
    room = PAGE - left - 96
    up = 40.0
    down = 22.0
    parts = []
    y = 6.0
    for name, steps in rows:
        base = y + up
        parts.append(_label(left - 8, base + 4, name, "end"))
        x = left
        for i, (tokens, drafted, accepted, seconds) in enumerate(steps):
            width = room * seconds / end
            if i == 0:
                parts.append(_box(x, base - up, width, up, "var(--line)"))
            else:
                token = up / most_tokens
                block = max(0.6, width - 0.8)
                good = min(accepted, tokens)
                own = token * (tokens - good)
                parts.append(_box(x, base - own, block, own, colours[0]))
                if good:
                    parts.append(_box(x, base - token * tokens, block, token * good, colours[1]))
                if drafted > accepted:
                    refused = down * (drafted - accepted) / most_refused
                    parts.append(_box(x, base, block, refused, colours[2]))
            x += width
        total = sum(step[0] for step in steps)
        seconds = sum(step[3] for step in steps)
        parts.append(_line(left, base, left + room, base))
        parts.append(_label(x + 6, base - 4, f"{total:.0f} in {seconds:.2f} s", soft=True))
        y += up + down + 14
    for tick in _ticks(end):
        if tick <= end:
            parts.append(_label(left + room * tick / end, y + 8, f"{tick:g} s", "middle", True))
    return _chart(y + 18, parts, "steps of one generation")
