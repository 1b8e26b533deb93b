"""Tokens that leave out layers: what policies are made of under which not all of a prompt passes
all layers.

    layers below the cut   all tokens, a piece of the prompt at a time; what leaves them waits
    layers from it on      once the prompt is in: the tokens that were chosen, at their positions

The prompt's last token is in the forward that chooses, so its logits are that forward's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from foretell.cache.job import Job
from foretell.cache.states import TappedStates
from foretell.core.model import Computed
from foretell.errors import Unsupported
from foretell.kv.base import CachePolicy, top_rows
from foretell.ops.attention import Attention

if TYPE_CHECKING:
    from foretell.core.model import Model

Run = Callable[[Sequence[Job], Sequence[int]], Computed]

PIECE = 512  # tokens of a forward of the layers from the cut on


def check_layers(name: str, target: Model) -> int:
    """How many layers a target has. Raises Unsupported where its tokens cannot leave out some."""
    layer_count = len(target.layout)
    if not (
        getattr(target, "skips", False) and {"layers", "taps"} <= target.caps and layer_count > 1
    ):
        missing_need = "two layers or more that can be run one by one"
        raise Unsupported.missing_capability(
            f"kv={name}", target.name, missing_need, "leave kv out"
        )
    return layer_count


@dataclass
class Skipping(CachePolicy):
    """Lets all tokens of a prompt pass the first `cut_layer` of `layers` layers, and only some the
    others.

    The last token's forward decides which, see `choose_tokens`. Scratch rows of the layers from the
    cut on hold nothing before it.
    """

    cut_layer: int = 0
    layers: int = 0
    waiting: TappedStates | None = None  # what enters the layer at the cut, of all tokens

    def begin_text(self, prompt: int) -> None:
        super().begin_text(prompt)
        self.waiting = TappedStates([self.cut_layer]) if self.leaves_out else None

    def fork(self) -> Skipping:
        twin = super().fork()
        assert isinstance(twin, Skipping)
        twin.waiting = None if self.waiting is None else self.waiting.fork()
        return twin

    @property
    def bytes(self) -> int:
        return super().bytes + (0 if self.waiting is None else self.waiting.bytes)

    def keep_nodes(self, cache: Any, nodes: Sequence[int]) -> None:
        super().keep_nodes(cache, nodes)
        if self.waiting is not None:
            self.waiting.keep_nodes(nodes)

    # --- what a policy decides

    @property
    def leaves_out(self) -> bool:
        """Whether any token of this prompt leaves out a layer."""
        raise NotImplementedError

    def goes_on(self, job: Any, taps: Sequence[int], run: Run) -> Computed:
        """The forward of the layers from the cut on, when the job that has the prompt's last token
        is through the layers below: its logits, and of each tap from the cut on the states of the
        job's own nodes, by place.
        """
        raise NotImplementedError

    # --- the layers below the cut

    def runs_layers(self, job: Any) -> bool:
        """All forwards of all layers over the prompt, and what is left of those that stopped."""
        if self.waiting is None or job.positions[0] >= self.prompt:
            return False
        job_layers = range(self.layers) if job.layers is None else job.layers
        resumes = job.states is not None and job_layers[0] <= self.cut_layer
        first_layer = job_layers[0] if resumes else 0
        return [*job_layers] == [*range(first_layer, self.layers)]

    def run_layers(self, job: Any, taps: Sequence[int], run: Run) -> Computed:
        assert self.waiting is not None
        lower_forward = self._run_below(job, taps, run)
        cut_states = lower_forward.hidden[self.cut_layer]
        self.waiting.write_states(job.start - job.cache.base, {self.cut_layer: cut_states})
        tap_states = {tap: lower_forward.hidden[min(tap, self.cut_layer)] for tap in taps}
        forward_parts = [lower_forward]
        if job.positions[-1] == self.prompt - 1:
            upper_forward = self.goes_on(job, [tap for tap in taps if tap > self.cut_layer], run)
            tap_states |= upper_forward.hidden
            forward_parts.append(upper_forward)
        return join_forwards(forward_parts, tap_states)

    def _run_below(self, job: Any, taps: Sequence[int], run: Run) -> Computed:
        """Runs the layers below the cut that the job has; the states of its nodes up to there."""
        first_layer = 0 if job.layers is None else job.layers[0]
        if first_layer == self.cut_layer:
            empty_logits = job.states.new_zeros(0, 1)
            return Computed(empty_logits, dict.fromkeys((*taps, self.cut_layer), job.states))
        needed_taps = sorted({self.cut_layer, *(tap for tap in taps if tap < self.cut_layer)})
        lower_job = replace(
            job, layers=tuple(range(first_layer, self.cut_layer)), rows=[], follow=0
        )
        return run([lower_job], needed_taps)


def piece_of(
    job: Any,
    start: int,
    token_positions: Sequence[int],
    states: torch.Tensor,
    layers: Sequence[int],
    watcher: CachePolicy | None = None,
) -> Job:
    """A job of tokens at these places of the text that enter `layers` with states (n, E). Their
    rows go after the first `start` of their cache, which they see, as they see each other: each
    those before it.
    """
    cache_view = copy.copy(job.cache)
    cache_view.base, cache_view.positions, cache_view.policy = start, None, watcher
    token_count = len(token_positions)
    return replace(
        job,
        cache=cache_view,
        tokens=[-1] * token_count,
        scratch_positions=list(token_positions),
        start=start,
        seen=None,
        rows=[],
        first=-token_count,
        layers=tuple(layers),
        states=states,
        known={},
        follow=0,
        masks={},
    )


def pass_layers(
    job: Any,
    view: Any,
    layers: Sequence[int],
    held_rows: torch.Tensor,
    token_positions: torch.Tensor,
    states: torch.Tensor,
    run: Run,
    watcher: CachePolicy | None,
    taps: Sequence[int],
) -> list[Computed]:
    """Makes the rows in `layers` of tokens at these places (n,), ascending, that enter with states
    (n, E). The job's own one is the last of them.

    Rows stand at their places in the job's cache. The tokens read each other and those `held_rows`,
    each what is before it. They are computed in `view`, a cache with empty buffers. Returned are
    the forwards, the last of the last token alone, under the `watcher`.
    """
    cache = job.cache
    held_count, last_index = len(held_rows), len(token_positions) - 1
    for layer in layers:
        for target_buffers, source_buffers in ((view.k, cache.k), (view.v, cache.v)):
            target_buffers[layer][:, :held_count] = source_buffers[layer][:, held_rows]
    view_job = replace(job, cache=view)
    position_order = torch.cat([held_rows, token_positions])
    forward_parts = []
    for piece_start in range(0, last_index, PIECE):
        piece_end = min(last_index, piece_start + PIECE)
        piece_positions = token_positions[piece_start:piece_end].tolist()
        piece = piece_of(
            view_job,
            held_count + piece_start,
            piece_positions,
            states[piece_start:piece_end],
            layers,
        )
        if held_count:
            # All rows are scratch rows to it: who sees whom is a matter of their places.
            piece.cache.base = 0
            piece.seen = (
                position_order[: held_count + piece_end]
                <= token_positions[piece_start:piece_end, None]
            ).cpu()
        forward_parts.append(run([piece], taps))
    piece = piece_of(
        view_job,
        held_count + last_index,
        token_positions[last_index:].tolist(),
        states[last_index:],
        layers,
        watcher,
    )
    piece.rows = [0] if job.rows and layers[-1] == len(cache.layout) - 1 else []
    forward_parts.append(run([piece], taps))
    for layer in layers:
        for target_buffers, source_buffers in ((cache.k, view.k), (cache.v, view.v)):
            target_buffers[layer][:, token_positions] = source_buffers[layer][
                :, held_count : held_count + last_index + 1
            ]
    return forward_parts


def join_forwards(parts: Sequence[Computed], hidden: dict[int, torch.Tensor]) -> Computed:
    """The forwards that made up one: the last one's logits, and these hidden states."""
    backend_names = dict.fromkeys(part.computed_by for part in parts if part.width)
    # A name of its own, as its time says nothing about forwards of all layers.
    forward_name = f"{'+'.join(backend_names)} (skipping)"
    return Computed(parts[-1].logits, hidden, forward_name, sum(part.width for part in parts))


def empty_view(cache: Any, rows: int) -> Any:
    """A cache of the same kind with buffers of its own, for so many rows."""
    view = copy.copy(cache)
    view.sharers = [1]
    view.begin_buffers(rows)
    return view


@dataclass
class LastRow(CachePolicy):
    """Takes note of what the last node of a job gives to all rows in one layer."""

    layer: int
    scores: torch.Tensor | None = None  # (rows,), the mean over all heads

    def watches_job(self, job: Any) -> bool:
        return True

    def attend_job(self, job: Any, attention: Attention) -> torch.Tensor:
        if attention.layer == self.layer:
            last_query = attention.q[:, -1:]
            last_mask = None if attention.mask is None else attention.mask[..., -1:, :]
            self.scores = replace(attention, q=last_query, mask=last_mask).weights()[:, 0].mean(0)
        return attention.full_output()

    def going_on(self, present_positions: torch.Tensor, rate: float) -> torch.Tensor:
        """The places of the tokens that go on, of those at these places, ascending: all but a share
        of those that got least. The last one always goes on.
        """
        assert self.scores is not None
        row_scores = self.scores.clone()
        row_scores[-1] = torch.inf
        going_count = len(present_positions) - int(rate * len(present_positions))
        return present_positions[top_rows(row_scores, going_count).sort().values]
