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
from foretell.bench.document import begin_document
from foretell.bench.runner import Load, Tell
from foretell.bench.sets import prompt_ids
from foretell.bench.settings import Settings
from foretell.bench.suites.jsonschema.checking import Checker
from foretell.bench.suites.jsonschema.figures import KEY, TIMES, schema_cells
from foretell.bench.suites.jsonschema.schemas import Item
from foretell.bench.turns import one_line_reason
from foretell.constraints.grammars import Grammars
from foretell.errors import BadConfig, ForetellError, PromptTooLong

SCHEMA = "foretell.measure.suites.jsonschema/1"
ASKED = "Write JSON that follows this JSON schema. Answer with the JSON alone.\n\n{schema}"
SAVED = 10  # seconds between two savings at least
Answer = dict[str, Any]


def begin(settings: Settings, items: Sequence[Item], path: Path | None = None) -> dict[str, Any]:
    """A document without answers, or that of `path` if it was begun the same way.

    Raises BadFile where it was not, BadConfig for settings that the suite has no use for,
    Unsupported without the package that judges answers.
    """
    Checker()
    default_settings = Settings()
    for name in ("peers", "requests", "contexts", "tasks", "budget"):
        if getattr(settings, name) != getattr(default_settings, name):
            raise BadConfig(f"--{name}: --suite jsonschema has no use for it; leave it out")
    schemas_by_set: dict[str, list[Any]] = {}
    for item in items:
        schemas_by_set.setdefault(item.set, []).append([item.name, item.schema])
    document = begin_document(settings, schemas_by_set, path, SCHEMA)
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
    answers: list[Answer] = [
        stored_answer
        for stored_answer in document["answers"]
        if stored_answer["status"] != "failed"
    ]
    document["answers"] = answers
    known_answers = {
        tuple(stored_answer[name] for name in (*KEY, "name")) for stored_answer in answers
    }
    places = [
        (model_name, dtype_name, temperature_value)
        for model_name in settings.models
        for dtype_name in settings.dtypes
        for temperature_value in settings.temperatures
    ]
    lm: LM | None = None
    loaded_model: Any = None
    last_saved = time.monotonic()
    for place_index, (model, dtype, temperature) in enumerate(places):
        todo: list[Item] = []
        for item in items:
            answer_keys = [
                (model, dtype, temperature, spec, item.set, item.name) for spec in settings.specs
            ]
            if not known_answers.issuperset(answer_keys):
                answers[:] = [
                    stored_answer
                    for stored_answer in answers
                    if tuple(stored_answer[field_name] for field_name in (*KEY, "name"))
                    not in answer_keys
                ]
                todo.append(item)
        if not todo:
            continue
        if lm is None or loaded_model != (model, dtype):
            lm, loaded_model = load(model, dtype), (model, dtype)
        place_fields = {"model": model, "dtype": dtype, "temperature": temperature}
        asker = Asker(lm, settings, temperature, checker)
        for done_count, item in enumerate(todo, 1 + len(items) - len(todo)):
            answers += [place_fields | answer for answer in asker.answers(item)]
            tell(
                f"{model} {item.set}",
                place_index * len(items) + done_count,
                len(places) * len(items),
            )
            if time.monotonic() - last_saved > SAVED:
                document["cells"] = schema_cells(answers)
                save(document)
                last_saved = time.monotonic()
    document["cells"] = schema_cells(answers)
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
        self.grammars.compile_form({"json_schema": True})  # reads the tokenizer, once

    def answers(self, item: Item) -> list[Answer]:
        """Answers a schema by every method."""
        item_fields = {"set": item.set, "name": item.name}
        start_time = time.perf_counter()
        try:
            grammar = self.grammars.compile_form({"json_schema": item.schema})
        except ForetellError as error:
            refusal = {"status": "refused", "reason": one_line_reason(error)}
            return [item_fields | {"method": method.name} | refusal for method in self.methods]
        compile_seconds = time.perf_counter() - start_time
        prompt = [{"role": "user", "content": ASKED.format(schema=json.dumps(item.schema))}]
        token_ids = prompt_ids(self.lm, prompt)
        runs: dict[tuple[int, bool], list[EngineRun]] = {}
        errors_by_case: dict[tuple[int, bool], BaseException] = {}
        for _ in range(self.settings.rounds):
            cases = [
                (method_index, formed_runs)
                for method_index in range(len(self.methods))
                for formed_runs in (True, False)
            ]
            for case in self.order.sample(cases, len(cases)):
                if case not in errors_by_case:
                    try:
                        runs.setdefault(case, []).append(
                            self._run_method(token_ids, *case, grammar)
                        )
                    except ForetellError as error:
                        errors_by_case[case] = error
        finished_answers = []
        for method_index, method in enumerate(self.methods):
            answer = item_fields | {"method": method.name, "compile_s": compile_seconds}
            formed_runs, free_runs = (
                runs.get((method_index, True), []),
                runs.get((method_index, False), []),
            )
            case_error = errors_by_case.get((method_index, True))
            if case_error is not None:
                status = "long" if isinstance(case_error, PromptTooLong) else "failed"
                answer |= {"status": status, "reason": one_line_reason(case_error)}
            else:
                answer |= self._judge_run(item, formed_runs[0]) | _round_times(formed_runs, "")
            case_error = errors_by_case.get((method_index, False))
            answer |= (
                _round_times(free_runs, "free_")
                if case_error is None
                else {"free": one_line_reason(case_error)}
            )
            finished_answers.append(answer)
        return finished_answers

    def _run_method(
        self, ids: list[int], method_index: int, with_form: bool, grammar: Any
    ) -> EngineRun:
        method, settings = self.methods[method_index], self.settings
        method.forget()
        constraint = grammar if with_form else None
        [run] = method.run(
            [ids], settings.max_new_tokens, self.temperature, settings.seed, constraint
        )
        return run

    def _judge_run(self, item: Item, run: EngineRun) -> Answer:
        """Judges a run: `cut` where it reached the length limit, else what the checker says."""
        end_tokens = self.lm.engine.eos
        text = self.lm.decode([token for token in run.tokens if token not in end_tokens])
        later_tokens = len(run.tokens) - run.counts[0]
        answer = {
            "text": text,
            "tokens": len(run.tokens),
            "later": later_tokens,
            "steps": run.stats.steps,
        }
        if run.ended != "stop":
            return answer | {"status": "cut", "reason": f"no end within {len(run.tokens)} tokens"}
        status, judgement_reason = self.checker.judge(item.schema, text)
        return answer | {"status": status, "reason": judgement_reason}


def _round_times(runs: Sequence[EngineRun], prefix: str) -> Answer:
    """Seconds of each round: to the first token, and a token and a step after it, if any came."""
    times_by_name: dict[str, list[float | None]] = {name: [] for name in TIMES}
    for run in runs:
        decode_seconds = run.times[-1] - run.times[0]
        later_tokens = len(run.tokens) - run.counts[0]
        times_by_name["ttft_s"].append(run.times[0])
        times_by_name["tpot_s"].append(decode_seconds / later_tokens if later_tokens else None)
        times_by_name["step_s"].append(decode_seconds / run.stats.steps if later_tokens else None)
    return {f"{prefix}{name}": values for name, values in times_by_name.items()}
