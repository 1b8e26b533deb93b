"""What is made of groups of rewarded answers: advantages, the loss of GRPO, and who is learnt from.

Source: Shao et al., "DeepSeekMath" (arXiv 2402.03300), section 4.1. No model is known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from foretell.strategies.samples.best_of import rank_share

EQUAL = 1e-9  # rewards that differ by less, as a share of the largest, are equal


@dataclass
class Group:
    """Answers to one prompt, token ids with those that end them, and the reward of each; those
    without a reward are left out.
    """

    prompt: tuple[int, ...]
    answers: list[list[int]]
    rewards: list[float]


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(d) - d - 1 for d = ln p_ref - ln p at tokens drawn from p: never below 0, and on average
    the divergence of p from p_ref (the paper's equation 4).
    """
    return torch.expm1(log_ratio) - log_ratio


def k2(log_ratio: torch.Tensor) -> torch.Tensor:
    """d² / 2, whose gradient is on average that of the divergence of p from p_ref."""
    return log_ratio.square() / 2


ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"k3": k3, "k2": k2}


def advantages(rewards: Sequence[float], scale: bool = True) -> torch.Tensor:
    """(n,) of a group's rewards less their mean, in float64, over their deviation where they are
    not all equal.
    """
    values = torch.tensor(rewards, dtype=torch.float64)
    if len(values) < 2 or values.max() - values.min() <= EQUAL * values.abs().max():
        return torch.zeros_like(values)
    centred = values - values.mean()
    return centred / values.std() if scale else centred


def grpo_loss(
    logprobs: torch.Tensor,
    drawn_logprobs: torch.Tensor,
    reference: torch.Tensor | None,
    worth: torch.Tensor,
    mask: torch.Tensor,
    clip: float,
    beta: float,
    kl: str,
) -> torch.Tensor:
    """(n,) the loss of each answer, the mean over its tokens (the paper's equation 3).

    `logprobs`, `drawn_logprobs`, `reference`: (n, L) log-probabilities of the answers' tokens, now,
    when they were drawn, and by the untrained model. `worth`: (n,) advantages. `mask`: (n, L)
    whether a token is there.
    """
    ratio = (logprobs - drawn_logprobs).exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    loss = -torch.minimum(ratio * worth[:, None], clipped * worth[:, None])
    if reference is not None:
        loss = loss + beta * ESTIMATORS[kl](reference - logprobs)
    return (loss * mask).sum(1) / mask.sum(1)


@dataclass
class Part:
    """Answers (n, L) to one prompt in one forward, filled up after."""

    ids: torch.Tensor  # (n, prompt + L)
    mask: torch.Tensor  # (n, L)
    advantages: torch.Tensor  # (n,)
    reference: torch.Tensor | None = None
    drawn_logprobs: torch.Tensor | None = None


def parts_of(group: Group, worth: torch.Tensor, micro: int, device: torch.device) -> list[Part]:
    """The answers of a group, about equally long ones together."""
    length_order = sorted(range(len(group.answers)), key=lambda number: len(group.answers[number]))
    parts = []
    for first_answer in range(0, len(length_order), micro):
        numbers = length_order[first_answer : first_answer + micro]
        lengths = torch.tensor([len(group.answers[number]) for number in numbers])
        max_length = int(lengths.max())
        id_rows = []
        for number in numbers:
            answer = group.answers[number]
            id_rows.append([*group.prompt, *answer, *[0] * (max_length - len(answer))])
        mask = (torch.arange(max_length) < lengths[:, None]).float()
        part_worths = worth[numbers].float()
        parts.append(
            Part(torch.tensor(id_rows).to(device), mask.to(device), part_worths.to(device))
        )
    return parts


def hardest_prompts(bleus: Sequence[float], share: float) -> list[int]:
    """The numbers, ascending, of this share of the prompts, those of the lowest BLEU; of equal ones
    the first.
    """
    count = max(1, round(share * len(bleus)))
    bleu_order = sorted(range(len(bleus)), key=lambda number: bleus[number])
    return sorted(bleu_order[:count])


def transform_rewards(
    rewards: Sequence[float], references: Sequence[float], t: float
) -> list[float]:
    """Values of answers that are to win after best-of-n, t > 0, or worst-of-n, t < 0.

    Of each reward the rank among ascending rewards of the untrained model's answers, C, from 0 to
    1, and of that sign(t) exp(t C); with t = 0 it is the rank itself.

    Source: Balashankar et al., InfAlign (arXiv 2412.19792), calibration and exponential transform.
    """
    ranks = [rank_share(reward, references) for reward in rewards]
    return [math.copysign(math.exp(t * reward_rank), t) for reward_rank in ranks] if t else ranks


def round_prompts(count: int, per_round: int, number: int, seed: int) -> list[int]:
    """The numbers of a round's prompts; each pass over all of them is in another order."""
    prompt_numbers = []
    for place in range(number * per_round, (number + 1) * per_round):
        order = np.random.default_rng([seed, place // count]).permutation(count)
        prompt_numbers.append(int(order[place % count]))
    return prompt_numbers


def mean_rewards(groups: Sequence[Group]) -> dict[str, float]:
    """The mean reward of all answers, and their mean length in tokens; nothing of no answers."""
    rewards = [reward for group in groups for reward in group.rewards]
    lengths = [len(answer) for group in groups for answer in group.answers]
    if not rewards:
        return {}
    return {"reward": sum(rewards) / len(rewards), "tokens": sum(lengths) / len(lengths)}
