"""How often a rule accepts one of k tokens that were drafted at a place, from the two laws there.

p is the target's law (V,) and q the draft model's, both float64. Every function returns the
acceptance for k = 1, 2, ..., `most`: the chance that one of the k drafted tokens is accepted, over
drafting and verification. Where fewer tokens are possible than k, all of them are drafted. What has
no closed form is a mean over draws, with its variance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from foretell.core.random import Door
from foretell.drafters.model.without_replacement import likeliest
from foretell.verification import kseq
from foretell.verification.acceptance import TINY

PATHS = 256  # refused drafts that are gone through one by one; where there are more, some are drawn


@dataclass(frozen=True)
class Chance:
    """A chance at one place. `variance`: of the mean of draws that it is; None: it is exact."""

    value: float
    variance: float | None = None


def refusal(p: torch.Tensor, q: torch.Tensor) -> tuple[float, torch.Tensor]:
    """The chance that min(1, p / q) refuses a token drawn from q, and what that leaves of p."""
    rest = (p - q).clamp_min(0)
    chance = float(rest.sum())
    return (chance, rest / chance) if chance > TINY else (0.0, p)


def others(q: torch.Tensor) -> torch.Tensor:
    """1 - q (V,), which is not rounded to 0 where one token has nearly all of the law."""
    rest = 1 - q
    best = int(q.argmax())
    rest[best] = q[:best].sum() + q[best + 1 :].sum()
    return rest


# --- independent draws from q


def independent_sequential(p: torch.Tensor, q: torch.Tensor, most: int) -> list[Chance]:
    """Each draw is tried against what its predecessors left of p, which they themselves do not
    sway.
    """
    refused = 1.0
    chances = []
    for _ in range(most):
        once, p = refusal(p, q)
        refused *= once
        chances.append(Chance(1 - refused))
    return chances


def independent_kseq(p: torch.Tensor, q: torch.Tensor, most: int) -> list[Chance]:
    """k-sequential selection: k tries against one threshold."""
    chances = []
    for k in range(1, most + 1):
        accepted = kseq.overlap(p, q, kseq.threshold(p, q, k))
        chances.append(Chance(1 - (1 - min(1.0, accepted)) ** k))
    return chances


def independent_walk(p: torch.Tensor, q: torch.Tensor, most: int) -> list[Chance]:
    """The target's own sample is among the drafts."""
    absent = torch.log1p(-q.clamp_max(1))
    return [Chance(float(p @ -torch.expm1(k * absent))) for k in range(1, most + 1)]


# --- drawn without replacement


def unreplaced_sequential(
    p: torch.Tensor, q: torch.Tensor, most: int, door: Door, place: int, draws: int
) -> list[Chance]:
    """Each draw, from q without its predecessors, is tried against what they left of p.

    Exact for k up to 2, and wherever there are at most PATHS ways to be refused before the last two
    tries. Else the mean over `draws` of them, at least 2, drawn by keys with this `place`.
    """
    chances = []
    first, later = int((q > p).sum()), int((q > 0).sum())  # tokens that may be refused
    for k in range(1, most + 1):
        if k <= 2 or first * later ** (k - 3) <= PATHS:
            chances.append(Chance(1 - _all_refused(p, q, k)))
            continue
        refused = []
        for number in range(draws):
            refused.append(_drawn_refusal(p, q, k, door, place, number * most * most + k * most))
        found = torch.tensor(refused, dtype=torch.float64)
        chances.append(Chance(1 - float(found.mean()), float(found.var()) / draws))
    return chances


def _all_refused(p: torch.Tensor, q: torch.Tensor, k: int) -> float:
    """The chance that all of k tries are refused, over every way to be refused before the last
    two.
    """
    if k <= 2:
        return _last_refused(p, q, k)
    once, left = refusal(p, q)
    if not once:
        return 0.0
    total = 0.0
    for token, chance in _refused_tokens(p, q):
        rest = _without(q, token)
        # Without a token to draw there is no further try, and the refusals so far are all.
        total += chance * (1.0 if rest is None else _all_refused(left, rest, k - 1))
    return total


def _drawn_refusal(
    p: torch.Tensor, q: torch.Tensor, k: int, door: Door, place: int, first: int
) -> float:
    """The same with one way to be refused before the last two tries, drawn by its chance."""
    refused = 1.0
    for step in range(k - 2):
        once, left = refusal(p, q)
        refused *= once
        if not refused:
            return 0.0
        surplus = (q - p).clamp_min(0)
        token = door.sample(surplus / surplus.sum(), "draft", place, first + step)
        rest = _without(q, token)
        if rest is None:
            return refused
        p, q = left, rest
    return refused * _last_refused(p, q, 2)


def _last_refused(p: torch.Tensor, q: torch.Tensor, k: int) -> float:
    """The chance that one try or both of two are refused.

    After x was refused the second try overlaps with sum of min(p', c q), where c = 1 / (1 - q(x))
    and p' is what is left of p. It is 0 at x itself, so that c alone tells one x from another: all
    are found by one sort.
    """
    once, left = refusal(p, q)
    if k == 1 or not once:
        return once
    surplus = (q - p).clamp_min(0)
    tokens = surplus.nonzero()[:, 0]
    scales = 1 / others(q)[tokens]
    possible = (q > 0).nonzero()[:, 0]
    ratios, order = (left[possible] / q[possible]).sort()
    zero = q.new_zeros(1)
    below = torch.cat([zero, left[possible][order].cumsum(0)])
    above = torch.cat([q[possible][order].flip(0).cumsum(0).flip(0), zero])
    place = torch.searchsorted(ratios, scales, right=True)
    overlap = (below[place] + scales * above[place]).clamp_max(1)
    # Where x is all that could be drawn there is no second try.
    overlap = torch.where(scales.isfinite(), overlap, 0.0)
    return float((surplus[tokens] * (1 - overlap)).sum())


def _refused_tokens(p: torch.Tensor, q: torch.Tensor) -> Iterator[tuple[int, float]]:
    """The tokens that may be drawn from q and refused, with the chance of both."""
    surplus = (q - p).clamp_min(0)
    tokens = surplus.nonzero()[:, 0]
    yield from zip(tokens.tolist(), surplus[tokens].tolist(), strict=True)


def _without(q: torch.Tensor, token: int) -> torch.Tensor | None:
    """q without the token, renormalised; None: nothing is left."""
    rest = q.clone()
    rest[token] = 0
    total = float(rest.sum())
    return rest / total if total > 0 else None


def unreplaced_walk(
    p: torch.Tensor, q: torch.Tensor, most: int, door: Door, place: int, draws: int
) -> list[Chance]:
    """The target's own sample is among the drafts. Exact for k up to 2; what later draws add to it
    is a mean over `draws` of them, at least 2.
    """
    # Drawn second is x behind each y: with q(y) q(x) / (1 - q(y)).
    odds = torch.where(others(q) > 0, q / others(q), 0.0)
    second = q + q * (odds.sum() - odds)
    exact = [Chance(float(p @ q)), Chance(min(1.0, float(p @ second.clamp_max(1))))][:most]
    if most <= 2:
        return exact
    more = torch.zeros(draws, most - 2, dtype=torch.float64)  # of p, by the third draw and later
    for number in range(draws):
        times = q.log() + door.gumbel(len(q), place, number).to(q)
        drawn = times.topk(min(most, int((q > 0).sum()))).indices
        later = p[drawn][2:].cumsum(0)
        more[number] = later[-1] if len(later) else 0
        more[number, : len(later)] = later
    pairs = zip(more.mean(0).tolist(), (more.var(0) / draws).tolist(), strict=True)
    return [*exact, *(Chance(exact[1].value + mean, variance) for mean, variance in pairs)]


# --- the k - 1 best of q and one drawn from the others; the k best


def one_drawn(
    p: torch.Tensor, q: torch.Tensor, most: int
) -> Iterator[tuple[float, torch.Tensor, torch.Tensor]]:
    """For each k: the target's chance of the best tokens, and both laws of the other ones (p not
    renormalised; q zero where nothing is left to draw).
    """
    best = [token for token, _ in likeliest(q, most - 1)]
    for k in range(1, most + 1):
        chosen = best[: k - 1]
        left, rest = p.clone(), q.clone()
        left[chosen] = 0
        rest[chosen] = 0
        total = float(rest.sum())
        rest = rest / total if total > 0 else rest
        yield float(p[chosen].sum()), left, rest


def one_drawn_sequential(p: torch.Tensor, q: torch.Tensor, most: int) -> list[Chance]:
    """The drawn one is tried first."""
    chances = []
    for chosen, left, rest in one_drawn(p, q, most):
        chances.append(Chance(chosen + float(torch.minimum(left, rest).sum())))
    return chances


def one_drawn_walk(p: torch.Tensor, q: torch.Tensor, most: int) -> list[Chance]:
    """The target's own sample is among the drafts."""
    return [Chance(chosen + float(left @ rest)) for chosen, left, rest in one_drawn(p, q, most)]


def chosen_any(p: torch.Tensor, q: torch.Tensor, most: int) -> list[Chance]:
    """The k best tokens of q by any exact rule: the target's chance of them."""
    best = [token for token, _ in likeliest(q, most)]
    return [Chance(float(p[best[:k]].sum())) for k in range(1, most + 1)]
