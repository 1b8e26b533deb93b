"""Which open asks take part in the next forward, and how much of a long text each computes.

A scheduler is a function `plan(waiting, costs)`; an engine has one, and a server may bring its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from foretell.engine.live import OpenAsk
    from foretell.speculation.costs import Costs

CHUNK = 512  # tokens of texts in a forward
DRAFT_CHUNK = CHUNK // 2  # of texts of draft models between two forwards of the target
LEAST = 4  # tokens that a long text gets in any forward it takes part in
STEP = 16  # committed tokens that an ask may lack and still be a step, which never waits for texts
ROWS = 4096  # tokens of steps that share a forward; a single step may have more
STRETCH = 2.0  # times as long as without texts a step may take, unless seconds are given
PATIENCE = 32  # forwards of draft models that an ask of the target lets pass

# (open asks, costs by model, executor and layers) -> pairs of an ask that takes part in the next
# forward and how many tokens of its text it may compute
Waiting = Sequence["OpenAsk"]
Planned = list[tuple["OpenAsk", int]]
Plan = Callable[[Waiting, Mapping[Any, "Costs"]], Planned]


@dataclass
class FairPlan:
    """Steps first, then as much of texts as fills the forward; no ask waits for ever.

    How much that is follows from what forwards were measured to cost: with pieces of texts a step
    takes at most `between_tokens` seconds, or STRETCH times as long as without them (Sarathi-Serve,
    section 4, with a time in place of its number of tokens). Where nobody waits for a step, as its
    answer is read as a whole, it is a CHUNK. Texts of a priority come in the order in which their
    requests were admitted.

    Draft models' asks come before the target's, so that the target's forward holds everybody, but
    their texts take at most half a chunk until the target's turn.
    """

    room: int = DRAFT_CHUNK  # for draft models' texts until the target's next forward
    passed: int = 0  # forwards of draft models since its last one
    between_tokens: float | None = None  # seconds of a step; None: STRETCH decides,
    # and only where somebody reads tokens as they come

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
        return self.share(group, self.beside_steps(group, costs))

    def beside_steps(self, group: Sequence[OpenAsk], costs: Mapping[Any, Costs]) -> int:
        """Tokens of texts that fit into a forward beside the steps of this group."""
        steps = self.fitting(group)
        read_live = any(entry.live.ctx.request.streamed for entry in steps)
        if not steps or (self.between_tokens is None and not read_live):
            return CHUNK
        text = self.in_turn([entry for entry in group if entry.pending > STEP])
        first = steps[0]
        # With a piece of a text there is one job more, which another executor may compute.
        executor = first.model.executor_of(len(steps) + 1)
        known = costs.get((first.model, executor, first.ask.layers))
        if not text or known is None or not known.seconds:
            return LEAST
        size = sum(entry.size for entry in steps)
        read = sum(entry.size * entry.before for entry in steps)
        pieces = np.arange(CHUNK + 1)
        read_with = read + pieces * (text[0].before + pieces / 2)
        seconds = known.curve(size + CHUNK)[size - 1 :] + known.row_seconds() * read_with
        allowed = self.between_tokens or STRETCH * seconds[0]
        return max(LEAST, int(np.searchsorted(seconds, allowed, side="right")) - 1)

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
    def fitting(group: Sequence[OpenAsk]) -> list[OpenAsk]:
        """The steps of a group that one forward takes, in their order. Where they have more than
        ROWS tokens, as canvases may, those that have waited for longest; the others come next.
        """
        steps = [entry for entry in group if entry.pending <= STEP]
        total = sum(entry.size for entry in steps)
        order = sorted(steps, key=lambda entry: entry.waited, reverse=True)
        while total > ROWS and len(order) > 1:
            total -= order.pop().size
        return [entry for entry in steps if entry in order] if len(order) < len(steps) else steps

    @staticmethod
    def in_turn(texts: list[OpenAsk]) -> list[OpenAsk]:
        """These in the order in which their requests come, see Admission."""
        return sorted(texts, key=lambda entry: entry.live.ctx.engine.admission.turn(entry.live))

    @staticmethod
    def share(group: list[OpenAsk], room: int) -> Planned:
        """The steps of the group that fit, and of its texts, in order, about `room` tokens."""
        planned: Planned = [(entry, entry.size) for entry in FairPlan.fitting(group)]
        for entry in FairPlan.in_turn([entry for entry in group if entry.pending > STEP]):
            if room < LEAST and planned:
                break
            tokens = min(entry.pending, max(room, LEAST))
            planned.append((entry, tokens))
            room -= tokens
        return planned
