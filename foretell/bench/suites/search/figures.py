"""The figures of the suite `search`: what each method solves and computes, and its differences to
the first one, task by task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev
from typing import Any

from foretell.bench.paired import bootstrap_interval

Answer = dict[str, Any]
KEY = ("model", "dtype", "sort")
HEAD = ["method", "solved", "score", "public", "forwards", "tokens", "solves more", "score more"]
ALSO = ["method", "answers", "right", "length of right ones", "of wrong ones"]


def method_cells(
    answers: Sequence[Answer], methods: Callable[[str], Sequence[str]]
) -> list[dict[str, Any]]:
    """Cells of each model, sort and method; `methods`: those of a sort, in order."""
    answer_groups: dict[tuple[str, ...], dict[str, dict[int, Answer]]] = {}
    for answer in answers:
        by_method = answer_groups.setdefault(tuple(answer[name] for name in KEY), {})
        by_method.setdefault(answer["method"], {})[answer["number"]] = answer
    finished_cells = []
    for group_key, by_method in answer_groups.items():
        key_fields = dict(zip(KEY, group_key, strict=True))
        method_order = [name for name in methods(key_fields["sort"]) if name in by_method]
        for name in method_order:
            method_figures = compare_answers(by_method[name], by_method[method_order[0]])
            finished_cells.append(key_fields | {"method": name} | method_figures)
    return finished_cells


def compare_answers(
    own_answers: dict[int, Answer], first_answers: dict[int, Answer]
) -> dict[str, Any]:
    """Figures of a method's answers, by number of the task, beside the first method's."""
    answers = list(own_answers.values())
    method_figures = {
        "tasks": len(answers),
        "solved": fmean(_is_right(answer) for answer in answers),
        "ended_by_budget": sum(answer["reason"] == "budget" for answer in answers),
    }
    for figure_name in ("score", "public", "forwards", "tokens"):
        method_figures[figure_name] = fmean(answer[figure_name] for answer in answers)
    if all(answer["found"] is not None for answer in answers):
        method_figures["found"] = fmean(answer["found"] for answer in answers)
    pairs = [
        (own_answers[number], first_answers[number])
        for number in own_answers
        if number in first_answers
    ]
    if len(pairs) > 1:
        method_figures["solved_more"] = _difference_interval(
            [_is_right(own_answer) - _is_right(first_answer) for own_answer, first_answer in pairs]
        )
        for figure_name in ("score", "forwards", "tokens"):
            method_figures[f"{figure_name}_more"] = _difference_interval(
                [
                    own_answer[figure_name] - first_answer[figure_name]
                    for own_answer, first_answer in pairs
                ]
            )
        if "found" in method_figures:
            method_figures["found_more"] = _difference_interval(
                [own_answer["found"] - first_answer["found"] for own_answer, first_answer in pairs]
            )
    if length_figures := length_statistics(answers):
        method_figures["lengths"] = length_figures
    return method_figures


def _is_right(answer: Answer) -> float:
    return float(answer["score"] == 1)


def _difference_interval(differences: Sequence[float]) -> dict[str, float]:
    return dict(zip(("mean", "low", "high"), bootstrap_interval(differences), strict=True))


# --- lengths of samples


def length_statistics(answers: Sequence[Answer]) -> dict[str, Any]:
    """How long right and wrong samples are, {} where no answer tells of samples or all are of one
    sort; `first_of`: what the first to end of n is right in.

    `model` takes lengths as normal, those of right samples and of wrong ones, each as a share of
    the mean length at its task; `counted` asks the shortest of n of the samples that are there.
    """
    sample_lists = [answer["samples"] for answer in answers if len(answer.get("samples", ())) > 1]
    right_lengths: list[float] = []
    wrong_lengths: list[float] = []
    for samples in sample_lists:
        mean_length = fmean(length for length, _ in samples) or 1.0
        for length, score in samples:
            (right_lengths if score == 1 else wrong_lengths).append(length / mean_length)
    if not right_lengths or not wrong_lengths:
        return {}
    right_share = len(right_lengths) / (len(right_lengths) + len(wrong_lengths))
    right_moments = fmean(right_lengths), pstdev(right_lengths)
    wrong_moments = fmean(wrong_lengths), pstdev(wrong_lengths)
    sizes = [
        sample_count
        for sample_count in (1, 2, 4, 8, 16)
        if all(len(samples) >= sample_count for samples in sample_lists)
    ]
    return {
        "samples": len(right_lengths) + len(wrong_lengths),
        "right": right_share,
        "of_right": right_moments,
        "of_wrong": wrong_moments,
        "first_of": [
            {
                "n": sample_count,
                "model": shortest_right_chance(
                    right_share, right_moments, wrong_moments, sample_count
                ),
                "counted": fmean(
                    _shortest_right_share(samples, sample_count) for samples in sample_lists
                ),
            }
            for sample_count in sizes
        ],
    }


def shortest_right_chance(
    right_share: float,
    right_moments: tuple[float, float],
    wrong_moments: tuple[float, float],
    sample_count: int,
) -> float:
    """The probability that the shortest of n samples is right, where this share of samples is and
    lengths are normal with (mean, spread).

    Source: Agarwal et al., First Finish Search, arXiv:2505.18149: lengths of right and wrong traces
    as two normal distributions.
    """
    components = [(right_share, right_moments), (1 - right_share, wrong_moments)]
    components = [
        (weight, (component_mean, max(spread, 1e-6)))
        for weight, (component_mean, spread) in components
    ]
    lower_end = min(component_mean - 8 * spread for _, (component_mean, spread) in components)
    upper_end = max(component_mean + 8 * spread for _, (component_mean, spread) in components)
    step_count = 4000
    probability = 0.0
    for step in range(step_count):
        length = lower_end + (step + 0.5) * (upper_end - lower_end) / step_count
        density = right_share * _normal_density(length, *components[0][1])
        longer_share = sum(weight * _normal_tail(length, *spread) for weight, spread in components)
        probability += sample_count * density * longer_share ** (sample_count - 1)
    return probability * (upper_end - lower_end) / step_count


def _normal_density(length: float, mean: float, spread: float) -> float:
    return math.exp(-(((length - mean) / spread) ** 2) / 2) / (spread * math.sqrt(2 * math.pi))


def _normal_tail(length: float, mean: float, spread: float) -> float:
    return math.erfc((length - mean) / (spread * math.sqrt(2))) / 2


def _shortest_right_share(samples: Sequence[Sequence[float]], sample_count: int) -> float:
    """The probability that the shortest of n of these (length, score) is right, the first of equal
    ones as it stands there.
    """
    sorted_indices = sorted(
        range(len(samples)), key=lambda sample_index: (samples[sample_index][0], sample_index)
    )
    winning_count = 0.0
    for rank, sample_index in enumerate(sorted_indices):
        longer_samples = len(samples) - rank - 1
        winning_count += (samples[sample_index][1] == 1) * math.comb(
            longer_samples, sample_count - 1
        )
    return winning_count / math.comb(len(samples), sample_count)


# --- what is shown


def tables(document: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """A title and rows, the head first, for every model and sort, and one of samples' lengths."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for cell in document["cells"]:
        groups.setdefault(tuple(cell[name] for name in KEY), []).append(cell)
    titled_tables = []
    for (model, dtype, sort), cells in groups.items():
        has_entries = all("found" in cell for cell in cells)
        column_heads = [*HEAD[:3], "right entries", *HEAD[3:]] if has_entries else HEAD
        rows = [column_heads, *(_figure_row(cell, cells[0], has_entries) for cell in cells)]
        task_count = cells[0]["tasks"]
        title = f"{sort}, {model}, {dtype}: {task_count} tasks, differences to {cells[0]['method']}"
        titled_tables.append((title, rows))
    if length_cells := [cell for cell in document["cells"] if "lengths" in cell]:
        sizes = sorted(
            {
                size_figures["n"]
                for cell in length_cells
                for size_figures in cell["lengths"]["first_of"]
            }
        )
        size_heads = [f"first of {sample_count}: by lengths, counted" for sample_count in sizes]
        titled_tables.append(
            (
                "samples",
                [
                    [*ALSO, *size_heads],
                    *(_lengths_row(size_figures, sizes) for size_figures in length_cells),
                ],
            )
        )
    return titled_tables


def _figure_row(cell: dict[str, Any], first_cell: dict[str, Any], has_entries: bool) -> list[str]:
    row = [cell["method"], f"{cell['solved']:.1%}", f"{cell['score']:.2f}"]
    if has_entries:
        row.append(f"{cell['found']:.1f}{_difference_text(cell, 'found', first_cell, '.1f')}")
    row += [f"{cell['public']:.2f}", f"{cell['forwards']:.0f}", f"{cell['tokens']:.0f}"]
    return [
        *row,
        _difference_text(cell, "solved", first_cell, ".1%"),
        _difference_text(cell, "score", first_cell, ".2f"),
    ]


def _difference_text(
    cell: dict[str, Any], figure_name: str, first_cell: dict[str, Any], number_format: str
) -> str:
    difference = cell.get(f"{figure_name}_more")
    if cell is first_cell or difference is None:
        return ""
    mean_text, lower_text, upper_text = (
        format(difference[part], f"+{number_format}") for part in ("mean", "low", "high")
    )
    return (
        f" {mean_text} ({lower_text} to {upper_text})"
        if figure_name == "found"
        else f"{mean_text} ({lower_text} to {upper_text})"
    )


def _lengths_row(cell: dict[str, Any], sizes: Sequence[int]) -> list[str]:
    length_figures = cell["lengths"]
    moment_texts = [
        f"{length_figures[part][0]:.2f} ± {length_figures[part][1]:.2f}"
        for part in ("of_right", "of_wrong")
    ]
    texts_by_size = {
        size_figures["n"]: f"{size_figures['model']:.1%}, {size_figures['counted']:.1%}"
        for size_figures in length_figures["first_of"]
    }
    leading_cells = [
        f"{cell['sort']} {cell['method']}",
        str(length_figures["samples"]),
        f"{length_figures['right']:.1%}",
    ]
    return [
        *leading_cells,
        *moment_texts,
        *(texts_by_size.get(sample_count, "") for sample_count in sizes),
    ]


def failures(document: dict[str, Any]) -> list[str]:
    """Returns no lines: whatever is no right answer is counted."""
    return []
