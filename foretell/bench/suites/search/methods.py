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
from foretell.registry import load, names

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


def methods(settings: Settings, sort: str) -> tuple[str, ...]:
    """What is compared on tasks of this sort, the first with the others."""
    if settings.methods == Settings().methods:
        return DEFAULTS.get(sort, OTHERS)
    return settings.methods


def check(settings: Settings) -> None:
    """Raises BadConfig for fields of a method that has none, and for a budget that is none."""
    for spec in settings.methods:
        if name_of(spec) in WAYS and spec not in WAYS:
            raise BadConfig(f"{spec}: {name_of(spec)} has no fields; leave them out")
    spending_of(settings.budget or None)


def name_of(spec: str) -> str:
    return spec.partition(":")[0]


def takes_reward(spec: str) -> bool:
    """Whether it chooses by a reward and names none."""
    name = name_of(spec)
    if name not in names("strategy") or re.search(r"[:,(]reward=", spec):
        return False
    return "reward" in {field.name for field in dataclasses.fields(load(name, "strategy"))}


def answer(lm: LM, task: Task, spec: str, settings: Settings, number: int) -> Answer:
    """What became of a task by a method. `number`: the task's among those of its sort.

    Raises BadConfig or Unsupported for a method that cannot be used on it.
    """
    prompt, before = task.asked(lm)
    name = name_of(spec)
    options: dict[str, Any] = {"max_new_tokens": settings.max_new_tokens, "stop": task.stop}
    if name in DRAWING:
        options["temperature"] = settings.temperatures[0] or TEMPERATURE
        options["seed"] = (settings.seed * 1_000_003 + number) * 1_000
    budget = spending_of(settings.budget or None)
    if name in ENDLESS and budget is None:
        budget = Spending(forwards=FORWARDS)
    if name == "resampling":
        assert budget is not None, "it is endless"
        return resampled(lm, task, prompt, before, options, budget)
    if takes_reward(spec):
        options["reward"] = Public.of(task, before)
    several = name == "icn" and task.sort == "lists"  # its answers are the entries
    if several:
        options["stop"] = ("\n",)
    method = {"sampling": "plain", "pg-td": SEARCH}.get(spec, spec)
    with Meter(lm.models["target"], len(prompt)) as meter:
        try:
            out = lm.generate(prompt, method, budget=budget, **options)
        except BadConfig as error:
            raise BadConfig(f"{task.sort}: {error}") from error
    text = before + out.text
    if several:
        found = [one.text for one in out.samples or [out]]
        text = "\n".join(f"{place}.{one}" for place, one in enumerate(found, 1))
    given = judged(task, text) | {
        "tokens": meter.tokens,
        "forwards": out.stats.calls.get("target", 0),
        "length": len(out.tokens),
        "reason": out.finish_reason,
    }
    if name == "best-of":
        samples = out.samples or [out]
        given["samples"] = [[len(one.tokens), task.score(before + one.text)] for one in samples]
    return given


def judged(task: Task, text: str) -> Answer:
    """An answer's text with its figures."""
    return {
        "text": text,
        "score": task.score(text),
        "public": task.public(text),
        "found": task.found([text]),
    }


def resampled(
    lm: LM,
    task: Task,
    prompt: Sequence[int],
    before: str,
    options: dict[str, Any],
    budget: Spending,
) -> Answer:
    """The best of samples that are drawn until one has all that is public or the forwards are
    spent, one a token; of at least one. Raises BadConfig for a budget without forwards.
    """
    if not budget.forwards or budget.seconds:
        raise BadConfig("resampling: its budget is in forwards; give --budget forwards=200")
    found: list[Any] = []
    values: list[float] = []
    spent = 0
    for one in drawn(lm, prompt, options):
        if found and spent + len(one.tokens) > budget.forwards:
            break
        spent += len(one.tokens)
        found.append(one)
        values.append(task.public(before + one.text))
        if values[-1] == 1:
            break
    place = max(range(len(found)), key=lambda place: values[place])
    best = found[place]
    return judged(task, before + best.text) | {
        "tokens": spent - len(found),  # the last token of a sample is not computed
        "forwards": spent,
        "length": len(best.tokens),
        "reason": best.finish_reason,
        "samples": [[len(one.tokens), task.score(before + one.text)] for one in found],
    }


def drawn(lm: LM, prompt: Sequence[int], options: dict[str, Any]) -> Iterator[Any]:
    """Samples without end, some of them drawn side by side; what is not taken costs nothing."""
    for seed in itertools.count(options["seed"], TOGETHER):
        seeds = [seed + place for place in range(TOGETHER)]
        yield from lm.generate([list(prompt)] * TOGETHER, "plain", **options | {"seed": seeds})
