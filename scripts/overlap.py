"""What comparison.overlap predicts beside what is measured: `python scripts/overlap.py`.

    python scripts/overlap.py --model demo --gamma 4 --lane thread --json runs/overlap.json

It times forwards of the target and of the draft model, counts how often drafted tokens hold on the
prompts that ship with the package, predicts by that what each method gives, and runs them: in
turns, so that a slow minute of the machine falls on all. `--slowdown` is what the lane costs while
both models compute; 2, the default, is one device for both.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from comparison.overlap import Case, Times, predict

import foretell
from foretell import bench
from foretell.core.model import Model
from foretell.engine import cost_profile as profiling

SEVERAL = 8  # tokens of the forward that tells what a further one takes


def step_seconds(model: Model) -> tuple[float, float]:
    """Of a forward of one token, and of each further token."""
    medians = profiling.measure_forwards(model)
    one, several = medians[1][0], medians[SEVERAL][0]
    return one, max(0.0, several - one) / (SEVERAL - 1)


def specs(gamma: int, lane: str) -> dict[str, str]:
    """The methods of a prediction as they are run."""
    return {
        "plain": "plain",
        "draft": f"draft:length={gamma},nodes={gamma}",
        "pearl": f"pearl:gamma={gamma},lane={lane}",
        "mirror": f"mirror:gamma={gamma},lane={lane}",
        "easyspec": f"easyspec:length={gamma},nodes={gamma}",
    }


def chance(lm: foretell.LM, prompts: list[list[int]], spec: str, tokens: int) -> float:
    """That a drafted token holds, of those that were looked at."""
    tested = accepted = 0
    for prompt in prompts:
        stats = lm.generate(prompt, spec, max_new_tokens=tokens, ignore_eos=True).stats
        tested += sum(tried for tried, _ in stats.by_depth)
        accepted += sum(held for _, held in stats.by_depth)
    return accepted / tested if tested else 0.0


def measured(
    lm: foretell.LM, prompts: list[list[int]], methods: dict[str, str], tokens: int, rounds: int
) -> dict[str, float]:
    """Tokens a second after the first token, medians."""
    speeds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(rounds):
        for prompt in prompts:
            for name, spec in methods.items():
                stats = lm.generate(prompt, spec, max_new_tokens=tokens, ignore_eos=True).stats
                speeds[name].append(stats.tokens_per_s)
    return {name: statistics.median(found) for name, found in speeds.items()}


def compare(lm: foretell.LM, gamma: int, lane: str, options: argparse.Namespace) -> dict[str, Any]:
    """Every number, by name."""
    prompts = [bench.prompt_ids(lm, p) for rows in bench.read_sets([]).values() for p in rows]
    prompts = prompts[:: max(1, len(prompts) // options.prompts)][: options.prompts]
    methods = specs(gamma, lane)
    target, target_token = step_seconds(lm.models["target"])
    draft, draft_token = step_seconds(lm.models["draft"])
    where = "inline" if lane == "inline" else "beside"
    times = Times(target, draft, target_token, draft_token, slowdown=options.slowdown, lane=where)
    sure = chance(lm, prompts, methods["draft"], options.tokens)
    rough = chance(lm, prompts, methods["easyspec"], options.tokens)
    case = Case(times, sure, gamma, rough_chance=rough)
    found = measured(lm, prompts, methods, options.tokens, options.rounds)
    rows = [
        {
            "method": one.method,
            "predicted": one.speedup,
            "measured": found[one.method] / found["plain"],
        }
        for one in predict(case)
    ]
    return {"target_s": target, "draft_s": draft, "chance": sure, "rough": rough, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--draft", help="a smaller relative; demo has its own")
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--lane", default="thread", help="inline, thread, stream or process")
    parser.add_argument("--slowdown", type=float, default=2.0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    lm = foretell.load(options.model, draft=options.draft, backend="torch")
    found = compare(lm, options.gamma, options.lane, options)
    print(f"{'times plain':<12}{'predicted':>10}{'measured':>10}")
    for row in found["rows"]:
        print(f"{row['method']:<12}{row['predicted']:>10.2f}{row['measured']:>10.2f}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
