"""Bar charts as SVG, which every browser shows and which needs no library to write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

COLOURS = ("#3b6fb6", "#e08a2c", "#4a9a62", "#8d65b0")  # of the series, told apart by lightness too
BAR, GAP, WIDTH, CHAR = 16, 14, 460, 6.9  # pixels: height of a bar, between groups, of the axis, of a letter


def bars(title: str, groups: Sequence[str], series: Sequence[str], values: Sequence[Sequence[float | None]],
         axis: str) -> str:  # fmt: skip
    """Horizontal bars: values[g][s] of group g and series s, None: no bar. Values are at least 0."""
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
        parts += [f'<rect x="{x:.1f}" y="44" width="12" height="12" fill="{colour}"/>', text(x + 17, 54, name)]
        x += 17 + CHAR * len(name) + 20
    bottom = height - 46
    for tick in range(round(end / step) + 1):
        at = left + WIDTH * tick * step / end
        parts.append(f'<line x1="{at:.1f}" y1="{top - 6}" x2="{at:.1f}" y2="{bottom}" stroke="#ddd"/>')
        parts.append(text(at, bottom + 16, f"{tick * step:g}", ' text-anchor="middle" fill="#666"'))
    parts.append(text(left + WIDTH / 2, bottom + 36, axis, ' text-anchor="middle" fill="#666"'))
    y = top
    for group, row in zip(groups, values, strict=True):
        parts.append(text(left - 8, y + BAR * len(series) / 2 + 4, group, ' text-anchor="end"'))
        for value, colour in zip(row, _colours(len(series)), strict=True):
            if value is not None:
                size = WIDTH * value / end
                parts.append(f'<rect x="{left}" y="{y + 1}" width="{size:.1f}" height="{BAR - 2}" fill="{colour}"/>')
                parts.append(text(left + size + 5, y + BAR - 4, f"{value:.2f}"))
            y += BAR
        y += GAP
    return "\n".join([*parts, "</svg>"]) + "\n"


def _colours(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]
