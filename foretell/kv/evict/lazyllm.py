"""Drops tokens between layers that the newest token hardly attends to, and revives them later.

At a few depths those `rate` of the tokens leave the forward to which the last token gives the least
attention in the layer before. What they would have entered the next layer with is stored. When
tokens are chosen anew, all of a text are candidates again: one that is chosen where it has no rows
yet enters with its stored state. So no token is computed twice in a layer, and a prompt takes less
than its whole time.

Paper: Fu et al., LazyLLM: Dynamic Token Pruning for Efficient Long Context LLM Inference,
arXiv:2407.14057
Guarantee: lossy: rows of dropped tokens are not read; with drafts the text is the one without them
Cost: target 1
Needs: layers that can be run one by one; cache rows of every layer, of all of the text
Trains: nothing
Differs:
- of n tokens int(rate x n) are dropped, of equal scores the older ones; the paper's tasks have
depths and rates of their own, which are not published
- with `every` above 1 tokens are chosen by so many at once, and drafts may be as long
- rows are given up nowhere: a cache holds those of every layer, and the stored states beside them
- a token of a prompt has, for who reads hidden states, the state that it left the first layers with
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from foretell.core.model import Computed
from foretell.errors import BadConfig
from foretell.kv.base import KV, NEVER, bytes_of, check_every
from foretell.kv.evict.layer_skipping import (
    LastRow,
    Run,
    Skipping,
    check_layers,
    empty,
    pass_layers,
    together,
)
from foretell.ops.attention import Attention

if TYPE_CHECKING:
    from foretell.core.model import Model

States = tuple[torch.Tensor, torch.Tensor]  # places (n,), and what their tokens enter with (n, E)


@dataclass(frozen=True)
class Lazyllm(KV):
    """Shares of a model's layers and of the tokens, and a count of tokens."""

    rate: float = 0.3  # share of the tokens that is dropped at each depth
    at: str = "0.3/0.6/0.9"  # depths: the share of the layers before each
    every: int = 1  # tokens between two choices

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 1:
            raise BadConfig.field("lazyllm:rate", self.rate, "0 or more, below 1")
        try:
            shares = self.shares
        except ValueError:
            shares = ()
        if not shares or sorted({*shares}) != [*shares] or not 0 < shares[0] <= shares[-1] < 1:
            need = "shares of the layers between 0 and 1, ascending, as in 0.3/0.6/0.9"
            raise BadConfig.field("lazyllm:at", repr(self.at), need)
        check_every("lazyllm", self.every)

    @property
    def shares(self) -> tuple[float, ...]:
        return tuple(float(share) for share in self.at.split("/"))

    def policy(self, target: Model) -> Dropping:
        self.fits(target)
        count = check_layers("lazyllm", target)
        cuts = {min(count - 1, max(1, round(share * count))) for share in self.shares}
        ends = (*sorted(cuts), count)
        return Dropping(ends[0], count, ends=ends, rate=self.rate, every=self.every)


@dataclass(frozen=True)
class Stage:
    """What there is of the layers between two depths, when tokens were chosen last."""

    chosen: torch.Tensor  # places of the tokens that are read, ascending
    known: torch.Tensor  # bool: the tokens, by place, that have rows
    places: torch.Tensor  # of the tokens that have none but a stored state
    states: torch.Tensor  # (n, E), what these enter with


@dataclass
class Dropping(Skipping):
    """`ends`: of each stage the layer behind it. All tokens pass the first, all that are new do."""

    ends: tuple[int, ...] = ()
    rate: float = 0.0
    every: int = 1
    length: int = 0  # of the text when tokens were chosen last
    stages: tuple[Stage, ...] = ()  # behind the first; none: the prompt is not in
    found: tuple[Stage, ...] = ()  # by a forward that is not committed

    plain = False

    def begin(self, prompt: int) -> None:
        super().begin(prompt)
        self.length, self.stages, self.found = 0, (), ()

    @property
    def bytes(self) -> int:
        """Of the states of tokens that were dropped, too."""
        return super().bytes + bytes_of(stage.states for stage in self.stages)

    @property
    def leaves_out(self) -> bool:
        return self.rate > 0

    def room(self, length: int) -> int:
        """Tokens are chosen by the last one before such a length, which is alone in its forward."""
        if not self.leaves_out:
            return NEVER
        left = self.prompt - length
        left = left if left > 0 else self.every - -left % self.every
        return max(1, left - 1)

    def chooses(self, job: Any) -> bool:
        beyond = job.positions[0] + 1 - self.prompt
        return self.leaves_out and beyond >= 0 and beyond % self.every == 0

    def skips(self, job: Any) -> bool:
        whole = job.layers is None or [*job.layers] == [*range(self.layers)]
        return (whole and self.chooses(job)) or super().skips(job)

    def keep(self, cache: Any, nodes: Sequence[int]) -> None:
        super().keep(cache, nodes)
        if self.found and nodes:
            self.stages, self.length = self.found, cache.length + 1
            self.waiting = None
        self.found = ()

    # --- between two choices

    def watches(self, job: Any) -> bool:
        return bool(self.stages)

    def attend(self, job: Any, asked: Attention) -> torch.Tensor:
        place = sum(asked.layer >= end for end in self.ends)
        if not place:
            return asked.whole()
        chosen = self.stages[place - 1].chosen
        new = torch.arange(self.length, asked.keys.shape[1], device=chosen.device)
        read = torch.cat([chosen, new])
        mask = None if asked.mask is None else asked.mask[..., read]
        keys, values = asked.keys[:, read], asked.values[:, read]
        return replace(asked, keys=keys, values=values, mask=mask).whole()

    # --- choosing

    def through(self, job: Any, taps: Sequence[int], run: Run) -> Computed:
        if not self.chooses(job):
            return super().through(job, taps, run)
        (place,) = job.positions
        seen = copy.copy(job.cache)
        seen.policy = read = LastRow(self.cut - 1)
        below = replace(job, cache=seen, layers=(*range(self.cut),), rows=[], follow=0)
        parts = [run([below], sorted({self.cut, *(tap for tap in taps if tap < self.cut)}))]
        hidden = dict(parts[0].hidden)
        state = hidden[self.cut]
        present = torch.arange(place + 1, device=state.device)
        arriving: States = present[:0], state[:0]
        if self.waiting is not None:
            self.waiting.write(job.start - job.cache.base, {self.cut: state})
            arriving = present[:place], self.waiting.read((self.cut,), 0, place)
        view = empty(job.cache, place + 1)
        found: list[Stage] = []
        for number, (start, end) in enumerate(pairwise(self.ends)):
            present = read.going_on(present, self.rate)
            stage, held, places, states = self.divided(number, place, present, arriving)
            places, states = torch.cat([places, present[-1:]]), torch.cat([states, state])
            read = LastRow(end - 1)
            watcher = read if end < self.layers else None
            own = sorted({end, *(tap for tap in taps if start < tap <= end)})
            layers = range(start, end)
            ran = pass_layers(job, view, layers, held, places, states, run, watcher, own)
            if watcher is not None:
                # The rows lie in another order there than in the text.
                assert read.scores is not None
                read.scores = read.scores[torch.cat([held, places]).argsort()]
            hidden |= ran[-1].hidden
            state = ran[-1].hidden[end]
            arriving = places[:-1], torch.cat([*(part.hidden[end] for part in ran[:-1]), state[:0]])
            found.append(stage)
            parts += ran
        self.found = tuple(found)
        return together(parts, hidden)

    def divided(
        self, number: int, place: int, kept: torch.Tensor, arriving: States
    ) -> tuple[Stage, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of the tokens kept up to this place, those that have rows in a stage, and those that
        enter it now, with their states; and what the stage will be. `arriving`: tokens that have
        come through the stage before it for the first time.
        """
        known = torch.zeros(place + 1, dtype=torch.bool, device=kept.device)
        places, states = arriving
        if self.stages:
            before = self.stages[number]
            known[: len(before.known)] = before.known
            known[len(before.known) :] = True
            places = torch.cat([before.places, places])
            states = torch.cat([before.states, states])
        known[place] = False  # its own row is none yet
        order = places.argsort()
        places, states = places[order], states[order]
        going = torch.zeros_like(known)
        going[kept] = True
        enter = going[places]
        held = kept[known[kept]]
        known[places[enter]] = True
        known[place] = True
        stage = Stage(kept, known, places[~enter], states[~enter])
        return stage, held, places[enter], states[enter]
