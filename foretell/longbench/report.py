"""What was measured, for people: figures of every contender, tables and a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from foretell.bench.report import markup
from foretell.bench.report.plot import Point, line_chart
from foretell.bench.tasks import compare_scores, describe_failures, format_difference
from foretell.longbench.settings import FULL, PERPLEXITY, budget_rows

Rows = list[list[str]]
GROUP = ("length", "task", "mode")  # what is compared
KEY = ("kv", "budget")  # of a contender
MODES = {  # in words
    "single": "the question known while the context is read",
    "requests": "the context read once, questions by themselves",
    "turns": "turns of one conversation",
    "text": "",
}


def contender_name(answer: dict[str, Any]) -> str:
    """The name of a contender, as tables show it."""
    return f"{answer['kv']} at {answer['budget']}" if answer["budget"] else str(answer["kv"])


def failure_lines(document: dict[str, Any]) -> list[str]:
    """Writes a line for each unit that could not be measured."""

    def where(answer: dict[str, Any]) -> str:
        task_name = f"{answer['task']}, {answer['mode']}, {answer['length']} tokens"
        return f"{task_name}, context {answer['number']}, {contender_name(answer)}"

    return describe_failures(document, where)


def summarize_cells(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Summarizes each task, mode, length and contender: the means, and how much more they are than
    those of the full cache, context by context with a 95 % interval.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in document["answers"]:
        if "error" not in one:
            groups.setdefault(tuple(one[group_key] for group_key in (*GROUP, *KEY)), []).append(one)
    cell_list = []
    for group_key, group_answers in groups.items():
        cell_fields = dict(zip((*GROUP, *KEY), group_key, strict=True))
        full_cache_answers = {
            one["number"]: one for one in groups.get((*group_key[:3], FULL, ""), [])
        }
        figures = (
            _text_figures(group_answers, full_cache_answers)
            if cell_fields["task"] == PERPLEXITY
            else _answer_figures(group_answers, full_cache_answers)
        )
        usages = [one for answer in group_answers for one in answer["held"]]
        figures["rows"] = fmean(one["rows"] for one in usages)
        figures["bytes"] = fmean(one["bytes"] for one in usages)
        cell_list.append(cell_fields | {"contexts": len(group_answers)} | figures)
    return cell_list


def _answer_figures(
    group_answers: Sequence[dict[str, Any]], full_cache_answers: dict[int, Any]
) -> dict[str, Any]:
    scores = [fmean(answer["scores"]) for answer in group_answers]
    figures: dict[str, Any] = {
        "score": fmean(scores),
        "turns": [
            fmean(turn_scores)
            for turn_scores in zip(*(answer["scores"] for answer in group_answers), strict=False)
        ],
        "first_s": mean_of_known(
            seconds for answer in group_answers for seconds in answer["first_s"]
        ),
        "token_s": mean_of_known(
            seconds for answer in group_answers for seconds in answer["token_s"]
        ),
    }
    depths = sorted({answer["place"] for answer in group_answers if answer["place"] is not None})
    if depths:
        figures["depths"] = {
            f"{depth:.0%}": fmean(
                score
                for score, answer in zip(scores, group_answers, strict=True)
                if answer["place"] == depth
            )
            for depth in depths
        }
    score_pairs = [
        (score, fmean(full_cache_answers[answer["number"]]["scores"]))
        for score, answer in zip(scores, group_answers, strict=True)
        if answer["number"] in full_cache_answers
    ]
    return figures | _difference_figures(group_answers, score_pairs)


def _text_figures(
    group_answers: Sequence[dict[str, Any]], full_cache_answers: dict[int, Any]
) -> dict[str, Any]:
    text_bits = [fmean(answer["bits"]) for answer in group_answers]
    parts = [
        fmean(part_bits)
        for part_bits in zip(*(answer["bits"] for answer in group_answers), strict=True)
    ]
    figures = {"bits": fmean(text_bits), "perplexity": 2 ** fmean(text_bits), "parts": parts}
    bit_pairs = [
        (own_bits, fmean(full_cache_answers[answer["number"]]["bits"]))
        for own_bits, answer in zip(text_bits, group_answers, strict=True)
        if answer["number"] in full_cache_answers
    ]
    return figures | _difference_figures(group_answers, bit_pairs)


def _difference_figures(
    group_answers: Sequence[dict[str, Any]], pairs: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    if group_answers[0]["kv"] == FULL or not pairs:
        return {}
    return {
        "more": compare_scores(
            [contender_value for contender_value, _ in pairs],
            [full_value for _, full_value in pairs],
        )
    }


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are known; None: none is."""
    known_values = [value for value in values if value is not None]
    return fmean(known_values) if known_values else None


# --- tables


def result_tables(document: dict[str, Any]) -> list[tuple[str, Rows]]:
    """Returns a title and rows, the head first, for each length, task and mode."""
    return [
        (group_title(cell_group), _group_table(cell_group)) for cell_group in group_cells(document)
    ]


def group_cells(document: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Groups the cells by length, task and mode."""
    cells_by_group: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for cell in summarize_cells(document):
        cells_by_group.setdefault(tuple(cell[key] for key in GROUP), []).append(cell)
    return list(cells_by_group.values())


def group_title(group_cells: Sequence[dict[str, Any]]) -> str:
    first_cell = group_cells[0]
    contexts = markup.format_count(first_cell["contexts"], "context")
    if first_cell["task"] == PERPLEXITY:
        return f"{PERPLEXITY} of the second half, {first_cell['length']:,} tokens: {contexts}"
    return (
        f"{first_cell['task']}, {first_cell['mode']}, {first_cell['length']:,} tokens: {contexts}"
    )


def _group_table(group_cells: Sequence[dict[str, Any]]) -> Rows:
    first_cell = group_cells[0]
    if first_cell["task"] == PERPLEXITY:
        header_row = ["", "perplexity", "bits", f"more than {FULL}"]
        header_row += [f"part {number}" for number in range(1, len(first_cell["parts"]) + 1)]
        header_row += ["rows", "MB"]
        return [header_row, *(_text_row(cell) for cell in group_cells)]
    header_row = ["", "score", f"more than {FULL}"]
    if first_cell["mode"] == "turns" and len(first_cell["turns"]) > 1:
        header_row += [f"turn {number}" for number in range(1, len(first_cell["turns"]) + 1)]
    header_row += [f"at {depth}" for depth in first_cell.get("depths", {})]
    header_row += ["first token", "a token", "rows", "MB"]
    return [header_row, *(_score_row(cell) for cell in group_cells)]


def _score_row(cell: dict[str, Any]) -> list[str]:
    row_cells = [
        contender_name(cell),
        f"{cell['score']:.1%}",
        format_difference(cell["more"]) if "more" in cell else "",
    ]
    if cell["mode"] == "turns" and len(cell["turns"]) > 1:
        row_cells += [f"{turn_score:.0%}" for turn_score in cell["turns"]]
    row_cells += [f"{score:.0%}" for score in cell.get("depths", {}).values()]
    first_seconds, token_seconds = cell["first_s"], cell["token_s"]
    row_cells.append("" if first_seconds is None else f"{first_seconds:.2f} s")
    row_cells.append("" if token_seconds is None else f"{1000 * token_seconds:.1f} ms")
    return row_cells + _usage_columns(cell)


def _text_row(cell: dict[str, Any]) -> list[str]:
    row_cells = [contender_name(cell), f"{cell['perplexity']:.2f}", f"{cell['bits']:.3f}"]
    row_cells.append(format_difference(cell["more"], "+.3f") if "more" in cell else "")
    return row_cells + [f"{part:.3f}" for part in cell["parts"]] + _usage_columns(cell)


def _usage_columns(cell: dict[str, Any]) -> list[str]:
    return [f"{cell['rows']:,.0f}", f"{cell['bytes'] / 1e6:.2f}"]


# --- a page


def render_html(document: dict[str, Any]) -> str:
    """Renders one self-contained file: of each length, task and mode the lines and the table."""
    page_sections = []
    for cell_group in group_cells(document):
        header_row, *body_rows = _group_table(cell_group)
        colours = markup.assign_colours(list(dict.fromkeys(cell["kv"] for cell in cell_group)))
        row_markup = [
            markup.name_cell(row[0], colours[cell["kv"]])
            + "".join(f"<td>{markup.escape(text)}</td>" for text in row[1:])
            for row, cell in zip(body_rows, cell_group, strict=True)
        ]
        plots = _group_plots(cell_group, colours)
        page_sections.append(
            markup.render_section(
                group_title(cell_group),
                MODES[cell_group[0]["mode"]],
                *plots,
                markup.render_table(header_row, row_markup),
            )
        )
    if failed_lines := failure_lines(document):
        page_sections.append(
            f"<section><h2>Failed</h2>{markup.render_list(failed_lines, 'bad')}</section>"
        )
    page_document = document | {"settings": {"models": [document["settings"]["model"]]}}
    return markup.render_page("foretell longbench", page_document, page_sections)


def _group_plots(group_cells: Sequence[dict[str, Any]], colours: dict[str, str]) -> list[str]:
    """Plots scores by rows, and of conversations by turn; of texts the bits by part."""
    if group_cells[0]["task"] == PERPLEXITY:
        return [_plot_by_place(group_cells, "parts", "part of the second half", "bits a token")]
    points_by_policy: dict[str, list[Point]] = {kv: [] for kv in colours}
    for cell in group_cells:
        row_count = budget_rows(cell["budget"], cell["length"]) if cell["budget"] else cell["rows"]
        points_by_policy[cell["kv"]].append((float(round(row_count)), cell["score"]))
    points = [sorted(line) for line in points_by_policy.values()]
    plots = [
        line_chart(
            list(points_by_policy),
            points,
            "rows",
            "score",
            [*colours.values()],
            top=1.0,
            logarithmic=True,
        )
    ]
    if group_cells[0]["mode"] == "turns" and len(group_cells[0]["turns"]) > 1:
        plots.append(_plot_by_place(group_cells, "turns", "turn", "score", y_limit=1.0))
    return plots


def _plot_by_place(
    group_cells: Sequence[dict[str, Any]],
    figure_name: str,
    x_label: str,
    y_label: str,
    y_limit: float | None = None,
) -> str:
    names = [contender_name(cell) for cell in group_cells]
    points = [
        [(place_index + 1.0, value) for place_index, value in enumerate(cell[figure_name])]
        for cell in group_cells
    ]
    return line_chart(
        names, points, x_label, y_label, [*markup.assign_colours(names).values()], top=y_limit
    )
