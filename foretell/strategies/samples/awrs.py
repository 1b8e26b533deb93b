"""Adaptive weighted rejection sampling: a form is asked about single tokens, and texts are weighed.

Masks make every token follow the form and forget how likely the model found that: texts that walked
into a corner count as much as those that came freely. Here `n` particles are drawn side by side,
each token by checking candidates one by one in the order of Gumbel noise until one passes, and each
token has a weight with the mean of the probability that the form left. A text's weight is their
product, so the weights' mean estimates, without bias, the probability that the model alone writes a
text of the form. Where they have become too uneven the particles are drawn anew by weight. The
answer is drawn by weight, too; all particles stand in the output with the logarithms of their
weights.

Paper: Lipkin et al., Fast Controlled Generation from Language Models with Adaptive Weighted
Rejection Sampling, arXiv:2504.05410
Guarantee: lossy: of several texts one is drawn by weight, which comes the nearer to the model's
distribution given the whole form the more there are; with n=1 it has the distribution that masks
give
Cost: target 1
Needs: a form of the text; without one it is plain sampling
Trains: nothing
Try: --method awrs --regex "[a-z ]{20,60}"
Differs:
- after `refusals` refused tokens at one place the whole mask is asked once; distribution and mean
weight stay, since what was refused is known (refusals=0: never, as in the paper)
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
from typing import Annotated, Any

import torch

from foretell.core.constraint import Guide
from foretell.core.context import Context
from foretell.core.distribution import Sampler
from foretell.core.refusals import refuse_options, refuse_source
from foretell.core.settings import OneOf, Range
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Commit, Drop, Finish, Fork, Message, Reply, Steps
from foretell.speculation.strategy import Strategy, decode_one_by_one
from foretell.strategies.samples.rejection import ESTIMATORS, Trial, draw_weighted
from foretell.strategies.samples.samples import fork_samples

CUTS = "it would have to know all tokens that the form allows"
REFUSED = dict.fromkeys(("top_k", "top_p", "min_p", "typical_p"), CUTS)


@dataclass
class Particle:
    """A text and the logarithm of its weight; -inf where nothing could follow it."""

    branch: int
    log: float = 0.0


@dataclass(frozen=True)
class Awrs(Strategy):
    """Sampling as masks do with n=1, and plain sampling without a form."""

    n: Annotated[int, Range(1, 256)] = 10  # particles
    # of n: an effective number of particles below it draws them anew
    threshold: Annotated[float, Range(0, 1)] = 0.5
    # of weights: recursive, geometric, or auto, which takes fewer checks
    estimator: Annotated[str, OneOf(("auto", *ESTIMATORS))] = "auto"
    accepts: Annotated[int, Range(2, 64)] = 2  # passes that the geometric estimator waits for
    # at one place, after which the mask is asked; 0: none
    refusals: Annotated[int, Range(0, 1 << 20)] = 32

    drawn_at = 1.0

    @property
    def most_texts(self) -> int:
        return 1 + self.n

    def run(self, ctx: Context) -> Steps:
        """Raises BadConfig, before anything runs, for what it cannot honour."""
        guide = ctx.sampler.guide
        if guide is None or ctx.sampler.greedy:
            return decode_one_by_one(ctx)
        refuse_options("awrs", ctx.request.sampling, REFUSED)
        refuse_source("awrs", ctx.request)
        return self._run_steps(ctx, guide)

    def _run_steps(self, ctx: Context, guide: Guide) -> Steps:
        free_sampler = copy.copy(ctx.sampler)
        free_sampler.guide = None
        particles = [Particle(branch) for branch in (yield from fork_samples(ctx, self.n))]
        position = 0
        while True:
            asks, growing_particles = [], []
            for particle in particles:
                particle_text = ctx.branches[particle.branch]
                if particle.log > -math.inf and particle_text.reason is None:
                    growing_particles.append(particle)
                    asks.append(Ask(TokenTree(particle_text.tokens[-1]), branch=particle.branch))
            if not growing_particles:
                break
            position += 1
            replies: list[Reply] = yield asks
            for particle, reply in zip(growing_particles, replies, strict=True):
                yield from self.extend_particle(
                    ctx.on(particle.branch), particle, reply, free_sampler, guide
                )
            if not any(particle.log > -math.inf for particle in particles):
                view = ctx.on(growing_particles[-1].branch)
                row = replies[-1].logits[0]
                raise free_sampler.fault(view.sampler.scores(row, view.output), row)
            is_over = all(
                ctx.branches[living_particle.branch].reason
                for living_particle in particles
                if living_particle.log > -math.inf
            )
            if not is_over and effective_count(particles) < self.threshold * self.n:
                particles = yield from self.resample_particles(ctx, particles, position)
        yield from self.choose_answer(ctx, particles, guide)

    def extend_particle(
        self, ctx: Context, particle: Particle, reply: Reply, free_sampler: Sampler, guide: Guide
    ) -> Generator[Message, Any, None]:
        """Draws one token more on the particle's branch, and its weight. `free_sampler`: asks no
        form.
        """
        output, row = list(ctx.output), reply.logits[0]
        draw_count = 0

        def draw(token_probs: torch.Tensor) -> int:
            # The first one is plain decoding's, whose token it is where it passes.
            nonlocal draw_count
            draw_count += 1
            return ctx.rng.sample(
                token_probs, "gumbel" if draw_count > 1 else "target", len(output), draw_count - 1
            )

        def passes(token: int) -> bool:
            ctx.stats.checks += 1
            return guide.may_follow(output, token)

        def list_allowed() -> torch.Tensor:
            return guide.masked(row, output) > -math.inf

        free_probs = free_sampler.law(row, output).double()
        token_trial = Trial(
            free_probs / free_probs.sum(), draw, passes, list_allowed, self.refusals
        )
        token, weight = draw_weighted(token_trial, self.estimator, self.accepts)
        if token < 0:
            particle.log = -math.inf
            return
        particle.log += math.log(weight)
        yield Commit([token], row[None], ctx.branch, ["target"])

    def resample_particles(
        self, ctx: Context, particles: Sequence[Particle], position: int
    ) -> Generator[Message, Any, list[Particle]]:
        """n particles drawn by weight, all of which now have the mean weight.

        The request's first branch stays even where it was not drawn: it is the answer if the
        request is ended from outside.
        """
        log_weights = torch.tensor([particle.log for particle in particles], dtype=torch.float64)
        mean_log_weight = float(log_weights.logsumexp(0)) - math.log(self.n)
        weight_probs = log_weights.softmax(0)
        copy_counts = Counter(
            ctx.rng.sample(weight_probs, "draft", position, draw_index)
            for draw_index in range(self.n)
        )
        for particle_index, particle in enumerate(particles):
            if not copy_counts[particle_index] and particle.branch != ctx.branch:
                yield Drop(particle.branch)
        new_particles: list[Particle] = []
        for particle_index, particle in enumerate(particles):
            if copy_counts[particle_index] > 1:
                copied_branches = yield Fork(particle.branch, copy_counts[particle_index] - 1)
                new_particles += [Particle(branch, mean_log_weight) for branch in copied_branches]
            if copy_counts[particle_index]:
                new_particles.append(Particle(particle.branch, mean_log_weight))
        return new_particles

    def choose_answer(
        self, ctx: Context, particles: Sequence[Particle], guide: Guide
    ) -> Generator[Message, Any, None]:
        """Draws the answer; of texts that were cut only where no other is left."""
        living_particles = [particle for particle in particles if particle.log > -math.inf]
        final_weights = []
        for particle in living_particles:
            text = ctx.branches[particle.branch]
            is_cut = text.reason == "length" and not guide.tracker.whole(text.output)
            final_weights.append(-math.inf if is_cut else particle.log)
        has_whole = max(final_weights) > -math.inf
        log_weights = (
            final_weights if has_whole else [particle.log for particle in living_particles]
        )
        weight_probs = torch.tensor(log_weights, dtype=torch.float64).softmax(0)
        chosen_index = ctx.rng.sample(weight_probs, "draft", 0)
        sorted_indices = sorted(
            range(len(living_particles)),
            key=lambda particle_index: (
                particle_index != chosen_index,
                -log_weights[particle_index],
            ),
        )
        answers = []
        for particle_index in sorted_indices:
            text = ctx.branches[living_particles[particle_index].branch]
            answers.append(
                (list(text.output), final_weights[particle_index], text.reason or "stop")
            )
        result_branch = living_particles[chosen_index].branch
        for branch in [branch for branch in ctx.branches if branch != result_branch]:
            if not ctx.branches[branch].quiet:
                yield Drop(branch)
        yield Finish(result_branch, answers[0][2], answers)


def effective_count(particles: Sequence[Particle]) -> float:
    """How many equal particles would vary as little: (sum of weights)^2 / sum of squares."""
    weight_probs = torch.tensor(
        [particle.log for particle in particles], dtype=torch.float64
    ).softmax(0)
    return float(1 / weight_probs.square().sum())
