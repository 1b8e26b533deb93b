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
from foretell.audit.copies import float32_copy, served_copy
from foretell.audit.law import check_ends, check_law
from foretell.audit.report import NO_CLAIM, Check, MethodReport, Report, summary_line
from foretell.audit.runs import Runs, dtype_name, has_exact_bits
from foretell.audit.samples import check_samples
from foretell.bench.prompts import Prompt
from foretell.bench.sets import prompt_ids
from foretell.cards import weakest_guarantee
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine.cost_profile import number_format
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
    audited_copies = [served_copy(lm)]
    if target.dtype != torch.float32 and isinstance(target, Decoder):
        audited_copies.insert(0, float32_copy(lm))
    runs = Runs(lm, encoded, audited_copies, max_new_tokens, samples)
    shared_checks = [check_exact_bits(target)] if has_exact_bits(target) else []
    checks_per_method = len(audited_copies) + len(SAMPLED) + 1
    total = checks_per_method * len(strategies)
    reports = []
    for method_index, (spec, name, strategy) in enumerate(strategies):
        checks: list[Check] = []
        for check in _checks(runs, name, strategy):
            checks.append(check)
            tell(
                f"{spec}: {check.name}",
                min(total - 1, method_index * checks_per_method + len(checks)),
                total,
            )
        reports.append(MethodReport(spec, _guarantee(name, strategy), [*shared_checks, *checks]))
    prompt_origin = "built-in" if prompts is None else "given"
    prompt_summary = f"{len(encoded)} {prompt_origin} prompt{'s' if len(encoded) > 1 else ''}"
    report = Report(
        model or target.name,
        dtype_name(target.dtype),
        number_format(target),
        str(target.device),
        {dtype_name(copy.dtype): copy.backend for copy in audited_copies},
        f"{prompt_summary}, {max_new_tokens} tokens each",
        reports,
    )
    for method in reports:
        method.line = summary_line(report, method)
    return report


def _checks(runs: Runs, name: str, strategy: Strategy) -> Iterator[Check]:
    rule = strategy.rule if isinstance(strategy, Speculative) else None
    claims_greedy = weakest_guarantee(name) in ("exact", "greedy") and (rule is None or rule.greedy)
    is_exact = _guarantee(name, strategy) == "exact"
    greedy_samplings = [Sampling(max_new_tokens=runs.length)] * len(runs.prompts)
    generated = []
    for copy_index, copy in enumerate(runs.copies):
        engine, lives = runs.run_requests(
            copy.models, name, strategy, greedy_samplings, runs.prompts
        )
        generated.append(Generated(copy, engine, lives))
        plain_outputs = runs.plain_tokens(copy_index, 0.0)
        yield check_greedy(generated[-1], strategy, runs.prompts, plain_outputs, claims_greedy)
    yield from _sampled_checks(runs, name, strategy, is_exact)
    yield check_cache(generated, strategy)


def _sampled_checks(runs: Runs, name: str, strategy: Strategy, is_exact: bool) -> Iterator[Check]:
    """Yields the checks at a temperature, which a method that is not exact may refuse."""
    sampling = Sampling(max_new_tokens=runs.length, temperature=1.0)
    samplings = [sampling] * len(runs.prompts)
    models = runs.copies[0].models
    try:
        _, lives = runs.run_requests(models, name, strategy, samplings, runs.prompts)
    except BadConfig as refusal:
        if is_exact:
            raise
        for check in SAMPLED:
            yield Check(check, NO_CLAIM, str(refusal))
        return
    rule = strategy.rule if isinstance(strategy, Speculative) else None
    draws_drafts = isinstance(strategy, Speculative) and strategy.drafter.draws
    follows_target = not draws_drafts if rule is None else type(rule).__name__ == "Walk"
    yield check_seeds(runs, strategy, lives, is_exact and follows_target, draws_drafts)
    yield check_samples(runs, name, strategy, is_exact)
    yield check_law(strategy, is_exact)
    yield check_ends(strategy, is_exact)


def _guarantee(name: str, strategy: Strategy) -> str:
    """The guarantee of the method's card, unless a lossy rule was chosen."""
    rule = strategy.rule if isinstance(strategy, Speculative) else None
    if rule is None or rule.exact:
        return weakest_guarantee(name)
    return f"lossy: rule {type(rule).__name__.lower()}"


def _check_requests(lm: LM, name: str, strategy: Strategy, prompts: Sequence[list[int]]) -> None:
    """Raises what would stand in the way, before anything runs."""
    for prompt in prompts:
        live = lm.engine.add(Request(prompt, strategy, Sampling(), name))
        lm.engine.end(live)
