"""A token that passes a check, drawn without checking all tokens, and what the check lets through.

Tokens are tried in the order of their log-probabilities with Gumbel noise, that is, drawn from p
without replacement, until one passes: it has the distribution of p given that the check passes.
With it comes a weight whose mean, whichever token it is, is Z: p's probability of a token that
passes. So E[w 1{x}] = p(x) for every x that passes, which is what importance sampling needs.

Source: Lipkin et al., arXiv:2504.05410, the recursive and the geometric estimator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from foretell.drafters.model.without_replacement import Urn

ESTIMATORS = ("recursive", "geometric")
SURE = 2 / 3  # probability of the best token from which two passes mostly take one check
# The variable of integration is u = 1 / (1 + exp(-t)): the integrand falls off on both sides as
# exp(-|t|), and its poles are pi away from the real line, so equal steps of t lose nothing.
T = np.arange(-50.0, 150.0, 0.25)
U = 1 / (1 + np.exp(-T))
REST = 1 / (1 + np.exp(T))  # 1 - u, to all digits
AREA = 0.25 * U * REST


@dataclass
class Trial:
    """The tokens of one place.

    `draw`: a token of a law (V,); `passes`: whether a token may follow; `allowed()`: a bool (V,) of
    all that may, asked once after `most` refusals, which changes neither distribution nor mean; 0:
    never.
    """

    p: torch.Tensor  # (V,), sums to 1
    draw: Callable[[torch.Tensor], int]
    passes: Callable[[int], bool]
    allowed: Callable[[], torch.Tensor]
    most: int = 0


def draw_weighted(trial: Trial, estimator: str = "auto", accepts: int = 2) -> tuple[int, float]:
    """A token that passes and its weight; -1 and 0 where none does.

    `estimator`: recursive, geometric, or the one that takes fewer checks; `accepts`: passes after
    which the geometric one stops, at least 2: the more, the less its weights vary.
    """
    if estimator == "auto":
        is_sure = accepts > 2 or float(trial.p.max()) >= SURE
        estimator = "geometric" if is_sure else "recursive"
    return (
        draw_geometrically(trial, accepts) if estimator == "geometric" else draw_recursively(trial)
    )


def draw_recursively(trial: Trial) -> tuple[int, float]:
    """After the token that passes the next one in order is checked too.

    What is left of p when x passes is m. The weight is m where the next one passes, too, else
    p(x), which has the mean p(x) + (m - p(x)) P(the next one passes) = Z.
    """
    urn = Urn(trial.p)
    refusal_count = 0
    while urn.left > 0:
        if trial.most and refusal_count == trial.most:
            urn.keep_tokens(trial.allowed())
            return (trial.draw(urn.next_law()), urn.left) if urn.left > 0 else (-1, 0.0)
        token, remaining_mass = trial.draw(urn.next_law()), urn.left
        urn.remove_token(token)
        if trial.passes(token):
            passes_alone = urn.left > 0 and not trial.passes(trial.draw(urn.next_law()))
            return token, float(urn.q[token]) if passes_alone else remaining_mass
        refusal_count += 1
    return -1, 0.0


def draw_geometrically(trial: Trial, accepts: int) -> tuple[int, float]:
    """The number of refusals before `accepts` passes, as if tokens were drawn with replacement.

    A refused token is not drawn again; how often it would have been is averaged over. Tokens that
    passed are drawn again, and checked once.
    """
    urn = Urn(trial.p)
    passing_tokens: set[int] = set()
    passed_draws: list[int] = []
    remaining_masses: list[float] = []
    refusal_count = 0
    while len(passed_draws) < accepts and urn.left > 0:
        if trial.most and refusal_count == trial.most:
            urn.keep_tokens(trial.allowed())
            break
        remaining_masses.append(urn.left)
        token = trial.draw(urn.next_law())
        if token in passing_tokens or trial.passes(token):
            passing_tokens.add(token)
            passed_draws.append(token)
        else:
            urn.remove_token(token)
            refusal_count += 1
    if not urn.left > 0:
        return -1, 0.0
    token = passed_draws[0] if passed_draws else trial.draw(urn.next_law())
    return token, mean_weight(
        accepts, refusal_count, remaining_masses, accepts - len(passed_draws), urn.left
    )


def mean_weight(
    accepts: int,
    refusal_count: int,
    remaining_masses: Sequence[float],
    missing_passes: int = 0,
    passing_mass: float = 1.0,
) -> float:
    """The mean of (accepts - 1) / (accepts - 1 + refusals) over the refusals that were not drawn.

    `refusal_count` of them were. Before each draw there were Geometric(left) - 1 more, of
    `remaining_masses`, what the refused tokens had left of p; and `missing_passes` passes, each of
    probability `passing_mass`, would have taken theirs. 1 / n is the integral of u^(n-1) over u in
    0..1, and the mean of u^refusals a product.
    """
    integrand = U ** (accepts - 2 + refusal_count)
    for remaining_mass in [*remaining_masses, *[passing_mass] * missing_passes]:
        integrand = integrand * (remaining_mass / (remaining_mass + (1 - remaining_mass) * REST))
    return float((accepts - 1) * (AREA * integrand).sum())
