"""The audit itself: which checks a method is put to, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from foretell.api.lm import LM
from foretell.audit.checks import (
    Generated,
    check_cache,
    check_exact_bits,
    check_greedy,
    check_seeds,
)
from foretell.audit.copies import as_served, in_float32
from foretell.audit.law import check_ends, check_law
from foretell.audit.report import NO_CLAIM, Check, MethodReport, Report, summary
from foretell.audit.runs import Runs, dtype_name, has_exact_bits
from foretell.audit.samples import check_samples
from foretell.bench.prompts import Prompt
from foretell.bench.sets import prompt_ids
from foretell.cards import guarantee
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine.cost_profile import numbers
from foretell.errors import BadConfig
from foretell.models.decoder.decoder import Decoder
from foretell.speculation.strategy import Speculative, Strategy

SAMPLES = 320  # of each prompt, at temperature 1
PROMPTS: tuple[Prompt, ...] = (
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "import json\nimport sys\n\n\ndef main():\n    for line in sys.stdin:\n"
    "        row = json.loads(line)\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "It was a quiet evening in the village. The old man closed the door, took his coat, and",
    "The history of the city begins with a river. In the early days, people came to the river to",
    "Usage\n=====\n\nInstall the package first::\n\n    pip install example\n\nThen import it and",
    "To read a file line by line, open it and iterate over it. For example:\n\n"
    "    with open(path) as file:\n",
    "1. Wash the vegetables.\n2. Cut the vegetables.\n3. Cook the vegetables.\n4.",
)
SAMPLED = ("seeds", "samples", "law", "ends")  # checks at a temperature
Tell = Callable[[str, int, int], None]  # (what is being done, checks done, checks in all)


def audit(
    lm: LM,
    methods: Sequence[str],
    prompts: Sequence[Prompt] | None = None,
    *,
    model: str | None = None,
    max_new_tokens: int = 48,
    samples: int | None = None,
    tell: Tell = lambda what, done, total: None,
) -> Report:
    """Checks every claim of these methods (specs) on `lm`.

    `prompts`: texts or chat messages; None: built-in ones. `model`: its title in the report.
    `max_new_tokens`: of each greedy comparison. `samples`: how often each of the first prompts is
    continued at random; None: SAMPLES. Raises BadConfig, Unsupported and the like where a method
    cannot run on the model at all.
    """
    samples = SAMPLES if samples is None else samples
    for option, value in (("max_new_tokens", max_new_tokens), ("samples", samples)):
        if value < 1:
            raise BadConfig.field(option, value, "at least 1")
    encoded = [prompt_ids(lm, prompt) for prompt in (PROMPTS if prompts is None else prompts)]
    strategies = [(spec, *lm.resolve(spec)) for spec in methods]
    for _, name, strategy in strategies:
        _check_requests(lm, name, strategy, encoded)
    target = lm.models["target"]
    copies = [as_served(lm)]
    if target.dtype != torch.float32 and isinstance(target, Decoder):
        copies.insert(0, in_float32(lm))
    runs = Runs(lm, encoded, copies, max_new_tokens, samples)
    shared = [check_exact_bits(target)] if has_exact_bits(target) else []
    each = len(copies) + len(SAMPLED) + 1
    total = each * len(strategies)
    reports = []
    for i, (spec, name, strategy) in enumerate(strategies):
        checks: list[Check] = []
        for check in _checks(runs, name, strategy):
            checks.append(check)
            tell(f"{spec}: {check.name}", min(total - 1, i * each + len(checks)), total)
        reports.append(MethodReport(spec, _guarantee(name, strategy), [*shared, *checks]))
    origin = "built-in" if prompts is None else "given"
    count = f"{len(encoded)} {origin} prompt{'s' if len(encoded) > 1 else ''}"
    report = Report(
        model or target.name,
        dtype_name(target.dtype),
        numbers(target),
        str(target.device),
        {dtype_name(copy.dtype): copy.executor for copy in copies},
        f"{count}, {max_new_tokens} tokens each",
        reports,
    )
    for method in reports:
        method.line = summary(report, method)
    return report


def _checks(runs: Runs, name: str, strategy: Strategy) -> Iterator[Check]:
    rule = strategy.rule if isinstance(strategy, Speculative) else None
    claims_greedy = guarantee(name) in ("exact", "greedy") and (rule is None or rule.greedy)
    exact = _guarantee(name, strategy) == "exact"
    greedy = [Sampling(max_new_tokens=runs.length)] * len(runs.prompts)
    generated = []
    for i, copy in enumerate(runs.copies):
        engine, lives = runs.run(copy.models, name, strategy, greedy, runs.prompts)
        generated.append(Generated(copy, engine, lives))
        expected = runs.plain(i, 0.0)
        yield check_greedy(generated[-1], strategy, runs.prompts, expected, claims_greedy)
    yield from _sampled_checks(runs, name, strategy, exact)
    yield check_cache(generated, strategy)


def _sampled_checks(runs: Runs, name: str, strategy: Strategy, exact: bool) -> Iterator[Check]:
    """Those at a temperature, which a method that is not exact may refuse."""
    sampling = Sampling(max_new_tokens=runs.length, temperature=1.0)
    samplings = [sampling] * len(runs.prompts)
    models = runs.copies[0].models
    try:
        _, lives = runs.run(models, name, strategy, samplings, runs.prompts)
    except BadConfig as refusal:
        if exact:
            raise
        for check in SAMPLED:
            yield Check(check, NO_CLAIM, str(refusal))
        return
    rule = strategy.rule if isinstance(strategy, Speculative) else None
    draws = isinstance(strategy, Speculative) and strategy.drafter.draws
    follows_target = not draws if rule is None else type(rule).__name__ == "Walk"
    yield check_seeds(runs, strategy, lives, exact and follows_target, draws)
    yield check_samples(runs, name, strategy, exact)
    yield check_law(strategy, exact)
    yield check_ends(strategy, exact)


def _guarantee(name: str, strategy: Strategy) -> str:
    """The card's, unless a lossy rule was chosen."""
    rule = strategy.rule if isinstance(strategy, Speculative) else None
    if rule is None or rule.exact:
        return guarantee(name)
    return f"lossy: rule {type(rule).__name__.lower()}"


def _check_requests(lm: LM, name: str, strategy: Strategy, prompts: Sequence[list[int]]) -> None:
    """Raises what would stand in the way, before anything runs."""
    for prompt in prompts:
        live = lm.engine.add(Request(prompt, strategy, Sampling(), name))
        lm.engine.end(live)
