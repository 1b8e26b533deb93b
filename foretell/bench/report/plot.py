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


def bar_chart(
    title: str,
    groups: Sequence[str],
    series: Sequence[str],
    values: Sequence[Sequence[float | None]],
    axis: str,
) -> str:
    """Horizontal bars: values[g][s] of group g and series s, at least 0; None: no bar."""
    has_legend = len(series) > 1
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(series))]
    axis_left = round(CHAR * max(map(len, groups))) + 24
    axis_top = 78 if has_legend else 52
    height = axis_top + len(groups) * (BAR * len(series) + GAP) + 46
    width = axis_left + WIDTH + 56
    bottom = height - 46
    ticks = _round_ticks(max([v for row in values for v in row if v is not None], default=0.0))
    axis_end = ticks[-1]
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        _text_element(16, 28, title, ' font-size="15" font-weight="bold"'),
    ]
    if has_legend:
        elements += _bar_legend(series, colours)
    for tick in ticks:
        tick_x = axis_left + WIDTH * tick / axis_end
        line_ends = f'x1="{tick_x:.1f}" y1="{axis_top - 6}" x2="{tick_x:.1f}" y2="{bottom}"'
        elements.append(f'<line {line_ends} stroke="#ddd"/>')
        elements.append(
            _text_element(tick_x, bottom + 16, f"{tick:g}", ' text-anchor="middle" fill="#666"')
        )
    elements.append(
        _text_element(axis_left + WIDTH / 2, bottom + 36, axis, ' text-anchor="middle" fill="#666"')
    )
    y = axis_top
    for group, row in zip(groups, values, strict=True):
        elements.append(
            _text_element(axis_left - 8, y + BAR * len(series) / 2 + 4, group, ' text-anchor="end"')
        )
        for value, colour in zip(row, colours, strict=True):
            if value is not None:
                bar_length = WIDTH * value / axis_end
                rectangle = (
                    f'x="{axis_left}" y="{y + 1}" width="{bar_length:.1f}" height="{BAR - 2}"'
                )
                elements.append(f'<rect {rectangle} fill="{colour}"/>')
                elements.append(
                    _text_element(axis_left + bar_length + 5, y + BAR - 4, f"{value:.2f}")
                )
            y += BAR
        y += GAP
    return "\n".join([*elements, "</svg>"]) + "\n"


def _bar_legend(series: Sequence[str], colours: Sequence[str]) -> list[str]:
    elements = []
    box_x = 16.0
    for name, colour in zip(series, colours, strict=True):
        rectangle = f'x="{box_x:.1f}" y="44" width="{NAME_BOX}" height="{NAME_BOX}"'
        elements.append(f'<rect {rectangle} fill="{colour}"/>')
        elements.append(_text_element(box_x + 17, 54, name))
        box_x += 17 + CHAR * len(name) + 20
    return elements


def _text_element(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(text)}</text>'


def _round_ticks(max_value: float, count: int = 6) -> list[float]:
    """About `count` round numbers from 0 to at least `max_value`, which may be 0."""
    max_value = max_value if max_value > 1e-9 else 1.0
    power_of_ten: float = 10.0 ** math.floor(math.log10(max_value))
    step = next(
        candidate
        for candidate in (power_of_ten / 5, power_of_ten / 2, power_of_ten, 2 * power_of_ten)
        if max_value / candidate <= count
    )
    return [tick_number * step for tick_number in range(math.ceil(max_value / step - 1e-9) + 1)]


# --- parts of a page


def _wrap_chart(height: float, elements: Sequence[str], description: str) -> str:
    size_attributes = (
        f'width="{PAGE}" height="{height:.0f}" viewBox="0 0 {PAGE} {height:.0f}" font-size="12"'
    )
    label_attributes = f'role="img" aria-label="{escape(description)}"'
    attributes = f"{size_attributes} {label_attributes}"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {attributes}>{"".join(elements)}</svg>'


def _label_text(x: float, y: float, text: str, anchor: str = "start", soft: bool = False) -> str:
    style_class = ' class="soft"' if soft else ""
    return _text_element(x, y, text, f' text-anchor="{anchor}"{style_class}')


def _line_element(
    x1: float, y1: float, x2: float, y2: float, colour: str = "var(--line)", width: float = 1
) -> str:
    line_ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {line_ends} stroke="{colour}" stroke-width="{width:g}"/>'


def _whisker_lines(x: float, y1: float, y2: float, colour: str) -> list[str]:
    """A range: an upright line with its two ends."""
    elements = [_line_element(x, y1, x, y2, colour, 1.2)]
    elements += [_line_element(x - 3, y, x + 3, y, colour, 1.2) for y in (y1, y2)]
    return elements


def _box_element(
    x: float, y: float, width: float, height: float, colour: str, attributes: str = ""
) -> str:
    size_attributes = f'width="{max(0.0, width):.1f}" height="{max(0.0, height):.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size_attributes} fill="{colour}"{attributes}/>'


def _legend_rows(names: Sequence[str], colours: Sequence[str]) -> tuple[list[str], float]:
    """Boxes with names in rows, and where the rows end."""
    elements = []
    x = 0.0
    y = 12.0
    for name, colour in zip(names, colours, strict=True):
        entry_width = 18 + CHAR * len(name) + 20
        if x and x + entry_width > PAGE:
            x = 0.0
            y += 20
        elements.append(_box_element(x, y - 10, NAME_BOX, NAME_BOX, colour, ' rx="2"'))
        elements.append(_label_text(x + 18, y, name))
        x += entry_width
    return elements, y + 18


def column_chart(
    groups: Sequence[str],
    series: Sequence[str],
    values: Sequence[Sequence[tuple[float, float, float] | None]],
    axis: str,
    colours: Sequence[str],
    *,
    baseline: float | None = 1.0,
) -> str:
    """Upright bars with ranges: values[g][s] is (middle, low, high) or None; a line is drawn at
    `baseline`.
    """
    elements, legend_end = _legend_rows(series, colours)
    ticks = _round_ticks(
        max([bar_range[2] for row in values for bar_range in row if bar_range] + [baseline or 0.0])
    )
    axis_left = 44.0
    bottom = legend_end + 22 + HIGH
    group_width = (PAGE - axis_left) / len(groups)
    bar_width = min(46.0, (group_width - 26) / len(series))

    def at(axis_value: float) -> float:
        return bottom - HIGH * axis_value / ticks[-1]

    for tick in ticks:
        elements.append(_line_element(axis_left, at(tick), PAGE, at(tick)))
        elements.append(_label_text(axis_left - 8, at(tick) + 4, f"{tick:g}", "end", True))
    elements.append(_label_text(0, legend_end + 4, axis, soft=True))
    for group_index, (group, row) in enumerate(zip(groups, values, strict=True)):
        bar_left = (
            axis_left + group_width * group_index + (group_width - bar_width * len(series)) / 2
        )
        elements.append(
            _label_text(axis_left + group_width * (group_index + 0.5), bottom + 20, group, "middle")
        )
        for value, colour in zip(row, colours, strict=True):
            if value is not None:
                height = bottom - at(value[0])
                centre = bar_left + bar_width / 2
                elements.append(
                    _box_element(
                        bar_left + 1, at(value[0]), bar_width - 2, height, colour, ' rx="2"'
                    )
                )
                elements += _whisker_lines(centre, at(value[1]), at(value[2]), "var(--ink)")
                if bar_width >= 30:
                    figure = f"{value[0]:.2f}" if value[0] < 100 else f"{value[0]:.0f}"
                    elements.append(_label_text(centre, at(value[2]) - 5, figure, "middle"))
            bar_left += bar_width
    if baseline is not None:
        elements.append(
            _line_element(axis_left, at(baseline), PAGE, at(baseline), "var(--ink)", 1.4)
        )
    return _wrap_chart(bottom + 30, elements, f"{axis} by group")


def line_chart(
    series: Sequence[str],
    points: Sequence[Sequence[Point]],
    x_title: str,
    y_title: str,
    colours: Sequence[str],
    *,
    top: float | None = None,
    logarithmic: bool = False,
    marks: Sequence[tuple[float, float, str, str]] = (),
    ranges: Sequence[Sequence[Point]] = (),
) -> str:
    """Lines through points.

    `x_title`, `y_title`: names of the axes; `top`: end of the upright one; `logarithmic`: whether
    the other one is; `marks`: dots (x, y, name, colour); `ranges`: (low, high) of each point.
    """
    elements, legend_end = _legend_rows(series, colours)
    point_heights = [y for line in points for _, y in line]
    point_heights += [upper_end for whiskers in ranges for _, upper_end in whiskers]
    ticks = _round_ticks(top or max(point_heights))
    axis_left = 54.0
    axis_right = float(PAGE - 20)
    bottom = legend_end + 22 + HIGH
    x_values = sorted({x for line in points for x, _ in line})
    first_x = x_values[0]
    last_x = max([x_values[-1], *(mark[0] for mark in marks)])

    def scale(x: float) -> float:
        return math.log(x) if logarithmic else x

    def at(x: float, y: float) -> Point:
        share = (scale(x) - scale(first_x)) / ((scale(last_x) - scale(first_x)) or 1)
        return axis_left + share * (axis_right - axis_left), bottom - HIGH * y / ticks[-1]

    for tick in ticks:
        y = at(first_x, tick)[1]
        elements.append(_line_element(axis_left, y, axis_right, y))
        elements.append(_label_text(axis_left - 8, y + 4, f"{tick:g}", "end", True))
    next_free = -math.inf  # where the next number has room
    for x in x_values:
        label_x, name = at(x, 0)[0], f"{x:.3g}" if x < 1000 else f"{x:g}"
        half_width = CHAR * len(name) / 2
        if label_x - half_width >= next_free:
            elements.append(_label_text(label_x, bottom + 18, name, "middle", True))
            next_free = label_x + half_width + 4
    elements.append(_label_text(0, legend_end + 4, y_title, soft=True))
    elements.append(_label_text((axis_left + axis_right) / 2, bottom + 38, x_title, "middle", True))
    for line, colour in zip(points, colours, strict=True):
        pixel_points = [at(x, y) for x, y in line]
        path_points = " ".join(f"{point_x:.1f},{point_y:.1f}" for point_x, point_y in pixel_points)
        elements.append(
            f'<polyline points="{path_points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        for point_x, point_y in pixel_points:
            elements.append(
                f'<circle cx="{point_x:.1f}" cy="{point_y:.1f}" r="2.5" fill="{colour}"/>'
            )
    for series_index, (line, whiskers) in enumerate(zip(points, ranges, strict=False)):
        whisker_shift = 5.0 * (
            series_index - (len(ranges) - 1) / 2
        )  # so that those of two lines do not overlap
        for (x, _), (lower_end, upper_end) in zip(line, whiskers, strict=True):
            point_x = at(x, 0)[0] + whisker_shift
            elements += _whisker_lines(
                point_x, at(x, lower_end)[1], at(x, upper_end)[1], colours[series_index]
            )
    dots = [(*at(x, y), f"{name}: {x:.1f}", colour) for x, y, name, colour in marks]
    elements += _dot_marks(dots, axis_right)
    return _wrap_chart(bottom + 46, elements, f"{y_title} by {x_title}")


def _dot_marks(dots: Sequence[tuple[float, float, str, str]], right_edge: float) -> list[str]:
    """Dots (x, y, text, colour) with their texts above them, where they do not overlap."""
    elements = []
    label_places: list[Point] = []
    # From right to left, so that a text further left is higher and no line crosses a text.
    for x, y, text, colour in sorted(dots, reverse=True):
        text_width = CHAR * len(text)
        label_y = y - 12.0
        while any(
            other_x - x < text_width + 12 and other_y - label_y < 14
            for other_x, other_y in label_places
        ):
            label_y -= 14
        label_places.append((x, label_y))
        elements.append(_line_element(x, y, x, label_y + 4, colour))
        circle = f'cx="{x:.1f}" cy="{y:.1f}"'
        elements.append(f'<circle {circle} r="5" fill="{colour}" stroke="var(--card)"/>')
        elements.append(
            _label_text(x, label_y, text, "end" if x + text_width > right_edge else "start")
        )
    return elements


def stacked_chart(
    groups: Sequence[str],
    series: Sequence[str],
    values: Sequence[Sequence[float]],
    axis: str,
    colours: Sequence[str],
    notes: Sequence[str] = (),
) -> str:
    """Horizontal bars of parts: values[g][s], at least 0; `notes`: a text after each bar's sum."""
    elements, legend_end = _legend_rows(series, colours)
    axis_left = CHAR * max(map(len, groups)) + 16
    ticks = _round_ticks(max(sum(row) for row in values))
    axis_width = PAGE - axis_left - 60 - CHAR * max(map(len, notes), default=0)
    bottom = legend_end + 6 + 26 * len(groups)
    for tick in ticks:
        part_x = axis_left + axis_width * tick / ticks[-1]
        elements.append(_line_element(part_x, legend_end, part_x, bottom))
        elements.append(_label_text(part_x, bottom + 16, f"{tick:g}", "middle", True))
    elements.append(_label_text(axis_left + axis_width / 2, bottom + 34, axis, "middle", True))
    for group_index, (group, row) in enumerate(zip(groups, values, strict=True)):
        part_x = axis_left
        bar_y = legend_end + 6 + 26 * group_index
        elements.append(_label_text(axis_left - 8, bar_y + 13, group, "end"))
        for value, colour in zip(row, colours, strict=True):
            part_width = axis_width * value / ticks[-1]
            elements.append(_box_element(part_x, bar_y, part_width, 18, colour))
            part_x += part_width
        note = notes[group_index] if notes else ""
        elements.append(_label_text(part_x + 6, bar_y + 13, f"{sum(row):.2f} {note}".strip()))
    return _wrap_chart(bottom + 42, elements, axis)


def track_chart(
    rows: Sequence[tuple[str, Sequence[Sequence[float]]]], colours: Sequence[str]
) -> str:
    """Generations on one clock: each row has steps [tokens, drafted, accepted, seconds], the first
    of which is the prefill.

    `colours`: of the model's own tokens, of accepted and of refused drafts.
    """
    later_steps = [step for _, steps in rows for step in steps[1:]]
    total_seconds = max(sum(step[3] for step in steps) for _, steps in rows) or 1.0
    most_tokens = max([step[0] for step in later_steps] + [1.0])
    most_refused = max([step[1] - step[2] for step in later_steps] + [1.0])
    axis_left = CHAR * max(len(name) for name, _ in rows) + 16
    axis_width = PAGE - axis_left - 96
    token_height = 40.0
    refused_height = 22.0
    elements = []
    row_y = 6.0
    for name, steps in rows:
        baseline = row_y + token_height
        elements.append(_label_text(axis_left - 8, baseline + 4, name, "end"))
        step_x = axis_left
        for step_index, (tokens, drafted, accepted, seconds) in enumerate(steps):
            step_width = axis_width * seconds / total_seconds
            if step_index == 0:
                elements.append(
                    _box_element(
                        step_x, baseline - token_height, step_width, token_height, "var(--line)"
                    )
                )
            else:
                height_per_token = token_height / most_tokens
                block_width = max(0.6, step_width - 0.8)
                accepted_tokens = min(accepted, tokens)
                own_height = height_per_token * (tokens - accepted_tokens)
                elements.append(
                    _box_element(step_x, baseline - own_height, block_width, own_height, colours[0])
                )
                if accepted_tokens:
                    elements.append(
                        _box_element(
                            step_x,
                            baseline - height_per_token * tokens,
                            block_width,
                            height_per_token * accepted_tokens,
                            colours[1],
                        )
                    )
                if drafted > accepted:
                    refused_depth = refused_height * (drafted - accepted) / most_refused
                    elements.append(
                        _box_element(step_x, baseline, block_width, refused_depth, colours[2])
                    )
            step_x += step_width
        total_tokens = sum(step[0] for step in steps)
        seconds = sum(step[3] for step in steps)
        elements.append(_line_element(axis_left, baseline, axis_left + axis_width, baseline))
        elements.append(
            _label_text(
                step_x + 6, baseline - 4, f"{total_tokens:.0f} in {seconds:.2f} s", soft=True
            )
        )
        row_y += token_height + refused_height + 14
    for tick in _round_ticks(total_seconds):
        if tick <= total_seconds:
            elements.append(
                _label_text(
                    axis_left + axis_width * tick / total_seconds,
                    row_y + 8,
                    f"{tick:g} s",
                    "middle",
                    True,
                )
            )
    return _wrap_chart(row_y + 18, elements, "steps of one generation")
