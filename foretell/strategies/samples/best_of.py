"""Best of n: several samples, of which a reward chooses the answer.

`n` samples are drawn side by side, one forward a step for all, each by itself and maybe sped up by
a drafter: inner=suffix. The one of the highest reward is the answer, and all of them stand in the
output with their rewards. With `references` more samples are drawn, and a reward becomes its rank
among theirs, from 0 to 1: numbers of any range, of a judge that says little of how much better a
text is, then compare. With `soft` the answer is drawn, each with a probability in proportion to
exp(t rank), so that chances follow ranks evenly.

Paper: Balashankar et al., InfAlign: Inference-aware language model alignment, arXiv:2412.19792
Guarantee: lossy: the best of several samples has another distribution than a sample
Cost: target 1
Needs: a reward, see `foretell methods`; what the inner drafter needs
Trains: nothing
Differs:
- the model is not trained for it (the paper's other half)
- the paper ranks among samples that were drawn before, for each prompt once
- without a reward it takes `bleu` among the samples: the text that has most in common with the
others
- a sample whose reward is no number is left out; where that is all of them, the first is the answer
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafter
from foretell.core.settings import Range
from foretell.core.spending import Spent
from foretell.core.types import Drop, Finish, Message, Steps, Together
from foretell.errors import BadConfig
from foretell.rewards.base import Reward, agreement_reward, needs_text, score_outputs
from foretell.strategies.samples.samples import Samples, fork_samples


@dataclass(frozen=True)
class BestOf(Samples):
    """Plain sampling with n=1, or what the inner drafter makes of it."""

    n: Annotated[int, Range(1, 256)] = 4  # samples
    reward: Reward | None = None  # None: bleu among the samples
    # samples among which rewards are ranked; the paper takes 100
    references: Annotated[int, Range(0, 1024)] = 0
    soft: bool = False  # whether the answer is drawn by ranks
    t: Annotated[float, Range(-1000, 1000)] = 10.0  # of soft: how much a rank counts
    inner: Drafter | None = None  # drafts for each sample

    drawn_at = 0.8

    @property
    def most_texts(self) -> int:
        return self.n + self.references

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.soft and not self.references:
            raise BadConfig("best-of:soft=yes: draws by ranks; give references=100 to rank among")

    def run(self, ctx: Context) -> Steps:
        """Raises Unsupported, before anything runs, where no text can be made."""
        if self.n > 1:
            needs_text("best-of", ctx, self.reward)
        return self._run_steps(ctx)

    def _run_steps(self, ctx: Context) -> Steps:
        reference_count = self.references if self.n > 1 else 0
        running_branches = yield from fork_samples(ctx, self.n + reference_count)
        samples, references = running_branches[: self.n], running_branches[self.n :]
        try:
            yield Together([self.draw_sample(ctx.on(branch)) for branch in running_branches])
        except Spent:  # what has ended counts, or all of them where none has
            samples = finished_samples(ctx, samples) or samples
            references = finished_samples(ctx, references) or references
        scores = yield from self.score_samples(ctx, samples, references)
        chosen_index = self.choose_sample(ctx, scores)
        sample_order = sorted(
            range(len(samples)),
            key=lambda sample_index: (sample_index != chosen_index, -scores[sample_index]),
        )
        answers = []
        for sample_index in sample_order:
            sample = ctx.branches[samples[sample_index]]
            answers.append((list(sample.output), scores[sample_index], sample.reason or "stop"))
        for branch in running_branches:
            if branch != samples[chosen_index]:
                yield Drop(branch)
        yield Finish(samples[chosen_index], answers[0][2], answers)

    def score_samples(
        self, ctx: Context, samples: Sequence[int], references: Sequence[int]
    ) -> Generator[Message, Any, list[float]]:
        """Returns the reward of each sample, or its rank among the references."""
        if self.n == 1:
            return [0.0]
        outputs = [ctx.branches[branch].output for branch in (*samples, *references)]
        scores = yield from score_outputs(ctx, self.reward or agreement_reward(), outputs)
        reference_scores = sorted(scores[len(samples) :])
        scores = scores[: len(samples)]
        if not reference_scores:
            return scores
        return [
            rank_share(score, reference_scores) if score > -math.inf else score for score in scores
        ]

    def choose_sample(self, ctx: Context, scores: Sequence[float]) -> int:
        """The number of the sample that is the answer."""
        scored_indices = [
            sample_index for sample_index, score in enumerate(scores) if score > -math.inf
        ] or [0]
        if not self.soft:
            return max(scored_indices, key=lambda sample_index: scores[sample_index])
        weights = torch.tensor(
            [self.t * scores[sample_index] for sample_index in scored_indices], dtype=torch.float64
        )
        return scored_indices[ctx.rng.sample(weights.softmax(0), "draft", 0)]


def finished_samples(ctx: Context, sample_branches: Sequence[int]) -> list[int]:
    """Returns the branches whose texts are whole."""
    return [branch for branch in sample_branches if ctx.branches[branch].reason is not None]


def rank_share(score: float, sorted_scores: Sequence[float]) -> float:
    """The share of ascending numbers that are below a score, of those that equal it the half."""
    count_below, count_up_to = bisect_left(sorted_scores, score), bisect_right(sorted_scores, score)
    return (count_below + count_up_to) / (2 * len(sorted_scores))
