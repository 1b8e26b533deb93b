"""What a drafter learns to come near to: losses of its distributions, beside the target's.

Each takes logits (m, V) of the drafter, the target's distributions (m, V) and the texts' next
tokens (m,), -1 for those that have no row, and gives a loss (m,) of each row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from foretell.errors import BadConfig

TINY = 1e-8
CHUNK = 512  # rows whose logits are there at a time
Objective = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def divergence(logits: torch.Tensor, laws: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """KL(p || q): Zhou et al., DistillSpec (arXiv 2310.08461), section 3."""
    logs = logits.log_softmax(-1)
    return (torch.xlogy(laws, laws) - laws * logs).sum(-1)


def cross_entropy(logits: torch.Tensor, laws: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """-ln q of the text's next token; 0 where that has no row."""
    return F.cross_entropy(logits, labels, ignore_index=-1, reduction="none")


def total_variation(logits: torch.Tensor, laws: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Half the distance of the distributions: the probability that a drawn token is rejected."""
    return (logits.softmax(-1) - laws).abs().sum(-1) / 2


def advantage(logits: torch.Tensor, laws: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """TVD++: Goel et al., Direct Alignment (arXiv 2403.00858), section 2.3.

    The policy gradient of total variation with the reward of a token (1 where the target finds it
    likelier than the drafter does) normalised over the rows. The expectation over the vocabulary is
    exact, so the mean has no effect, and the gradient is total variation's over the deviation.
    """
    logs = logits.log_softmax(-1)
    q = logs.exp().detach()
    reward = (laws > q).to(q.dtype)
    mean = (q * reward).sum(-1).mean()
    deviation = (q * (reward - mean).square()).sum(-1).mean().sqrt().clamp_min(TINY)
    return -(q * (reward - mean) / deviation * logs).sum(-1)


def certainty(logits: torch.Tensor, laws: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy with the text, and the entropy of the drafter's distribution where its best
    token is the text's.
    """
    logs = logits.log_softmax(-1)
    is_right = logits.argmax(-1) == labels
    entropy = -(logs.exp() * logs).sum(-1)
    return cross_entropy(logits, laws, labels) + torch.where(is_right, entropy, 0.0)


OBJECTIVES: dict[str, Objective] = {
    "kl": divergence,
    "ce": cross_entropy,
    "tv": total_variation,
    "tvd++": advantage,
    "certainty": certainty,
}


def objective_named(name: str) -> Objective:
    """Returns the objective of this name. Raises BadConfig."""
    if name not in OBJECTIVES:
        raise BadConfig.field("objective", name, f"one of {', '.join(OBJECTIVES)}")
    return OBJECTIVES[name]


class _RowLoss(torch.autograd.Function):
    """The sum of an objective over rows, whose logits are there for a part of them at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        laws: torch.Tensor,
        labels: torch.Tensor,
        loss_of: Objective,
    ) -> torch.Tensor:
        gradient = torch.empty_like(states)
        total = states.new_zeros((), dtype=torch.float32)
        for start in range(0, len(states), CHUNK):
            row_slice = slice(start, start + CHUNK)
            rows = states[row_slice].detach().to(weight.dtype)
            logits = (rows @ weight.T).float().requires_grad_()
            with torch.enable_grad():
                loss = loss_of(logits, laws[row_slice], labels[row_slice]).sum()
            (logit_gradient,) = torch.autograd.grad(loss, logits)
            gradient[row_slice] = (logit_gradient.to(weight.dtype) @ weight).to(gradient.dtype)
            total += loss.detach()
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0].to(gradient.dtype), None, None, None, None


def row_loss(
    states: torch.Tensor,
    weight: torch.Tensor,
    laws: torch.Tensor,
    labels: torch.Tensor,
    loss_of: Objective,
) -> torch.Tensor:
    """The sum of an objective over rows: states (m, E) read by a fixed output matrix (V, E)."""
    apply: Any = _RowLoss.apply
    total: torch.Tensor = apply(states, weight, laws, labels, loss_of)
    return total


@torch.no_grad()
def lag_behind(
    states: torch.Tensor, reference: torch.Tensor, weight: torch.Tensor, laws: torch.Tensor
) -> torch.Tensor:
    """(m,) how much further a head is from the target's distributions than a reference is, both by
    their states (m, E) read by the same output matrix (V, E), in nats.
    """
    lags = []
    for start in range(0, len(states), CHUNK):
        row_slice = slice(start, start + CHUNK)
        head_lag, reference_lag = (
            divergence(
                (rows[row_slice].to(weight.dtype) @ weight.T).float(),
                laws[row_slice],
                laws[row_slice],
            )
            for rows in (states, reference)
        )
        lags.append(head_lag - reference_lag)
    return torch.cat(lags)


def furthest_behind(lags: torch.Tensor, keep: float) -> torch.Tensor:
    """Numbers, ascending, of the share `keep` of the tokens from which most is to be learnt.

    AdaSPEC: Hu et al. (arXiv 2510.19779), section 3: tokens that the reference did not learn either
    are left to the target.
    """
    count = max(1, round(keep * len(lags)))
    return lags.topk(count).indices.sort().values
