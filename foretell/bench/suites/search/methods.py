"""What the suite `search` compares: every method of the registry, and sampling in two ways.

`sampling` is one sample by plain decoding. `resampling` draws one sample after the other until one
has all that is public or the budget is spent, and takes the best by that. Methods that choose by a
reward and name none get what is public of the task. Those that draw do so at the suite's
temperature, all others decode greedily.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from foretell.bench.metering import Meter
from foretell.bench.settings import Settings
from foretell.bench.suites.search.tasks import Public, Task
from foretell.core.spending import Spending, spending_of
from foretell.errors import BadConfig
from foretell.registry import load_method, method_names

if TYPE_CHECKING:
    from foretell.api.lm import LM

WAYS = ("sampling", "resampling")  # beside the registry's methods
DRAWING = (*WAYS, "best-of", "first-finish", "cntp", "a-star")
TEMPERATURE = 0.6  # of these, unless one above 0 is given
FORWARDS = 200  # that a search without an end of its own may spend on a task, of one text each
ENDLESS = ("resampling", "pg-td")
# What pg-td is without fields: it goes on until all that is public is there, or the budget is
# spent; where the whole tree is soon known, rollouts take no forwards.
SEARCH = "pg-td:rollouts=1000,enough=1"
TOGETHER = 8  # samples that are drawn side by side
DEFAULTS = {
    "functions": ("resampling", "pg-td", "sampling", "plain"),
    "programs": ("resampling", "pg-td", "sampling", "plain"),
}
OTHERS = ("sampling", "plain", "best-of")  # the defaults of other sorts
Answer = dict[str, Any]


def compared_methods(settings: Settings, sort: str) -> tuple[str, ...]:
    """Methods that are compared on tasks of this sort, the first with the others."""
    if settings.methods == Settings().methods:
        return DEFAULTS.get(sort, OTHERS)
    return settings.methods


def check_settings(settings: Settings) -> None:
    """Raises BadConfig for fields of a method that has none, and for a budget that is none."""
    for spec in settings.methods:
        if method_name_of(spec) in WAYS and spec not in WAYS:
            raise BadConfig(f"{spec}: {method_name_of(spec)} has no fields; leave them out")
    spending_of(settings.budget or None)


def method_name_of(spec: str) -> str:
    return spec.partition(":")[0]


def takes_reward(spec: str) -> bool:
    """Whether a method chooses by a reward and names none."""
    method_name = method_name_of(spec)
    if method_name not in method_names("strategy") or re.search(r"[:,(]reward=", spec):
        return False
    return "reward" in {
        field.name for field in dataclasses.fields(load_method(method_name, "strategy"))
    }


def answer_task(lm: LM, task: Task, spec: str, settings: Settings, number: int) -> Answer:
    """Answers a task by a method. `number`: the task's among those of its sort.

    Raises BadConfig or Unsupported for a method that cannot be used on it.
    """
    prompt, answer_prefix = task.encode_prompt(lm)
    method_name = method_name_of(spec)
    generate_options: dict[str, Any] = {
        "max_new_tokens": settings.max_new_tokens,
        "stop": task.stop,
    }
    if method_name in DRAWING:
        generate_options["temperature"] = settings.temperatures[0] or TEMPERATURE
        generate_options["seed"] = (settings.seed * 1_000_003 + number) * 1_000
    budget = spending_of(settings.budget or None)
    if method_name in ENDLESS and budget is None:
        budget = Spending(forwards=FORWARDS)
    if method_name == "resampling":
        assert budget is not None, "it is endless"
        return draw_until_solved(lm, task, prompt, answer_prefix, generate_options, budget)
    if takes_reward(spec):
        generate_options["reward"] = Public.of(task, answer_prefix)
    answers_are_entries = (
        method_name == "icn" and task.sort == "lists"
    )  # its answers are the entries
    if answers_are_entries:
        generate_options["stop"] = ("\n",)
    method = {"sampling": "plain", "pg-td": SEARCH}.get(spec, spec)
    with Meter(lm.models["target"], len(prompt)) as meter:
        try:
            output = lm.generate(prompt, method, budget=budget, **generate_options)
        except BadConfig as error:
            raise BadConfig(f"{task.sort}: {error}") from error
    text = answer_prefix + output.text
    if answers_are_entries:
        entry_texts = [entry.text for entry in output.samples or [output]]
        text = "\n".join(
            f"{entry_number}.{entry}" for entry_number, entry in enumerate(entry_texts, 1)
        )
    answer_fields = judge_text(task, text) | {
        "tokens": meter.tokens,
        "forwards": output.stats.calls.get("target", 0),
        "length": len(output.tokens),
        "reason": output.finish_reason,
    }
    if method_name == "best-of":
        samples = output.samples or [output]
        answer_fields["samples"] = [
            [len(entry.tokens), task.score_answer(answer_prefix + entry.text)] for entry in samples
        ]
    return answer_fields


def judge_text(task: Task, text: str) -> Answer:
    """An answer's text with its figures."""
    return {
        "text": text,
        "score": task.score_answer(text),
        "public": task.public(text),
        "found": task.count_correct([text]),
    }


def draw_until_solved(
    lm: LM,
    task: Task,
    prompt: Sequence[int],
    answer_prefix: str,
    generate_options: dict[str, Any],
    budget: Spending,
) -> Answer:
    """The best of samples that are drawn until one has all that is public or the forwards are
    spent, one a token; of at least one. Raises BadConfig for a budget without forwards.
    """
    if not budget.forwards or budget.seconds:
        raise BadConfig("resampling: its budget is in forwards; give --budget forwards=200")
    drawn_samples: list[Any] = []
    public_scores: list[float] = []
    spent_forwards = 0
    for sample in draw_samples(lm, prompt, generate_options):
        if drawn_samples and spent_forwards + len(sample.tokens) > budget.forwards:
            break
        spent_forwards += len(sample.tokens)
        drawn_samples.append(sample)
        public_scores.append(task.public(answer_prefix + sample.text))
        if public_scores[-1] == 1:
            break
    sample_index = max(
        range(len(drawn_samples)), key=lambda sample_index: public_scores[sample_index]
    )
    best_sample = drawn_samples[sample_index]
    return judge_text(task, answer_prefix + best_sample.text) | {
        "tokens": spent_forwards - len(drawn_samples),  # the last token of a sample is not computed
        "forwards": spent_forwards,
        "length": len(best_sample.tokens),
        "reason": best_sample.finish_reason,
        "samples": [
            [len(sample.tokens), task.score_answer(answer_prefix + sample.text)]
            for sample in drawn_samples
        ],
    }


def draw_samples(lm: LM, prompt: Sequence[int], generate_options: dict[str, Any]) -> Iterator[Any]:
    """Samples without end, some of them drawn side by side; what is not taken costs nothing."""
    for first_seed in itertools.count(generate_options["seed"], TOGETHER):
        seeds = [first_seed + offset for offset in range(TOGETHER)]
        yield from lm.generate(
            [list(prompt)] * TOGETHER, "plain", **generate_options | {"seed": seeds}
        )
