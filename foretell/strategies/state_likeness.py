"""Hidden states of a whole text, and how alike they are.

A reply holds the states of the nodes its forward computed. Those of a long prompt come in pieces,
and those of a shared prefix in none, so a method that reads all of them has the target's caches
keep them, as they do for heads: it brings a `StateReader`, a model that reads them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from foretell.core.model import Model
from foretell.core.types import Reply

if TYPE_CHECKING:
    from foretell.cache.job import Job


class StateReader(Model):
    """Computes nothing: an ask is answered with the target's states of all tokens before its last.

    `tap`: which states; they are in `Reply.hidden[tap]`, (tokens, E). It has no rows of its own.
    """

    caps = Model.caps | {"taps"}
    layout = ()

    def __init__(self, target: Model, tap: int):
        self.name = f"{target.name}[states]"
        self.vocab, self.context = target.vocab, target.context
        self.dtype, self.device = target.dtype, target.device
        self.feeds = (tap,)

    def forward(self, jobs: Sequence[Job]) -> list[Reply]:
        replies = []
        self.calls += 1
        self.width = sum(len(job.tokens) for job in jobs)
        for job in jobs:
            extra_states: Any = job.cache.beside
            states = extra_states.states.read_states(self.feeds, 0, job.positions[-1])
            job.cache.finish()
            no_logits = torch.empty(0, self.vocab)
            replies.append(Reply(no_logits, {self.feeds[0]: states}, [], list(range(len(states)))))
        return replies


def last_tap(model: Model) -> int:
    """The tap of what leaves the last layer."""
    return len(model.layout)


def apply_norm(model: Model, states: torch.Tensor) -> torch.Tensor:
    """States (n, E) of the last tap after the last norm, where the model has one that is known:
    what its head reads, and transformers calls the last hidden states.
    """
    last_norm: Any = getattr(getattr(model, "loop", None), "norm", None)
    if last_norm is None:
        return states
    with torch.inference_mode():
        normed_states: torch.Tensor = last_norm(states)
    return normed_states


class Directions:
    """The directions of states (n, E), to which others are compared. They grow by doubling."""

    def __init__(self, states: torch.Tensor):
        self.units = unit_vectors(states)
        self.count = len(states)

    def add(self, states: torch.Tensor) -> None:
        new_count = self.count + len(states)
        if new_count > len(self.units):
            spare_rows = self.units.new_zeros(
                max(64, 2 * new_count) - len(self.units), self.units.shape[1]
            )
            self.units = torch.cat([self.units, spare_rows])
        self.units[self.count : new_count] = unit_vectors(states)
        self.count = new_count

    def nearest(self, states: torch.Tensor) -> torch.Tensor:
        """The largest cosine (n,) of each of these states with any of the others."""
        return (unit_vectors(states) @ self.units[: self.count].T).amax(-1)


def unit_vectors(states: torch.Tensor) -> torch.Tensor:
    """States (n, E) of length 1, in float32 or wider."""
    return F.normalize(states if states.dtype == torch.float64 else states.float(), dim=-1)
