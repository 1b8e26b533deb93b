"""A model that reads its own cache through a selecting policy: a quick draft of the model itself.

    rows   0 ............ base-1 | base ....
           the model's own       | the draft's, until the model makes room for its next forward
           read by selection     | read by what follows them

Nothing is copied: the rows are those of the model's cache, and a draft's stand where the next tree
of the model will be written. The model takes none of them for its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from foretell.cache.buffers import row_bytes
from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.core.model import Computed, Model
from foretell.errors import BadConfig, Unsupported
from foretell.kv.base import KV, check_rows
from foretell.kv.select.base import Selecting
from foretell.ops.attention import Attention
from foretell.ops.row_attention import Listed

if TYPE_CHECKING:
    from foretell.core.request import Request
    from foretell.core.types import Ask


class Viewed(Model):
    """The model `base` over those rows of its caches that `policy` selects.

    `base` computes it, by its own executor where that leaves attention to policies.
    """

    copies_rows = True

    def __init__(self, base: Model, policy: Selecting, name: str):
        self.base = base
        self.policy = policy
        self.name = f"{base.name}[{name}]"
        self.vocab = base.vocab
        self.context = base.context
        self.layout = base.layout
        self.dtype = base.dtype
        self.device = base.device
        self.caps = base.caps - {"layers", "parts", "taps"}
        self.tokenizer = base.tokenizer

    @property
    def usual_executor(self) -> str:  # type: ignore[override]
        executor = getattr(self.base, "executor", None)
        return self.base.usual_executor if getattr(executor, "takes_watched", False) else "torch"

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        cache = ViewedCache(self.layout, self.dtype, self.device)
        cache.use(self.policy)
        # What it knows of rows grows between drafts, and changes no law.
        assert cache.policy is not None
        cache.policy.waits = True
        return self.prepared(cache, request, beside)

    def compute(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        return self.base.compute(jobs, taps)

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        return self.base.embed(tokens)


class ViewedCache(Cache):
    """The rows of the cache `beside`, and behind them those of a draft, which are never kept."""

    beside: Cache
    sharable = False

    # The rows of the cache beside it are its rows.
    keys = property(lambda self: self.beside.keys)  # type: ignore[assignment]
    values = property(lambda self: self.beside.values)  # type: ignore[assignment]
    k = property(lambda self: self.beside.k)  # type: ignore[assignment]
    v = property(lambda self: self.beside.v)  # type: ignore[assignment]

    def _allocate(self) -> None:
        """It has no memory of its own."""

    def begin(self, rows: int) -> None:
        """The same."""

    def reserve(self, rows: int) -> None:
        """Rows of the running draft outlive a growth of the buffers, as those of the text do."""
        used = max(self.beside.base + len(self.beside.tokens), self.base + len(self.tokens))
        self.beside.grow(rows, used)

    @property
    def bytes(self) -> int:
        """Of the draft's rows, and of what its policy knows of the others."""
        held = 0 if self.policy is None else self.policy.bytes
        return len(self.tokens) * row_bytes(self.layout, self.dtype) + held

    @property
    def allocated(self) -> int:
        """The draft's rows lie in the buffers of the cache beside it."""
        return 0 if self.policy is None else self.policy.bytes

    def fork(self) -> Cache:
        twin = super().fork()
        twin._clear_scratch()  # its rows stay with the text that it is a copy of
        return twin

    def commit(self, tokens: Sequence[int]) -> None:
        """Takes note of the rows that came since."""
        beside = self.beside
        beside.commit(tokens)
        beside.own()
        self._clear_scratch()
        if beside.length < self.length:  # they were given up, and computed again
            self.forget()
        assert self.policy is not None
        fresh = beside.base - self.base
        if fresh:
            self.policy.keep(self, range(fresh))
        self.length, self.base = beside.length, beside.base
        if self.length >= self.changes_at:
            self.policy.change(self)
            self._plan_change()

    def prepare(self, ask: Ask, tokens: Sequence[int], chunk: int) -> tuple[Job, bool]:
        self.sync(tokens)
        if self.beside.tokens or self.beside.guest is not self:
            self.commit(tokens)  # the rows of its draft were written over, or others will be
        prepared = super().prepare(ask, tokens, chunk)
        self.beside.guest = self
        return prepared


@dataclass
class Once(Selecting):
    """What `inner` selects for the last committed token, for all tokens of a draft.

    Source: TriForce (arXiv 2404.11912), section 4.1: what is chosen serves many drafting steps.
    """

    inner: Selecting
    # Of each layer which committed rows are read, bool (H or KV, 1, base).
    found: dict[int, torch.Tensor] = field(default_factory=dict)
    watched: bool = False  # whether anything is left out of this draft

    def begin(self, prompt: int) -> None:
        super().begin(prompt)
        self.inner.begin(prompt)
        self.found = {}

    def fork(self) -> Once:
        twin = super().fork()
        assert isinstance(twin, Once)
        inner = self.inner.fork()
        assert isinstance(inner, Selecting)
        twin.inner, twin.found = inner, dict(self.found)
        return twin

    def room(self, length: int) -> int:
        return self.inner.room(length)

    def keep(self, cache: Any, nodes: Sequence[int]) -> None:
        self.found = {}
        self.inner.keep(cache, nodes)

    def change(self, cache: Any) -> None:
        self.inner.change(cache)

    @property
    def bytes(self) -> int:
        return self.inner.bytes

    def watches(self, job: Any) -> bool:
        if job.first <= 0:
            self.watched = self.inner.watches(job)
        return self.watched

    def reads(self, job: Any, asked: Attention) -> torch.Tensor:
        base, rows = job.cache.base, asked.keys.shape[1]
        if job.first <= 0:
            self.found[asked.layer] = self._of_root(job, asked)[..., :base]
        known = self.found[asked.layer]
        drafted = known.new_ones(len(known), 1, rows - base)
        return torch.cat([known, drafted], -1).expand(-1, asked.q.shape[1], -1)

    def _of_root(self, job: Any, asked: Attention) -> torch.Tensor:
        """Which rows the tree's root reads, bool (H or KV, 1, rows)."""
        root = slice(-job.first, 1 - job.first)
        mask = None if asked.mask is None else asked.mask[..., root, :]
        read = self.inner.reads(job, replace(asked, q=asked.q[:, root], mask=mask))
        if isinstance(read, Listed):
            return read.read(asked.keys.shape[1])
        assert read is not None, "a policy that watches selects"
        return read


def viewed(target: Model, kv: KV, method: str, once: bool = False) -> Viewed:
    """`target` over the rows of its own caches that the policy reads; `once`: over those that it
    reads for the last token. Raises BadConfig for a policy that is no view, Unsupported for a
    target without such rows.
    """
    check_whole(method.partition(":")[0], target)
    policy = kv.view(target)
    if not isinstance(policy, Selecting):
        allowed = (
            "a policy that reads a part of the rows and keeps all, such as quest, double-sparsity "
            "or streaming-llm: others change them"
        )
        raise BadConfig.field(method, kv.name, allowed)
    return Viewed(target, over(policy, once), f"rows by {kv.name}")


def check_whole(what: str, target: Model) -> None:
    """Raises Unsupported for a target that has not all of a text in rows of every layer."""
    cure = "use the method suffix"
    check_rows(what, target, cure)
    if target.state_bytes:
        need = "a target without recurrent layers, whose states cannot be read in part"
        raise Unsupported.missing(what, target.name, need, cure)


def over(policy: Selecting, once: bool) -> Selecting:
    """The policy, or what it selects once a draft."""
    return Once(policy.dense, policy) if once else policy
