"""Checks on the real model that compare tokens, logits and cache rows with plain decoding's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foretell.audit.bits import compare
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
    """Random steps against single ones, to the last bit."""
    same, first_difference = compare(model, RANDOM_STEPS)
    numbers = {"identical": same, "of": RANDOM_STEPS}
    if same == RANDOM_STEPS:
        return Check("exact bits", HELD, f"{same} random steps identical", numbers)
    detail = f"{same} of {RANDOM_STEPS} random steps identical; {first_difference}"
    return Check("exact bits", FAILED, detail, numbers)


def check_greedy(
    generated: Generated,
    strategy: Strategy,
    prompts: Sequence[list[int]],
    expected: Sequence[list[int]],
    claimed: bool,
) -> Check:
    """Greedy tokens against plain decoding's (`expected`), prompt by prompt."""
    copy = generated.copy
    target = copy.models["target"]
    dtype = dtype_name(copy.dtype)
    differences: list[dict[str, Any]] = []
    for i, (prompt, plain) in enumerate(zip(prompts, expected, strict=True)):
        output = generated.lives[i].ctx.output
        if output != plain:
            differences.append(
                {"prompt": i, **_difference(copy.dtype, target, prompt, plain, output)}
            )
    count = len(expected)
    same = count - len(differences)
    ties = sum(difference["tie"] for difference in differences)
    errors = count - same - ties
    detail = f"{same}/{count} identical"
    if ties:
        detail += f", {ties} divergence{'s' if ties > 1 else ''} at a tie"
    if errors:
        detail += f", {errors} real"
    if differences:
        first = differences[0]
        if "margin" in first:
            detail += f"; first: prompt {first['prompt']}, token {first['position']}, "
            detail += f"top-2 margin {first['margin']:.2g}"
        else:
            detail += f"; prompt {first['prompt']} ends early, at token {first['position']}"
    drafts = Drafts.of(strategy, [live.ctx.stats for live in generated.lives])
    numbers = {
        "identical": same,
        "ties": ties,
        "of": count,
        "dtype": dtype,
        "differences": differences,
    }
    verdict = drafts.verdict(claimed, errors == 0)
    return Check(f"greedy {dtype}", verdict, f"{detail}, {drafts}", numbers)


def _difference(
    dtype: torch.dtype, target: Model, prompt: list[int], plain: list[int], output: list[int]
) -> dict[str, Any]:
    """Where two texts first differ, and whether rounding can explain it."""
    shorter = min(len(output), len(plain))
    position = 0
    while position < shorter and output[position] == plain[position]:
        position += 1
    if position == shorter:
        return {"position": position, "tie": False}
    row = target.score([*prompt, *plain[:position]])[0]
    best, second = row.topk(2).values.tolist()
    expected = float(row[plain[position]])
    actual = float(row[output[position]])
    unit = COARSE if has_coarse_activations(target) else dtype
    allowed = TIE[unit] * torch.finfo(unit).eps * float(row.abs().max())
    near_best = best - min(expected, actual) <= allowed
    return {
        "position": position,
        "tie": near_best and not has_exact_bits(target),
        "margin": best - second,
        "gap": abs(expected - actual),
        "allowed": allowed,
    }


def check_seeds(
    runs: Runs, strategy: Strategy, lives: Sequence[Live], claimed: bool, draws: bool
) -> Check:
    """Tokens sampled at temperature 1 against plain decoding's with the same seeds.

    Nothing is claimed where rounding may depend on the rows of a forward: in formats narrower than
    float32, and with activations of 8 bits. `draws`: whether drafts are drawn at random.
    """
    first = runs.copies[0]
    expected = runs.plain(0, 1.0)
    same = 0
    for live, plain in zip(lives, expected, strict=True):
        same += live.ctx.output == plain
    precise = first.dtype in (torch.float32, torch.float64)
    precise = precise and not has_coarse_activations(first.models["target"])
    detail = f"{same}/{len(lives)} identical at temperature 1, {dtype_name(first.dtype)}"
    if claimed and not precise:
        detail += " (not claimed: in this format, rounding differs with the rows of a forward)"
    elif not claimed and draws:
        detail += " (not claimed: drafts are drawn, so other draws give the same law)"
    elif not claimed:
        detail += " (not claimed)"
    drafts = Drafts.of(strategy, [live.ctx.stats for live in lives])
    verdict = drafts.verdict(claimed and precise, same == len(lives))
    return Check("seeds", verdict, f"{detail}, {drafts}", {"identical": same, "of": len(lives)})


@torch.inference_mode()
def check_cache(runs_by_format: Sequence[Generated], strategy: Strategy) -> Check:
    """The rows that generations left in the target's cache against those of a fresh prefill."""
    passed = True
    parts = []
    numbers = {}
    stats = []
    for generated in runs_by_format:
        copy = generated.copy
        target = copy.models["target"]
        worst = 0.0
        for live in generated.lives:
            cache = generated.engine.kept[live.index]
            worst = max(worst, _row_distance(target, cache, live.ctx.tokens, live.ctx.request))
            stats.append(live.ctx.stats)
        allowed = ROW_DISTANCE[COARSE if has_coarse_activations(target) else copy.dtype]
        passed = passed and worst <= allowed
        parts.append(f"{worst:.1g} in {dtype_name(copy.dtype)} (at most {allowed:g})")
        numbers[dtype_name(copy.dtype)] = worst
    drafts = Drafts.of(strategy, stats)
    detail = f"largest relative distance of a row from a fresh prefill {', '.join(parts)}, {drafts}"
    return Check("cache", drafts.verdict(True, passed), detail, numbers)


def _row_distance(
    target: Model, cache: Cache, tokens: list[int], request: Request | None = None
) -> float:
    """The largest relative distance of the cache's rows from those of a fresh prefill.

    `request`: whose they are, for models that make caches by it.
    """
    cache.commit(tokens)
    fresh = target.cache(request)
    ask = Ask(TokenTree(tokens[-1]))
    job, _ = fresh.prepare(ask, tokens, len(tokens))
    fresh_logits = target.forward([job])[0].logits
    pairs = []
    for left, wanted in zip((*cache.k, *cache.v), (*fresh.k, *fresh.v), strict=True):
        if left is not None:
            pairs.append((left[:, : cache.length], wanted[:, : cache.length]))
    if not pairs or not cache.sharable:
        # For rows that cannot be read, and for states, the logits of one more token have to speak.
        job, _ = cache.prepare(ask, tokens, len(tokens))
        pairs.append((target.forward([job])[0].logits, fresh_logits))
    worst = 0.0
    for left, wanted in pairs:
        wanted = wanted.double()
        difference = (left.double() - wanted).norm(dim=-1)
        relative = difference / wanted.norm(dim=-1).clamp_min(1e-9)
        if relative.numel():
            worst = max(worst, float(relative.max()))
    return worst
