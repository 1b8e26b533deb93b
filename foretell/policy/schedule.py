"""Which open asks take part in the next forward, and how much of a long text each computes.

A scheduler is a function `plan(waiting, costs)`; an engine has one, and a server may bring its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretell.core.live import OpenAsk
    from foretell.policy.costs import Costs

CHUNK = 512  # tokens of texts in a forward
DRAFT_CHUNK = CHUNK // 2  # of texts of draft models between two forwards of the target
LEAST = 64  # tokens that a long text gets in any forward it takes part in
STEP = 64  # committed tokens that an ask may lack and still be a step, which never waits for texts
PATIENCE = 32  # forwards of draft models that an ask of the target lets pass

# (open asks, costs by model, executor and layers) -> pairs of an ask that takes part in the next
# forward and how many tokens of its text it may compute
Waiting = Sequence["OpenAsk"]
Planned = list[tuple["OpenAsk", int]]
Plan = Callable[[Waiting, Mapping[Any, "Costs"]], Planned]


@dataclass
class FairPlan:
    """Steps first, then texts by age, as far as one chunk goes; no ask waits for ever.

    Draft models' asks come before the target's, so that the target's forward holds everybody, but
    their texts take at most half a chunk until the target's turn. So between two steps of a running
    request lie at most one forward of a full chunk and half a chunk more.
    """

    room: int = DRAFT_CHUNK  # for draft models' texts until the target's next forward
    passed: int = 0  # forwards of draft models since its last one

    def __call__(self, waiting: Waiting, costs: Mapping[Any, Costs]) -> Planned:
        if len(waiting) == 1:  # nobody else to be fair to
            return [(waiting[0], CHUNK)]
        groups: dict[Any, list[OpenAsk]] = {}
        for entry in waiting:
            groups.setdefault(self.group(entry), []).append(entry)
        drafts = [group for group in groups.values() if not group[0].for_target]
        target = [group for group in groups.values() if group[0].for_target]
        steps = [group for group in drafts if any(entry.pending <= STEP for entry in group)]
        if not (target or steps):
            return self.share(self.oldest(drafts), CHUNK)
        if self.passed < PATIENCE and (steps or (drafts and self.room >= LEAST)):
            planned = self.share(self.oldest(steps or drafts), self.room)
            self.room -= sum(tokens for entry, tokens in planned if entry.pending > STEP)
            self.passed += 1
            return planned
        self.room, self.passed = DRAFT_CHUNK, 0
        group = self.oldest(target or drafts)
        steps_size = sum(entry.size for entry in group if entry.pending <= STEP)
        return self.share(group, max(LEAST, CHUNK - steps_size))

    @staticmethod
    def group(entry: OpenAsk) -> Any:
        """What asks that share a forward have in common."""
        ask = entry.ask
        return id(entry.model), ask.layers, ask.states is None

    @staticmethod
    def oldest(groups: Sequence[list[OpenAsk]]) -> list[OpenAsk]:
        """The group with the ask that has waited for longest."""
        return max(groups, key=lambda group: max(entry.waited for entry in group))

    @staticmethod
    def share(group: list[OpenAsk], room: int) -> Planned:
        """All steps of the group, and of its texts, in order, about `room` tokens."""
        planned: Planned = [(entry, entry.size) for entry in group if entry.pending <= STEP]
        texts = [entry for entry in group if entry.pending > STEP]
        for entry in texts:
            if room < LEAST and planned:
                break
            tokens = min(entry.pending, max(room, LEAST))
            planned.append((entry, tokens))
            room -= tokens
        return planned
