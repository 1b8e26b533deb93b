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
from typing import TYPE_CHECKING, Annotated, Any

import torch

from foretell.core.model import Computed
from foretell.core.settings import Range
from foretell.errors import BadConfig
from foretell.kv.base import KV, NEVER, bytes_of
from foretell.kv.evict.layer_skipping import (
    LastRow,
    Run,
    Skipping,
    check_layers,
    empty_view,
    join_forwards,
    pass_layers,
)
from foretell.ops.attention import Attention

if TYPE_CHECKING:
    from foretell.core.model import Model

States = tuple[torch.Tensor, torch.Tensor]  # places (n,), and what their tokens enter with (n, E)


@dataclass(frozen=True)
class Lazyllm(KV):
    """Shares of a model's layers and of the tokens, and a count of tokens."""

    # share of the tokens that is dropped at each depth
    rate: Annotated[float, Range(0, 1, open_high=True)] = 0.3
    at: str = "0.3/0.6/0.9"  # depths: the share of the layers before each
    every: Annotated[int, Range(1)] = 1  # tokens between two choices

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            shares = self.shares
        except ValueError:
            shares = ()
        if not shares or sorted({*shares}) != [*shares] or not 0 < shares[0] <= shares[-1] < 1:
            allowed_values = "shares of the layers between 0 and 1, ascending, as in 0.3/0.6/0.9"
            raise BadConfig.field("lazyllm:at", repr(self.at), allowed_values)

    @property
    def shares(self) -> tuple[float, ...]:
        return tuple(float(share) for share in self.at.split("/"))

    def build_policy(self, target: Model) -> Dropping:
        self.check_target(target)
        layer_count = check_layers("lazyllm", target)
        cut_layers = {
            min(layer_count - 1, max(1, round(share * layer_count))) for share in self.shares
        }
        stage_ends = (*sorted(cut_layers), layer_count)
        return Dropping(
            stage_ends[0], layer_count, ends=stage_ends, rate=self.rate, every=self.every
        )


@dataclass(frozen=True)
class Stage:
    """The tokens of the layers between two depths, as they were when tokens were chosen last."""

    read_positions: torch.Tensor  # places of the tokens that are read, ascending
    has_rows: torch.Tensor  # bool: the tokens, by place, that have rows
    places: torch.Tensor  # of the tokens that have none but a stored state
    states: torch.Tensor  # (n, E), what these enter with


@dataclass
class Dropping(Skipping):
    """`ends`: of each stage the layer after it. All tokens pass the first, all that are new do."""

    ends: tuple[int, ...] = ()
    rate: float = 0.0
    every: int = 1
    length: int = 0  # of the text when tokens were chosen last
    stages: tuple[Stage, ...] = ()  # after the first; none: the prompt is not in
    pending_stages: tuple[Stage, ...] = ()  # by a forward that is not committed

    plain = False

    def begin_text(self, prompt: int) -> None:
        super().begin_text(prompt)
        self.length, self.stages, self.pending_stages = 0, (), ()

    @property
    def bytes(self) -> int:
        """Memory beside the rows, with the states of tokens that were dropped."""
        return super().bytes + bytes_of(stage.states for stage in self.stages)

    @property
    def leaves_out(self) -> bool:
        return self.rate > 0

    def room_left(self, length: int) -> int:
        """Tokens are chosen by the last one before such a length, which is alone in its forward."""
        if not self.leaves_out:
            return NEVER
        remaining_tokens = self.prompt - length
        remaining_tokens = (
            remaining_tokens
            if remaining_tokens > 0
            else self.every - -remaining_tokens % self.every
        )
        return max(1, remaining_tokens - 1)

    def chooses_at(self, job: Any) -> bool:
        tokens_beyond = job.positions[0] + 1 - self.prompt
        return self.leaves_out and tokens_beyond >= 0 and tokens_beyond % self.every == 0

    def runs_layers(self, job: Any) -> bool:
        all_layers = job.layers is None or [*job.layers] == [*range(self.layers)]
        return (all_layers and self.chooses_at(job)) or super().runs_layers(job)

    def keep_nodes(self, cache: Any, nodes: Sequence[int]) -> None:
        super().keep_nodes(cache, nodes)
        if self.pending_stages and nodes:
            self.stages, self.length = self.pending_stages, cache.length + 1
            self.waiting = None
        self.pending_stages = ()

    # --- between two choices

    def watches_job(self, job: Any) -> bool:
        return bool(self.stages)

    def attend_job(self, job: Any, attention: Attention) -> torch.Tensor:
        stage_index = sum(attention.layer >= end for end in self.ends)
        if not stage_index:
            return attention.full_output()
        chosen_rows = self.stages[stage_index - 1].read_positions
        new_rows = torch.arange(self.length, attention.keys.shape[1], device=chosen_rows.device)
        read_positions = torch.cat([chosen_rows, new_rows])
        read_mask = None if attention.mask is None else attention.mask[..., read_positions]
        keys, values = attention.keys[:, read_positions], attention.values[:, read_positions]
        return replace(attention, keys=keys, values=values, mask=read_mask).full_output()

    # --- choosing

    def run_layers(self, job: Any, taps: Sequence[int], run: Run) -> Computed:
        if not self.chooses_at(job):
            return super().run_layers(job, taps, run)
        (last_place,) = job.positions
        watched = copy.copy(job.cache)
        watched.policy = last_row = LastRow(self.cut_layer - 1)
        lower_job = replace(job, cache=watched, layers=(*range(self.cut_layer),), rows=[], follow=0)
        lower_taps = sorted({self.cut_layer, *(tap for tap in taps if tap < self.cut_layer)})
        parts = [run([lower_job], lower_taps)]
        hidden = dict(parts[0].hidden)
        state = hidden[self.cut_layer]
        present = torch.arange(last_place + 1, device=state.device)
        arriving: States = present[:0], state[:0]
        if self.waiting is not None:
            self.waiting.write_states(job.start - job.cache.base, {self.cut_layer: state})
            waiting = self.waiting.read_states((self.cut_layer,), 0, last_place)
            arriving = present[:last_place], waiting
        view = empty_view(job.cache, last_place + 1)
        new_stages: list[Stage] = []
        for number, (start, end) in enumerate(pairwise(self.ends)):
            present = last_row.going_on(present, self.rate)
            stage, held_rows, places, states = self.divide_tokens(
                number, last_place, present, arriving
            )
            places, states = torch.cat([places, present[-1:]]), torch.cat([states, state])
            last_row = LastRow(end - 1)
            watcher = last_row if end < self.layers else None
            stage_taps = sorted({end, *(tap for tap in taps if start < tap <= end)})
            layers = range(start, end)
            forwards = pass_layers(
                job, view, layers, held_rows, places, states, run, watcher, stage_taps
            )
            if watcher is not None:
                # The rows lie in another order there than in the text.
                assert last_row.scores is not None
                last_row.scores = last_row.scores[torch.cat([held_rows, places]).argsort()]
            hidden |= forwards[-1].hidden
            state = forwards[-1].hidden[end]
            end_states = [*(part.hidden[end] for part in forwards[:-1]), state[:0]]
            arriving = places[:-1], torch.cat(end_states)
            new_stages.append(stage)
            parts += forwards
        self.pending_stages = tuple(new_stages)
        return join_forwards(parts, hidden)

    def divide_tokens(
        self, number: int, last_place: int, kept_places: torch.Tensor, arriving: States
    ) -> tuple[Stage, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Divides the tokens kept up to this place: those that have rows in a stage, and those that
        enter it now, with their states; and what the stage will be. `arriving`: tokens that
        have come through the stage before it for the first time.
        """
        row_mask = torch.zeros(last_place + 1, dtype=torch.bool, device=kept_places.device)
        places, states = arriving
        if self.stages:
            earlier = self.stages[number]
            row_mask[: len(earlier.has_rows)] = earlier.has_rows
            row_mask[len(earlier.has_rows) :] = True
            places = torch.cat([earlier.places, places])
            states = torch.cat([earlier.states, states])
        row_mask[last_place] = False  # its own row is none yet
        position_order = places.argsort()
        places, states = places[position_order], states[position_order]
        going_mask = torch.zeros_like(row_mask)
        going_mask[kept_places] = True
        entering_mask = going_mask[places]
        held_rows = kept_places[row_mask[kept_places]]
        row_mask[places[entering_mask]] = True
        row_mask[last_place] = True
        stage = Stage(kept_places, row_mask, places[~entering_mask], states[~entering_mask])
        return stage, held_rows, places[entering_mask], states[entering_mask]
