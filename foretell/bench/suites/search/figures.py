"""The figures of the suite `search`: what each method solves and computes, and its differences to
the first one, task by task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev
from typing import Any

from foretell.bench.paired import interval

Answer = dict[str, Any]
KEY = ("model", "dtype", "sort")
HEAD = ["method", "solved", "score", "public", "forwards", "tokens", "solves more", "score more"]
ALSO = ["method", "answers", "right", "length of right ones", "of wrong ones"]


def cells(
    answers: Sequence[Answer], methods: Callable[[str], Sequence[str]]
) -> list[dict[str, Any]]:
    """Of each model, sort and method; `methods`: those of a sort, in order."""
    groups: dict[tuple[str, ...], dict[str, dict[int, Answer]]] = {}
    for one in answers:
        by_method = groups.setdefault(tuple(one[name] for name in KEY), {})
        by_method.setdefault(one["method"], {})[one["number"]] = one
    found = []
    for key, by_method in groups.items():
        about = dict(zip(KEY, key, strict=True))
        order = [name for name in methods(about["sort"]) if name in by_method]
        for name in order:
            own = figures(by_method[name], by_method[order[0]])
            found.append(about | {"method": name} | own)
    return found


def figures(own: dict[int, Answer], first: dict[int, Answer]) -> dict[str, Any]:
    """Of a method's answers, by number of the task, and of the first method's to the same."""
    answers = list(own.values())
    made = {
        "tasks": len(answers),
        "solved": fmean(_right(one) for one in answers),
        "ended_by_budget": sum(one["reason"] == "budget" for one in answers),
    }
    for name in ("score", "public", "forwards", "tokens"):
        made[name] = fmean(one[name] for one in answers)
    if all(one["found"] is not None for one in answers):
        made["found"] = fmean(one["found"] for one in answers)
    pairs = [(own[number], first[number]) for number in own if number in first]
    if len(pairs) > 1:
        made["solved_more"] = _interval([_right(a) - _right(b) for a, b in pairs])
        for name in ("score", "forwards", "tokens"):
            made[f"{name}_more"] = _interval([a[name] - b[name] for a, b in pairs])
        if "found" in made:
            made["found_more"] = _interval([a["found"] - b["found"] for a, b in pairs])
    if made_lengths := lengths(answers):
        made["lengths"] = made_lengths
    return made


def _right(answer: Answer) -> float:
    return float(answer["score"] == 1)


def _interval(differences: Sequence[float]) -> dict[str, float]:
    return dict(zip(("mean", "low", "high"), interval(differences), strict=True))


# --- lengths of samples


def lengths(answers: Sequence[Answer]) -> dict[str, Any]:
    """How long right and wrong samples are, {} where no answer tells of samples or all are of one
    sort; `first_of`: what the first to end of n is right in.

    `model` takes lengths as normal, those of right samples and of wrong ones, each as a share of
    the mean length at its task; `counted` asks the shortest of n of the samples that are there.
    """
    told = [one["samples"] for one in answers if len(one.get("samples", ())) > 1]
    right: list[float] = []
    wrong: list[float] = []
    for samples in told:
        mean = fmean(length for length, _ in samples) or 1.0
        for length, score in samples:
            (right if score == 1 else wrong).append(length / mean)
    if not right or not wrong:
        return {}
    share = len(right) / (len(right) + len(wrong))
    of_right = fmean(right), pstdev(right)
    of_wrong = fmean(wrong), pstdev(wrong)
    sizes = [n for n in (1, 2, 4, 8, 16) if all(len(samples) >= n for samples in told)]
    return {
        "samples": len(right) + len(wrong),
        "right": share,
        "of_right": of_right,
        "of_wrong": of_wrong,
        "first_of": [
            {
                "n": n,
                "model": first_is_right(share, of_right, of_wrong, n),
                "counted": fmean(_shortest(samples, n) for samples in told),
            }
            for n in sizes
        ],
    }


def first_is_right(
    share: float, right: tuple[float, float], wrong: tuple[float, float], n: int
) -> float:
    """The chance that the shortest of n samples is right, where this share of samples is and
    lengths are normal with (mean, spread).

    Source: Agarwal et al., First Finish Search, arXiv:2505.18149: lengths of right and wrong traces
    as two normal distributions.
    """
    parts = [(share, right), (1 - share, wrong)]
    parts = [(weight, (mean, max(spread, 1e-6))) for weight, (mean, spread) in parts]
    low = min(mean - 8 * spread for _, (mean, spread) in parts)
    high = max(mean + 8 * spread for _, (mean, spread) in parts)
    steps = 4000
    total = 0.0
    for step in range(steps):
        x = low + (step + 0.5) * (high - low) / steps
        density = share * _density(x, *parts[0][1])
        longer = sum(weight * _above(x, *spread) for weight, spread in parts)
        total += n * density * longer ** (n - 1)
    return total * (high - low) / steps


def _density(x: float, mean: float, spread: float) -> float:
    return math.exp(-(((x - mean) / spread) ** 2) / 2) / (spread * math.sqrt(2 * math.pi))


def _above(x: float, mean: float, spread: float) -> float:
    return math.erfc((x - mean) / (spread * math.sqrt(2))) / 2


def _shortest(samples: Sequence[Sequence[float]], n: int) -> float:
    """The chance that the shortest of n of these (length, score) is right, the first of equal ones
    as it stands there.
    """
    order = sorted(range(len(samples)), key=lambda place: (samples[place][0], place))
    total = 0.0
    for rank, place in enumerate(order):
        behind = len(samples) - rank - 1
        total += (samples[place][1] == 1) * math.comb(behind, n - 1)
    return total / math.comb(len(samples), n)


# --- what is shown


def tables(document: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """A title and rows, the head first, for every model and sort, and one of samples' lengths."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for cell in document["cells"]:
        groups.setdefault(tuple(cell[name] for name in KEY), []).append(cell)
    found = []
    for (model, dtype, sort), cells in groups.items():
        listed = all("found" in cell for cell in cells)
        head = [*HEAD[:3], "right entries", *HEAD[3:]] if listed else HEAD
        rows = [head, *(_row(cell, cells[0], listed) for cell in cells)]
        count = cells[0]["tasks"]
        title = f"{sort}, {model}, {dtype}: {count} tasks, differences to {cells[0]['method']}"
        found.append((title, rows))
    if told := [cell for cell in document["cells"] if "lengths" in cell]:
        sizes = sorted({one["n"] for cell in told for one in cell["lengths"]["first_of"]})
        firsts = [f"first of {n}: by lengths, counted" for n in sizes]
        found.append(("samples", [[*ALSO, *firsts], *(_lengths_row(one, sizes) for one in told)]))
    return found


def _row(cell: dict[str, Any], first: dict[str, Any], listed: bool) -> list[str]:
    row = [cell["method"], f"{cell['solved']:.1%}", f"{cell['score']:.2f}"]
    if listed:
        row.append(f"{cell['found']:.1f}{_more(cell, 'found', first, '.1f')}")
    row += [f"{cell['public']:.2f}", f"{cell['forwards']:.0f}", f"{cell['tokens']:.0f}"]
    return [*row, _more(cell, "solved", first, ".1%"), _more(cell, "score", first, ".2f")]


def _more(cell: dict[str, Any], name: str, first: dict[str, Any], form: str) -> str:
    more = cell.get(f"{name}_more")
    if cell is first or more is None:
        return ""
    mean, low, high = (format(more[part], f"+{form}") for part in ("mean", "low", "high"))
    return f" {mean} ({low} to {high})" if name == "found" else f"{mean} ({low} to {high})"


def _lengths_row(cell: dict[str, Any], sizes: Sequence[int]) -> list[str]:
    told = cell["lengths"]
    spreads = [f"{told[part][0]:.2f} ± {told[part][1]:.2f}" for part in ("of_right", "of_wrong")]
    firsts = {one["n"]: f"{one['model']:.1%}, {one['counted']:.1%}" for one in told["first_of"]}
    about = [f"{cell['sort']} {cell['method']}", str(told["samples"]), f"{told['right']:.1%}"]
    return [*about, *spreads, *(firsts.get(n, "") for n in sizes)]


def failures(document: dict[str, Any]) -> list[str]:
    """None: whatever is no right answer is counted."""
    return []
