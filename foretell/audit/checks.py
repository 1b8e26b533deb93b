"""Checks on the real model that compare tokens, logits and cache rows with plain decoding's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foretell.audit.bits import compare_steps
from foretell.audit.copies import Copy
from foretell.audit.report import FAILED, HELD, Check, Drafts
from foretell.audit.runs import (
    KeepingEngine,
    Runs,
    dtype_name,
    has_coarse_activations,
    has_exact_bits,
)
from foretell.cache.cache import Cache
from foretell.core.model import Model
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.engine.live import Live
from foretell.speculation.strategy import Strategy

# How far the logits of a tie may be apart, in units in the last place of the row's largest logit.
TIE = {torch.float64: 64, torch.float32: 64, torch.bfloat16: 2, torch.float16: 2}
# The largest relative distance of a cache row from that of a fresh prefill.
ROW_DISTANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
# Activations of 8 bits are about as coarse as bfloat16, whatever format the sums have.
COARSE = torch.bfloat16
RANDOM_STEPS = 100  # whose logits are compared to the last bit


@dataclass
class Generated:
    """The greedy texts of a method in one number format."""

    copy: Copy
    engine: KeepingEngine
    lives: list[Live]


def check_exact_bits(model: Model) -> Check:
    """Checks random steps against single ones, to the last bit."""
    identical_count, first_difference = compare_steps(model, RANDOM_STEPS)
    numbers = {"identical": identical_count, "of": RANDOM_STEPS}
    if identical_count == RANDOM_STEPS:
        return Check("exact bits", HELD, f"{identical_count} random steps identical", numbers)
    detail = f"{identical_count} of {RANDOM_STEPS} random steps identical; {first_difference}"
    return Check("exact bits", FAILED, detail, numbers)


def check_greedy(
    generated: Generated,
    strategy: Strategy,
    prompts: Sequence[list[int]],
    expected: Sequence[list[int]],
    claimed: bool,
) -> Check:
    """Checks greedy tokens against plain decoding's (`expected`), prompt by prompt."""
    copy = generated.copy
    target = copy.models["target"]
    dtype = dtype_name(copy.dtype)
    differences: list[dict[str, Any]] = []
    for prompt_index, (prompt, plain) in enumerate(zip(prompts, expected, strict=True)):
        output = generated.lives[prompt_index].ctx.output
        if output != plain:
            differences.append(
                {"prompt": prompt_index, **_difference(copy.dtype, target, prompt, plain, output)}
            )
    count = len(expected)
    identical_count = count - len(differences)
    ties = sum(difference["tie"] for difference in differences)
    error_count = count - identical_count - ties
    detail = f"{identical_count}/{count} identical"
    if ties:
        detail += f", {ties} divergence{'s' if ties > 1 else ''} at a tie"
    if error_count:
        detail += f", {error_count} real"
    if differences:
        first_difference = differences[0]
        if "margin" in first_difference:
            detail += f"; first: prompt {first_difference['prompt']}, "
            detail += f"token {first_difference['position']}, "
            detail += f"top-2 margin {first_difference['margin']:.2g}"
        else:
            detail += f"; prompt {first_difference['prompt']} ends early, "
            detail += f"at token {first_difference['position']}"
    drafts = Drafts.count_drafts(strategy, [live.ctx.stats for live in generated.lives])
    numbers = {
        "identical": identical_count,
        "ties": ties,
        "of": count,
        "dtype": dtype,
        "differences": differences,
    }
    verdict = drafts.verdict(claimed, error_count == 0)
    return Check(f"greedy {dtype}", verdict, f"{detail}, {drafts}", numbers)


def _difference(
    dtype: torch.dtype, target: Model, prompt: list[int], plain: list[int], output: list[int]
) -> dict[str, Any]:
    """Describes where two texts first differ, and whether rounding can explain it."""
    common_limit = min(len(output), len(plain))
    position = 0
    while position < common_limit and output[position] == plain[position]:
        position += 1
    if position == common_limit:
        return {"position": position, "tie": False}
    row = target.score([*prompt, *plain[:position]])[0]
    best_logit, second_logit = row.topk(2).values.tolist()
    plain_logit = float(row[plain[position]])
    output_logit = float(row[output[position]])
    tie_dtype = COARSE if has_coarse_activations(target) else dtype
    max_gap = TIE[tie_dtype] * torch.finfo(tie_dtype).eps * float(row.abs().max())
    near_best = best_logit - min(plain_logit, output_logit) <= max_gap
    return {
        "position": position,
        "tie": near_best and not has_exact_bits(target),
        "margin": best_logit - second_logit,
        "gap": abs(plain_logit - output_logit),
        "allowed": max_gap,
    }


def check_seeds(
    runs: Runs, strategy: Strategy, lives: Sequence[Live], claimed: bool, draws: bool
) -> Check:
    """Checks tokens sampled at temperature 1 against plain decoding's with the same seeds.

    Nothing is claimed where rounding may depend on the rows of a forward: in formats narrower than
    float32, and with activations of 8 bits. `draws`: whether drafts are drawn at random.
    """
    served_copy = runs.copies[0]
    expected = runs.plain_tokens(0, 1.0)
    identical_count = 0
    for live, plain_output in zip(lives, expected, strict=True):
        identical_count += live.ctx.output == plain_output
    is_precise = served_copy.dtype in (torch.float32, torch.float64)
    is_precise = is_precise and not has_coarse_activations(served_copy.models["target"])
    dtype = dtype_name(served_copy.dtype)
    detail = f"{identical_count}/{len(lives)} identical at temperature 1, {dtype}"
    if claimed and not is_precise:
        detail += " (not claimed: in this format, rounding differs with the rows of a forward)"
    elif not claimed and draws:
        detail += " (not claimed: drafts are drawn, so other draws give the same law)"
    elif not claimed:
        detail += " (not claimed)"
    drafts = Drafts.count_drafts(strategy, [live.ctx.stats for live in lives])
    verdict = drafts.verdict(claimed and is_precise, identical_count == len(lives))
    return Check(
        "seeds", verdict, f"{detail}, {drafts}", {"identical": identical_count, "of": len(lives)}
    )


@torch.inference_mode()
def check_cache(runs_by_format: Sequence[Generated], strategy: Strategy) -> Check:
    """Checks the rows that generations left in the target's cache against those of a fresh
    prefill.
    """
    all_passed = True
    parts = []
    numbers = {}
    stats = []
    for generated in runs_by_format:
        copy = generated.copy
        target = copy.models["target"]
        worst_distance = 0.0
        for live in generated.lives:
            cache = generated.engine.kept_caches[live.index]
            worst_distance = max(
                worst_distance, _row_distance(target, cache, live.ctx.tokens, live.ctx.request)
            )
            stats.append(live.ctx.stats)
        max_distance = ROW_DISTANCE[COARSE if has_coarse_activations(target) else copy.dtype]
        all_passed = all_passed and worst_distance <= max_distance
        parts.append(f"{worst_distance:.1g} in {dtype_name(copy.dtype)} (at most {max_distance:g})")
        numbers[dtype_name(copy.dtype)] = worst_distance
    drafts = Drafts.count_drafts(strategy, stats)
    detail = f"largest relative distance of a row from a fresh prefill {', '.join(parts)}, {drafts}"
    return Check("cache", drafts.verdict(True, all_passed), detail, numbers)


def _row_distance(
    target: Model, cache: Cache, tokens: list[int], request: Request | None = None
) -> float:
    """The largest relative distance of the cache's rows from those of a fresh prefill.

    `request`: whose they are, for models that make caches by it.
    """
    cache.commit(tokens)
    fresh_cache = target.cache(request)
    ask = Ask(TokenTree(tokens[-1]))
    job, _ = fresh_cache.prepare(ask, tokens, len(tokens))
    fresh_logits = target.forward([job])[0].logits
    row_pairs = []
    for cached_rows, fresh_rows in zip(
        (*cache.k, *cache.v), (*fresh_cache.k, *fresh_cache.v), strict=True
    ):
        if cached_rows is not None:
            row_pairs.append((cached_rows[:, : cache.length], fresh_rows[:, : cache.length]))
    if not row_pairs or not cache.sharable:
        # For rows that cannot be read, and for states, the logits of one more token have to speak.
        job, _ = cache.prepare(ask, tokens, len(tokens))
        row_pairs.append((target.forward([job])[0].logits, fresh_logits))
    worst_distance = 0.0
    for cached_rows, fresh_rows in row_pairs:
        fresh_rows = fresh_rows.double()
        difference = (cached_rows.double() - fresh_rows).norm(dim=-1)
        relative_distances = difference / fresh_rows.norm(dim=-1).clamp_min(1e-9)
        if relative_distances.numel():
            worst_distance = max(worst_distance, float(relative_distances.max()))
    return worst_distance
