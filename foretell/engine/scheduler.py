"""Schedulers with chunked prefill: which asks join a forward, with how much of a long text.

An ask whose cache lacks at most STEP tokens is a *step* of decoding. Any other is a *prefill*,
whose text is read in pieces. What asks say of themselves is in `engine.live.OpenAsk`.

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

CHUNK = 512  # tokens of prefills in a forward
DRAFT_CHUNK = CHUNK // 2  # of prefills of draft models between two forwards of the target
LEAST = 4  # tokens that a prefill gets in any forward it takes part in
STEP = 16  # tokens that an ask may lack and still be a step, which waits for no prefill
ROWS = 4096  # tokens of steps that share a forward; a single step may have more
STRETCH = 2.0  # times as long as without prefills a step may take, unless seconds are given
PATIENCE = 32  # forwards of draft models that an ask of the target lets pass

# (open asks, costs by model, backend and layers) -> pairs of an ask that takes part in the next
# forward and how many tokens of its text it may compute
Waiting = Sequence["OpenAsk"]
Planned = list[tuple["OpenAsk", int]]
Plan = Callable[[Waiting, Mapping[Any, "Costs"]], Planned]


@dataclass
class FairPlan:
    """Steps first, then as much of prefills as fills the forward; no ask waits for ever.

    How much that is follows from what forwards were measured to cost: with pieces of prefills a
    step takes at most `between_tokens` seconds, or STRETCH times as long as without them
    (Sarathi-Serve, section 4, with a time in place of its number of tokens). Where nobody waits for
    a step, as its answer is read as a whole, it is a CHUNK. Prefills of a priority come in the
    order in which their requests were admitted.

    Draft models' asks come before the target's, so that the target's forward holds everybody, but
    their prefills take at most half a chunk until the target's turn.
    """

    room: int = DRAFT_CHUNK  # for draft models' prefills until the target's next forward
    passed: int = 0  # forwards of draft models since its last one
    between_tokens: float | None = None  # seconds of a step; None: STRETCH decides,
    # and only where somebody reads tokens as they come

    def __call__(self, waiting: Waiting, costs: Mapping[Any, Costs]) -> Planned:
        if len(waiting) == 1:  # nobody else to be fair to
            return [(waiting[0], CHUNK)]
        groups: dict[Any, list[OpenAsk]] = {}
        for open_ask in waiting:
            groups.setdefault(self.group(open_ask), []).append(open_ask)
        drafts = [group for group in groups.values() if not group[0].for_target]
        target = [group for group in groups.values() if group[0].for_target]
        steps = [group for group in drafts if any(open_ask.pending <= STEP for open_ask in group)]
        if not (target or steps):
            return self.share(self.find_oldest(drafts), CHUNK)
        if self.passed < PATIENCE and (steps or (drafts and self.room >= LEAST)):
            planned = self.share(self.find_oldest(steps or drafts), self.room)
            self.room -= sum(tokens for open_ask, tokens in planned if open_ask.pending > STEP)
            self.passed += 1
            return planned
        self.room, self.passed = DRAFT_CHUNK, 0
        group = self.find_oldest(target or drafts)
        return self.share(group, self.beside_steps(group, costs))

    def beside_steps(self, group: Sequence[OpenAsk], costs: Mapping[Any, Costs]) -> int:
        """Tokens of prefills that fit into a forward beside the steps of this group."""
        steps = self.find_fitting(group)
        read_live = any(open_ask.live.ctx.request.streamed for open_ask in steps)
        if not steps or (self.between_tokens is None and not read_live):
            return CHUNK
        waiting_prefills = self.in_turn([open_ask for open_ask in group if open_ask.pending > STEP])
        first_step = steps[0]
        # With a piece of a prefill there is one job more, which another backend may compute.
        backend = first_step.model.backend_of(len(steps) + 1)
        model_costs = costs.get((first_step.model, backend, first_step.ask.layers))
        if not waiting_prefills or model_costs is None or not model_costs.seconds:
            return LEAST
        step_size = sum(open_ask.size for open_ask in steps)
        read_rows = sum(open_ask.size * open_ask.cached_length for open_ask in steps)
        pieces = np.arange(CHUNK + 1)
        read_with = read_rows + pieces * (waiting_prefills[0].cached_length + pieces / 2)
        seconds = (
            model_costs.curve(step_size + CHUNK)[step_size - 1 :]
            + model_costs.row_seconds() * read_with
        )
        allowed_seconds = self.between_tokens or STRETCH * seconds[0]
        return max(LEAST, int(np.searchsorted(seconds, allowed_seconds, side="right")) - 1)

    @staticmethod
    def group(open_ask: OpenAsk) -> Any:
        """Key of the asks that may share a forward."""
        ask = open_ask.ask
        return id(open_ask.model), ask.layers, ask.states is None

    @staticmethod
    def find_oldest(groups: Sequence[list[OpenAsk]]) -> list[OpenAsk]:
        """The group with the ask that has waited for longest."""
        return max(groups, key=lambda group: max(open_ask.waited for open_ask in group))

    @staticmethod
    def find_fitting(group: Sequence[OpenAsk]) -> list[OpenAsk]:
        """The steps of a group that one forward takes, in their order. Where they have more than
        ROWS tokens, as canvases may, those that have waited for longest; the others come next.
        """
        steps = [open_ask for open_ask in group if open_ask.pending <= STEP]
        total = sum(open_ask.size for open_ask in steps)
        order = sorted(steps, key=lambda open_ask: open_ask.waited, reverse=True)
        while total > ROWS and len(order) > 1:
            total -= order.pop().size
        return (
            [open_ask for open_ask in steps if open_ask in order]
            if len(order) < len(steps)
            else steps
        )

    @staticmethod
    def in_turn(texts: list[OpenAsk]) -> list[OpenAsk]:
        """Sorts texts by the turns of their requests, see Admission."""
        return sorted(
            texts, key=lambda open_ask: open_ask.live.ctx.engine.admission.turn(open_ask.live)
        )

    @staticmethod
    def share(group: list[OpenAsk], room: int) -> Planned:
        """The steps of the group that fit, and of its texts, in order, about `room` tokens."""
        planned: Planned = [(open_ask, open_ask.size) for open_ask in FairPlan.find_fitting(group)]
        for open_ask in FairPlan.in_turn(
            [open_ask for open_ask in group if open_ask.pending > STEP]
        ):
            if room < LEAST and planned:
                break
            tokens = min(open_ask.pending, max(room, LEAST))
            planned.append((open_ask, tokens))
            room -= tokens
        return planned
