"""Bar charts as SVG, which every browser shows and which needs no library to write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

COLOURS = ("#3b6fb6", "#e08a2c", "#4a9a62", "#8d65b0")  # of the series, told apart by lightness too
BAR, GAP, WIDTH, CHAR = (
    16,
    14,
    460,
    6.9,
)  # pixels: height of a bar, between groups, of the axis, of a letter


def bars(
    title: str,
    groups: Sequence[str],
    series: Sequence[str],
    values: Sequence[Sequence[float | None]],
    axis: str,
) -> str:
    """Horizontal bars: values[g][s] of group g and series s, None: no bar. Values are at least
    0.
    """
    left = round(CHAR * max(map(len, groups))) + 24
    top = 78 if len(series) > 1 else 52
    high = max([v for row in values for v in row if v is not None], default=0.0)
    high = high if high > 1e-9 else 1.0
    step = 10 ** math.floor(math.log10(high))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if high / s <= 6)
    end = step * math.ceil(high / step - 1e-9)
    height = top + len(groups) * (BAR * len(series) + GAP) + 46
    wide = left + WIDTH + 56

    def text(x: float, y: float, what: str, more: str = "") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{escape(what)}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{height}" viewBox="0 0 {wide} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#222">',
        f'<rect width="{wide}" height="{height}" fill="#fff"/>',
        text(16, 28, title, ' font-size="15" font-weight="bold"'),
    ]
    x = 16.0
    for name, colour in zip(series, _colours(len(series)), strict=True) if len(series) > 1 else ():
        parts += [
            f'<rect x="{x:.1f}" y="44" width="12" height="12" fill="{colour}"/>',
            text(x + 17, 54, name),
        ]
        x += 17 + CHAR * len(name) + 20
    bottom = height - 46
    for tick in range(round(end / step) + 1):
        at = left + WIDTH * tick * step / end
        parts.append(
            f'<line x1="{at:.1f}" y1="{top - 6}" x2="{at:.1f}" y2="{bottom}" stroke="#ddd"/>'
        )
        parts.append(text(at, bottom + 16, f"{tick * step:g}", ' text-anchor="middle" fill="#666"'))
    parts.append(text(left + WIDTH / 2, bottom + 36, axis, ' text-anchor="middle" fill="#666"'))
    y = top
    for group, row in zip(groups, values, strict=True):
        parts.append(text(left - 8, y + BAR * len(series) / 2 + 4, group, ' text-anchor="end"'))
        for value, colour in zip(row, _colours(len(series)), strict=True):
            if value is not None:
                size = WIDTH * value / end
                parts.append(
                    f'<rect x="{left}" y="{y + 1}" width="{size:.1f}" height="{BAR - 2}" fill="{colour}"/>'
                )
                parts.append(text(left + size + 5, y + BAR - 4, f"{value:.2f}"))
            y += BAR
        y += GAP
    return "\n".join([*parts, "</svg>"]) + "\n"


def _colours(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


# --- charts of a page, whose style sheet gives the colours (var(--ink), var(--line)) in light and
# dark

PAGE = 1040  # pixels: width of such a chart


def _page(height: float, parts: Sequence[str], about: str) -> str:
    size = f'width="{PAGE}" height="{height:.0f}" viewBox="0 0 {PAGE} {height:.0f}" font-size="12"'
    about = f'role="img" aria-label="{escape(about)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {about}>{"".join(parts)}</svg>'


def _word(x: float, y: float, text: str, anchor: str = "start", soft: bool = False) -> str:
    kind = ' class="soft"' if soft else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(text)}</text>'


def _line(
    x1: float, y1: float, x2: float, y2: float, colour: str = "var(--line)", wide: float = 1
) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-width="{wide:g}"/>'
    )


def _box(x: float, y: float, wide: float, high: float, colour: str, more: str = "") -> str:
    size = f'width="{max(0.0, wide):.1f}" height="{max(0.0, high):.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{colour}"{more}/>'


def _legend(names: Sequence[str], colours: Sequence[str]) -> tuple[list[str], float]:
    """Boxes with names in rows, and where the rows end."""
    parts, x, y = list[str](), 0.0, 12.0
    for name, colour in zip(names, colours, strict=True):
        wide = 18 + CHAR * len(name) + 20
        if x and x + wide > PAGE:
            x, y = 0.0, y + 20
        parts += [_box(x, y - 10, 12, 12, colour, ' rx="2"'), _word(x + 18, y, name)]
        x += wide
    return parts, y + 18


def _ticks(high: float, count: int = 6) -> list[float]:
    """Round numbers from 0 to at least `high`, which may be 0."""
    high = high if high > 1e-9 else 1.0
    ten: float = 10.0 ** math.floor(math.log10(high))
    step = next(s for s in (ten / 5, ten / 2, ten, 2 * ten) if high / s <= count)
    return [i * step for i in range(math.ceil(high / step - 1e-9) + 1)]


def columns(
    groups: Sequence[str],
    series: Sequence[str],
    values: Sequence[Sequence[tuple[float, float, float] | None]],
    axis: str,
    colours: Sequence[str],
    *,
    base: float | None = 1.0,
) -> str:
    """Upright bars with ranges: values[g][s] is (middle, low, high) or None; a line stands at
    `base`.
    """
    parts, top = _legend(series, colours)
    ticks = _ticks(max([v[2] for row in values for v in row if v] + [base or 0.0]))
    left, high = 44.0, 260.0
    bottom, room = top + 22 + high, (PAGE - left) / len(groups)
    wide = min(46.0, (room - 26) / len(series))

    def at(value: float) -> float:
        return bottom - high * value / ticks[-1]

    for tick in ticks:
        parts += [
            _line(left, at(tick), PAGE, at(tick)),
            _word(left - 8, at(tick) + 4, f"{tick:g}", "end", True),
        ]
    parts.append(_word(0, top + 4, axis, soft=True))
    for g, (group, row) in enumerate(zip(groups, values, strict=True)):
        x = left + room * g + (room - wide * len(series)) / 2
        parts.append(_word(left + room * (g + 0.5), bottom + 20, group, "middle"))
        for value, colour in zip(row, colours, strict=True):
            if value is not None:
                middle = x + wide / 2
                parts.append(
                    _box(x + 1, at(value[0]), wide - 2, bottom - at(value[0]), colour, ' rx="2"')
                )
                parts.append(_line(middle, at(value[1]), middle, at(value[2]), "var(--ink)", 1.2))
                parts += [
                    _line(middle - 3, at(v), middle + 3, at(v), "var(--ink)", 1.2)
                    for v in value[1:]
                ]
                if wide >= 30:
                    figure = f"{value[0]:.2f}" if value[0] < 100 else f"{value[0]:.0f}"
                    parts.append(_word(middle, at(value[2]) - 5, figure, "middle"))
            x += wide
    parts += [_line(left, at(base), PAGE, at(base), "var(--ink)", 1.4)] if base is not None else []
    return _page(bottom + 30, parts, f"{axis} by group")


def lines(
    series: Sequence[str],
    points: Sequence[Sequence[tuple[float, float]]],
    across: str,
    up: str,
    colours: Sequence[str],
    *,
    top: float | None = None,
    log: bool = False,
    marks: Sequence[tuple[float, float, str, str]] = (),
    ranges: Sequence[Sequence[tuple[float, float]]] = (),
) -> str:
    """Lines through points; `marks`: (x, y, name, colour) dots; `log`: x by its logarithm; `top`:
    end of the y axis.

    `ranges`: (low, high) of each point.
    """
    parts, above = _legend(series, colours)
    ends = [high for line in ranges for _, high in line]
    ticks = _ticks(top or max([y for line in points for _, y in line] + ends))
    left, high = 54.0, 260.0
    bottom, right = above + 22 + high, float(PAGE - 20)
    xs = sorted({x for line in points for x, _ in line})
    low, far = xs[0], max([xs[-1], *(m[0] for m in marks)])

    def scale(x: float) -> float:
        return math.log(x) if log else x

    def at(x: float, y: float) -> tuple[float, float]:
        part = (scale(x) - scale(low)) / ((scale(far) - scale(low)) or 1)
        return left + part * (right - left), bottom - high * y / ticks[-1]

    for tick in ticks:
        y = at(low, tick)[1]
        parts += [_line(left, y, right, y), _word(left - 8, y + 4, f"{tick:g}", "end", True)]
    for x in xs:
        parts.append(_word(at(x, 0)[0], bottom + 18, f"{x:g}", "middle", True))
    parts += [
        _word(0, above + 4, up, soft=True),
        _word((left + right) / 2, bottom + 38, across, "middle", True),
    ]
    for line, colour in zip(points, colours, strict=True):
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in (at(x, y) for x, y in line))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{colour}"/>'
            for a, b in (at(x, y) for x, y in line)
        ]
    for i, (line, whiskers) in enumerate(zip(points, ranges, strict=False)):
        aside = 5.0 * (i - (len(ranges) - 1) / 2)  # or those of two lines would hide one another
        for (x, y), ends_of in zip(line, whiskers, strict=True):
            a = at(x, y)[0] + aside
            low_at, high_at = (at(x, end)[1] for end in ends_of)
            parts.append(_line(a, low_at, a, high_at, colours[i], 1.2))
            parts += [_line(a - 3, b, a + 3, b, colours[i], 1.2) for b in (low_at, high_at)]
    taken: list[tuple[float, float]] = []
    for x, y, name, colour in sorted(
        marks, reverse=True
    ):  # a label further left is higher: no line crosses a label
        a, b = at(x, y)
        words, label = f"{name}: {x:.1f}", b - 12.0
        while any(c - a < CHAR * len(words) + 12 and d - label < 14 for c, d in taken):
            label -= 14
        taken.append((a, label))
        parts += [
            _line(a, b, a, label + 4, colour),
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="5" fill="{colour}" stroke="var(--card)"/>',
            _word(a, label, words, "end" if a + CHAR * len(words) > right else "start"),
        ]
    return _page(bottom + 46, parts, f"{up} by {across}")


def stacked(
    groups: Sequence[str],
    series: Sequence[str],
    values: Sequence[Sequence[float]],
    axis: str,
    colours: Sequence[str],
    notes: Sequence[str] = (),
) -> str:
    """Horizontal bars of parts: values[g][s], at least 0; `notes`: a word behind each bar's sum."""
    parts, top = _legend(series, colours)
    left = CHAR * max(map(len, groups)) + 16
    ticks = _ticks(max(sum(row) for row in values))
    room, bottom = (
        PAGE - left - 60 - CHAR * max(map(len, notes), default=0),
        top + 6 + 26 * len(groups),
    )
    for tick in ticks:
        x = left + room * tick / ticks[-1]
        parts += [_line(x, top, x, bottom), _word(x, bottom + 16, f"{tick:g}", "middle", True)]
    parts.append(_word(left + room / 2, bottom + 34, axis, "middle", True))
    for g, (group, row) in enumerate(zip(groups, values, strict=True)):
        x, y = left, top + 6 + 26 * g
        parts.append(_word(left - 8, y + 13, group, "end"))
        for value, colour in zip(row, colours, strict=True):
            parts.append(_box(x, y, room * value / ticks[-1], 18, colour))
            x += room * value / ticks[-1]
        parts.append(_word(x + 6, y + 13, f"{sum(row):.2f} {notes[g] if notes else ''}".strip()))
    return _page(bottom + 42, parts, axis)


def track(rows: Sequence[tuple[str, Sequence[Sequence[float]]]], colours: Sequence[str]) -> str:
    """Generations on one clock: each row has steps [tokens, drafted, accepted, seconds], the first
    one the prefill.

    `colours`: of the model's own tokens, of accepted and of refused drafts.
    """
    parts: list[str] = []
    end = max(sum(step[3] for step in steps) for _, steps in rows) or 1.0
    most = max([step[0] for _, steps in rows for step in steps[1:]] + [1.0])
    worst = max([step[1] - step[2] for _, steps in rows for step in steps[1:]] + [1.0])
    left = CHAR * max(len(name) for name, _ in rows) + 16
    room, up, down, y = PAGE - left - 96, 40.0, 22.0, 6.0
    for name, steps in rows:
        x, base = left, y + up
        parts.append(_word(left - 8, base + 4, name, "end"))
        for i, (tokens, drafted, accepted, seconds) in enumerate(steps):
            wide = room * seconds / end
            if i == 0:
                parts.append(_box(x, base - up, wide, up, "var(--line)"))
            else:
                one, body = up / most, max(0.6, wide - 0.8)
                good = min(accepted, tokens)
                parts.append(
                    _box(x, base - one * (tokens - good), body, one * (tokens - good), colours[0])
                )
                if good:
                    parts.append(_box(x, base - one * tokens, body, one * good, colours[1]))
                if drafted > accepted:
                    parts.append(
                        _box(x, base, body, down * (drafted - accepted) / worst, colours[2])
                    )
            x += wide
        total, seconds = sum(step[0] for step in steps), sum(step[3] for step in steps)
        parts += [
            _line(left, base, left + room, base),
            _word(x + 6, base - 4, f"{total:.0f} in {seconds:.2f} s", soft=True),
        ]
        y += up + down + 14
    for tick in _ticks(end):
        if tick <= end:
            parts.append(_word(left + room * tick / end, y + 8, f"{tick:g} s", "middle", True))
    return _page(y + 18, parts, "steps of one generation")
