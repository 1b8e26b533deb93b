"""Sampled tokens of the real model against the probabilities that it gives them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretell.audit import statistics
from foretell.audit.report import NO_CLAIM, UNTESTED, Check, Drafts
from foretell.audit.runs import KeepingEngine, Runs, dtype_name, run_batch
from foretell.audit.statistics import Position
from foretell.core.distribution import Sampler
from foretell.core.model import Model
from foretell.core.types import Sampling
from foretell.speculation.strategy import Strategy

LEVEL = 1e-3  # the smallest p-value that is not a failure
VARIATION = 0.1  # total variation whose power is reported
PROMPTS = 4  # whose next tokens are sampled
DEPTH = 3  # tokens of a text that are compared
POSITIONS = 8  # compared behind one prompt at most
ARRIVALS = 40.0  # samples expected at a position
BATCH = 64  # requests at a time; later ones draft from what earlier ones taught


@dataclass
class PromptPositions:
    """The positions of one prompt: which output leads to each and which cell each token is in."""

    prefixes: list[tuple[int, ...]]
    positions: list[Position]  # parents are counted within this prompt
    cell_of: list[np.ndarray]  # (V,) each token's cell

    def count(self, outputs: list[list[int]]) -> list[np.ndarray]:
        """How often each cell was sampled at each position, (1, cells)."""
        index = {prefix: i for i, prefix in enumerate(self.prefixes)}
        counts = [np.zeros((1, len(position.law)), np.int64) for position in self.positions]
        for output in outputs:
            for depth, token in enumerate(output[:DEPTH]):
                i = index.get(tuple(output[:depth]))
                if i is None:
                    break
                counts[i][0, self.cell_of[i][token]] += 1
        return counts


def plan(model: Model, prompt: list[int], sampler: Sampler, samples: int) -> PromptPositions:
    """Chooses, by the model's own law and before any sample, where tokens are compared.

    The positions that most samples are expected at come first.
    """
    planned = PromptPositions([], [], [])
    candidates: list[tuple[float, tuple[int, ...], int, int]] = [(float(samples), (), -1, -1)]
    while candidates and len(planned.positions) < POSITIONS:
        candidates.sort(key=lambda candidate: -candidate[0])
        expected, prefix, parent, cell = candidates.pop(0)
        row = model.score([*prompt, *prefix])[0]
        law = sampler.law(row, prefix).double().cpu().numpy()
        cells = statistics.merge(law, expected)
        cell_of = np.empty(len(law), np.int64)
        for i, tokens in enumerate(cells):
            cell_of[tokens] = i
        masses = np.array([law[tokens].sum() for tokens in cells])
        index = len(planned.positions)
        planned.prefixes.append(prefix)
        planned.cell_of.append(cell_of)
        planned.positions.append(
            Position(masses / masses.sum(), 0 if prefix else samples, parent, cell)
        )
        if len(prefix) + 1 == DEPTH:
            continue
        for i, tokens in enumerate(cells):
            arrivals = expected * masses[i]
            if len(tokens) == 1 and tokens[0] not in sampler.stops and arrivals >= ARRIVALS:
                candidates.append((arrivals, (*prefix, tokens[0]), index, i))
    return planned


def joined(parts: list[PromptPositions]) -> list[Position]:
    """The positions of all prompts in one list."""
    positions: list[Position] = []
    for part in parts:
        start = len(positions)
        for position in part.positions:
            parent = position.parent + start if position.parent >= 0 else -1
            positions.append(Position(position.law, position.samples, parent, position.cell))
    return positions


def seeds(prompt: int, samples: int) -> range:
    """Of the samples of one prompt: no two of an audit are equal, nor 0, which other checks use."""
    return range(1 + prompt * samples, 1 + (prompt + 1) * samples)


def check_samples(runs: Runs, name: str, strategy: Strategy, exact: bool) -> Check:
    """Samples DEPTH tokens behind each of the first PROMPTS prompts, at temperature 1."""
    target = runs.lm.models["target"]
    prompts = runs.prompts[:PROMPTS]
    sampling = Sampling(temperature=1.0)
    parts = []
    for prompt in prompts:
        sampler = Sampler(sampling, prompt, runs.lm.engine.eos, target.vocab)
        parts.append(plan(target, prompt, sampler, runs.samples))
    engine = KeepingEngine(runs.lm.models, runs.lm.engine.eos)
    counts: list[np.ndarray] = []
    stats = []
    for i, prompt in enumerate(prompts):
        outputs: list[list[int]] = []
        every = list(seeds(i, runs.samples))
        for start in range(0, len(every), BATCH):
            # One token more than is compared, so that the last one can still be drafted.
            samplings = [
                Sampling(max_new_tokens=DEPTH + 1, temperature=1.0, seed=seed)
                for seed in every[start : start + BATCH]
            ]
            lives = run_batch(engine, name, strategy, samplings, [prompt] * len(samplings))
            engine.kept.clear()
            outputs += [live.ctx.output for live in lives]
            stats += [live.ctx.stats for live in lives]
        counts += parts[i].count(outputs)
    drafts = Drafts.of(strategy, stats)
    positions = joined(parts)
    uncertain = sum(statistics.uncertain(position.law, VARIATION) for position in positions)
    if not uncertain:
        detail = (
            "the model is certain of every next token; give prompts that can go on in several ways"
        )
        return Check("samples", UNTESTED if exact else NO_CLAIM, detail)
    null = statistics.null_distances(positions)
    p = float(statistics.p_values(null, statistics.distance(positions, counts))[0])
    power = statistics.power(positions, null, VARIATION, LEVEL)
    power_text = (
        f"would find a total variation of {VARIATION} over its cells in {power:.0%} of runs"
    )
    tokens = sum(int(count.sum()) for count in counts)
    detail = (
        f"p={p:.2g}, {runs.samples} samples behind each of {len(prompts)} prompts, {tokens} tokens "
        f"at {len(positions)} positions ({uncertain} uncertain ones), {power_text}, {drafts}"
    )
    numbers = {
        "p": p,
        "power": power,
        "variation": VARIATION,
        "level": LEVEL,
        "power_text": power_text,
        "dtype": dtype_name(target.dtype),
        "of": runs.samples * len(prompts),
        "prompts": len(prompts),
        "tokens": tokens,
        "positions": len(positions),
        "uncertain_positions": uncertain,
    }
    return Check("samples", drafts.verdict(exact, p >= LEVEL), detail, numbers)
