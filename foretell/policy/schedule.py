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
DRAFT_CHUNK = CHUNK // 2  # of a draft model's, while others wait for the target
LEAST = 64  # tokens that a long text gets in any forward it takes part in
STEP = 64  # tokens up to which an ask is a step, which never waits for texts
PATIENCE = 32  # forwards of draft models that an ask of the target lets pass

# (asks of one model, costs by model) -> (ask, most tokens of its text that it may compute now)
Waiting = Sequence["OpenAsk"]
Planned = list[tuple["OpenAsk", int]]
Plan = Callable[[Waiting, Mapping[Any, "Costs"]], Planned]


@dataclass
class FairPlan:
    """Steps first, then texts by age, as far as one chunk goes; no ask waits for ever.

    Draft models' asks come before the target's, so that the target's forward holds everybody, but a
    forward that only takes in a draft model's text is followed by one of the target's. So between
    two steps of a running request lie at most one forward of a full chunk and one of half a chunk.
    """

    text_ran: bool = False  # the last forward only took in text for a draft model

    def __call__(self, waiting: Waiting, costs: Mapping[Any, Costs]) -> Planned:
        if len(waiting) == 1:  # nobody else to be fair to
            return self.share(list(waiting), CHUNK)
        groups: dict[Any, list[OpenAsk]] = {}
        for entry in waiting:
            groups.setdefault(self.group(entry), []).append(entry)
        drafts = [group for group in groups.values() if not group[0].for_target]
        target = [group for group in groups.values() if group[0].for_target]
        waited = max((entry.waited for group in target for entry in group), default=0)
        if drafts and waited <= PATIENCE:
            oldest = max(drafts, key=lambda group: max(entry.waited for entry in group))
            short = [group for group in drafts if any(entry.size <= STEP for entry in group)]
            if short:
                self.text_ran = False
                return self.share(max(short, key=lambda g: max(e.waited for e in g)), DRAFT_CHUNK)
            if not target or not self.text_ran:
                self.text_ran = bool(target)
                return self.share(oldest, DRAFT_CHUNK if target else CHUNK)
        self.text_ran = False
        candidates = target or drafts
        oldest = max(candidates, key=lambda group: max(entry.waited for entry in group))
        return self.share(oldest, CHUNK)

    @staticmethod
    def group(entry: OpenAsk) -> Any:
        """What asks that share a forward have in common."""
        ask = entry.ask
        return id(entry.model), ask.layers, ask.states is None

    @staticmethod
    def share(group: list[OpenAsk], chunk: int) -> Planned:
        """All steps of the group, and its texts, oldest first, until the chunk is full."""
        if len(group) == 1:
            return [(group[0], min(group[0].size, chunk))]
        steps = [entry for entry in group if entry.size <= STEP]
        texts = [entry for entry in group if entry.size > STEP]
        planned: Planned = [(entry, entry.size) for entry in steps]
        room = max(LEAST, chunk - sum(entry.size for entry in steps))
        for entry in sorted(texts, key=lambda entry: -entry.waited):
            if room < LEAST and planned:
                break
            planned.append((entry, min(entry.pending, room)))
            room -= min(entry.size, room)
        return planned
