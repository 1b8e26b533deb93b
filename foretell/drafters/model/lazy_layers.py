"""A draft model with exits, whose upper layers read a token only when some later token needs them.

An ask names the layers that are to have run for its last node, from the first on or from the exit
below. The cache knows how far every row is: those of the text so far that lack a layer are run
through it first, all at once and in order, from the hidden states that left the exit below. So
every layer runs once for a token, or never, and the rows are those of a forward through all layers.
What an exit has read of a rejected token is forgotten at all of them.

    rows        0 .......... base | base .................................. the last node asked for
    first exit  all               | all
    second      all               | up to the last node that went on, then none
    last        all               | up to the last node that went on to the end: these join `base`

Source: Kavehzadeh et al., "S2D: Sorted Speculative Decoding For More Efficient Deployment of Nested
Large Language Models" (arXiv 2407.01955).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from foretell.cache.buffers import Shape
from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.cache.states import NO_STATES
from foretell.core.model import Computed, Model
from foretell.core.types import Ask
from foretell.errors import Unsupported

if TYPE_CHECKING:
    from foretell.core.request import Request


@dataclass(slots=True)
class Running:
    """The forward that is being made: the layers up to each of these exits, over the scratch rows
    `start` to `end`.
    """

    first: int
    last: int
    start: int
    end: int
    tokens: list[int]  # of all scratch rows up to `end`


class LazyCache(Cache):
    """Rows of one branch, a chain, some of which lack the layers after some exit.

    `exits`: ascending numbers of layers, the last one all of them.
    """

    def __init__(
        self,
        layout: Sequence[Shape | None],
        dtype: torch.dtype,
        device: torch.device,
        exits: Sequence[int],
    ):
        self.exits = tuple(exits)
        super().__init__(layout, dtype, device)

    def _clear_scratch(self) -> None:
        super()._clear_scratch()
        self.running: Running | None = None
        # Of each exit, how many scratch rows have its layers: never more than of the one below.
        self.filled = [0] * len(self.exits)
        # Of each exit the states (n, E) that left it, of the rows that the next one lacks.
        self.waiting: list[torch.Tensor | None] = [None] * len(self.exits)

    def fork(self) -> LazyCache:
        twin = super().fork()
        assert isinstance(twin, LazyCache)
        twin.filled, twin.waiting = list(self.filled), list(self.waiting)
        return twin

    # --- what was accepted

    def commit(self, tokens: Sequence[int]) -> None:
        """Keeps the rows of the branch's tokens, as far as each of them is, and no others.

        Those that have all layers join the committed ones: they stand where they are to stand.
        """
        self._cut_scratch(_shared_prefix_length(self.tokens, tokens[self.length : len(tokens) - 1]))
        full_rows = self.filled[-1]
        self.length += full_rows
        self.base += full_rows
        self.tokens = self.tokens[full_rows:]
        self.filled = [count - full_rows for count in self.filled]
        self.running = None

    def sync(self, tokens: Sequence[int]) -> int:
        """Does what Cache.sync does; the branch lacks the rows that the first exit has not read."""
        if self.synced != len(tokens):
            self.commit(tokens)
        return max(0, len(tokens) - 1 - self.length - self.filled[0])

    def _cut_scratch(self, count: int) -> None:
        """Forgets the scratch rows after the first `count`."""
        self.filled = [min(filled_rows, count) for filled_rows in self.filled]
        self.tokens = self.tokens[:count]
        for exit_index, states in enumerate(self.waiting[:-1]):
            if states is not None:
                self.waiting[exit_index] = states[
                    : self.filled[exit_index] - self.filled[exit_index + 1]
                ]

    # --- what is to be computed

    def prepare(self, ask: Ask, tokens: Sequence[int], chunk: int) -> tuple[Job, bool]:
        """Does what Cache.prepare does, for an ask whose `layers` end with an exit; None: with the
        last.
        """
        lacking = self.sync(tokens)
        last_exit = self._exit_of(ask)
        preceding = tokens[self.length : len(tokens) - 1]
        requested_tokens = [*preceding, *ask.tree.tokens]
        known_count = _shared_prefix_length(self.tokens, requested_tokens)
        if ask.rows:
            # A row of logits comes with its node's forward alone.
            first_asked = len(preceding) + min(ask.rows)
            known_count = (
                min(known_count, first_asked)
                if first_asked < self.filled[last_exit]
                else known_count
            )
        self._cut_scratch(known_count)
        if self.filled[last_exit] == len(requested_tokens):
            # All is there: the tree is computed again.
            self._cut_scratch(len(preceding))
        self.synced = len(tokens)
        end_row, is_partial = len(requested_tokens), lacking > chunk
        start_row = self.filled[last_exit]
        first_exit = next(
            (exit_number for exit_number in range(last_exit) if self.filled[exit_number] < end_row),
            last_exit,
        )
        if self.filled[first_exit] > start_row:
            first_exit = 0  # rows were lost in the middle of a draft: all below is run again
        if is_partial:
            end_row, self.synced = max(self.filled[0], start_row) + chunk, 0
        self.reserve(self.base + end_row)
        self.running = Running(
            first_exit, last_exit, start_row, end_row, requested_tokens[:end_row]
        )
        lower_layer = 0 if first_exit == 0 else self.exits[first_exit - 1]
        job = self.job_type(
            cache=self,
            tokens=requested_tokens[start_row:end_row],
            scratch_positions=[self.length + row for row in range(end_row)],
            start=self.base + start_row,
            seen=None,
            rows=[],
            first=start_row - len(preceding),
            taps=(self.exits[last_exit],) if last_exit < len(self.exits) - 1 else (),
            layers=tuple(range(lower_layer, self.exits[last_exit])),
            states=self.waiting[first_exit - 1] if first_exit else None,
        )
        if not is_partial:
            new_rows = range(max(0, job.first), len(ask.tree))
            job.rows = [row - job.first for row in (new_rows if ask.rows is None else ask.rows)]
        return job, not is_partial

    def _exit_of(self, ask: Ask) -> int:
        is_plain = (
            ask.tree.is_chain and ask.states is None and ask.features is None and not ask.taps
        )
        assert is_plain, "a draft model with exits is asked for the rows of chains"
        top_layer = len(self.layout) - 1 if ask.layers is None else ask.layers[-1]
        assert isinstance(top_layer, int), "halves of layers are none of its"
        return self.exits.index(top_layer + 1)

    def finish(self, hidden: Mapping[int, torch.Tensor] = NO_STATES) -> None:
        running_forward = self.running
        assert running_forward is not None, "finished twice"
        if running_forward.first:
            self.waiting[running_forward.first - 1] = None  # all of them went on
        for exit_index in range(running_forward.first, running_forward.last):
            self.waiting[exit_index] = None
        self.filled[running_forward.first : running_forward.last + 1] = [running_forward.end] * (
            running_forward.last + 1 - running_forward.first
        )
        if running_forward.last < len(self.exits) - 1:
            # A copy, since a backend may write over what it returned.
            new_states = hidden[self.exits[running_forward.last]].clone()
            waiting_states = self.waiting[running_forward.last]
            self.waiting[running_forward.last] = (
                new_states if waiting_states is None else torch.cat([waiting_states, new_states])
            )
        self.tokens = running_forward.tokens
        self.running = None


def _shared_prefix_length(our_tokens: Sequence[int], their_tokens: Sequence[int]) -> int:
    """How many first tokens two texts have in common."""
    pairs = zip(our_tokens, their_tokens, strict=False)
    return next(
        (index for index, (a, b) in enumerate(pairs) if a != b),
        min(len(our_tokens), len(their_tokens)),
    )


class LazyLayers(Model):
    """A model whose caches are lazy in the layers after `exits`, ascending and the last one all.

    `base` computes it, by its own backend where that runs parts of the layers. Raises Unsupported,
    for `method`, where the layers cannot be run one by one.
    """

    def __init__(self, base: Model, exits: Sequence[int], method: str):
        # A model that it shows as a view, or computes elsewhere, has caches of another kind.
        if "layers" not in base.caps or None in base.layout:
            need = "layers that can be run one by one and all keep rows"
            raise Unsupported.missing_capability(method, base.name, need, "use the method draft")
        self.base = base
        self.exits = tuple(exits)
        self.name = f"{base.name}[exits {' '.join(map(str, exits))}]"
        self.vocab = base.vocab
        self.context = base.context
        self.layout = base.layout
        self.device = base.device
        self.caps = base.caps - {"tree", "parts", "taps"}
        self.tokenizer = base.tokenizer
        plain_cache = base.cache()
        # Rows in a backend's own memory are for forwards of all layers.
        self.dtype = plain_cache.dtype if type(plain_cache) is Cache else base.dtype

    @property
    def usual_backend(self) -> str:  # type: ignore[override]
        return self.base.usual_backend

    @property
    def most_jobs(self) -> int:  # type: ignore[override]
        return self.base.most_jobs

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        rows = LazyCache(self.layout, self.dtype, self.device, self.exits)
        return self.prepare_cache(rows, request, beside)

    def compute(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        self.base.threads_wanted = self.threads_wanted or self.base.threads_wanted
        return self.base.compute(jobs, taps)

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        return self.base.embed(tokens)
