"""The suite `monitor`: does a language server keep a model from inventing names behind dots?

A model goes on with code that uses invented modules, by every method with and without the
constraint `monitor`. Of each answer the whole lines count: which names behind dots exist, by the
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
from foretell.bench.invented import Module, invent, names_in, put
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
failures = shared.failures


def prepare(given: Sequence[str | Path], settings: Settings, limit: int = 0) -> list[Module]:
    """The modules."""
    return invent(limit or MODULES, settings.seed)


def begin(
    settings: Settings, modules: Sequence[Module], path: Path | None = None
) -> dict[str, Any]:
    """A document without answers, or that of `path` if it was begun the same way.

    Raises BadFile where it was not, BadConfig for settings that the suite has no use for,
    Unsupported without a language server.
    """
    Monitor().language_server({})
    tasks = [astuple(module) for module in modules]
    return shared.begin(settings, "monitor", tasks, path, ("draft", "methods"))


def run(
    settings: Settings,
    modules: Sequence[Module],
    load: Load,
    document: dict[str, Any],
    tell: Tell = lambda what, done, total: None,
    save: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """Fills `document` (see `begin`) with the answers it lacks and their figures; returns it."""
    usual = settings.methods == Settings().methods
    specs = ["plain"] if usual else settings.specs
    with tempfile.TemporaryDirectory() as folder:
        put(modules, Path(folder))
        monitor = Monitor(root=folder, file=FILE)
        judge = Documents(
            replace(monitor, limit=PATIENCE).language_server({}), Path(folder).resolve() / FILE
        )

        def work(lm: LM, numbers: Sequence[int]) -> list[shared.Answer]:
            own = [modules[number] for number in numbers]
            return [answer(lm, module, specs, settings, monitor, judge) for module in own]

        try:
            args = document, work, summary, tell, save
            return shared.answered(settings, len(modules), load, *args)
        finally:
            judge.server.close()


def answer(
    lm: LM,
    module: Module,
    specs: Sequence[str],
    settings: Settings,
    monitor: Monitor,
    judge: Documents,
) -> shared.Answer:
    """By method and side what became of each of a module's prompts."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    outside: Counter[str] = Counter()
    prompts = list(module.prompts)
    for spec in specs:
        for side in SIDES:
            outs = lm.generate(
                prompts,
                spec,
                max_new_tokens=settings.max_new_tokens,
                temperature=settings.temperatures[0],
                seed=[settings.seed + place for place in range(len(prompts))],
                constraint=monitor if side == "with" else None,
            )
            programs = found.setdefault(spec, {}).setdefault(side, [])
            for prompt, out in zip(prompts, outs, strict=True):
                if out.error is not None:
                    raise out.error
                programs.append({"text": out.text, "names": names_in(prompt, out.text, judge)})
                outside.update(out.stats.outside)
    return {"ways": found, "questions": dict(outside)}


def summary(answers: Sequence[shared.Answer]) -> dict[str, Any]:
    """Of each method and side the names and those that exist, the programs and the clean ones;
    how many more of these there are with the monitor.
    """
    ways: dict[str, dict[str, Any]] = {}
    for spec in answers[0]["ways"]:
        clean: dict[str, list[float]] = {}
        for side in SIDES:
            modules = [one["ways"][spec][side] for one in answers]
            names = [known for programs in modules for one in programs for _, known in one["names"]]
            clean[side] = [sum(map(is_clean, programs)) / len(programs) for programs in modules]
            ways.setdefault(spec, {})[side] = {
                "names": len(names),
                "exist": sum(names),
                "programs": sum(map(len, modules)),
                "clean": sum(is_clean(one) for programs in modules for one in programs),
            }
        ways[spec]["more"] = shared.more(clean["with"], clean["without"])
    questions: Counter[str] = Counter()
    for one in answers:
        questions.update(one["questions"])
    return {"ways": ways, "questions": dict(questions)}


def is_clean(program: dict[str, Any]) -> bool:
    return all(exists for _, exists in program["names"])


def tables(document: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """A title and rows, the head first: of each model the names and programs, and the questions."""
    found = []
    for cell in document["cells"]:
        rows = [HEAD]
        for spec, way in cell["ways"].items():
            for side in SIDES:
                one = way[side]
                more = shared.told(way["more"]) if side == "with" else ""
                counts = [str(one[part]) for part in ("names", "exist", "programs", "clean")]
                rows.append([spec, f"{side} monitor", *counts, more])
        title = f"monitor, {cell['model']}, {cell['dtype']}"
        found.append((f"{title}: {cell['tasks']} modules", rows))
        questions = [[what, str(count)] for what, count in cell["questions"].items()]
        found.append((f"{title}: questions to the server", [["", "questions"], *questions]))
    return found
