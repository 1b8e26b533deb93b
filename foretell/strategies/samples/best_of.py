"""Best of n: several samples, of which a reward chooses the answer.

`n` samples are drawn side by side, one forward a step for all, each by itself and maybe sped up by
a drafter: inner=suffix. The one of the highest reward is the answer, and all of them stand in the
output with their rewards. With `references` more samples are drawn, and a reward becomes its rank
among theirs, from 0 to 1: numbers of any range, of a judge that says little of how much better a
text is, then compare. With `soft` the answer is drawn, each with a chance in proportion to
exp(t rank), so that chances follow ranks evenly.

Paper: Balashankar et al., InfAlign: Inference-aware language model alignment, arXiv:2412.19792
Guarantee: lossy: the best of several samples has another law than a sample
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
from typing import Any

import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafter
from foretell.core.spending import Spent
from foretell.core.types import Drop, Finish, Message, Steps, Together
from foretell.errors import BadConfig
from foretell.rewards.base import Reward, agreement, needs_text, scored
from foretell.strategies.samples.samples import Samples, branches


@dataclass(frozen=True)
class BestOf(Samples):
    """With n=1 it is plain sampling, or what the inner drafter makes of it."""

    n: int = 4  # samples
    reward: Reward | None = None  # None: bleu among the samples
    references: int = 0  # samples among which rewards are ranked; the paper takes 100
    soft: bool = False  # whether the answer is drawn by ranks
    t: float = 10.0  # of soft: how much a rank counts
    inner: Drafter | None = None  # drafts for each sample

    drawn_at = 0.8

    @property
    def most_texts(self) -> int:
        return self.n + self.references

    def __post_init__(self) -> None:
        for name, least, most in (("n", 1, 256), ("references", 0, 1024)):
            value = getattr(self, name)
            if not least <= value <= most:
                raise BadConfig.field(f"best-of:{name}", value, f"between {least} and {most}")
        if not -1000 <= self.t <= 1000:
            raise BadConfig.field("best-of:t", self.t, "between -1000 and 1000")
        if self.soft and not self.references:
            raise BadConfig("best-of:soft=yes: draws by ranks; give references=100 to rank among")

    def run(self, ctx: Context) -> Steps:
        """Raises Unsupported, before anything runs, where no text can be made."""
        if self.n > 1:
            needs_text("best-of", ctx, self.reward)
        return self._steps(ctx)

    def _steps(self, ctx: Context) -> Steps:
        extra = self.references if self.n > 1 else 0
        running = yield from branches(ctx, self.n + extra)
        samples, references = running[: self.n], running[self.n :]
        try:
            yield Together([self.drawn(ctx.on(branch)) for branch in running])
        except Spent:  # what has ended counts, or all of them where none has
            samples = ended(ctx, samples) or samples
            references = ended(ctx, references) or references
        scores = yield from self.values(ctx, samples, references)
        place = self.chosen(ctx, scores)
        order = sorted(range(len(samples)), key=lambda number: (number != place, -scores[number]))
        answers = []
        for number in order:
            sample = ctx.branches[samples[number]]
            answers.append((list(sample.output), scores[number], sample.reason or "stop"))
        for branch in running:
            if branch != samples[place]:
                yield Drop(branch)
        yield Finish(samples[place], answers[0][2], answers)

    def values(
        self, ctx: Context, samples: Sequence[int], references: Sequence[int]
    ) -> Generator[Message, Any, list[float]]:
        """Of each sample its reward, or its rank among the references."""
        if self.n == 1:
            return [0.0]
        outputs = [ctx.branches[branch].output for branch in (*samples, *references)]
        scores = yield from scored(ctx, self.reward or agreement(), outputs)
        others = sorted(scores[len(samples) :])
        scores = scores[: len(samples)]
        if not others:
            return scores
        return [rank(score, others) if score > -math.inf else score for score in scores]

    def chosen(self, ctx: Context, scores: Sequence[float]) -> int:
        """The number of the sample that is the answer."""
        known = [place for place, score in enumerate(scores) if score > -math.inf] or [0]
        if not self.soft:
            return max(known, key=lambda place: scores[place])
        weights = torch.tensor([self.t * scores[place] for place in known], dtype=torch.float64)
        return known[ctx.rng.sample(weights.softmax(0), "draft", 0)]


def ended(ctx: Context, samples: Sequence[int]) -> list[int]:
    """Those whose texts are whole."""
    return [branch for branch in samples if ctx.branches[branch].reason is not None]


def rank(score: float, others: Sequence[float]) -> float:
    """The share of ascending numbers that are below a score, of those that equal it the half."""
    low, high = bisect_left(others, score), bisect_right(others, score)
    return (low + high) / (2 * len(others))
