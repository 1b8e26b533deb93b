"""Runs the suite: schema by schema, every method with and without the form, into a document."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from foretell.api.lm import LM
from foretell.bench.contenders import EngineRun, Method
from foretell.bench.document import begin as begin_document
from foretell.bench.runner import Load, Tell
from foretell.bench.sets import prompt_ids
from foretell.bench.settings import Settings
from foretell.bench.suites.jsonschema.checking import Checker
from foretell.bench.suites.jsonschema.figures import KEY, TIMES, cells
from foretell.bench.suites.jsonschema.schemas import Item
from foretell.bench.turns import reason
from foretell.constraints.grammars import Grammars
from foretell.errors import BadConfig, ForetellError, PromptTooLong

SCHEMA = "foretell.bench.suites.jsonschema/1"
ASKED = "Write JSON that follows this JSON schema. Answer with the JSON alone.\n\n{schema}"
SAVED = 10  # seconds between two savings at least
Answer = dict[str, Any]


def begin(settings: Settings, items: Sequence[Item], path: Path | None = None) -> dict[str, Any]:
    """A document without answers, or that of `path` if it was begun the same way.

    Raises BadFile where it was not, BadConfig for settings that the suite has no use for,
    Unsupported without the package that judges answers.
    """
    Checker()
    usual = Settings()
    for name in ("peers", "requests", "contexts", "tasks", "budget"):
        if getattr(settings, name) != getattr(usual, name):
            raise BadConfig(f"--{name}: --suite jsonschema has no use for it; leave it out")
    sets: dict[str, list[Any]] = {}
    for item in items:
        sets.setdefault(item.set, []).append([item.name, item.schema])
    document = begin_document(settings, sets, path, SCHEMA)
    document.setdefault("answers", [])
    return document


def run(
    settings: Settings,
    items: Sequence[Item],
    load: Load,
    document: dict[str, Any],
    tell: Tell = lambda what, done, total: None,
    save: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """Fills `document` (see `begin`) with the answers it lacks and their figures; returns it.

    What failed is tried again. Calls `save(document)` now and then, and at the end.
    """
    checker = Checker()
    answers: list[Answer] = [one for one in document["answers"] if one["status"] != "failed"]
    document["answers"] = answers
    known = {tuple(one[name] for name in (*KEY, "name")) for one in answers}
    places = [
        (m, d, t) for m in settings.models for d in settings.dtypes for t in settings.temperatures
    ]
    lm: LM | None = None
    loaded: Any = None
    saved = time.monotonic()
    for number, (model, dtype, temperature) in enumerate(places):
        todo: list[Item] = []
        for item in items:
            own = [
                (model, dtype, temperature, spec, item.set, item.name) for spec in settings.specs
            ]
            if not known.issuperset(own):
                answers[:] = [
                    one for one in answers if tuple(one[n] for n in (*KEY, "name")) not in own
                ]
                todo.append(item)
        if not todo:
            continue
        if lm is None or loaded != (model, dtype):
            lm, loaded = load(model, dtype), (model, dtype)
        about = {"model": model, "dtype": dtype, "temperature": temperature}
        asker = Asker(lm, settings, temperature, checker)
        for done, item in enumerate(todo, 1 + len(items) - len(todo)):
            answers += [about | answer for answer in asker.answers(item)]
            tell(f"{model} {item.set}", number * len(items) + done, len(places) * len(items))
            if time.monotonic() - saved > SAVED:
                document["cells"] = cells(answers)
                save(document)
                saved = time.monotonic()
    document["cells"] = cells(answers)
    save(document)
    return document


class Asker:
    """Asks one model, at one temperature, by all methods. Raises BadConfig for a wrong method."""

    def __init__(self, lm: LM, settings: Settings, temperature: float, checker: Checker):
        self.lm = lm
        self.settings = settings
        self.temperature = temperature
        self.checker = checker
        self.order = random.Random(settings.seed)
        self.methods = [Method(lm, spec) for spec in settings.specs]
        self.grammars = Grammars(lm.tokenizer, lm.models["target"].vocab, lm.engine.eos)
        self.grammars.compile({"json_schema": True})  # reads the tokenizer, once

    def answers(self, item: Item) -> list[Answer]:
        """One answer a method."""
        about = {"set": item.set, "name": item.name}
        began = time.perf_counter()
        try:
            grammar = self.grammars.compile({"json_schema": item.schema})
        except ForetellError as error:
            refused = {"status": "refused", "reason": reason(error)}
            return [about | {"method": method.name} | refused for method in self.methods]
        compiled = time.perf_counter() - began
        prompt = [{"role": "user", "content": ASKED.format(schema=json.dumps(item.schema))}]
        ids = prompt_ids(self.lm, prompt)
        runs: dict[tuple[int, bool], list[EngineRun]] = {}
        broken: dict[tuple[int, bool], BaseException] = {}
        for _ in range(self.settings.rounds):
            cases = [(i, formed) for i in range(len(self.methods)) for formed in (True, False)]
            for case in self.order.sample(cases, len(cases)):
                if case not in broken:
                    try:
                        runs.setdefault(case, []).append(self._run(ids, *case, grammar))
                    except ForetellError as error:
                        broken[case] = error
        made = []
        for i, method in enumerate(self.methods):
            answer = about | {"method": method.name, "compile_s": compiled}
            formed, free = runs.get((i, True), []), runs.get((i, False), [])
            trouble = broken.get((i, True))
            if trouble is not None:
                status = "long" if isinstance(trouble, PromptTooLong) else "failed"
                answer |= {"status": status, "reason": reason(trouble)}
            else:
                answer |= self._judged(item, formed[0]) | _times(formed, "")
            trouble = broken.get((i, False))
            answer |= _times(free, "free_") if trouble is None else {"free": reason(trouble)}
            made.append(answer)
        return made

    def _run(self, ids: list[int], number: int, formed: bool, grammar: Any) -> EngineRun:
        method, s = self.methods[number], self.settings
        method.forget()
        form = grammar if formed else None
        [run] = method.run([ids], s.max_new_tokens, self.temperature, s.seed, form)
        return run

    def _judged(self, item: Item, run: EngineRun) -> Answer:
        """`cut` where it reached the length limit, else what the checker says."""
        ends = self.lm.engine.eos
        text = self.lm.decode([token for token in run.tokens if token not in ends])
        later = len(run.tokens) - run.counts[0]
        answer = {"text": text, "tokens": len(run.tokens), "later": later, "steps": run.stats.steps}
        if run.ended != "stop":
            return answer | {"status": "cut", "reason": f"no end within {len(run.tokens)} tokens"}
        status, why = self.checker.judge(item.schema, text)
        return answer | {"status": status, "reason": why}


def _times(runs: Sequence[EngineRun], prefix: str) -> Answer:
    """Seconds of each round: to the first token, and a token and a step after it, if any came."""
    found: dict[str, list[float | None]] = {name: [] for name in TIMES}
    for run in runs:
        seconds = run.times[-1] - run.times[0]
        later = len(run.tokens) - run.counts[0]
        found["ttft_s"].append(run.times[0])
        found["tpot_s"].append(seconds / later if later else None)
        found["step_s"].append(seconds / run.stats.steps if later else None)
    return {f"{prefix}{name}": values for name, values in found.items()}
