"""A model as the engine sees it: `forward(jobs)`, one packed forest of every request's new nodes.

All jobs lie in one row of T tokens, without padding. A model computes what is local to a token as
it likes; attention is here: each job's keys and values go to its own cache, and its nodes see that
cache's rows under the job's mask. What a model can do is asked of `caps`:

    tree    branching jobs          rows      logits that a drafter can learn from
    taps    hidden states           layers    layer subsets, entry with given states
    parts   the halves of a layer, attention and MLP, each alone
    rollback  any scratch rows can be forgotten; else (recurrent states) chains only
    source  it reads a request's inputs["source"], token ids, beside the text
    pictures  it reads a request's inputs["pictures"] where its tokens stand for them
    blocks  the nodes of a tree, which is a block then, see each other
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from foretell.cache.buffers import Shape, row_bytes
from foretell.cache.cache import Cache
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Reply
from foretell.ops.attention import LayerQuery
from foretell.ops.threads import one_at_a_time

if TYPE_CHECKING:
    from foretell.cache.job import Job
    from foretell.core.request import Request
    from foretell.ops.attention import Bias

STEP: ContextVar[Sequence[Job]] = ContextVar("foretell_step")  # the jobs of the running forward


def forest_attention(
    layer: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    bias: Bias | None = None,
) -> torch.Tensor:
    """Packed q (H, T, D), k, v (KV, T, D) of the running step -> (T, H, D), job by job.

    `bias` is added to the scores: (query positions (n,), key positions (rows,)) -> (heads or 1, n,
    rows), for families that tell positions apart in attention (ALiBi).
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    query = LayerQuery(layer, q, k, v, scale, window, softcap, sinks, bias)
    jobs = STEP.get()
    if len(jobs) == 1:
        return jobs[0].attend(query)
    outs = []
    start = 0
    for job in jobs:
        end = start + len(job.tokens)
        outs.append(job.attend(query.part(start, end)))
        start = end
    return torch.cat(outs)


@dataclass(slots=True)
class Computed:
    """Results of a forward of some jobs, in their order."""

    logits: torch.Tensor  # (all wanted rows, V)
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)  # of each tap (new nodes, E)
    computed_by: str = "torch"
    width: int = 0  # tokens computed, with those that only fill a forward up
    # Of each job its Reply's `followed`; empty: nothing followed.
    followed: Sequence[list[tuple[int, float, int]]] = ()
    forwards: int = 1  # with those of what followed


class Model:
    """The base of every adapter, which sets these fields and overrides `run`."""

    name: str
    vocab: int
    context: int  # longest sequence, in tokens
    layout: tuple[Shape | None, ...]  # of each layer; None: it keeps no cache rows
    dtype: torch.dtype
    device: torch.device
    caps: frozenset[str] = frozenset({"tree", "rows", "rollback"})
    feeds: tuple[int, ...] = ()  # taps of the target that its nodes read beside their tokens
    lag = 1  # how far before its own token the one is whose taps a node reads: 0 or 1
    copies_rows = False  # whether its caches take their rows from the target's
    learns = False  # whether it makes further copies of its weights while it serves
    reads = 0  # so many of a prompt's tokens at most, the last ones; 0: all of them
    tokenizer: Any = None  # what its texts are made with, where that is known
    usual_backend = "torch"  # who computes its plain jobs
    most_jobs = 0  # how many of them in one forward, 0: any number; more are torch's
    reads_segments = True  # whether these may begin with rows that others share
    weight_bytes = 0
    mask_copies = 1  # masks of a forward that are kept, those of heads that share keys together
    state_bytes = 0  # of what its caches hold of a text besides rows
    tap_bytes = 0  # of one hidden state of a token
    fed_bytes = 0  # of the hidden states of a token that the target's cache keeps for it
    threads_wanted = 0  # to compute with; 0: as many as torch has
    recipe: Mapping[str, Any] | None = None  # by which a worker makes the same: engine/remote.py
    calls = 0  # forwards so far
    width = 0  # tokens that the last one computed
    took = 1  # forwards that it was, with those of what followed
    computed_by = "torch"  # the last one

    @property
    def reads_target(self) -> bool:
        """Whether its caches need the target's cache of the same branch beside them."""
        return bool(self.feeds) or self.copies_rows

    def backend_of(self, jobs: int) -> str:
        """Name of the backend that computes a forward of so many plain jobs."""
        return "torch" if 0 < self.most_jobs < jobs else self.usual_backend

    @property
    def row_bytes(self) -> int:
        """Bytes of the cache rows of one token."""
        return row_bytes(self.layout, self.dtype)

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        first: Job,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """ids, positions (1, T), rows (R,) -> logits (R, V), hidden[i] (T, E) of each tap i.

        `first`: one of the jobs in STEP, all of which have the same layers.
        """
        raise NotImplementedError

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """States (n, E) that enter layer 0 for these tokens. Models that can `layers` have it."""
        raise NotImplementedError

    def head_rows(self, h: torch.Tensor) -> torch.Tensor:
        """Rows (n, V) that norm and head make of states (n, E) after any layer. As `embed`."""
        raise NotImplementedError

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        """An empty cache for one branch of `request`.

        `beside`: the target's cache of that branch, where this model reads it.
        """
        return self.prepare_cache(Cache(self.layout, self.dtype, self.device), request, beside)

    def prepare_cache(self, cache: Cache, request: Request | None, beside: Cache | None) -> Cache:
        """The new cache with what every cache is told."""
        if request is not None:
            cache.inputs = request.inputs
            if request.room is not None:
                cache.begin_buffers(request.room.rows)
        if self.reads_target and beside is not None:
            cache.beside, cache.feeds, cache.lag = beside, self.feeds, self.lag
        return cache

    def compute(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        """Runs a packed forward by `run`; the jobs have the same layers, and all or none states."""
        ids = [token for job in jobs for token in job.tokens]
        positions = [position for job in jobs for position in job.positions]
        rows = []
        start = 0
        for job in jobs:
            rows += [start + row for row in job.rows]
            start += len(job.tokens)
        previous = STEP.set(jobs)
        try:
            logits, hidden = self.run(
                torch.tensor([ids], device=self.device),
                torch.tensor([positions], device=self.device),
                torch.tensor(rows, dtype=torch.long, device=self.device),
                jobs[0],
                taps,
            )
        finally:
            STEP.reset(previous)
        return Computed(logits, hidden, "torch", len(ids))

    @one_at_a_time
    def forward(self, jobs: Sequence[Job]) -> list[Reply]:
        """Runs one forward of these jobs, and returns a Reply each. Writes their cache rows."""
        taps = sorted({tap for job in jobs for tap in job.taps})
        computed = self.compute(jobs, taps)
        self.calls += 1
        self.width = computed.width
        self.computed_by, self.took = computed.computed_by, computed.forwards
        logits = computed.logits
        if logits.dtype != torch.float64:
            logits = logits.float()
        replies = []
        row = 0
        start = 0
        for number, job in enumerate(jobs):
            end = start + len(job.tokens)
            hidden = {tap: computed.hidden[tap][start:end] for tap in job.taps} | dict(job.known)
            job.cache.finish(hidden)
            followed = computed.followed[number] if computed.followed else []
            if not self.feeds:
                job.cache.extend([token for token, _, _ in followed[:-1]])
            reply = Reply(
                logits=logits[row : row + len(job.rows)],
                hidden=hidden,
                nodes=[r + job.first for r in job.rows],
                new=list(range(job.first, job.first + len(job.tokens))),
                followed=followed,
                computed_by=computed.computed_by,
            )
            replies.append(reply)
            row += len(job.rows)
            start = end
        return replies

    @torch.inference_mode()
    def score(self, tokens: Sequence[int], tree: TokenTree | None = None) -> torch.Tensor:
        """Rows (N, V) of a tree below `tokens`, from an empty cache: a reference for audits."""
        ask = Ask(tree or TokenTree(tokens[-1]))
        job, _ = self.cache().prepare(ask, tokens, len(tokens))
        return self.forward([job])[0].logits
