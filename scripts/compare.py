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
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.progress import track

import foretell
from foretell.measure import peers
from foretell.measure.peers import Peer, Place
from foretell.measure.profiling import processor
from foretell.measure.prompts import read_prompts

PROMPTS = Path(foretell.__file__).parent / "assets" / "prompts"
Run = tuple[
    float, list[int], float, float
]  # tokens/s after the first token, tokens, MAT, host milliseconds a step


def stock(peer: Peer, tokens: int, temperature: float) -> Callable[[list[int]], Run]:
    """One way of transformers' generate."""

    def run(ids: list[int]) -> Run:
        found = peer.run(ids, tokens, temperature, 0)
        later, seconds = sum(found.counts[1:]), found.times[-1] - found.times[0]
        return (
            later / seconds if later else 0.0,
            found.tokens,
            later / max(1, len(found.counts) - 1),
            0.0,
        )

    return run


def ours(
    lm: foretell.LM, method: str, tokens: int, temperature: float
) -> Callable[[list[int]], Run]:
    def run(ids: list[int]) -> Run:
        out = lm.generate(ids, method=method, max_new_tokens=tokens, temperature=temperature)
        host = 1000 * out.stats.host_s / (out.stats.steps + 1)
        return out.stats.tokens_per_s, out.tokens, out.stats.mat, host

    return run


def held_out(lm: foretell.LM, name: str) -> list[list[int]]:
    return [lm.encode(str(p)) for p in read_prompts(PROMPTS / f"{name}.jsonl")]


def unpredictable(lm: foretell.LM) -> list[list[int]]:
    """Eight prompts of 64 random tokens, the same every time."""
    draw = torch.Generator().manual_seed(0)
    return [
        torch.randint(2, lm.models["target"].vocab, (64,), generator=draw).tolist()
        for _ in range(8)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    lm = foretell.load(args.model, draft=args.draft, dtype=args.dtype)
    small = args.draft or str(Path(str(lm.path)).parent / "demo-draft")
    place = Place(str(lm.path), small, args.dtype, "cpu", args.threads)
    contenders = {
        p.name: stock(p, args.tokens, args.temperature)
        for p in peers.contenders("transformers", place)
    }
    contenders |= {
        f"foretell {m}": ours(lm, m, args.tokens, args.temperature) for m in args.methods.split(";")
    }
    report: dict[str, dict[str, dict[str, Any]]] = {}
    for name in args.sets.split(","):
        prompts = unpredictable(lm) if name == "random" else held_out(lm, name)
        speeds: dict[str, list[float]] = {c: [] for c in contenders}
        mats: dict[str, list[float]] = {c: [] for c in contenders}
        hosts: dict[str, list[float]] = {c: [] for c in contenders}
        same: dict[str, int] = dict.fromkeys(contenders, 0)
        order = random.Random(0)
        for turn in track(range(args.rounds + 1), description=name):
            # Or a drafter that learns would know a text from the last round, or from a contender
            # that shares its store.
            stores: dict[str, dict[Hashable, Any]] = {c: {} for c in contenders}
            for ids in prompts:
                results = {}
                for c in order.sample(list(contenders), len(contenders)):
                    lm.engine.stores = stores[c]
                    time.sleep(
                        0.02
                    )  # threads of the one before go on spinning for some milliseconds
                    results[c] = contenders[c](ids)
                if turn == 0:
                    for c, (_, new, _, _) in results.items():
                        same[c] += new == results["transformers"][1]
                    continue
                for c, (speed, _, mat, host) in results.items():
                    speeds[c].append(speed)
                    mats[c].append(mat)
                    hosts[c].append(host)
        report[name] = {}
        for c in contenders:
            pairs = zip(speeds[c], speeds["transformers"], strict=True)
            ratios = sorted(a / b for a, b in pairs if b > 0 and a > 0)
            beside = zip(speeds[c], speeds.get("foretell plain", []), strict=False)
            own = [a / b for a, b in beside if b > 0 and a > 0]
            report[name][c] = {
                "tokens_per_s": round(statistics.median(speeds[c]), 1),
                "ratio": round(statistics.median(ratios), 2),
                "range": [
                    round(ratios[len(ratios) // 10], 2),
                    round(ratios[-1 - len(ratios) // 10], 2),
                ],
                "ratio_to_plain": round(statistics.median(own), 2) if own else None,
                "MAT": round(statistics.mean(mats[c]), 2),
                "host_ms_per_step": round(statistics.median(hosts[c]), 3),
                "same_tokens_as_transformers": f"{same[c]}/{len(prompts)}",
            }
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
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(document, indent=1))
    head = " | ".join(f"{s} tok/s | x | MAT | same" for s in report)
    print(f"| | {head} |\n|---|" + "---|" * (4 * len(report)))
    for c in contenders:
        cells = []
        for row in (r[c] for r in report.values()):
            low, high = row["range"]
            cells += [
                str(row["tokens_per_s"]),
                f"{row['ratio']} ({low} to {high})",
                str(row["MAT"]),
            ]
            cells.append(row["same_tokens_as_transformers"])
        print(f"| {c} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
