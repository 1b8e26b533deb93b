"""The auditor: what a method claims, checked on the model, device and number format at hand.

It knows which experiment proves which claim, and what counts as proof; it knows no method.
Criteria:

- *greedy*: the tokens of plain decoding, in float32 and in the model's own format. Where they first
  differ, the two tokens' logits in a fresh row are compared. A gap of at most TIE units in the last
  place of the row's largest logit is a tie, which rounding decides: several rows of one forward are
  summed in another order than one. It fails no claim. With matrices of 8 bits, whose activations
  have 8 bits too, the units are bfloat16's, whatever format the sums have.
- *seeds*: where drafts are chosen by a rule and the walk verifies them, seed by seed the tokens of
  plain decoding. It claims nothing where the model cannot be had in float32, or has matrices of 8
  bits without exact bits: there the last bit of an activation may decide how it is rounded to 8.
- *law*: on the toy model every outcome of every draw is taken in turn; the output's law may be off
  by at most LAW.
- *two-sample*: first tokens of the real model at temperature 1, method against plain, other seeds
  on each side; a permutation test of binned counts within each prompt. It fails below P.
- *exact bits*, of models loaded with them: the logits of random steps (chunks, trees, batches,
  forks) are those of plain steps to the last bit. Greedy comparisons then allow no tie.
- *cache*: the rows left by a generation against those of a fresh prefill, as relative distance of
  each row.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

import foretell
from foretell.api import LM, wrap
from foretell.cards import guarantee
from foretell.core.cache import Cache
from foretell.core.engine import Engine, Live, Request
from foretell.core.model import Model
from foretell.core.sampling import Sampler
from foretell.core.stats import Stats
from foretell.core.strategy import Speculative, Strategy
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.errors import BadConfig, Unsupported
from foretell.families.decoder import Decoder
from foretell.families.toy import Toy
from foretell.measure.bits import compare
from foretell.measure.outcomes import Enumerator
from foretell.measure.prompts import Prompt
from foretell.policy.costs import numbers
from foretell.spec import resolve

LAW = 1e-9  # largest error of a probability
P = 1e-3  # smallest p-value
TIE = {
    torch.float64: 64,
    torch.float32: 64,
    torch.bfloat16: 2,
    torch.float16: 2,
}  # units in the last place
ROWS = {
    torch.float64: 1e-6,
    torch.float32: 1e-3,
    torch.bfloat16: 0.1,
    torch.float16: 0.05,
}  # relative distance
SAMPLES = 64  # of each prompt and side
BITS = 100  # random steps whose logits are compared to the last bit
STRATA = 4  # prompts of the two-sample test
WIDE = 64  # outcomes of two tokens above which three would take too long
PROMPTS: tuple[Prompt, ...] = (
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "import json\nimport sys\n\n\ndef main():\n    for line in sys.stdin:\n        row = json.loads(line)\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "It was a quiet evening in the village. The old man closed the door, took his coat, and",
    "The history of the city begins with a river. In the early days, people came to the river to",
    "Usage\n=====\n\nInstall the package first::\n\n    pip install example\n\nThen import it and",
    "To read a file line by line, open it and iterate over it. For example:\n\n    with open(path) as file:\n",
    "1. Wash the vegetables.\n2. Cut the vegetables.\n3. Cook the vegetables.\n4.",
)
Tell = Callable[[str, int, int], None]  # (what is being done, steps done, steps in all)


@dataclass
class Check:
    """One experiment. `held` None: nothing was claimed, or it could not be run; `detail` says
    which.
    """

    name: str
    held: bool | None
    detail: str
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass
class MethodReport:
    """All checks of one method. `line` is meant to be pasted."""

    method: str
    guarantee: str
    checks: list[Check]
    line: str = ""

    @property
    def held(self) -> bool:
        """Whether no claim failed."""
        return all(check.held is not False for check in self.checks)


@dataclass
class Report:
    """What `audit` found."""

    model: str
    dtype: str
    numbers: str  # the format of its matrices, where it is another
    device: str
    methods: list[MethodReport]

    @property
    def held(self) -> bool:
        return all(method.held for method in self.methods)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, schema foretell.measure.audit/1."""
        methods = [{**asdict(method), "held": method.held} for method in self.methods]
        about = {
            "model": self.model,
            "dtype": self.numbers,
            "device": self.device,
            "torch": torch.__version__,
        }
        return {
            "schema": "foretell.measure.audit/1",
            "version": foretell.__version__,
            **about,
            "held": self.held,
            "methods": methods,
        }

    def text(self) -> str:
        """For people: a line a check, and at the end one line a method to paste."""
        words = {True: "held", False: "FAILED", None: "no claim"}
        lines = []
        for method in self.methods:
            lines += [f"{method.method} ({method.guarantee})"]
            lines += [
                f"  {words[check.held]:8}  {check.name}: {check.detail}" for check in method.checks
            ] + [""]
        return "\n".join([*lines, *(method.line for method in self.methods)])


def audit(
    lm: LM,
    methods: Sequence[str],
    prompts: Sequence[Prompt] | None = None,
    *,
    model: str | None = None,
    max_new_tokens: int = 48,
    tell: Tell = lambda what, done, total: None,
) -> Report:
    """Checks every claim of these methods (specs) on `lm`. `prompts`: texts or chat messages; None:
    built-in ones.

    Raises BadConfig, Unsupported and the like where a method cannot run on the model at all.
    """
    if max_new_tokens < 1:
        raise BadConfig.field("max_new_tokens", max_new_tokens, "at least 1")
    texts = [lm._encode(prompt) for prompt in (PROMPTS if prompts is None else prompts)]
    strategies = [(spec, lm.resolve(spec)) for spec in methods]
    target = lm.models["target"]
    for _, (name, strategy) in strategies:
        _fits(lm, name, strategy, texts)
    worlds = [(target.dtype, lm.models)]
    if target.dtype != torch.float32 and isinstance(target, Decoder):
        worlds.insert(0, (torch.float32, _in_float32(lm)))
    bench = _Bench(lm, texts, worlds, max_new_tokens)
    each = len(worlds) + 4 + _exact(target)
    reports, total = [], len(strategies) * each
    for i, (spec, (name, strategy)) in enumerate(strategies):
        checks: list[Check] = []
        for check in _checks(bench, name, strategy):
            checks.append(check)
            tell(f"{spec}: {check.name}", min(total - 1, i * each + len(checks)), total)
        reports.append(MethodReport(spec, _guarantee(name, strategy), checks))
    title = model or target.name
    report = Report(title, _name(target.dtype), numbers(target), str(target.device), reports)
    for one in reports:
        one.line = _line(report, one)
    return report


class Watching(Engine):
    """An engine that keeps the target's rows of every request, and notes who drew tokens."""

    def __init__(self, models: dict[str, Model], eos: Sequence[int]):
        super().__init__(models, eos)
        self.rows: dict[int, Cache] = {}
        self.drew: set[int] = set()

    def end(self, live: Live) -> None:
        cache = live.caches.get(("target", live.result))
        if cache is not None:
            self.rows[live.index] = cache.fork()
        super().end(live)

    def _answer(self, waiting: list[tuple[Live, int]]) -> None:
        self.drew |= {live.index for live, i in waiting if live.asks[i].tree.drawn}
        super()._answer(waiting)


@dataclass
class _Bench:
    """What the checks of all methods share."""

    lm: LM
    texts: list[list[int]]
    worlds: list[tuple[torch.dtype, dict[str, Model]]]  # the first is float32 where that can be had
    length: int  # tokens of a comparison
    plain: dict[Any, list[list[int]]] = field(default_factory=dict)
    bits: Check | None = None  # of the model, so the same for every method

    def run(
        self,
        models: dict[str, Model],
        name: str,
        strategy: Strategy,
        sampling: Sequence[Sampling],
        texts: Sequence[list[int]],
    ) -> tuple[Watching, list[Live]]:
        """One request a sampling and text, in one batch. Raises the first error."""
        engine = Watching(models, self.lm.engine.eos)
        pairs = zip(texts, sampling, strict=True)
        lives = [engine.add(Request(text, strategy, s, name)) for text, s in pairs]
        for _ in engine.run():
            pass
        for live in lives:
            if live.error is not None:
                raise live.error
        return engine, lives

    def expected(self, world: int, temperature: float) -> list[list[int]]:
        """Plain decoding's tokens of each text, seed 0."""
        if (key := (world, temperature)) not in self.plain:
            chosen = [Sampling(max_new_tokens=self.length, temperature=temperature)] * len(
                self.texts
            )
            # One at a time: what one row of a forward gives is what the others are held against.
            plain = resolve("plain")[1]
            runs = [
                self.run(self.worlds[world][1], "plain", plain, [s], [t])
                for s, t in zip(chosen, self.texts, strict=True)
            ]
            self.plain[key] = [lives[0].ctx.output for _, lives in runs]
        return self.plain[key]


def _checks(bench: _Bench, name: str, strategy: Strategy) -> Iterator[Check]:
    claimed, rule = guarantee(name), strategy.rule if isinstance(strategy, Speculative) else None
    exact, rows = _guarantee(name, strategy) == "exact", []
    if _exact(target := bench.lm.models["target"]):
        bench.bits = bench.bits or _bits(target)
        yield bench.bits
    for world, (dtype, models) in enumerate(bench.worlds):
        chosen = [Sampling(max_new_tokens=bench.length)] * len(bench.texts)
        engine, lives = bench.run(models, name, strategy, chosen, bench.texts)
        check = _greedy(models["target"], dtype, bench, bench.expected(world, 0.0), lives)
        if claimed not in ("exact", "greedy") or not (rule is None or rule.greedy):
            check.held = None
        yield check
        rows.append((dtype, models["target"], engine, lives))
    models = bench.worlds[0][1]
    chosen = [Sampling(max_new_tokens=bench.length, temperature=1.0)] * len(bench.texts)
    try:
        engine, lives = bench.run(models, name, strategy, chosen, bench.texts)
    except BadConfig as refused:
        if exact:
            raise
        yield from (Check(what, None, str(refused)) for what in ("seeds", "law", "two-sample"))
    else:
        drew = bool(engine.drew)
        walks = rule is None or type(rule).__name__ == "Walk"
        yield _seeds(
            bench, lives, claimed=exact and walks and (not drew or rule is not None), drew=drew
        )
        yield _law(strategy, exact)
        yield _two_sample(bench, name, strategy, exact)
    yield _rows(rows)


def _exact(model: Model) -> bool:
    return isinstance(model, Decoder) and model.exact_bits


def _coarse(model: Model) -> bool:
    return getattr(model, "narrow", False) and not _exact(model)


def _bits(model: Model) -> Check:
    same, first = compare(model, BITS)
    detail = (
        f"{same} random steps identical"
        if same == BITS
        else f"{same} of {BITS} random steps identical; {first}"
    )
    return Check("exact bits", same == BITS, detail, {"identical": same, "of": BITS})


def _guarantee(name: str, strategy: Strategy) -> str:
    """The card's, unless a lossy rule was chosen."""
    rule = strategy.rule if isinstance(strategy, Speculative) else None
    return (
        guarantee(name)
        if rule is None or rule.exact
        else f"lossy: rule {type(rule).__name__.lower()}"
    )


def _drafted(stats: Sequence[Stats]) -> str:
    """Said beside every proof, since without drafts it would prove nothing."""
    drafted = sum(s.drafted for s in stats)
    return (
        f", {sum(s.accepted for s in stats)} of {drafted} drafted accepted"
        if drafted
        else ", nothing drafted"
    )


def _greedy(
    target: Model, dtype: torch.dtype, bench: _Bench, expected: list[list[int]], lives: list[Live]
) -> Check:
    name, same, ties, worst = f"greedy {_name(dtype)}", 0, 0, ""
    differences = []
    for i, (live, plain, text) in enumerate(zip(lives, expected, bench.texts, strict=True)):
        mine = live.ctx.output
        if mine == plain:
            same += 1
            continue
        at = next(
            (k for k, (a, b) in enumerate(zip(mine, plain, strict=False)) if a != b),
            min(len(mine), len(plain)),
        )
        found: dict[str, Any] = {"prompt": i, "position": at, "tie": False}
        if at < min(len(mine), len(plain)):
            row = target.score([*text, *plain[:at]])[0]
            best = row.topk(2).values.tolist()
            gap, largest = abs(float(row[plain[at]] - row[mine[at]])), float(row.abs().max())
            unit = torch.bfloat16 if _coarse(target) else dtype
            allowed = TIE[unit] * torch.finfo(unit).eps * largest
            near = best[0] - min(float(row[plain[at]]), float(row[mine[at]])) <= allowed
            near = near and not _exact(target)
            found |= {"margin": best[0] - best[1], "gap": gap, "allowed": allowed, "tie": near}
            worst = (
                worst or f"; first: prompt {i}, token {at}, top-2 margin {best[0] - best[1]:.2g}"
            )
        else:
            worst = f"; prompt {i} ends early, at token {at}"
        ties += bool(found["tie"])
        differences.append(found)
    detail = f"{same}/{len(lives)} identical"
    if ties:
        detail += f", {ties} divergence{'s' if ties > 1 else ''} at a tie"
    if same + ties < len(lives):
        detail += f", {len(lives) - same - ties} real"
    numbers = {
        "identical": same,
        "ties": ties,
        "of": len(lives),
        "dtype": _name(dtype),
        "differences": differences,
    }
    detail += worst + _drafted([live.ctx.stats for live in lives])
    return Check(name, same + ties == len(lives), detail, numbers)


def _seeds(bench: _Bench, lives: list[Live], claimed: bool, drew: bool) -> Check:
    same = sum(
        live.ctx.output == plain for live, plain in zip(lives, bench.expected(0, 1.0), strict=True)
    )
    detail = f"{same}/{len(lives)} identical at temperature 1, {_name(bench.worlds[0][0])}"
    wide = bench.worlds[0][0] in (torch.float32, torch.float64) and not _coarse(
        bench.worlds[0][1]["target"]
    )
    if claimed and not wide:
        claimed = False
        detail += " (not claimed: in this format, rounding differs with the rows of a forward)"
    elif not claimed:
        detail += " (its drafts are drawn: other draws, the same law)" if drew else " (not claimed)"
    numbers = {"identical": same, "of": len(lives)}
    return Check("seeds", same == len(lives) if claimed else None, detail, numbers)


SETTINGS = (
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_p=0.9),
    Sampling(temperature=1.0, repetition_penalty=1.5, presence_penalty=0.5),
)
TOY_PROMPT = (0, 1, 2, 0, 1, 2, 0)


def law_error(
    strategy: Strategy, sampling: Sampling, tokens: int, vocab: int = 3
) -> tuple[float, list[Stats]]:
    """Largest error of the probability of any output of `tokens` toy tokens; the numbers of every
    outcome walked.
    """
    models: dict[str, Model] = {"target": Toy(vocab, 3, copy=0.5)}
    for i, other in enumerate(strategy.models):
        models[other] = Toy(vocab, 3, noise=0.6 + 0.2 * i, copy=0.5, name=f"toy-{other}")
    if isinstance(strategy, Speculative) and not strategy.models:
        # A fixed size, since one chosen by measured time would differ between the outcomes.
        strategy = replace(strategy, nodes=strategy.nodes or 8)
    sampling, warm = replace(sampling, max_new_tokens=tokens), Engine(models)
    for seed in range(2):
        warm.add(
            Request(
                TOY_PROMPT[: 3 + seed],
                strategy,
                Sampling(max_new_tokens=12, temperature=1.0, seed=seed),
            )
        )
    for _ in warm.run():
        pass
    law: Counter[tuple[int, ...]] = Counter()
    stats: list[Stats] = []

    def once(door: Enumerator) -> tuple[int, ...]:
        engine = Engine(models)
        engine.stores = copy.deepcopy(warm.stores)
        live = engine.add(Request(TOY_PROMPT, strategy, sampling, rng=door))
        for _ in engine.run():
            pass
        if live.error is not None:
            raise live.error.__cause__ or live.error
        stats.append(live.ctx.stats)
        return tuple(live.ctx.output)

    for weight, output in Enumerator.walk(once):
        law[output] += weight  # type: ignore[assignment]
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    sampler = Sampler(sampling, TOY_PROMPT, (), vocab)
    for _ in range(tokens):
        expected = {
            (*output, token): weight * float(p)
            for output, weight in expected.items()
            for token, p in enumerate(
                sampler.law(models["target"].score([*TOY_PROMPT, *output])[0], output)
            )
        }
    return max(abs(law[output] - expected.get(output, 0.0)) for output in {*law, *expected}), stats


def _law(strategy: Strategy, exact: bool) -> Check:
    worst, stats = 0.0, list[Stats]()
    try:
        for sampling in SETTINGS:
            error, walked = law_error(strategy, sampling, 2)
            worst, stats = max(worst, error), stats + walked
            if len(walked) <= WIDE:
                error, walked = law_error(strategy, sampling, 3)
                worst, stats = max(worst, error), stats + walked
    except Unsupported as missing:
        return Check("law", None, f"cannot be run on the toy model: {missing}")
    except Exception as broken:  # whatever a method raises where others run is a claim that failed
        if "Gumbel" in str(broken):
            return Check("law", None, "cannot be enumerated: it draws Gumbel noise")
        return Check(
            "law",
            False if exact else None,
            f"failed on the toy model: {type(broken).__name__}: {broken}",
        )
    detail = f"error {worst:.0e} over {len(stats)} outcomes of the toy model{_drafted(stats)}"
    return Check(
        "law", worst <= LAW if exact else None, detail, {"error": worst, "outcomes": len(stats)}
    )


def _two_sample(bench: _Bench, name: str, strategy: Strategy, exact: bool) -> Check:
    models = bench.lm.models
    count, strata = SAMPLES, []
    for text in bench.texts[:STRATA]:
        sides = []
        for side, (label, chosen) in enumerate([(name, strategy), resolve("plain")]):
            # Three tokens and not two, so that the second can still be drafted.
            sampling = [
                Sampling(max_new_tokens=3, temperature=1.0, seed=side * 10**6 + k)
                for k in range(count)
            ]
            _, lives = bench.run(models, label, chosen, sampling, [text] * count)
            sides.append([(*live.ctx.output[:2], -1, -1)[:2] for live in lives])
        strata.append(_table(*sides))
    p, bins = permutation_test(strata), sum(table.shape[1] for table in strata)
    detail = f"p={p:.2g}, {len(strata)} prompts, {count} samples a side of the first two tokens, {bins} bins"
    return Check(
        "two-sample",
        p >= P if exact else None,
        detail,
        {"p": p, "samples": count * len(strata), "bins": bins},
    )


def _table(a: Sequence[tuple[int, ...]], b: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Counts (2, bins): the commonest tokens of each place have a bin, the others share three; rare
    pairs share one.
    """
    common = [
        {t for t, _ in Counter(pair[place] for pair in (*a, *b)).most_common(4)}
        for place in range(2)
    ]

    def coarse(pair: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(t if t in common[place] else -2 - t % 3 for place, t in enumerate(pair))

    counts = [Counter(map(coarse, side)) for side in (a, b)]
    pooled = counts[0] + counts[1]
    bins = {pair: i for i, pair in enumerate(sorted(pair for pair, n in pooled.items() if n >= 8))}
    table = np.zeros((2, len(bins) + 1), dtype=np.int64)
    for side in range(2):
        for pair, n in counts[side].items():
            table[side, bins.get(pair, len(bins))] += n
    return table[:, table.sum(0) > 0]


def permutation_test(strata: Sequence[np.ndarray], rounds: int = 4999, seed: int = 0) -> float:
    """p-value that the two rows of each table (2, bins) of counts come from one law; chi-square
    distance, permuted.
    """
    rng = np.random.default_rng(seed)
    seen, drawn = 0.0, np.zeros(rounds)
    for table in strata:
        pooled, size = table.sum(0), table.sum(1)
        share = pooled * size[0] / size.sum()
        draws = rng.multivariate_hypergeometric(pooled, int(size[0]), size=rounds)
        seen += float(((table[0] - share) ** 2 / pooled).sum())
        drawn += ((draws - share) ** 2 / pooled).sum(1)
    return float((1 + (drawn >= seen * (1 - 1e-12)).sum()) / (1 + rounds))


@torch.inference_mode()
def _rows(runs: Sequence[tuple[torch.dtype, Model, Watching, list[Live]]]) -> Check:
    held, parts, numbers = True, [], {}
    for dtype, target, engine, lives in runs:
        worst = 0.0
        for live in lives:
            mine, tokens = engine.rows[live.index], live.ctx.tokens
            mine.commit(tokens)
            fresh = target.cache()
            ask = Ask(TokenTree(tokens[-1]))
            seen = target.forward([fresh.prepare(ask, tokens, len(tokens))[0]])[0].logits
            pairs = [
                (a[:, : mine.length], b[:, : mine.length])
                for a, b in zip((*mine.k, *mine.v), (*fresh.k, *fresh.v), strict=True)
            ]
            if not pairs:  # rows that cannot be looked at, but what a token makes of them can
                pairs = [
                    (target.forward([mine.prepare(ask, tokens, len(tokens))[0]])[0].logits, seen)
                ]
            for a, b in ((ours.double(), theirs.double()) for ours, theirs in pairs):
                distance = (a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-9)
                worst = max(worst, float(distance.max())) if distance.numel() else worst
        most = ROWS[torch.bfloat16] if _coarse(target) else ROWS[dtype]
        held &= worst <= most
        parts.append(f"{worst:.1g} in {_name(dtype)} (at most {most:g})")
        numbers[_name(dtype)] = worst
    return Check(
        "cache",
        held,
        f"largest relative distance of a row from a fresh prefill {', '.join(parts)}",
        numbers,
    )


def _fits(lm: LM, name: str, strategy: Strategy, texts: Sequence[list[int]]) -> None:
    """Raises what would stand in the way, before anything runs."""
    for text in texts:
        lm.engine.end(lm.engine.add(Request(text, strategy, Sampling(), name)))


def _in_float32(lm: LM) -> dict[str, Model]:
    """The same models with their weights widened, which changes none of them, and on the same
    executor.
    """
    copies = {
        n: copy.deepcopy(m.hf).float() for n, m in lm.models.items() if isinstance(m, Decoder)
    }
    target = lm.models["target"]
    wide = wrap(
        copies["target"], None, copies.get("draft"), target.name, exact_bits=_exact(target)
    ).models
    for name, model in wide.items():
        if (
            isinstance(model, Decoder)
            and (executor := getattr(lm.models[name], "executor", None)) is not None
        ):
            model.use(type(executor))
    return wide


def _line(report: Report, method: MethodReport) -> str:
    """foretell 0.1.0 audit: demo bfloat16 ngram exact: greedy 8/8 identical, law 2e-16, p=0.43,
    cache ok
    """
    checks = {check.name: check for check in method.checks}
    greedy = checks[f"greedy {report.dtype}"].numbers
    words = [f"greedy {greedy['identical']}/{greedy['of']} identical"]
    if greedy["ties"]:
        words.append(f"{greedy['ties']} at a tie")
    if "exact bits" in checks:
        words.append("exact bits {identical}/{of}".format(**checks["exact bits"].numbers))
    words.append(
        f"law {checks['law'].numbers['error']:.0e}"
        if checks["law"].numbers
        else "law not enumerated"
    )
    sampled = checks["two-sample"].numbers
    words.append(f"p={sampled['p']:.2g}" if sampled else "samples not compared")
    words.append("cache ok" if checks["cache"].held else "cache WRONG")
    if not method.held:
        words.append(
            "FAILED: " + ", ".join(check.name for check in method.checks if check.held is False)
        )
    about = f"foretell {foretell.__version__} audit: {report.model} {report.numbers}"
    return f"{about} {method.method} {method.guarantee.partition(':')[0]}: {', '.join(words)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
