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
    """Rows of one branch, a chain, some of which lack the layers behind some exit.

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
        self._cut(_common(self.tokens, tokens[self.length : len(tokens) - 1]))
        whole = self.filled[-1]
        self.length += whole
        self.base += whole
        self.tokens = self.tokens[whole:]
        self.filled = [count - whole for count in self.filled]
        self.running = None

    def sync(self, tokens: Sequence[int]) -> int:
        """As Cache.sync; it lacks those that the first exit has not read."""
        if self.synced != len(tokens):
            self.commit(tokens)
        return max(0, len(tokens) - 1 - self.length - self.filled[0])

    def _cut(self, count: int) -> None:
        """Forgets the scratch rows behind the first `count`."""
        self.filled = [min(filled, count) for filled in self.filled]
        self.tokens = self.tokens[:count]
        for place, states in enumerate(self.waiting[:-1]):
            if states is not None:
                self.waiting[place] = states[: self.filled[place] - self.filled[place + 1]]

    # --- what is to be computed

    def prepare(self, ask: Ask, tokens: Sequence[int], chunk: int) -> tuple[Job, bool]:
        """As Cache.prepare, for an ask whose `layers` end with an exit; None: with the last one."""
        lacking = self.sync(tokens)
        last = self._exit_of(ask)
        before = tokens[self.length : len(tokens) - 1]
        wanted = [*before, *ask.tree.tokens]
        known = _common(self.tokens, wanted)
        if ask.rows:
            # A row of logits comes with its node's forward alone.
            asked = len(before) + min(ask.rows)
            known = min(known, asked) if asked < self.filled[last] else known
        self._cut(known)
        if self.filled[last] == len(wanted):  # all is there: the tree is computed again
            self._cut(len(before))
        self.synced = len(tokens)
        end, part = len(wanted), lacking > chunk
        start = self.filled[last]
        first = next((e for e in range(last) if self.filled[e] < end), last)
        if self.filled[first] > start:
            first = 0  # rows were lost in the middle of a draft: all below is run again
        if part:
            end, self.synced = max(self.filled[0], start) + chunk, 0
        self.reserve(self.base + end)
        self.running = Running(first, last, start, end, wanted[:end])
        below = 0 if first == 0 else self.exits[first - 1]
        job = self.job_type(
            cache=self,
            tokens=wanted[start:end],
            scratch_positions=[self.length + row for row in range(end)],
            start=self.base + start,
            seen=None,
            rows=[],
            first=start - len(before),
            taps=(self.exits[last],) if last < len(self.exits) - 1 else (),
            layers=tuple(range(below, self.exits[last])),
            states=self.waiting[first - 1] if first else None,
        )
        if not part:
            new = range(max(0, job.first), len(ask.tree))
            job.rows = [row - job.first for row in (new if ask.rows is None else ask.rows)]
        return job, not part

    def _exit_of(self, ask: Ask) -> int:
        plain = ask.tree.is_chain and ask.states is None and ask.features is None and not ask.taps
        assert plain, "a draft model with exits is asked for the rows of chains"
        top = len(self.layout) - 1 if ask.layers is None else ask.layers[-1]
        assert isinstance(top, int), "halves of layers are none of its"
        return self.exits.index(top + 1)

    def finish(self, hidden: Mapping[int, torch.Tensor] = NO_STATES) -> None:
        run = self.running
        assert run is not None, "finished twice"
        if run.first:
            self.waiting[run.first - 1] = None  # all of them went on
        for place in range(run.first, run.last):
            self.waiting[place] = None
        self.filled[run.first : run.last + 1] = [run.end] * (run.last + 1 - run.first)
        if run.last < len(self.exits) - 1:
            # A copy, since an executor may write over what it returned.
            new = hidden[self.exits[run.last]].clone()
            held = self.waiting[run.last]
            self.waiting[run.last] = new if held is None else torch.cat([held, new])
        self.tokens = run.tokens
        self.running = None


def _common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many first tokens two texts have in common."""
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


class LazyLayers(Model):
    """A model whose caches are lazy in the layers behind `exits`, ascending and the last one all.

    `base` computes it, by its own executor where that runs parts of the layers. Raises Unsupported,
    for `method`, where the layers cannot be run one by one.
    """

    def __init__(self, base: Model, exits: Sequence[int], method: str):
        # A model that it shows as a view, or computes elsewhere, has caches of another kind.
        if "layers" not in base.caps or None in base.layout:
            need = "layers that can be run one by one and all keep rows"
            raise Unsupported.missing(method, base.name, need, "use the method draft")
        self.base = base
        self.exits = tuple(exits)
        self.name = f"{base.name}[exits {' '.join(map(str, exits))}]"
        self.vocab = base.vocab
        self.context = base.context
        self.layout = base.layout
        self.device = base.device
        self.caps = base.caps - {"tree", "parts", "taps"}
        self.tokenizer = base.tokenizer
        usual = base.cache()
        # Rows in an executor's own memory are for forwards of all layers.
        self.dtype = usual.dtype if type(usual) is Cache else base.dtype

    @property
    def usual_executor(self) -> str:  # type: ignore[override]
        return self.base.usual_executor

    @property
    def most_jobs(self) -> int:  # type: ignore[override]
        return self.base.most_jobs

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        rows = LazyCache(self.layout, self.dtype, self.device, self.exits)
        return self.prepared(rows, request, beside)

    def compute(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        self.base.threads_wanted = self.threads_wanted or self.base.threads_wanted
        return self.base.compute(jobs, taps)

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        return self.base.embed(tokens)
