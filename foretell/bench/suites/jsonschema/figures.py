"""From answers to coverage, compliance and efficiency, and to what is shown of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from foretell.bench.figures import spread

KEY = ("model", "dtype", "temperature", "method", "set")
# What becomes of a schema: not used; not asked; broken; not ended; ended, and judged or not.
STATUSES = ("refused", "long", "failed", "cut", "valid", "invalid", "unchecked")
TIMES = ("ttft_s", "tpot_s", "step_s")
ALL = "all"
COUNTED = ["", "set", "schemas", "used", "ended", "valid", "coverage", "compliance"]
TIMED = ["", "set", "first token", "a token", "without", "more", "a step", "MAT"]
Row = list[str]


def cells(answers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The figures of each model, method and set, and of all sets together where there are several.

    `coverage`: the share of schemas that were used and whose answer ended; `compliance`: the share
    of valid ones among the answers that were judged; `overhead`: what a token took more than
    without the form, as a share, answer by answer and round by round. With drafts it tells how much
    better the one text was drafted than the other, too, so there is that of a step beside it.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    sets = {answer["set"] for answer in answers}
    for answer in answers:
        key = tuple(answer[name] for name in KEY)
        groups.setdefault(key, []).append(answer)
        if len(sets) > 1:
            groups.setdefault((*key[:-1], ALL), []).append(answer)
    made = []
    for key, own in groups.items():
        made.append(dict(zip(KEY, key, strict=True)) | _figures(own))
    return sorted(made, key=lambda cell: cell["set"] == ALL)


def _figures(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    counts = Counter(answer["status"] for answer in answers)
    ended = counts["valid"] + counts["invalid"] + counts["unchecked"]
    judged = counts["valid"] + counts["invalid"]
    reasons: dict[str, Counter[str]] = {}
    for answer in answers:
        if answer["reason"]:
            reasons.setdefault(answer["status"], Counter())[kind(answer["reason"])] += 1
    found: dict[str, Any] = {
        "schemas": len(answers),
        "counts": {status: counts[status] for status in STATUSES},
        "accepted": len(answers) - counts["refused"],
        "ended": ended,
        "coverage": ended / len(answers),
        "compliance": counts["valid"] / judged if judged else None,
        "valid_share": counts["valid"] / len(answers),
        "reasons": {status: dict(tally.most_common()) for status, tally in reasons.items()},
        "compile_s": spread([a["compile_s"] for a in answers if "compile_s" in a]),
        "tokens": sum(answer.get("tokens", 0) for answer in answers),
        "later": sum(answer.get("later", 0) for answer in answers),
        "steps": sum(answer.get("steps", 0) for answer in answers),
    }
    for name in (*TIMES, *(f"free_{name}" for name in TIMES)):
        values = [v for answer in answers for v in answer.get(name, ()) if v is not None]
        found[name] = spread(values)
    pairs = _pairs(answers, "tpot_s")
    found["overhead_s"] = spread([formed - free for formed, free in pairs])
    found["overhead"] = spread([formed / free - 1 for formed, free in pairs])
    steps = _pairs(answers, "step_s")
    found["step_overhead"] = spread([formed / free - 1 for formed, free in steps])
    return found


def _pairs(answers: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    """A time with the form and without, of each answer and round that has both."""
    found = []
    for answer in answers:
        pairs = zip(answer.get(name, ()), answer.get(f"free_{name}", ()), strict=False)
        found += [(formed, free) for formed, free in pairs if formed and free]
    return found


def kind(reason: str) -> str:
    """A reason without its place and what it says of one schema's own values."""
    reason = re.sub(r"^json_schema( at \S+)?: ", "", reason)
    head, _, cure = reason.rpartition("; ")
    reason = head if head and not cure.startswith("'") else reason
    if re.match(r"[a-zA-Z$]+: ", reason) and not reason.startswith("not "):
        return reason.partition(": ")[0]
    return re.sub(r"\d+", "N", reason)


def tables(document: Mapping[str, Any]) -> list[tuple[str, list[Row]]]:
    """(title, rows) of each model, number format and temperature: what became of the schemas, and
    what it took; at last why some are not valid. The first row names the columns.
    """
    counted: dict[str, list[Row]] = {}
    timed: dict[str, list[Row]] = {}
    for cell in document["cells"]:
        how = f"temperature {cell['temperature']:g}" if cell["temperature"] else "greedy"
        title = f"{cell['model']}, {cell['dtype']}, {how}"
        line = [cell["method"], cell["set"]]
        numbers = [cell["schemas"], cell["accepted"], cell["ended"], cell["counts"]["valid"]]
        counted.setdefault(title, [COUNTED]).append(
            [*line, *map(str, numbers), _percent(cell["coverage"]), _percent(cell["compliance"])]
        )
        mat = cell["later"] / cell["steps"] if cell["steps"] else None
        timed.setdefault(title, [TIMED]).append(
            [
                *line,
                *(_milliseconds(cell[name]) for name in ("ttft_s", "tpot_s", "free_tpot_s")),
                *(_median(cell[name]) for name in ("overhead", "step_overhead")),
                "" if mat is None else f"{mat:.2f}",
            ]
        )
    found = []
    for title, rows in counted.items():
        found += [(title, rows), (f"{title}: medians, with and without the form", timed[title])]
    return found + _reasons(document)


def _reasons(document: Mapping[str, Any]) -> list[tuple[str, list[Row]]]:
    """Why schemas and answers count as what they do, the most frequent first."""
    totals: dict[tuple[str, str, str], int] = {}
    for cell in document["cells"]:
        if cell["set"] == ALL:
            continue
        for status, tally in cell["reasons"].items():
            for why, count in tally.items():
                key = (cell["method"], status, why)
                totals[key] = totals.get(key, 0) + count
    order = sorted(totals.items(), key=lambda item: (STATUSES.index(item[0][1]), -item[1]))
    rows = [["", "", "schemas", "why"]]
    rows += [[method, status, str(count), why] for (method, status, why), count in order]
    return [("not valid", rows)] if len(rows) > 1 else []


def failures(document: Mapping[str, Any]) -> list[str]:
    """A line for each answer that does not follow its schema, or broke."""
    lines = []
    for answer in document["answers"]:
        if answer["status"] in ("invalid", "failed"):
            what = f"{answer['method']} on {answer['model']}, {answer['set']} {answer['name']}"
            lines.append(f"{what}: {answer['status']}, {answer['reason']}")
        elif "free" in answer and answer["status"] != "long":
            lines.append(f"{answer['method']} without the form, {answer['name']}: {answer['free']}")
    return lines


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _median(share: Mapping[str, float] | None) -> str:
    return "" if share is None else f"{100 * share['median']:+.1f} %"


def _milliseconds(value: Mapping[str, float] | None) -> str:
    return "" if value is None else f"{1000 * value['median']:,.1f} ms"
