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
POSITIONS = 8  # compared after one prompt at most
ARRIVALS = 40.0  # samples expected at a position
BATCH = 64  # requests at a time; later ones draft from what earlier ones taught


@dataclass
class PromptPositions:
    """The positions of one prompt: which output leads to each and which cell each token is in."""

    prefixes: list[tuple[int, ...]]
    positions: list[Position]  # parents are counted within this prompt
    token_cells: list[np.ndarray]  # (V,) each token's cell

    def count_cells(self, outputs: list[list[int]]) -> list[np.ndarray]:
        """Counts how often each cell was sampled at each position, (1, cells)."""
        position_by_prefix = {
            prefix: position_index for position_index, prefix in enumerate(self.prefixes)
        }
        counts = [np.zeros((1, len(position.law)), np.int64) for position in self.positions]
        for output in outputs:
            for depth, token in enumerate(output[:DEPTH]):
                position_index = position_by_prefix.get(tuple(output[:depth]))
                if position_index is None:
                    break
                counts[position_index][0, self.token_cells[position_index][token]] += 1
        return counts


def plan_positions(
    model: Model, prompt: list[int], sampler: Sampler, samples: int
) -> PromptPositions:
    """Chooses, by the model's own distribution and before any sample, where tokens are compared.

    The positions that most samples are expected at come first.
    """
    prompt_positions = PromptPositions([], [], [])
    candidates: list[tuple[float, tuple[int, ...], int, int]] = [(float(samples), (), -1, -1)]
    while candidates and len(prompt_positions.positions) < POSITIONS:
        candidates.sort(key=lambda candidate: -candidate[0])
        expected_samples, prefix, parent, cell = candidates.pop(0)
        row = model.score([*prompt, *prefix])[0]
        next_probs = sampler.law(row, prefix).double().cpu().numpy()
        cells = statistics.merge_cells(next_probs, expected_samples)
        token_cells = np.empty(len(next_probs), np.int64)
        for cell_index, tokens in enumerate(cells):
            token_cells[tokens] = cell_index
        cell_masses = np.array([next_probs[tokens].sum() for tokens in cells])
        position_index = len(prompt_positions.positions)
        prompt_positions.prefixes.append(prefix)
        prompt_positions.token_cells.append(token_cells)
        prompt_positions.positions.append(
            Position(cell_masses / cell_masses.sum(), 0 if prefix else samples, parent, cell)
        )
        if len(prefix) + 1 == DEPTH:
            continue
        for cell_index, tokens in enumerate(cells):
            arrivals = expected_samples * cell_masses[cell_index]
            if len(tokens) == 1 and tokens[0] not in sampler.stops and arrivals >= ARRIVALS:
                candidates.append((arrivals, (*prefix, tokens[0]), position_index, cell_index))
    return prompt_positions


def join_positions(parts: list[PromptPositions]) -> list[Position]:
    """Joins the positions of all prompts in one list."""
    positions: list[Position] = []
    for prompt_positions in parts:
        part_start = len(positions)
        for position in prompt_positions.positions:
            parent = position.parent + part_start if position.parent >= 0 else -1
            positions.append(Position(position.law, position.samples, parent, position.cell))
    return positions


def sample_seeds(prompt: int, samples: int) -> range:
    """The seeds of the samples of one prompt: no two of an audit are equal, nor 0, which other
    checks use.
    """
    return range(1 + prompt * samples, 1 + (prompt + 1) * samples)


def check_samples(runs: Runs, name: str, strategy: Strategy, exact: bool) -> Check:
    """Samples DEPTH tokens after each of the first PROMPTS prompts, at temperature 1."""
    target = runs.lm.models["target"]
    prompts = runs.prompts[:PROMPTS]
    sampling = Sampling(temperature=1.0)
    prompt_positions = []
    for prompt in prompts:
        sampler = Sampler(sampling, prompt, runs.lm.engine.eos, target.vocab)
        prompt_positions.append(plan_positions(target, prompt, sampler, runs.samples))
    engine = KeepingEngine(runs.lm.models, runs.lm.engine.eos)
    counts: list[np.ndarray] = []
    stats = []
    for prompt_index, prompt in enumerate(prompts):
        outputs: list[list[int]] = []
        all_seeds = list(sample_seeds(prompt_index, runs.samples))
        for start in range(0, len(all_seeds), BATCH):
            # One token more than is compared, so that the last one can still be drafted.
            samplings = [
                Sampling(max_new_tokens=DEPTH + 1, temperature=1.0, seed=seed)
                for seed in all_seeds[start : start + BATCH]
            ]
            lives = run_batch(engine, name, strategy, samplings, [prompt] * len(samplings))
            engine.kept_caches.clear()
            outputs += [live.ctx.output for live in lives]
            stats += [live.ctx.stats for live in lives]
        counts += prompt_positions[prompt_index].count_cells(outputs)
    drafts = Drafts.count_drafts(strategy, stats)
    positions = join_positions(prompt_positions)
    uncertain_count = sum(
        statistics.is_uncertain(position.law, VARIATION) for position in positions
    )
    if not uncertain_count:
        detail = (
            "the model is certain of every next token; give prompts that can go on in several ways"
        )
        return Check("samples", UNTESTED if exact else NO_CLAIM, detail)
    null_distances = statistics.null_distances(positions)
    p_value = float(
        statistics.p_values(null_distances, statistics.count_distance(positions, counts))[0]
    )
    power = statistics.simulate_power(positions, null_distances, VARIATION, LEVEL)
    power_text = (
        f"would find a total variation of {VARIATION} over its cells in {power:.0%} of runs"
    )
    tokens = sum(int(count.sum()) for count in counts)
    detail = (
        f"p={p_value:.2g}, {runs.samples} samples after each of {len(prompts)} prompts, "
        f"{tokens} tokens at {len(positions)} positions "
        f"({uncertain_count} uncertain ones), {power_text}, {drafts}"
    )
    numbers = {
        "p": p_value,
        "power": power,
        "variation": VARIATION,
        "level": LEVEL,
        "power_text": power_text,
        "dtype": dtype_name(target.dtype),
        "of": runs.samples * len(prompts),
        "prompts": len(prompts),
        "tokens": tokens,
        "positions": len(positions),
        "uncertain_positions": uncertain_count,
    }
    return Check("samples", drafts.verdict(exact, p_value >= LEVEL), detail, numbers)
