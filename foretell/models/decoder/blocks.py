"""Blocks: trees whose nodes all see each other, for models that fill in several tokens at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.cache.states import NO_STATES
from foretell.core.types import Ask


class Blocks(Cache):
    """The nodes of a tree, the root included, see each other.

    The text before them is read as any text is. Nothing computed of a block is kept, since each of
    its rows depends on all its tokens.
    """

    def prepare(self, ask: Ask, tokens: Sequence[int], chunk: int) -> tuple[Job, bool]:
        self.commit(tokens)
        job, is_complete = super().prepare(ask, tokens, chunk)
        if is_complete:
            pending_nodes = -job.first
            visible_nodes = torch.ones(len(job.tokens), len(job.tokens), dtype=torch.bool)
            visible_nodes[:pending_nodes].tril_()
            job.seen = visible_nodes
        return job, is_complete

    def finish(self, hidden: Mapping[int, torch.Tensor] = NO_STATES) -> None:
        plan: Any = self.plan
        super().finish(hidden)
        if not plan.part:
            self.trusted = plan.pending
