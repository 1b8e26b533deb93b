"""How often a rule accepts one of k tokens that were drafted at a place, from the two distributions
there.

p is the target's distribution (V,) and q the draft model's, both float64. Every function returns
the acceptance for k = 1, 2, ..., `max_count`: the probability that one of the k drafted tokens is
accepted, over drafting and verification. Where fewer tokens are possible than k, all of them are
drafted. What has no closed form is a mean over draws, with its variance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from foretell.core.random import Door
from foretell.drafters.model.without_replacement import likeliest_tokens
from foretell.verification import kseq
from foretell.verification.acceptance import TINY

PATHS = 256  # refused drafts that are gone through one by one; where there are more, some are drawn


@dataclass(frozen=True)
class Chance:
    """A probability at one place. `variance`: of the mean of draws that it is; None: it is
    exact.
    """

    value: float
    variance: float | None = None


def refusal_probability(p: torch.Tensor, q: torch.Tensor) -> tuple[float, torch.Tensor]:
    """The probability that min(1, p / q) refuses a token drawn from q, and what that leaves
    of p.
    """
    remaining_probs = (p - q).clamp_min(0)
    chance = float(remaining_probs.sum())
    return (chance, remaining_probs / chance) if chance > TINY else (0.0, p)


def complement_probs(q: torch.Tensor) -> torch.Tensor:
    """Returns 1 - q (V,), which is not rounded to 0 where one token has nearly all of the
    distribution.
    """
    complements = 1 - q
    best_token = int(q.argmax())
    complements[best_token] = q[:best_token].sum() + q[best_token + 1 :].sum()
    return complements


# --- independent draws from q


def try_independent(p: torch.Tensor, q: torch.Tensor, max_count: int) -> list[Chance]:
    """Tries each draw against what its predecessors left of p, which they themselves do not
    sway.
    """
    refused = 1.0
    chances = []
    for _ in range(max_count):
        try_refusal, p = refusal_probability(p, q)
        refused *= try_refusal
        chances.append(Chance(1 - refused))
    return chances


def kseq_independent(p: torch.Tensor, q: torch.Tensor, max_count: int) -> list[Chance]:
    """Selects k-sequentially: k tries against one threshold."""
    chances = []
    for k in range(1, max_count + 1):
        accepted = kseq.acceptance_mass(p, q, kseq.find_threshold(p, q, k))
        chances.append(Chance(1 - (1 - min(1.0, accepted)) ** k))
    return chances


def walk_independent(p: torch.Tensor, q: torch.Tensor, max_count: int) -> list[Chance]:
    """Accepts where the target's own sample is among the drafts."""
    log_absence = torch.log1p(-q.clamp_max(1))
    return [Chance(float(p @ -torch.expm1(k * log_absence))) for k in range(1, max_count + 1)]


# --- drawn without replacement


def try_unreplaced(
    p: torch.Tensor, q: torch.Tensor, max_count: int, door: Door, position_number: int, draws: int
) -> list[Chance]:
    """Tries each draw, from q without its predecessors, against what they left of p.

    Exact for k up to 2, and wherever there are at most PATHS ways to be refused before the last two
    tries. Else the mean over `draws` of them, at least 2, drawn by keys with `position_number`.
    """
    chances = []
    first_count, later_count = int((q > p).sum()), int((q > 0).sum())  # tokens that may be refused
    for k in range(1, max_count + 1):
        if k <= 2 or first_count * later_count ** (k - 3) <= PATHS:
            chances.append(Chance(1 - _all_refused(p, q, k)))
            continue
        refusal_samples = []
        for draw_number in range(draws):
            refusal_samples.append(
                _drawn_refusal(
                    p,
                    q,
                    k,
                    door,
                    position_number,
                    draw_number * max_count * max_count + k * max_count,
                )
            )
        refusal_draws = torch.tensor(refusal_samples, dtype=torch.float64)
        chances.append(Chance(1 - float(refusal_draws.mean()), float(refusal_draws.var()) / draws))
    return chances


def _all_refused(p: torch.Tensor, q: torch.Tensor, k: int) -> float:
    """The probability that all of k tries are refused, over every way to be refused before the last
    two.
    """
    if k <= 2:
        return _last_refused(p, q, k)
    try_refusal, remaining_probs = refusal_probability(p, q)
    if not try_refusal:
        return 0.0
    total_refusal = 0.0
    for token, chance in _refused_tokens(p, q):
        unreplaced_probs = _remove_token(q, token)
        # Without a token to draw there is no further try, and the refusals so far are all.
        total_refusal += chance * (
            1.0
            if unreplaced_probs is None
            else _all_refused(remaining_probs, unreplaced_probs, k - 1)
        )
    return total_refusal


def _drawn_refusal(
    p: torch.Tensor, q: torch.Tensor, k: int, door: Door, position_number: int, first_draw: int
) -> float:
    """The probability that all of k tries are refused, with one way to be refused before the last
    two tries, drawn by its probability.
    """
    refused = 1.0
    for try_number in range(k - 2):
        try_refusal, remaining_probs = refusal_probability(p, q)
        refused *= try_refusal
        if not refused:
            return 0.0
        surplus = (q - p).clamp_min(0)
        token = door.sample(
            surplus / surplus.sum(), "draft", position_number, first_draw + try_number
        )
        unreplaced_probs = _remove_token(q, token)
        if unreplaced_probs is None:
            return refused
        p, q = remaining_probs, unreplaced_probs
    return refused * _last_refused(p, q, 2)


def _last_refused(p: torch.Tensor, q: torch.Tensor, k: int) -> float:
    """The probability that one try or both of two are refused.

    After x was refused the second try overlaps with sum of min(p', c q), where c = 1 / (1 - q(x))
    and p' is what is left of p. It is 0 at x itself, so that c alone tells one x from another: all
    are found by one sort.
    """
    try_refusal, remaining_probs = refusal_probability(p, q)
    if k == 1 or not try_refusal:
        return try_refusal
    surplus = (q - p).clamp_min(0)
    tokens = surplus.nonzero()[:, 0]
    scales = 1 / complement_probs(q)[tokens]
    possible_tokens = (q > 0).nonzero()[:, 0]
    ratios, ratio_order = (remaining_probs[possible_tokens] / q[possible_tokens]).sort()
    zero_start = q.new_zeros(1)
    mass_below = torch.cat([zero_start, remaining_probs[possible_tokens][ratio_order].cumsum(0)])
    mass_above = torch.cat([q[possible_tokens][ratio_order].flip(0).cumsum(0).flip(0), zero_start])
    ratio_index = torch.searchsorted(ratios, scales, right=True)
    overlap = (mass_below[ratio_index] + scales * mass_above[ratio_index]).clamp_max(1)
    # Where x is all that could be drawn there is no second try.
    overlap = torch.where(scales.isfinite(), overlap, 0.0)
    return float((surplus[tokens] * (1 - overlap)).sum())


def _refused_tokens(p: torch.Tensor, q: torch.Tensor) -> Iterator[tuple[int, float]]:
    """Yields the tokens that may be drawn from q and refused, with the probability of both."""
    surplus = (q - p).clamp_min(0)
    tokens = surplus.nonzero()[:, 0]
    yield from zip(tokens.tolist(), surplus[tokens].tolist(), strict=True)


def _remove_token(q: torch.Tensor, token: int) -> torch.Tensor | None:
    """Returns q without the token, renormalised; None: nothing is left."""
    remaining_probs = q.clone()
    remaining_probs[token] = 0
    remaining_mass = float(remaining_probs.sum())
    return remaining_probs / remaining_mass if remaining_mass > 0 else None


def walk_unreplaced(
    p: torch.Tensor, q: torch.Tensor, max_count: int, door: Door, position_number: int, draws: int
) -> list[Chance]:
    """Accepts where the target's own sample is among the drafts. Exact for k up to 2; what later
    draws add to it is a mean over `draws` of them, at least 2.
    """
    # Drawn second is x after each y: with q(y) q(x) / (1 - q(y)).
    odds = torch.where(complement_probs(q) > 0, q / complement_probs(q), 0.0)
    second_probs = q + q * (odds.sum() - odds)
    exact_chances = [Chance(float(p @ q)), Chance(min(1.0, float(p @ second_probs.clamp_max(1))))][
        :max_count
    ]
    if max_count <= 2:
        return exact_chances
    later_masses = torch.zeros(
        draws, max_count - 2, dtype=torch.float64
    )  # of p, by the third draw and later
    for draw_number in range(draws):
        draw_keys = q.log() + door.gumbel(len(q), position_number, draw_number).to(q)
        drawn_tokens = draw_keys.topk(min(max_count, int((q > 0).sum()))).indices
        later_mass = p[drawn_tokens][2:].cumsum(0)
        later_masses[draw_number] = later_mass[-1] if len(later_mass) else 0
        later_masses[draw_number, : len(later_mass)] = later_mass
    mass_statistics = zip(
        later_masses.mean(0).tolist(), (later_masses.var(0) / draws).tolist(), strict=True
    )
    return [
        *exact_chances,
        *(Chance(exact_chances[1].value + mean, variance) for mean, variance in mass_statistics),
    ]


# --- the k - 1 best of q and one drawn from the others; the k best


def split_one_drawn(
    p: torch.Tensor, q: torch.Tensor, max_count: int
) -> Iterator[tuple[float, torch.Tensor, torch.Tensor]]:
    """Yields for each k the target's probability of the best tokens, and both distributions of the
    other ones (p not renormalised; q zero where nothing is left to draw).
    """
    best_tokens = [token for token, _ in likeliest_tokens(q, max_count - 1)]
    for k in range(1, max_count + 1):
        chosen_tokens = best_tokens[: k - 1]
        target_rest, draft_rest = p.clone(), q.clone()
        target_rest[chosen_tokens] = 0
        draft_rest[chosen_tokens] = 0
        draft_mass = float(draft_rest.sum())
        draft_rest = draft_rest / draft_mass if draft_mass > 0 else draft_rest
        yield float(p[chosen_tokens].sum()), target_rest, draft_rest


def try_one_drawn(p: torch.Tensor, q: torch.Tensor, max_count: int) -> list[Chance]:
    """Tries the drawn token first."""
    chances = []
    for chosen_mass, target_rest, draft_rest in split_one_drawn(p, q, max_count):
        chances.append(Chance(chosen_mass + float(torch.minimum(target_rest, draft_rest).sum())))
    return chances


def walk_one_drawn(p: torch.Tensor, q: torch.Tensor, max_count: int) -> list[Chance]:
    """Accepts where the target's own sample is among the drafts."""
    return [
        Chance(chosen_mass + float(target_rest @ draft_rest))
        for chosen_mass, target_rest, draft_rest in split_one_drawn(p, q, max_count)
    ]


def accept_best(p: torch.Tensor, q: torch.Tensor, max_count: int) -> list[Chance]:
    """Accepts the k best tokens of q by any exact rule: the target's probability of them."""
    best_tokens = [token for token, _ in likeliest_tokens(q, max_count)]
    return [Chance(float(p[best_tokens[:k]].sum())) for k in range(1, max_count + 1)]
