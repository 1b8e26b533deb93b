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

    `base` computes it, by its own backend where that leaves attention to policies.
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
    def usual_backend(self) -> str:  # type: ignore[override]
        backend = getattr(self.base, "backend", None)
        return self.base.usual_backend if getattr(backend, "takes_watched", False) else "torch"

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        cache = ViewedCache(self.layout, self.dtype, self.device)
        cache.use(self.policy)
        # What it knows of rows grows between drafts, and changes no distribution.
        assert cache.policy is not None
        cache.policy.waits = True
        return self.prepare_cache(cache, request, beside)

    def compute(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        return self.base.compute(jobs, taps)

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        return self.base.embed(tokens)


class ViewedCache(Cache):
    """The rows of the cache `beside`, and after them those of a draft, which are never kept."""

    beside: Cache
    sharable = False

    # The rows of the cache beside it are its rows.
    keys = property(lambda self: self.beside.keys)  # type: ignore[assignment]
    values = property(lambda self: self.beside.values)  # type: ignore[assignment]
    k = property(lambda self: self.beside.k)  # type: ignore[assignment]
    v = property(lambda self: self.beside.v)  # type: ignore[assignment]

    def _allocate(self) -> None:
        """Does nothing: the cache has no memory of its own."""

    def begin_buffers(self, rows: int) -> None:
        """Does nothing: the buffers are those of the cache beside it."""

    def reserve(self, rows: int) -> None:
        """Rows of the running draft outlive a growth of the buffers, as those of the text do."""
        used_rows = max(self.beside.base + len(self.beside.tokens), self.base + len(self.tokens))
        self.beside.grow_buffers(rows, used_rows)

    @property
    def bytes(self) -> int:
        """Bytes of the draft's rows, and of what its policy knows of the others."""
        policy_bytes = 0 if self.policy is None else self.policy.bytes
        return len(self.tokens) * row_bytes(self.layout, self.dtype) + policy_bytes

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
        beside.unshare_rows()
        self._clear_scratch()
        if beside.length < self.length:  # they were given up, and computed again
            self.forget()
        assert self.policy is not None
        new_rows = beside.base - self.base
        if new_rows:
            self.policy.keep_nodes(self, range(new_rows))
        self.length, self.base = beside.length, beside.base
        if self.length >= self.changes_at:
            self.policy.change_rows(self)
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
    """Reads in all tokens of a draft what `inner` selects for the last committed token.

    Source: TriForce (arXiv 2404.11912), section 4.1: what is chosen serves many drafting steps.
    """

    inner: Selecting
    # Of each layer which committed rows are read, bool (H or KV, 1, base).
    root_rows: dict[int, torch.Tensor] = field(default_factory=dict)
    watched: bool = False  # whether anything is left out of this draft

    def begin_text(self, prompt: int) -> None:
        super().begin_text(prompt)
        self.inner.begin_text(prompt)
        self.root_rows = {}

    def fork(self) -> Once:
        twin = super().fork()
        assert isinstance(twin, Once)
        inner = self.inner.fork()
        assert isinstance(inner, Selecting)
        twin.inner, twin.root_rows = inner, dict(self.root_rows)
        return twin

    def room_left(self, length: int) -> int:
        return self.inner.room_left(length)

    def keep_nodes(self, cache: Any, nodes: Sequence[int]) -> None:
        self.root_rows = {}
        self.inner.keep_nodes(cache, nodes)

    def change_rows(self, cache: Any) -> None:
        self.inner.change_rows(cache)

    @property
    def bytes(self) -> int:
        return self.inner.bytes

    def watches_job(self, job: Any) -> bool:
        if job.first <= 0:
            self.watched = self.inner.watches_job(job)
        return self.watched

    def select_rows(self, job: Any, attention: Attention) -> torch.Tensor:
        base, rows = job.cache.base, attention.keys.shape[1]
        if job.first <= 0:
            self.root_rows[attention.layer] = self._select_for_root(job, attention)[..., :base]
        known_rows = self.root_rows[attention.layer]
        drafted_rows = known_rows.new_ones(len(known_rows), 1, rows - base)
        return torch.cat([known_rows, drafted_rows], -1).expand(-1, attention.q.shape[1], -1)

    def _select_for_root(self, job: Any, attention: Attention) -> torch.Tensor:
        """Which rows the tree's root reads, bool (H or KV, 1, rows)."""
        root_range = slice(-job.first, 1 - job.first)
        mask = None if attention.mask is None else attention.mask[..., root_range, :]
        selected_rows = self.inner.select_rows(
            job, replace(attention, q=attention.q[:, root_range], mask=mask)
        )
        if isinstance(selected_rows, Listed):
            return selected_rows.mask_rows(attention.keys.shape[1])
        assert selected_rows is not None, "a policy that watches selects"
        return selected_rows


def build_viewed(target: Model, kv: KV, method: str, per_draft: bool = False) -> Viewed:
    """`target` over the rows of its own caches that the policy reads; `per_draft`: over those that
    it reads for the last token. Raises BadConfig for a policy that is no view, Unsupported for a
    target without such rows.
    """
    check_whole(method.partition(":")[0], target)
    policy = kv.build_view(target)
    if not isinstance(policy, Selecting):
        allowed_values = (
            "a policy that reads a part of the rows and keeps all, such as quest, double-sparsity "
            "or streaming-llm: others change them"
        )
        raise BadConfig.field(method, kv.name, allowed_values)
    return Viewed(target, once_per_draft(policy, per_draft), f"rows by {kv.name}")


def check_whole(method_name: str, target: Model) -> None:
    """Raises Unsupported for a target that has not all of a text in rows of every layer."""
    cure = "use the method suffix"
    check_rows(method_name, target, cure)
    if target.state_bytes:
        missing_need = "a target without recurrent layers, whose states cannot be read in part"
        raise Unsupported.missing_capability(method_name, target.name, missing_need, cure)


def once_per_draft(policy: Selecting, per_draft: bool) -> Selecting:
    """The policy, or what it selects once a draft."""
    return Once(policy.dense, policy) if per_draft else policy
