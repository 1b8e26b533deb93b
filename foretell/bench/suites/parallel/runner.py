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
from foretell.bench.paired import interval
from foretell.bench.report import markup
from foretell.bench.report.plot import lines
from foretell.bench.runner import Load, Tell
from foretell.bench.sets import prompt_ids
from foretell.bench.settings import Settings
from foretell.bench.suites.parallel import data
from foretell.bench.suites.parallel.tasks import TASKS, Item, items
from foretell.bench.turns import reason
from foretell.errors import BadConfig, Unsupported
from foretell.spec import resolve

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
failures = shared.failures


def prepare(given: Sequence[str | Path], settings: Settings, limit: int = 0) -> list[Item]:
    """The items of all tasks, `limit` of each: of a folder's files, or made here. Raises BadConfig
    or BadFile.
    """
    tasks = chosen(settings.tasks)
    if not given:
        made = [items(task, limit or ITEMS, settings.seed) for task in tasks or TASKS]
        return [item for own in made for item in own]
    found = []
    for task, own in data.read(given[0], tasks).items():
        draw = random.Random(f"{settings.seed} {task}")
        places = draw.sample(range(len(own)), min(limit or len(own), len(own)))
        found += [own[place] for place in sorted(places)]
    return found


def chosen(names: Sequence[str]) -> list[str]:
    """The tasks that are named, groups of them by theirs. Raises BadConfig."""
    found: list[str] = []
    for name in names:
        if name not in (*TASKS, *GROUPS):
            raise BadConfig.field("--tasks", name, f"one of {', '.join((*GROUPS, *TASKS))}")
        found += GROUPS.get(name, [name])
    return list(dict.fromkeys(found))


def contenders(settings: Settings) -> list[str]:
    """The methods, names of sweeps replaced by what they stand for. Raises BadConfig."""
    found: list[str] = []
    for spec in settings.specs:
        name = spec.partition(":")[0]
        if name in SWEEPS and spec != name:
            raise BadConfig(f"{spec}: {name} has no fields; leave them out")
        found += SWEEPS.get(spec, [spec])
    if "auto" not in found:
        found.insert(1, "auto")
    for spec in found:
        if spec != "auto":
            resolve(spec)
    return list(dict.fromkeys(found))


def begin(settings: Settings, tasks: Sequence[Item], path: Path | None = None) -> dict[str, Any]:
    """A document without answers, or that of `path` if it was begun the same way.

    Raises BadFile where it was not, BadConfig for settings that the suite has no use for.
    """
    contenders(settings)
    told = [asdict(item) for item in tasks]
    return shared.begin(settings, "parallel", told, path, ("draft", "methods"))


def run(
    settings: Settings,
    tasks: Sequence[Item],
    load: Load,
    document: dict[str, Any],
    tell: Tell = lambda what, done, total: None,
    save: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """Fills `document` (see `begin`) with the answers it lacks and their figures; returns it."""
    specs = contenders(settings)
    warm: set[int] = set()  # models that every method has run on once

    def work(lm: LM, numbers: Sequence[int]) -> list[shared.Answer]:
        if id(lm) not in warm:
            warm.add(id(lm))
            answer(lm, tasks[numbers[0]], specs, settings, numbers[0])
        return [answer(lm, tasks[number], specs, settings, number) for number in numbers]

    return shared.answered(settings, len(tasks), load, document, work, summary, tell, save)


def answer(
    lm: LM, item: Item, specs: Sequence[str], settings: Settings, number: int
) -> shared.Answer:
    """What became of an item by every method, in an order of its own, and what that took.

    Raises what a method raises, but for those that the model cannot run.
    """
    order = random.Random(f"{settings.seed} {number}").sample(list(specs), len(specs))
    prompt = prompt_ids(lm, [{"role": "user", "content": item.prompt}])
    found: dict[str, dict[str, Any]] = {}
    for spec in order:
        with Meter(lm.models["target"], 0) as meter:
            try:
                out = lm.generate(
                    prompt,
                    spec,
                    max_new_tokens=settings.max_new_tokens,
                    temperature=settings.temperatures[0],
                    seed=settings.seed * 1_000_003 + number,
                    stop=(item.stop,),
                )
            except Unsupported as error:
                found[spec] = {"refused": reason(error)}
                continue
        forwards = max(1, out.stats.calls.get("target", 0))
        found[spec] = {
            "text": out.text,
            "score": item.score(out.text),
            "speed": len(out.tokens) / forwards,
            "forwards": forwards,
            "rows": meter.tokens,
            "seconds": out.stats.total_s,
        }
    if all("refused" in one for one in found.values()):
        raise Unsupported(found[specs[0]]["refused"])
    return {"task": item.task, "ways": {spec: found[spec] for spec in specs}}


def summary(answers: Sequence[shared.Answer]) -> dict[str, Any]:
    """Of each task, and of all those with right answers, every method's figures with intervals, and
    how much more they are than those of the first method that the model can run.
    """
    found: dict[str, Any] = {}
    tasks = list(dict.fromkeys(one["task"] for one in answers))
    groups = {task: [one for one in answers if one["task"] == task] for task in tasks}
    exact = [task for task in tasks if not TASKS[task].ours]
    if len(exact) > 1:
        groups = {EXACT: [one for one in answers if one["task"] in exact]} | groups
    for name, own in groups.items():
        ways = {spec: [one["ways"][spec] for one in own] for spec in own[0]["ways"]}
        refused = {
            spec: next((one["refused"] for one in each if "refused" in one), None)
            for spec, each in ways.items()
        }
        runs = {spec: each for spec, each in ways.items() if refused[spec] is None}
        if not runs:
            continue
        first = next(iter(runs))
        found[name] = {"items": len(own), "first": first, "ways": {}}
        for spec, each in ways.items():
            if spec not in runs:
                found[name]["ways"][spec] = {"refused": refused[spec]}
                continue
            figures: dict[str, dict[str, Any]] = {}
            found[name]["ways"][spec] = figures
            for figure in FIGURES:
                values = [one[figure] for one in each]
                mean, low, high = interval(values)
                figures[figure] = {"mean": mean, "low": low, "high": high}
                if spec != first:
                    others = [one[figure] for one in runs[first]]
                    figures[figure]["more"] = shared.more(values, others)
    return {"groups": found}


def tables(document: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """A title and rows, the head first: of each model and task the figures, and the differences."""
    found = []
    for cell in document["cells"]:
        for name, group in cell["groups"].items():
            title = _title(cell, name, group)
            head = ["", *_heads(name)]
            means, gaps = [head], [head]
            for spec, way in group["ways"].items():
                if "refused" in way:
                    means.append([spec, f"cannot run: {way['refused']}", *[""] * (len(head) - 2)])
                    continue
                means.append([spec, *(_ranged(way[figure], figure) for figure in FIGURES)])
                if spec != group["first"]:
                    told = [
                        shared.told(way[figure]["more"], f"+{FORMS[figure]}") for figure in FIGURES
                    ]
                    gaps.append([spec, *told])
            found.append((title, means))
            if len(gaps) > 1:
                found.append((f"{title}, more than {group['first']}", gaps))
    return found


def _title(cell: dict[str, Any], name: str, group: dict[str, Any]) -> str:
    return f"{name}, {cell['model']}, {cell['dtype']}: {markup.count(group['items'], 'item')}"


def _heads(name: str) -> list[str]:
    ours = name in TASKS and TASKS[name].ours
    return [OURS if ours and head == "score" else head for head in FIGURES.values()]


def _ranged(value: dict[str, float], figure: str) -> str:
    """A mean, of scores with its interval."""
    form = FORMS[figure]
    if figure != "score":
        return format(value["mean"], form)
    return f"{value['mean']:{form}} ({value['low']:{form}} to {value['high']:{form}})"


# --- a page


def html(document: dict[str, Any]) -> str:
    """One self-contained file: of each model and task the plot and the tables."""
    shown = dict(tables(document))
    parts = []
    for cell in document["cells"]:
        for name, group in cell["groups"].items():
            title = _title(cell, name, group)
            tabled = [
                markup.table(head, [_row(row) for row in rows])
                for of, (head, *rows) in shown.items()
                if of == title or of.startswith(f"{title}, ")
            ]
            why = f"Differences are to {group['first']}, item by item, with 95 % intervals."
            parts.append(markup.section(title, why, _plot(name, group), *tabled))
    if failed := failures(document):
        parts.append(f"<section><h2>Failed</h2>{markup.items(failed, 'bad')}</section>")
    return markup.page("foretell bench --suite parallel", document, parts)


def _row(row: Sequence[str]) -> str:
    return "".join(f"<td>{markup.escape(text)}</td>" for text in row)


def _plot(name: str, group: dict[str, Any]) -> str:
    """Scores by tokens a forward: a line for each method, through its settings."""
    ways = {spec: way for spec, way in group["ways"].items() if "refused" not in way}
    series: dict[str, list[tuple[float, float, tuple[float, float]]]] = {}
    for spec, way in ways.items():
        score = way["score"]
        point = (way["speed"]["mean"], score["mean"], (score["low"], score["high"]))
        series.setdefault(spec.partition(":")[0], []).append(point)
    ordered = [sorted(points) for points in series.values()]
    return lines(
        list(series),
        [[(x, y) for x, y, _ in points] for points in ordered],
        FIGURES["speed"],
        _heads(name)[0],
        [*markup.colours(list(series)).values()],
        top=1.0,
        ranges=[[whisker for _, _, whisker in points] for points in ordered],
    )
