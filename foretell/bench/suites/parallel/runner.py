"""The suite `parallel`: what do methods lose where they decode tokens in parallel, and gain?

Tasks whose answers hold together in different degrees (bench/suites/parallel/tasks.py): operations
on lists, a Latin square, a sudoku, sentences of given words, a paraphrase, a summary. Every method,
denoisers and those that write from left to right alike, answers every item by itself; its score
stands beside the tokens of the answer a forward, the forwards, the rows that went through the model
and the seconds. Differences to the first method are taken item by item, with a 95 % interval.
`orders`, `thresholds`, `factors` and `blocks` stand for the settings that the paper sweeps over.

Scores of texts are ours, since no grammar checker is there: see bench/suites/parallel/scores.py.

Source: Kang et al., ParallelBench, arXiv:2510.04767.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.bench import tasks as shared
from foretell.bench.metering import Meter
from foretell.bench.paired import bootstrap_interval
from foretell.bench.report import markup
from foretell.bench.report.plot import line_chart
from foretell.bench.runner import Load, Tell
from foretell.bench.sets import prompt_ids
from foretell.bench.settings import Settings
from foretell.bench.suites.parallel import data
from foretell.bench.suites.parallel.tasks import TASKS, Item, make_items
from foretell.bench.turns import one_line_reason
from foretell.errors import BadConfig, Unsupported
from foretell.spec import resolve_method

if TYPE_CHECKING:
    from foretell.api.lm import LM

TAKES = ("tasks", "data", "html")
CANVASES = True  # models that fill them are compared, too
ITEMS = 20  # of a task that is made here, unless a number is given
STEPS = (1, 2, 4, 8, 16, 32, 64)
ORDERS = ("random", "confidence", "margin", "entropy")
# Names that stand for methods with several settings.
SWEEPS = {
    "orders": [f"{order}:block=0,steps={steps}" for order in ORDERS for steps in STEPS],
    "thresholds": [f"threshold:tau={tau:g}" for tau in (0.5, 0.6, 0.7, 0.8, 0.9, 1)],
    "factors": [f"factor:f={f:g}" for f in (0.7, 1, 1.3, 1.6, 1.9)],
    "blocks": [f"confidence:block={block},steps=32" for block in (1, 2, 4, 8, 16, 32, 64)],
}
WAYS = tuple(SWEEPS)
GROUPS = {
    "lists": [*data.LISTS],
    "puzzles": ["latin_square", "sudoku"],
    "texts": [name for name, task in TASKS.items() if task.ours],
}
FIGURES = {
    "score": "score",
    "speed": "tokens a forward",
    "forwards": "forwards",
    "rows": "rows",
    "seconds": "seconds",
}
FORMS = {"score": ".3f", "speed": ".2f", "forwards": ".1f", "rows": ",.0f", "seconds": ".3f"}
EXACT = "all tasks with right answers"
OURS = "score (ours)"
failures = shared.failure_lines


def prepare(paths: Sequence[str | Path], settings: Settings, limit: int = 0) -> list[Item]:
    """The items of all tasks, `limit` of each: of a folder's files, or made here. Raises BadConfig
    or BadFile.
    """
    tasks = select_tasks(settings.tasks)
    if not paths:
        items_by_task = [make_items(task, limit or ITEMS, settings.seed) for task in tasks or TASKS]
        return [item for task_items in items_by_task for item in task_items]
    chosen_items = []
    for task, task_items in data.read_folder(paths[0], tasks).items():
        generator = random.Random(f"{settings.seed} {task}")
        item_indices = generator.sample(
            range(len(task_items)), min(limit or len(task_items), len(task_items))
        )
        chosen_items += [task_items[item_index] for item_index in sorted(item_indices)]
    return chosen_items


def select_tasks(names: Sequence[str]) -> list[str]:
    """The tasks that are named, groups of them by theirs. Raises BadConfig."""
    task_names: list[str] = []
    for name in names:
        if name not in (*TASKS, *GROUPS):
            raise BadConfig.field("--tasks", name, f"one of {', '.join((*GROUPS, *TASKS))}")
        task_names += GROUPS.get(name, [name])
    return list(dict.fromkeys(task_names))


def expand_sweeps(settings: Settings) -> list[str]:
    """The methods, names of sweeps replaced by what they stand for. Raises BadConfig."""
    method_specs: list[str] = []
    for spec in settings.specs:
        name = spec.partition(":")[0]
        if name in SWEEPS and spec != name:
            raise BadConfig(f"{spec}: {name} has no fields; leave them out")
        method_specs += SWEEPS.get(spec, [spec])
    if "auto" not in method_specs:
        method_specs.insert(1, "auto")
    for spec in method_specs:
        if spec != "auto":
            resolve_method(spec)
    return list(dict.fromkeys(method_specs))


def begin(settings: Settings, tasks: Sequence[Item], path: Path | None = None) -> dict[str, Any]:
    """A document without answers, or that of `path` if it was begun the same way.

    Raises BadFile where it was not, BadConfig for settings that the suite has no use for.
    """
    expand_sweeps(settings)
    task_records = [asdict(item) for item in tasks]
    return shared.begin_suite(settings, "parallel", task_records, path, ("draft", "methods"))


def run(
    settings: Settings,
    tasks: Sequence[Item],
    load: Load,
    document: dict[str, Any],
    tell: Tell = lambda what, done, total: None,
    save: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """Fills `document` (see `begin`) with the answers it lacks and their figures; returns it."""
    specs = expand_sweeps(settings)
    warm_models: set[int] = set()  # models that every method has run on once

    def work(lm: LM, numbers: Sequence[int]) -> list[shared.Answer]:
        if id(lm) not in warm_models:
            warm_models.add(id(lm))
            answer_item(lm, tasks[numbers[0]], specs, settings, numbers[0])
        return [answer_item(lm, tasks[number], specs, settings, number) for number in numbers]

    return shared.answer_all(
        settings, len(tasks), load, document, work, summarise_items, tell, save
    )


def answer_item(
    lm: LM, item: Item, specs: Sequence[str], settings: Settings, number: int
) -> shared.Answer:
    """Answers an item by every method, in an order of its own, and notes what that took.

    Raises what a method raises, but for those that the model cannot run.
    """
    method_order = random.Random(f"{settings.seed} {number}").sample(list(specs), len(specs))
    prompt = prompt_ids(lm, [{"role": "user", "content": item.prompt}])
    figures_by_spec: dict[str, dict[str, Any]] = {}
    for spec in method_order:
        with Meter(lm.models["target"], 0) as meter:
            try:
                output = lm.generate(
                    prompt,
                    spec,
                    max_new_tokens=settings.max_new_tokens,
                    temperature=settings.temperatures[0],
                    seed=settings.seed * 1_000_003 + number,
                    stop=(item.stop,),
                )
            except Unsupported as error:
                figures_by_spec[spec] = {"refused": one_line_reason(error)}
                continue
        forward_count = max(1, output.stats.calls.get("target", 0))
        figures_by_spec[spec] = {
            "text": output.text,
            "score": item.score(output.text),
            "speed": len(output.tokens) / forward_count,
            "forwards": forward_count,
            "rows": meter.tokens,
            "seconds": output.stats.total_s,
        }
    if all("refused" in figures for figures in figures_by_spec.values()):
        raise Unsupported(figures_by_spec[specs[0]]["refused"])
    return {"task": item.task, "ways": {spec: figures_by_spec[spec] for spec in specs}}


def summarise_items(answers: Sequence[shared.Answer]) -> dict[str, Any]:
    """Summarises each task, and all those with right answers together: every method's figures with
    intervals, and how much more they are than those of the first method that the model can run.
    """
    groups_found: dict[str, Any] = {}
    tasks = list(dict.fromkeys(answer["task"] for answer in answers))
    groups = {task: [answer for answer in answers if answer["task"] == task] for task in tasks}
    exact_tasks = [task for task in tasks if not TASKS[task].ours]
    if len(exact_tasks) > 1:
        groups = {EXACT: [answer for answer in answers if answer["task"] in exact_tasks]} | groups
    for group_name, group_answers in groups.items():
        ways = {
            spec: [answer["ways"][spec] for answer in group_answers]
            for spec in group_answers[0]["ways"]
        }
        refusals = {
            spec: next((answer["refused"] for answer in way_answers if "refused" in answer), None)
            for spec, way_answers in ways.items()
        }
        finished_ways = {
            spec: way_answers for spec, way_answers in ways.items() if refusals[spec] is None
        }
        if not finished_ways:
            continue
        first_spec = next(iter(finished_ways))
        groups_found[group_name] = {"items": len(group_answers), "first": first_spec, "ways": {}}
        for spec, way_answers in ways.items():
            if spec not in finished_ways:
                groups_found[group_name]["ways"][spec] = {"refused": refusals[spec]}
                continue
            way_figures: dict[str, dict[str, Any]] = {}
            groups_found[group_name]["ways"][spec] = way_figures
            for figure in FIGURES:
                values = [answer[figure] for answer in way_answers]
                mean, lower_bound, upper_bound = bootstrap_interval(values)
                way_figures[figure] = {"mean": mean, "low": lower_bound, "high": upper_bound}
                if spec != first_spec:
                    first_values = [answer[figure] for answer in finished_ways[first_spec]]
                    way_figures[figure]["more"] = shared.compare_scores(values, first_values)
    return {"groups": groups_found}


def tables(document: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """A title and rows, the head first: of each model and task the figures, and the differences."""
    titled_tables = []
    for cell in document["cells"]:
        for group_name, group in cell["groups"].items():
            title = _table_title(cell, group_name, group)
            column_heads = ["", *_column_heads(group_name)]
            mean_rows, difference_rows = [column_heads], [column_heads]
            for spec, way_figures in group["ways"].items():
                if "refused" in way_figures:
                    mean_rows.append(
                        [
                            spec,
                            f"cannot run: {way_figures['refused']}",
                            *[""] * (len(column_heads) - 2),
                        ]
                    )
                    continue
                mean_rows.append(
                    [spec, *(_format_range(way_figures[figure], figure) for figure in FIGURES)]
                )
                if spec != group["first"]:
                    difference_texts = [
                        shared.format_difference(way_figures[figure]["more"], f"+{FORMS[figure]}")
                        for figure in FIGURES
                    ]
                    difference_rows.append([spec, *difference_texts])
            titled_tables.append((title, mean_rows))
            if len(difference_rows) > 1:
                titled_tables.append((f"{title}, more than {group['first']}", difference_rows))
    return titled_tables


def _table_title(cell: dict[str, Any], name: str, group: dict[str, Any]) -> str:
    return (
        f"{name}, {cell['model']}, {cell['dtype']}: {markup.format_count(group['items'], 'item')}"
    )


def _column_heads(name: str) -> list[str]:
    is_ours = name in TASKS and TASKS[name].ours
    return [
        OURS if is_ours and figure_head == "score" else figure_head
        for figure_head in FIGURES.values()
    ]


def _format_range(value: dict[str, float], figure: str) -> str:
    """A mean, of scores with its interval."""
    number_format = FORMS[figure]
    if figure != "score":
        return format(value["mean"], number_format)
    mean_text, lower_text, upper_text = (
        format(value[part], number_format) for part in ("mean", "low", "high")
    )
    return f"{mean_text} ({lower_text} to {upper_text})"


# --- a page


def html(document: dict[str, Any]) -> str:
    """Page of a document, one self-contained file: plot and tables of each model and task."""
    tables_by_title = dict(tables(document))
    page_parts = []
    for cell in document["cells"]:
        for group_name, group in cell["groups"].items():
            title = _table_title(cell, group_name, group)
            table_elements = [
                markup.render_table(head, [_row_cells(row) for row in rows])
                for table_title, (head, *rows) in tables_by_title.items()
                if table_title == title or table_title.startswith(f"{title}, ")
            ]
            explanation = f"Differences are to {group['first']}, item by item, with 95 % intervals."
            page_parts.append(
                markup.render_section(
                    title, explanation, _score_plot(group_name, group), *table_elements
                )
            )
    if failure_lines := failures(document):
        page_parts.append(
            f"<section><h2>Failed</h2>{markup.render_list(failure_lines, 'bad')}</section>"
        )
    return markup.render_page("foretell bench --suite parallel", document, page_parts)


def _row_cells(row: Sequence[str]) -> str:
    return "".join(f"<td>{markup.escape(text)}</td>" for text in row)


def _score_plot(group_name: str, group: dict[str, Any]) -> str:
    """Scores by tokens a forward: a line for each method, through its settings."""
    ways = {spec: way for spec, way in group["ways"].items() if "refused" not in way}
    series: dict[str, list[tuple[float, float, tuple[float, float]]]] = {}
    for spec, way in ways.items():
        score_range = way["score"]
        score_point = (
            way["speed"]["mean"],
            score_range["mean"],
            (score_range["low"], score_range["high"]),
        )
        series.setdefault(spec.partition(":")[0], []).append(score_point)
    sorted_series = [sorted(points) for points in series.values()]
    return line_chart(
        list(series),
        [[(x, y) for x, y, _ in points] for points in sorted_series],
        FIGURES["speed"],
        _column_heads(group_name)[0],
        [*markup.assign_colours(list(series)).values()],
        top=1.0,
        ranges=[[whisker for _, _, whisker in points] for points in sorted_series],
    )
