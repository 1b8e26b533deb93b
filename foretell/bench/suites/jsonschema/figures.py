"""From answers to coverage, compliance and efficiency, and to what is shown of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from foretell.bench.figures import percentile_range

KEY = ("model", "dtype", "temperature", "method", "set")
# What becomes of a schema: not used; not asked; broken; not ended; ended, and judged or not.
STATUSES = ("refused", "long", "failed", "cut", "valid", "invalid", "unchecked")
TIMES = ("ttft_s", "tpot_s", "step_s")
ALL = "all"
COUNTED = ["", "set", "schemas", "used", "ended", "valid", "coverage", "compliance"]
TIMED = ["", "set", "first token", "a token", "without", "more", "a step", "MAT"]
Row = list[str]


def schema_cells(answers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The figures of each model, method and set, and of all sets together where there are several.

    `coverage`: the share of schemas that were used and whose answer ended; `compliance`: the share
    of valid ones among the answers that were judged; `overhead`: what a token took more than
    without the form, as a share, answer by answer and round by round. With drafts it tells how much
    better the one text was drafted than the other, too, so there is that of a step beside it.
    """
    answer_groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    set_names = {answer["set"] for answer in answers}
    for answer in answers:
        group_key = tuple(answer[name] for name in KEY)
        answer_groups.setdefault(group_key, []).append(answer)
        if len(set_names) > 1:
            answer_groups.setdefault((*group_key[:-1], ALL), []).append(answer)
    finished_cells = []
    for group_key, group_answers in answer_groups.items():
        finished_cells.append(
            dict(zip(KEY, group_key, strict=True)) | _answer_figures(group_answers)
        )
    return sorted(finished_cells, key=lambda cell: cell["set"] == ALL)


def _answer_figures(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    counts = Counter(answer["status"] for answer in answers)
    ended_count = counts["valid"] + counts["invalid"] + counts["unchecked"]
    judged_count = counts["valid"] + counts["invalid"]
    reasons: dict[str, Counter[str]] = {}
    for answer in answers:
        if answer["reason"]:
            reasons.setdefault(answer["status"], Counter())[reason_kind(answer["reason"])] += 1
    figures: dict[str, Any] = {
        "schemas": len(answers),
        "counts": {status: counts[status] for status in STATUSES},
        "accepted": len(answers) - counts["refused"],
        "ended": ended_count,
        "coverage": ended_count / len(answers),
        "compliance": counts["valid"] / judged_count if judged_count else None,
        "valid_share": counts["valid"] / len(answers),
        "reasons": {status: dict(tally.most_common()) for status, tally in reasons.items()},
        "compile_s": percentile_range([a["compile_s"] for a in answers if "compile_s" in a]),
        "tokens": sum(answer.get("tokens", 0) for answer in answers),
        "later": sum(answer.get("later", 0) for answer in answers),
        "steps": sum(answer.get("steps", 0) for answer in answers),
    }
    for time_name in (*TIMES, *(f"free_{time_name}" for time_name in TIMES)):
        values = [
            value for answer in answers for value in answer.get(time_name, ()) if value is not None
        ]
        figures[time_name] = percentile_range(values)
    token_pairs = _time_pairs(answers, "tpot_s")
    figures["overhead_s"] = percentile_range(
        [formed_seconds - free_seconds for formed_seconds, free_seconds in token_pairs]
    )
    figures["overhead"] = percentile_range(
        [formed_seconds / free_seconds - 1 for formed_seconds, free_seconds in token_pairs]
    )
    step_pairs = _time_pairs(answers, "step_s")
    figures["step_overhead"] = percentile_range(
        [formed_seconds / free_seconds - 1 for formed_seconds, free_seconds in step_pairs]
    )
    return figures


def _time_pairs(answers: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    """A time with the form and without, of each answer and round that has both."""
    time_pairs = []
    for answer in answers:
        pairs = zip(answer.get(name, ()), answer.get(f"free_{name}", ()), strict=False)
        time_pairs += [
            (formed_seconds, free_seconds)
            for formed_seconds, free_seconds in pairs
            if formed_seconds and free_seconds
        ]
    return time_pairs


def reason_kind(reason: str) -> str:
    """A reason without its place and what it says of one schema's own values."""
    reason = re.sub(r"^json_schema( at \S+)?: ", "", reason)
    description, _, cure = reason.rpartition("; ")
    reason = description if description and not cure.startswith("'") else reason
    if re.match(r"[a-zA-Z$]+: ", reason) and not reason.startswith("not "):
        return reason.partition(": ")[0]
    return re.sub(r"\d+", "N", reason)


def tables(document: Mapping[str, Any]) -> list[tuple[str, list[Row]]]:
    """(title, rows) of each model, number format and temperature: what became of the schemas, and
    what it took; at last why some are not valid. The first row names the columns.
    """
    count_tables: dict[str, list[Row]] = {}
    time_tables: dict[str, list[Row]] = {}
    for cell in document["cells"]:
        sampling_words = f"temperature {cell['temperature']:g}" if cell["temperature"] else "greedy"
        title = f"{cell['model']}, {cell['dtype']}, {sampling_words}"
        line = [cell["method"], cell["set"]]
        counts = [cell["schemas"], cell["accepted"], cell["ended"], cell["counts"]["valid"]]
        count_tables.setdefault(title, [COUNTED]).append(
            [
                *line,
                *map(str, counts),
                _format_percent(cell["coverage"]),
                _format_percent(cell["compliance"]),
            ]
        )
        tokens_per_step = cell["later"] / cell["steps"] if cell["steps"] else None
        time_tables.setdefault(title, [TIMED]).append(
            [
                *line,
                *(_format_milliseconds(cell[name]) for name in ("ttft_s", "tpot_s", "free_tpot_s")),
                *(_format_median(cell[name]) for name in ("overhead", "step_overhead")),
                "" if tokens_per_step is None else f"{tokens_per_step:.2f}",
            ]
        )
    titled_tables = []
    for title, rows in count_tables.items():
        titled_tables += [
            (title, rows),
            (f"{title}: medians, with and without the form", time_tables[title]),
        ]
    return titled_tables + _reason_table(document)


def _reason_table(document: Mapping[str, Any]) -> list[tuple[str, list[Row]]]:
    """Why schemas and answers count as what they do, the most frequent first."""
    totals: dict[tuple[str, str, str], int] = {}
    for cell in document["cells"]:
        if cell["set"] == ALL:
            continue
        for status, tally in cell["reasons"].items():
            for answer_reason, count in tally.items():
                reason_key = (cell["method"], status, answer_reason)
                totals[reason_key] = totals.get(reason_key, 0) + count
    sorted_totals = sorted(totals.items(), key=lambda item: (STATUSES.index(item[0][1]), -item[1]))
    table_rows = [["", "", "schemas", "why"]]
    table_rows += [
        [method, status, str(count), answer_reason]
        for (method, status, answer_reason), count in sorted_totals
    ]
    return [("not valid", table_rows)] if len(table_rows) > 1 else []


def failures(document: Mapping[str, Any]) -> list[str]:
    """A line for each answer that does not follow its schema, or broke."""
    lines = []
    for answer in document["answers"]:
        if answer["status"] in ("invalid", "failed"):
            answer_name = (
                f"{answer['method']} on {answer['model']}, {answer['set']} {answer['name']}"
            )
            lines.append(f"{answer_name}: {answer['status']}, {answer['reason']}")
        elif "free" in answer and answer["status"] != "long":
            lines.append(f"{answer['method']} without the form, {answer['name']}: {answer['free']}")
    return lines


def _format_percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _format_median(share: Mapping[str, float] | None) -> str:
    return "" if share is None else f"{100 * share['median']:+.1f} %"


def _format_milliseconds(value: Mapping[str, float] | None) -> str:
    return "" if value is None else f"{1000 * value['median']:,.1f} ms"
