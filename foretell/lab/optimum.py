"""The most that any exact rule can accept of a draft of k tokens.

A rule couples the draft with the target's token so that this is one of the drafted tokens as often
as possible: an optimal transport. By its dual that chance is 1 + the least P(H) - Q(H) of any set H
of tokens, where Q(H) is the probability that all drafted tokens are in H. The least one is found
among the beginnings of the tokens in the order of p / q: one sort and one scan. (Hu et al.,
arXiv:2502.18779)

p and q are distributions (V,) in float64. Every function returns the optimum for k = 1, 2, ...,
`max_count`.
"""

from __future__ import annotations

import math
from itertools import combinations

import torch

from foretell.lab.acceptance import complement_probs, split_one_drawn

STEP = 0.25  # of the logarithm of time, for errors of at most 1e-12
EARLIEST = -13.0  # what happens before has a probability of 1e-17
LATEST = 40.0  # in units of the slowest decay
CHUNK = 1 << 20  # numbers that are integrated at a time


def independent_optimum(p: torch.Tensor, q: torch.Tensor, max_count: int) -> list[float]:
    """The optimum for k independent draws from q."""
    order = order_by_ratio(p, q)
    target_mass, draft_mass = p[order].cumsum(0), q[order].cumsum(0)
    return [least_difference(target_mass, draft_mass**k) for k in range(1, max_count + 1)]


def unreplaced_optimum(p: torch.Tensor, q: torch.Tensor, max_count: int) -> list[float]:
    """The optimum for k draws from q without replacement."""
    order = order_by_ratio(p, q)
    target_mass = p[order].cumsum(0)
    return [
        least_difference(target_mass, draft_mass)
        for draft_mass in inside_probabilities(q[order], max_count)
    ]


def one_drawn_optimum(p: torch.Tensor, q: torch.Tensor, max_count: int) -> list[float]:
    """The optimum for the k - 1 best tokens of q and one drawn from q without them."""
    bounds = []
    for chosen_mass, target_rest, draft_rest in split_one_drawn(p, q, max_count):
        if not bool(draft_rest.any()):
            bounds.append(chosen_mass)
            continue
        # A set without one of the chosen tokens holds no whole draft.
        order = order_by_ratio(target_rest, draft_rest)
        target_mass = chosen_mass + torch.cat([p.new_zeros(1), target_rest[order].cumsum(0)])
        draft_mass = torch.cat([p.new_zeros(1), draft_rest[order].cumsum(0)])
        bounds.append(least_difference(target_mass, draft_mass))
    return bounds


def order_by_ratio(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The tokens that may be drafted, those first that the draft proposes too often."""
    possible_tokens = (q > 0).nonzero()[:, 0]
    return possible_tokens[(p[possible_tokens] / q[possible_tokens]).argsort(stable=True)]


def least_difference(target_mass: torch.Tensor, draft_mass: torch.Tensor) -> float:
    """Returns 1 + the least of P - Q, which is 0 for the empty set."""
    return 1 + min(0.0, float((target_mass - draft_mass).min()))


def inside_probabilities(q: torch.Tensor, max_count: int) -> list[torch.Tensor]:
    """The probability (N,), for k = 1 to `max_count` and each n, that k draws without replacement
    are all among the first n tokens. q (N,) is the distribution, without tokens of probability 0.

    Tokens are drawn in the order in which clocks ring, token i's with rate q_i. All of k draws are
    inside where the first n have rung k times before any other has: 1 - s * the sum over j < k of
    the integral of exp(-t) e_j(t), where s is the rate of the others and e_j the j-th elementary
    symmetric polynomial of exp(q_i t) - 1. The first two integrals are known.
    """
    outside_mass = torch.cat([q.flip(0).cumsum(0).flip(0)[1:], q.new_zeros(1)])
    integrals = [torch.ones_like(q), (q / complement_probs(q)).cumsum(0), *_integrals(q, max_count)]
    inside_masses = [q.cumsum(0)]
    integral_sum = integrals[0]
    for k in range(2, max_count + 1):
        integral_sum = integral_sum + integrals[k - 1]
        inside_mass = torch.where(outside_mass > 0, 1 - outside_mass * integral_sum, 1.0)
        # Fewer than k tokens hold no draft of k, unless they are all there are.
        inside_mass[: min(k, len(q)) - 1] = 0
        inside_masses.append(inside_mass.clamp(0, 1))
    return inside_masses


def _integrals(q: torch.Tensor, max_count: int) -> list[torch.Tensor]:
    """Integrates exp(-t) e_j(t) over the first n tokens, (N,), for j = 2 to max_count - 1, summed
    at equal steps of log t.

    Which of the likeliest tokens a product holds is gone through one by one. So rates that make up
    nearly all of the distribution are added up before they meet exp(-t), and what the other tokens
    contribute stays within the range of numbers.
    """
    if max_count < 3:
        return []
    sorted_probs = q.sort(descending=True).values
    slowest_rate = max(
        float(sorted_probs[max_count - 1 :].sum()) or float(sorted_probs[-1]), 1e-290
    )
    log_times = torch.arange(EARLIEST, math.log(LATEST / slowest_rate), STEP, dtype=q.dtype)
    likeliest_tokens = q.topk(min(max_count - 1, len(q))).indices.tolist()
    small_probs = q.clone()
    small_probs[likeliest_tokens] = 0
    sums = [torch.zeros_like(q) for _ in range(max_count - 2)]
    for log_chunk in log_times.split(max(1, CHUNK // len(q))):
        t = log_chunk.exp()[:, None]
        exponential_terms = torch.expm1(small_probs * t)
        polynomials = [torch.ones_like(exponential_terms)]  # e_0, e_1, ... of the others
        for j in range(1, max_count):
            lower_polynomial = polynomials[-1]
            if j > 1:
                lower_polynomial = torch.cat([torch.zeros_like(t), lower_polynomial[:, :-1]], 1)
            polynomials.append((exponential_terms * lower_polynomial).cumsum(1))
        for held_count in range(len(likeliest_tokens) + 1):
            for held_tokens in combinations(likeliest_tokens, held_count):
                rate = float(q.index_fill(0, torch.tensor(held_tokens, dtype=torch.long), 0).sum())
                log_rung = torch.log(-torch.expm1(-q[list(held_tokens)] * t)).sum(1)
                weights = (log_chunk + math.log(STEP) - rate * t[:, 0] + log_rung).exp()
                prefix_start = max(held_tokens, default=0)  # of the prefixes that hold these
                for j in range(max(2, held_count), max_count):
                    sums[j - 2][prefix_start:] += (
                        weights @ polynomials[j - held_count][:, prefix_start:]
                    )
    return sums
