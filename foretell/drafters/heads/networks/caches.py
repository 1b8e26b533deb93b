"""Caches of heads whose rows read more than a token and the target's state before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.cache.states import NO_STATES
from foretell.core.types import Ask
from foretell.models.decoder.blocks import Blocks


class KnownTokens(Cache):
    """Of a head whose nodes read tokens before their own: it has the last committed ones."""

    reach = 0  # so many
    latest: Sequence[int] = ()

    def prepare(self, ask: Ask, tokens: Sequence[int], chunk: int) -> tuple[Job, bool]:
        made = super().prepare(ask, tokens, chunk)
        self.latest = tuple(tokens[max(0, self.length - self.reach) : self.length])
        return made

    def earlier(self, job: Job) -> list[list[int]]:
        """Of each of the job's new nodes the tokens above it, the nearest first, `reach` of them.

        Above the text's first token stands that token again.
        """
        plan = self.plan
        assert plan is not None
        found = []
        for node in range(plan.shared, len(plan.tokens)):
            above: list[int] = []
            at = plan.parents[node]
            while at >= 0 and len(above) < self.reach:
                above.append(plan.tokens[at])
                at = plan.parents[at]
            above = [*above, *reversed(self.latest)][: self.reach]
            first = above[-1] if above else plan.tokens[node]
            found.append(above + [first] * (self.reach - len(above)))
        return found


class KnownStates(Cache):
    """Of a head whose drafted nodes are given the target's own states: their rows are kept."""

    def finish(self, hidden: Mapping[int, torch.Tensor] = NO_STATES) -> None:
        super().finish(hidden)
        self.trusted = len(self.tokens)


class UnknownStates(Blocks):
    """Of a head that fills in blocks: rows of the text read states, and those of a block none."""

    def _features(self, job: Job, given: torch.Tensor | None) -> torch.Tensor:
        assert self.beside is not None and self.beside.states is not None
        known = torch.cat([self.beside.states.none[tap] for tap in self.feeds], 1)
        nodes = len(job.tokens) + min(0, job.first)
        return super()._features(job, known.new_zeros(nodes, known.shape[1]))
