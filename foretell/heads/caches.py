"""Caches of heads whose rows read the target's state of their own token."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from foretell.core.cache import NO_STATES, Cache
from foretell.families.blocks import Blocks
from foretell.memory.job import Job


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
