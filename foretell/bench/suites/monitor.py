"""The suite `monitor`: does a language server keep a model from inventing names after dots?

A model goes on with code that uses invented modules, by every method with and without the
constraint `monitor`. Of each answer the whole lines count: which names after dots exist, by the
language server's word where it has one, and whether a program has no other name. Judge and adviser
are the same server; the judge waits longer. Differences are taken module by module, with a 95 %
interval.

Source: Agrawal et al., arXiv:2306.10763, which measures how many programs compile with it.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.bench import tasks as shared
from foretell.bench.invented import Module, invent_modules, judge_names, write_modules
from foretell.bench.runner import Load, Tell
from foretell.bench.settings import Settings
from foretell.constraints.completing import Documents
from foretell.constraints.monitor import Monitor

if TYPE_CHECKING:
    from foretell.api.lm import LM

TAKES: tuple[str, ...] = ()
MODULES = 20  # unless a number is given
PATIENCE = 60.0  # seconds that the judge waits for an answer
FILE = "kit/use.py"  # what the programs are taken for
SIDES = ("without", "with")
HEAD = ["", "", "names", "exist", "programs", "without unknown names", "more"]
failures = shared.failure_lines


def prepare(paths: Sequence[str | Path], settings: Settings, limit: int = 0) -> list[Module]:
    """The modules."""
    return invent_modules(limit or MODULES, settings.seed)


def begin(
    settings: Settings, modules: Sequence[Module], path: Path | None = None
) -> dict[str, Any]:
    """A document without answers, or that of `path` if it was begun the same way.

    Raises BadFile where it was not, BadConfig for settings that the suite has no use for,
    Unsupported without a language server.
    """
    Monitor().language_server({})
    tasks = [astuple(module) for module in modules]
    return shared.begin_suite(settings, "monitor", tasks, path, ("draft", "methods"))


def run(
    settings: Settings,
    modules: Sequence[Module],
    load: Load,
    document: dict[str, Any],
    tell: Tell = lambda what, done, total: None,
    save: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """Fills `document` (see `begin`) with the answers it lacks and their figures; returns it."""
    uses_default = settings.methods == Settings().methods
    specs = ["plain"] if uses_default else settings.specs
    with tempfile.TemporaryDirectory() as folder:
        write_modules(modules, Path(folder))
        monitor = Monitor(root=folder, file=FILE)
        judge = Documents(
            replace(monitor, limit=PATIENCE).language_server({}), Path(folder).resolve() / FILE
        )

        def work(lm: LM, numbers: Sequence[int]) -> list[shared.Answer]:
            task_modules = [modules[number] for number in numbers]
            return [
                answer_module(lm, module, specs, settings, monitor, judge)
                for module in task_modules
            ]

        try:
            args = document, work, summarise_modules, tell, save
            return shared.answer_all(settings, len(modules), load, *args)
        finally:
            judge.server.close()


def answer_module(
    lm: LM,
    module: Module,
    specs: Sequence[str],
    settings: Settings,
    monitor: Monitor,
    judge: Documents,
) -> shared.Answer:
    """Answers each of a module's prompts by every method, with the monitor and without."""
    programs_by_way: dict[str, dict[str, list[dict[str, Any]]]] = {}
    server_questions: Counter[str] = Counter()
    prompts = list(module.prompts)
    for spec in specs:
        for side in SIDES:
            outputs = lm.generate(
                prompts,
                spec,
                max_new_tokens=settings.max_new_tokens,
                temperature=settings.temperatures[0],
                seed=[settings.seed + prompt_index for prompt_index in range(len(prompts))],
                constraint=monitor if side == "with" else None,
            )
            programs = programs_by_way.setdefault(spec, {}).setdefault(side, [])
            for prompt, output in zip(prompts, outputs, strict=True):
                if output.error is not None:
                    raise output.error
                programs.append(
                    {"text": output.text, "names": judge_names(prompt, output.text, judge)}
                )
                server_questions.update(output.stats.outside)
    return {"ways": programs_by_way, "questions": dict(server_questions)}


def summarise_modules(answers: Sequence[shared.Answer]) -> dict[str, Any]:
    """Counts of each method and side: names and those that exist, programs and the clean ones, and
    how many more of these there are with the monitor.
    """
    ways: dict[str, dict[str, Any]] = {}
    for spec in answers[0]["ways"]:
        clean_shares: dict[str, list[float]] = {}
        for side in SIDES:
            modules = [answer["ways"][spec][side] for answer in answers]
            names = [
                exists
                for programs in modules
                for answer in programs
                for _, exists in answer["names"]
            ]
            clean_shares[side] = [
                sum(map(is_clean, programs)) / len(programs) for programs in modules
            ]
            ways.setdefault(spec, {})[side] = {
                "names": len(names),
                "exist": sum(names),
                "programs": sum(map(len, modules)),
                "clean": sum(is_clean(answer) for programs in modules for answer in programs),
            }
        ways[spec]["more"] = shared.compare_scores(clean_shares["with"], clean_shares["without"])
    questions: Counter[str] = Counter()
    for answer in answers:
        questions.update(answer["questions"])
    return {"ways": ways, "questions": dict(questions)}


def is_clean(program: dict[str, Any]) -> bool:
    return all(exists for _, exists in program["names"])


def tables(document: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """Titles with rows, the head first: of each model the names and programs, and the questions."""
    titled_tables = []
    for cell in document["cells"]:
        rows = [HEAD]
        for spec, way_figures in cell["ways"].items():
            for side in SIDES:
                side_figures = way_figures[side]
                difference_text = (
                    shared.format_difference(way_figures["more"]) if side == "with" else ""
                )
                counts = [
                    str(side_figures[part]) for part in ("names", "exist", "programs", "clean")
                ]
                rows.append([spec, f"{side} monitor", *counts, difference_text])
        title = f"monitor, {cell['model']}, {cell['dtype']}"
        titled_tables.append((f"{title}: {cell['tasks']} modules", rows))
        questions = [[question, str(count)] for question, count in cell["questions"].items()]
        titled_tables.append((f"{title}: questions to the server", [["", "questions"], *questions]))
    return titled_tables
