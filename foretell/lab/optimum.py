"""The most that any exact rule can accept of a draft of k tokens.

A rule couples the draft with the target's token so that this is one of the drafted tokens as often
as possible: an optimal transport. By its dual that chance is 1 + the least P(H) - Q(H) of any set H
of tokens, where Q(H) is the chance that all drafted tokens are in H. The least one is found among
the beginnings of the tokens in the order of p / q: one sort and one scan. (Hu et al.,
arXiv:2502.18779)

p and q are laws (V,) in float64. Every function returns the optimum for k = 1, 2, ..., `most`.
"""

from __future__ import annotations

import math
from itertools import combinations

import torch

from foretell.lab.acceptance import one_drawn, others

STEP = 0.25  # of the logarithm of time, for errors of at most 1e-12
EARLIEST = -13.0  # what happens before has a chance of 1e-17
LATEST = 40.0  # in units of the slowest decay
CHUNK = 1 << 20  # numbers that are integrated at a time


def independent(p: torch.Tensor, q: torch.Tensor, most: int) -> list[float]:
    """Of k independent draws from q."""
    order = by_ratio(p, q)
    mass, inside = p[order].cumsum(0), q[order].cumsum(0)
    return [least(mass, inside**k) for k in range(1, most + 1)]


def unreplaced(p: torch.Tensor, q: torch.Tensor, most: int) -> list[float]:
    """Of k draws from q without replacement."""
    order = by_ratio(p, q)
    mass = p[order].cumsum(0)
    return [least(mass, inside) for inside in all_inside(q[order], most)]


def one_drawn_optimum(p: torch.Tensor, q: torch.Tensor, most: int) -> list[float]:
    """Of the k - 1 best tokens of q and one drawn from q without them."""
    bounds = []
    for chosen, left, rest in one_drawn(p, q, most):
        if not bool(rest.any()):
            bounds.append(chosen)
            continue
        # A set without one of the chosen tokens holds no whole draft.
        order = by_ratio(left, rest)
        mass = chosen + torch.cat([p.new_zeros(1), left[order].cumsum(0)])
        inside = torch.cat([p.new_zeros(1), rest[order].cumsum(0)])
        bounds.append(least(mass, inside))
    return bounds


def by_ratio(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The tokens that may be drafted, those first of which the draft has most too many."""
    possible = (q > 0).nonzero()[:, 0]
    return possible[(p[possible] / q[possible]).argsort(stable=True)]


def least(mass: torch.Tensor, inside: torch.Tensor) -> float:
    """1 + the least of P - Q, which is 0 for the empty set."""
    return 1 + min(0.0, float((mass - inside).min()))


def all_inside(q: torch.Tensor, most: int) -> list[torch.Tensor]:
    """For k = 1 to `most` and each n the chance (N,) that k draws without replacement are all among
    the first n tokens. q (N,) is the law, without tokens of chance 0.

    Tokens are drawn in the order in which clocks ring, token i's with rate q_i. All of k draws are
    inside where the first n have rung k times before any other has: 1 - s * the sum over j < k of
    the integral of exp(-t) e_j(t), where s is the rate of the others and e_j the j-th elementary
    symmetric polynomial of exp(q_i t) - 1. The first two integrals are known.
    """
    outside = torch.cat([q.flip(0).cumsum(0).flip(0)[1:], q.new_zeros(1)])
    integrals = [torch.ones_like(q), (q / others(q)).cumsum(0), *_integrals(q, most)]
    found = [q.cumsum(0)]
    total = integrals[0]
    for k in range(2, most + 1):
        total = total + integrals[k - 1]
        inside = torch.where(outside > 0, 1 - outside * total, 1.0)
        # Fewer than k tokens hold no draft of k, unless they are all there are.
        inside[: min(k, len(q)) - 1] = 0
        found.append(inside.clamp(0, 1))
    return found


def _integrals(q: torch.Tensor, most: int) -> list[torch.Tensor]:
    """Those of exp(-t) e_j(t) over the first n tokens, (N,), for j = 2 to most - 1, summed at equal
    steps of log t.

    Which of the likeliest tokens a product holds is gone through one by one. So rates that make up
    nearly all of the law are added up before they meet exp(-t), and what the other tokens
    contribute stays within the range of numbers.
    """
    if most < 3:
        return []
    falling = q.sort(descending=True).values
    slowest = max(float(falling[most - 1 :].sum()) or float(falling[-1]), 1e-290)
    logs = torch.arange(EARLIEST, math.log(LATEST / slowest), STEP, dtype=q.dtype)
    likeliest = q.topk(min(most - 1, len(q))).indices.tolist()
    small = q.clone()
    small[likeliest] = 0
    sums = [torch.zeros_like(q) for _ in range(most - 2)]
    for some in logs.split(max(1, CHUNK // len(q))):
        t = some.exp()[:, None]
        terms = torch.expm1(small * t)
        polynomials = [torch.ones_like(terms)]  # e_0, e_1, ... of the others
        for j in range(1, most):
            before = polynomials[-1]
            if j > 1:
                before = torch.cat([torch.zeros_like(t), before[:, :-1]], 1)
            polynomials.append((terms * before).cumsum(1))
        for size in range(len(likeliest) + 1):
            for held in combinations(likeliest, size):
                rate = float(q.index_fill(0, torch.tensor(held, dtype=torch.long), 0).sum())
                rung = torch.log(-torch.expm1(-q[list(held)] * t)).sum(1)
                weights = (some + math.log(STEP) - rate * t[:, 0] + rung).exp()
                start = max(held, default=0)  # of the prefixes that hold these
                for j in range(max(2, size), most):
                    sums[j - 2][start:] += weights @ polynomials[j - size][:, start:]
    return sums
