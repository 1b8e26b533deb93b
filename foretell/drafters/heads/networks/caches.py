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
    """The cache of a head whose nodes read tokens before their own: the last committed ones."""

    reach = 0  # so many
    latest: Sequence[int] = ()

    def prepare(self, ask: Ask, tokens: Sequence[int], chunk: int) -> tuple[Job, bool]:
        prepared_job = super().prepare(ask, tokens, chunk)
        self.latest = tuple(tokens[max(0, self.length - self.reach) : self.length])
        return prepared_job

    def tokens_above(self, job: Job) -> list[list[int]]:
        """Tokens above each of the job's new nodes, the nearest first, `reach` of them a node.

        Above the text's first token stands that token again.
        """
        plan = self.plan
        assert plan is not None
        preceding_tokens = []
        for node in range(plan.shared, len(plan.tokens)):
            path_tokens: list[int] = []
            ancestor = plan.parents[node]
            while ancestor >= 0 and len(path_tokens) < self.reach:
                path_tokens.append(plan.tokens[ancestor])
                ancestor = plan.parents[ancestor]
            path_tokens = [*path_tokens, *reversed(self.latest)][: self.reach]
            top_token = path_tokens[-1] if path_tokens else plan.tokens[node]
            preceding_tokens.append(path_tokens + [top_token] * (self.reach - len(path_tokens)))
        return preceding_tokens


class KnownStates(Cache):
    """The cache of a head whose drafted nodes are given the target's own states: it keeps their
    rows.
    """

    def finish(self, hidden: Mapping[int, torch.Tensor] = NO_STATES) -> None:
        super().finish(hidden)
        self.trusted = len(self.tokens)


class UnknownStates(Blocks):
    """The cache of a head that fills in blocks: rows of the text read states, those of a block
    none.
    """

    def _read_features(self, job: Job, given: torch.Tensor | None) -> torch.Tensor:
        assert self.beside is not None and self.beside.states is not None
        empty_features = torch.cat([self.beside.states.none[tap] for tap in self.feeds], 1)
        node_count = len(job.tokens) + min(0, job.first)
        return super()._read_features(
            job, empty_features.new_zeros(node_count, empty_features.shape[1])
        )
