"""Heads of one target side by side: `python scripts/compare_heads.py RUN [RUN ...]`.

    python scripts/compare_heads.py runs/medusa runs/hydra runs/eagle3 --against medusa

A RUN is what `foretell train head --out RUN` left behind: a head and its report. Every head drafts
for the prompts that ship with the package, at temperature 0, with exactly as many nodes a step as
each of `--nodes` says, and its forwards are counted: tokens a step of all texts together, and the
mean of the prompts' differences to the head of `--against` with a 95 % interval, by resampling
prompts. No speed is measured, so that other work beside it does no harm.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import foretell
from foretell import bench
from foretell.ops.files import write_text

RESAMPLED = 2_000


@dataclass
class Measured:
    """Of one head."""

    report: dict[str, Any]
    # By number of nodes, of each prompt: tokens after the first, and forwards.
    tokens: dict[int, list[int]] = field(default_factory=dict)
    steps: dict[int, list[int]] = field(default_factory=dict)

    def mat(self, nodes: int) -> float:
        """Tokens a step of all texts together."""
        return sum(self.tokens[nodes]) / sum(self.steps[nodes])

    def beside(self, other: Measured, nodes: int) -> tuple[float, float, float]:
        """The mean difference of the prompts' tokens a step, and its interval."""
        own = np.array(self.tokens[nodes]) / np.array(self.steps[nodes])
        theirs = np.array(other.tokens[nodes]) / np.array(other.steps[nodes])
        differences = own - theirs
        draw = np.random.default_rng(0)
        rows = draw.integers(len(differences), size=(RESAMPLED, len(differences)))
        low, high = np.quantile(differences[rows].mean(1), (0.025, 0.975))
        return float(differences.mean()), float(low), float(high)


def measure(lm: foretell.LM, run: Path, nodes: list[int], prompts: Any, tokens: int) -> Measured:
    report = json.loads((run / "report.json").read_text("utf-8"))
    kind = report["settings"]["kind"]
    found = Measured(report)
    for count in nodes:
        stats = [
            lm.generate(
                prompt,
                f"{kind}:head={run / 'head'},nodes={count}",
                max_new_tokens=tokens,
                temperature=0.0,
            ).stats
            for prompt in prompts
        ]
        told = [one for one in stats if one.steps]
        found.tokens[count] = [one.tokens - one.first_tokens for one in told]
        found.steps[count] = [one.steps for one in told]
    return found


def table(heads: dict[str, Measured], nodes: list[int], against: str) -> str:
    """In Markdown."""
    sizes = [f"MAT, {count} nodes | to `{against}`" for count in nodes]
    lines = [
        "| head | hits | overlap | parameters | tokens seen | " + " | ".join(sizes) + " |",
        "|---" * (5 + 2 * len(nodes)) + "|",
    ]
    for name, head in heads.items():
        hits = " ".join(f"{share:.3f}".lstrip("0") for share in head.report["hits"])
        overlap = head.report["overlaps"][0] if head.report.get("overlaps") else float("nan")
        cells = [f"`{name}`", hits, f"{overlap:.3f}", f"{head.report['parameters']:,}"]
        cells.append(f"{head.report['tokens_seen']:,}")
        for count in nodes:
            middle, low, high = head.beside(heads[against], count)
            cells += [f"{head.mat(count):.2f}", f"{middle:+.2f} ({low:+.2f} to {high:+.2f})"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares trained heads by counted forwards.")
    parser.add_argument("runs", nargs="+", type=Path, help="folders of `foretell train head`")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--nodes", nargs="+", type=int, default=[8, 16])
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--against", default="", help="a run's name; without it the first")
    parser.add_argument("--json", type=Path, help="file for every number")
    options = parser.parse_args()
    names = [run.name for run in options.runs]
    against = options.against or names[0]
    if against not in names:
        parser.error(f"--against {against} is none of {', '.join(names)}")
    lm = foretell.load(options.model, dtype=options.dtype)
    prompts = [bench.prompt_ids(lm, one) for rows in bench.read_sets([]).values() for one in rows]
    heads = {}
    for run in options.runs:
        heads[run.name] = measure(lm, run, options.nodes, prompts, options.tokens)
        print(f"{run.name}: {heads[run.name].mat(options.nodes[0]):.3f}", flush=True)
    print(table(heads, options.nodes, against))
    if options.json:
        numbers = {
            name: {"report": head.report, "tokens": head.tokens, "steps": head.steps}
            for name, head in heads.items()
        }
        write_text(options.json, json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main()
