"""Adaptive weighted rejection sampling: a form is asked about single tokens, and texts are weighed.

Masks make every token follow the form and forget how likely the model found that: texts that walked
into a corner count as much as those that came freely. Here `n` particles are drawn side by side,
each token by checking candidates one by one in the order of Gumbel noise until one passes, and each
token has a weight with the mean of the chance that the form left. A text's weight is their product,
so the weights' mean estimates, without bias, the chance that the model alone writes a text of the
form. Where they have become too uneven the particles are drawn anew by weight. The answer is drawn
by weight, too; all particles stand in the output with the logarithms of their weights.

Paper: Lipkin et al., Fast Controlled Generation from Language Models with Adaptive Weighted
Rejection Sampling, arXiv:2504.05410
Guarantee: lossy: of several texts one is drawn by weight, which comes the nearer to the model's law
given the whole form the more there are; with n=1 it has the law that masks give
Cost: target 1
Needs: a form of the text; without one it is plain sampling
Trains: nothing
Try: --method awrs --regex "[a-z ]{20,60}"
Differs:
- after `refusals` refused tokens at one place the whole mask is asked once; law and mean weight
stay, since what was refused is known (refusals=0: never, as in the paper)
- how often the geometric estimator would have drawn refused tokens again is averaged over, rather
than drawn
- n is that of the authors' example; the paper varies it
- a text that is cut at the length limit before it is whole has the weight 0, and is the answer only
where all were cut
- where nothing can follow but an end, the text ends without one, as everywhere here
- no critic beside the form, and no drafter: the particles share their forwards
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foretell.core.constraint import Guide
from foretell.core.context import Context
from foretell.core.distribution import Sampler
from foretell.core.refusals import refuse_options, refuse_source
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Commit, Drop, Finish, Fork, Message, Reply, Steps
from foretell.errors import BadConfig
from foretell.speculation.strategy import Strategy, one_by_one
from foretell.strategies.samples.rejection import ESTIMATORS, Trial, weighted
from foretell.strategies.samples.samples import branches

CUTS = "it would have to know all tokens that the form allows"
REFUSED = dict.fromkeys(("top_k", "top_p", "min_p", "typical_p"), CUTS)


@dataclass
class Particle:
    """A text and the logarithm of its weight; -inf where nothing could follow it."""

    branch: int
    log: float = 0.0


@dataclass(frozen=True)
class Awrs(Strategy):
    """With n=1 it samples as masks do, and without a form it is plain sampling."""

    n: int = 10  # particles
    threshold: float = 0.5  # of n: an effective number of particles below it draws them anew
    estimator: str = "auto"  # of weights: recursive, geometric, or auto, which takes fewer checks
    accepts: int = 2  # passes that the geometric estimator waits for
    refusals: int = 32  # at one place, after which the mask is asked; 0: none

    drawn_at = 1.0

    @property
    def most_texts(self) -> int:
        return 1 + self.n

    def __post_init__(self) -> None:
        ranges = {"n": (1, 256), "threshold": (0, 1), "accepts": (2, 64), "refusals": (0, 1 << 20)}
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise BadConfig.field(f"awrs:{name}", value, f"between {least} and {most}")
        if self.estimator not in ("auto", *ESTIMATORS):
            known = f"auto, {' or '.join(ESTIMATORS)}"
            raise BadConfig.field("awrs:estimator", self.estimator, known)

    def run(self, ctx: Context) -> Steps:
        """Raises BadConfig, before anything runs, for what it cannot honour."""
        guide = ctx.sampler.guide
        if guide is None or ctx.sampler.greedy:
            return one_by_one(ctx)
        refuse_options("awrs", ctx.request.sampling, REFUSED)
        refuse_source("awrs", ctx.request)
        return self._steps(ctx, guide)

    def _steps(self, ctx: Context, guide: Guide) -> Steps:
        free = copy.copy(ctx.sampler)
        free.guide = None
        particles = [Particle(branch) for branch in (yield from branches(ctx, self.n))]
        place = 0
        while True:
            asks, growing = [], []
            for particle in particles:
                text = ctx.branches[particle.branch]
                if particle.log > -math.inf and text.reason is None:
                    growing.append(particle)
                    asks.append(Ask(TokenTree(text.tokens[-1]), branch=particle.branch))
            if not growing:
                break
            place += 1
            replies: list[Reply] = yield asks
            for particle, reply in zip(growing, replies, strict=True):
                yield from self.extend(ctx.on(particle.branch), particle, reply, free, guide)
            if not any(particle.log > -math.inf for particle in particles):
                view = ctx.on(growing[-1].branch)
                row = replies[-1].logits[0]
                raise free.fault(view.sampler.scores(row, view.output), row)
            over = all(ctx.branches[one.branch].reason for one in particles if one.log > -math.inf)
            if not over and effective(particles) < self.threshold * self.n:
                particles = yield from self.anew(ctx, particles, place)
        yield from self.end(ctx, particles, guide)

    def extend(
        self, ctx: Context, particle: Particle, reply: Reply, free: Sampler, guide: Guide
    ) -> Generator[Message, Any, None]:
        """One token more on the particle's branch, and its weight. `free`: asks no form."""
        output, row = list(ctx.output), reply.logits[0]
        draws = 0

        def draw(law: torch.Tensor) -> int:
            # The first one is plain decoding's, whose token it is where it passes.
            nonlocal draws
            draws += 1
            return ctx.rng.sample(law, "gumbel" if draws > 1 else "target", len(output), draws - 1)

        def passes(token: int) -> bool:
            ctx.stats.checks += 1
            return guide.may_follow(output, token)

        def allowed() -> torch.Tensor:
            return guide.masked(row, output) > -math.inf

        law = free.law(row, output).double()
        trial = Trial(law / law.sum(), draw, passes, allowed, self.refusals)
        token, weight = weighted(trial, self.estimator, self.accepts)
        if token < 0:
            particle.log = -math.inf
            return
        particle.log += math.log(weight)
        yield Commit([token], row[None], ctx.branch, ["target"])

    def anew(
        self, ctx: Context, particles: Sequence[Particle], place: int
    ) -> Generator[Message, Any, list[Particle]]:
        """n particles drawn by weight, all of which now have the mean weight.

        The request's first branch stays even where it was not drawn: it is the answer if the
        request is ended from outside.
        """
        logs = torch.tensor([particle.log for particle in particles], dtype=torch.float64)
        mean = float(logs.logsumexp(0)) - math.log(self.n)
        law = logs.softmax(0)
        counts = Counter(ctx.rng.sample(law, "draft", place, i) for i in range(self.n))
        for number, particle in enumerate(particles):
            if not counts[number] and particle.branch != ctx.branch:
                yield Drop(particle.branch)
        drawn: list[Particle] = []
        for number, particle in enumerate(particles):
            if counts[number] > 1:
                twins = yield Fork(particle.branch, counts[number] - 1)
                drawn += [Particle(branch, mean) for branch in twins]
            if counts[number]:
                drawn.append(Particle(particle.branch, mean))
        return drawn

    def end(
        self, ctx: Context, particles: Sequence[Particle], guide: Guide
    ) -> Generator[Message, Any, None]:
        """Draws the answer; of texts that were cut only where no other is left."""
        living = [particle for particle in particles if particle.log > -math.inf]
        weights = []
        for particle in living:
            text = ctx.branches[particle.branch]
            cut = text.reason == "length" and not guide.tracker.whole(text.output)
            weights.append(-math.inf if cut else particle.log)
        some = max(weights) > -math.inf
        logs = weights if some else [particle.log for particle in living]
        law = torch.tensor(logs, dtype=torch.float64).softmax(0)
        chosen = ctx.rng.sample(law, "draft", 0)
        order = sorted(range(len(living)), key=lambda place: (place != chosen, -logs[place]))
        answers = []
        for place in order:
            text = ctx.branches[living[place].branch]
            answers.append((list(text.output), weights[place], text.reason or "stop"))
        result = living[chosen].branch
        for branch in [branch for branch in ctx.branches if branch != result]:
            if not ctx.branches[branch].quiet:
                yield Drop(branch)
        yield Finish(result, answers[0][2], answers)


def effective(particles: Sequence[Particle]) -> float:
    """How many equal particles would vary as little: (sum of weights)^2 / sum of squares."""
    law = torch.tensor([particle.log for particle in particles], dtype=torch.float64).softmax(0)
    return float(1 / law.square().sum())
