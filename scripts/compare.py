"""The README's table: foretell beside transformers' own generate, one request, interleaved in one
process.

    python scripts/compare.py --model demo --threads 2 --json runs/compare.json

Every prompt is run by every contender, in an order shuffled each time, `--rounds` times over, after
one warm-up round that is not counted. A figure is tokens/s after the first token (prefill and first
token left out on both sides); a ratio is taken prompt by prompt within one round, and of all of
them the median and the range from the 10th to the 90th percentile are printed. Each contender has
stores of its own, forgotten between rounds: nobody learns from another one's text, nor from this
text in an earlier round. The set `random` has prompts of random tokens: with --temperature 1.5
nothing there can be predicted. Held-out prompts come with the package (foretell/assets/prompts:
their documents were kept from the embedded model's training).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.progress import track

import foretell
from foretell.measure import peers
from foretell.measure.bench import Method
from foretell.measure.peers import Peer, Place
from foretell.measure.profiling import processor
from foretell.measure.prompts import read_prompts
from foretell.ops.files import write_text

PROMPTS = Path(foretell.__file__).parent / "assets" / "prompts"
BASE = "transformers"  # the contender that speeds and tokens are compared with
PLAIN = "foretell plain"
PAUSE = 0.02  # seconds: threads of the run before go on spinning for some milliseconds


@dataclass
class Run:
    """One answer. `speed`: tokens/s after the first token; `host_ms`: host milliseconds a step."""

    speed: float
    tokens: list[int]
    mat: float
    host_ms: float


@dataclass
class Figures:
    """What was measured of one contender on one set. `same`: answers with the tokens of BASE."""

    runs: list[Run] = field(default_factory=list)
    same: int = 0


Contender = Callable[[list[int]], Run]


def stock(peer: Peer, tokens: int, temperature: float) -> Contender:
    """One way of transformers' generate."""

    def run(ids: list[int]) -> Run:
        measured = peer.run(ids, tokens, temperature, 0)
        later = sum(measured.counts[1:])
        seconds = measured.times[-1] - measured.times[0]
        speed = later / seconds if later else 0.0
        return Run(speed, measured.tokens, later / max(1, len(measured.counts) - 1), 0.0)

    return run


def ours(method: Method, tokens: int, temperature: float) -> Contender:
    def run(ids: list[int]) -> Run:
        (measured,) = method.run([ids], tokens, temperature, 0)
        stats = measured.stats
        host_ms = 1000 * stats.host_s / (stats.steps + 1)
        return Run(stats.tokens_per_s, measured.tokens, stats.mat, host_ms)

    return run


def held_out(lm: foretell.LM, name: str) -> list[list[int]]:
    return [lm.encode(str(prompt)) for prompt in read_prompts(PROMPTS / f"{name}.jsonl")]


def unpredictable(lm: foretell.LM) -> list[list[int]]:
    """Eight prompts of 64 random tokens, the same every time."""
    draw = torch.Generator().manual_seed(0)
    vocab = lm.models["target"].vocab
    return [torch.randint(2, vocab, (64,), generator=draw).tolist() for _ in range(8)]


def measure(
    contenders: Mapping[str, Contender],
    methods: Sequence[Method],
    name: str,
    prompts: Sequence[list[int]],
    rounds: int,
) -> dict[str, Figures]:
    """Every prompt by every contender, `rounds` times after a warm-up, whose tokens are compared.

    `methods`: the contenders of ours, which forget before every round what they have learnt;
    `name`: of the set, for the bar.
    """
    figures = {contender: Figures() for contender in contenders}
    order = random.Random(0)
    for turn in track(range(rounds + 1), description=name):
        for method in methods:
            method.forget()
        for ids in prompts:
            results = {}
            for contender in order.sample(list(contenders), len(contenders)):
                time.sleep(PAUSE)
                results[contender] = contenders[contender](ids)
            for contender, run in results.items():
                if turn:
                    figures[contender].runs.append(run)
                else:
                    figures[contender].same += run.tokens == results[BASE].tokens
    return figures


def summary(figures: Mapping[str, Figures], prompts: int) -> dict[str, dict[str, Any]]:
    """The rounded numbers of one set, by contender."""
    rows = {}
    for contender, measured in figures.items():
        runs = measured.runs
        against_base = sorted(ratios(runs, figures[BASE].runs))
        tenth = len(against_base) // 10
        low, high = against_base[tenth], against_base[-1 - tenth]
        against_plain = ratios(runs, figures[PLAIN].runs) if PLAIN in figures else []
        rows[contender] = {
            "tokens_per_s": round(statistics.median(run.speed for run in runs), 1),
            "ratio": round(statistics.median(against_base), 2),
            "range": [round(low, 2), round(high, 2)],
            "ratio_to_plain": round(statistics.median(against_plain), 2) if against_plain else None,
            "MAT": round(statistics.mean(run.mat for run in runs), 2),
            "host_ms_per_step": round(statistics.median(run.host_ms for run in runs), 3),
            "same_tokens_as_transformers": f"{measured.same}/{prompts}",
        }
    return rows


def ratios(runs: Sequence[Run], others: Sequence[Run]) -> list[float]:
    """Of speeds on the same prompt in the same round, where both are known."""
    pairs = zip(runs, others, strict=True)
    return [run.speed / other.speed for run, other in pairs if run.speed > 0 and other.speed > 0]


def show(report: Mapping[str, Mapping[str, Mapping[str, Any]]], contenders: Sequence[str]) -> None:
    """Prints the table in Markdown."""
    head = " | ".join(f"{name} tok/s | x | MAT | same" for name in report)
    print(f"| | {head} |\n|---|" + "---|" * (4 * len(report)))
    for contender in contenders:
        cells = []
        for rows in report.values():
            row = rows[contender]
            low, high = row["range"]
            cells.append(str(row["tokens_per_s"]))
            cells.append(f"{row['ratio']} ({low} to {high})")
            cells.append(str(row["MAT"]))
            cells.append(row["same_tokens_as_transformers"])
        print(f"| {contender} | " + " | ".join(cells) + " |")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--draft", default=None)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--methods", default="plain;auto;ngram;token-recycling;draft")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sets", default="code,docs,prose,edits,repetitive")
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    lm = foretell.load(args.model, draft=args.draft, dtype=args.dtype)
    lm.measure()  # or it would be done within the first run
    draft = args.draft or str(Path(str(lm.path)).parent / "demo-draft")
    place = Place(str(lm.path), draft, args.dtype, "cpu", args.threads)
    contenders: dict[str, Contender] = {}
    for peer in peers.contenders("transformers", place):
        contenders[peer.name] = stock(peer, args.tokens, args.temperature)
    methods = [Method(lm, spec) for spec in args.methods.split(";")]
    for method in methods:
        contenders[f"foretell {method.name}"] = ours(method, args.tokens, args.temperature)
    report = {}
    for name in args.sets.split(","):
        prompts = unpredictable(lm) if name == "random" else held_out(lm, name)
        figures = measure(contenders, methods, name, prompts, args.rounds)
        report[name] = summary(figures, len(prompts))
    if args.json:
        executor = getattr(lm.models["target"], "executor", None)
        document = {
            "schema": "foretell.compare/1",
            "model": args.model,
            "dtype": args.dtype,
            "threads": args.threads,
            "tokens": args.tokens,
            "temperature": args.temperature,
            "rounds": args.rounds,
            "cores": os.cpu_count(),
            "machine": processor(),
            "date": time.strftime("%Y-%m-%d"),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "executor": getattr(executor, "name", "torch"),
            "results": report,
        }
        write_text(args.json, json.dumps(document, indent=1))
    show(report, list(contenders))


if __name__ == "__main__":
    main()
