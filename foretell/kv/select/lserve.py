"""Half of the heads see the first and last rows alone, the others read pages that may matter.

Which heads stream is told by gates, as for duo-attention. Of every part of a page the extremes of
each key channel are known: they bound what a query can give to any key of it, and a page is as good
as its best part. Behind the prompt each other head reads the pages of the highest bounds and the
newest one; a choice holds for `reuse` tokens. Rows that leave the cache are kept in 8 bits.

Paper: Yang et al., LServe: Efficient Long-sequence LLM Serving with Unified Sparse Attention,
arXiv:2502.14866
Guarantee: lossy: some heads give up rows, others leave some out, rows are rounded; with drafts the
text is the one without them
Cost: target 1
Needs: cache rows of every layer, of all of the text, and gates of the model's key heads
Trains: gates, by `foretell train gates`; some ship for smollm2
Try: --model smollm2 --kv lserve
Differs:
- a streaming head sees its rows exactly; in the published code whole pages of them
- each query head chooses pages for itself, as in Quest
- tokens choose whose place is a multiple of `reuse`, and the first one behind the prompt; others of
a draft follow those above them
- rows are rounded when they leave the cache, each by its own range; the paper scales whole tensors,
and rounds weights and activations too
- torch computes it, and reads all rows that are held: no time is saved yet
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from foretell.errors import BadConfig
from foretell.kv.base import KV, bytes_of, check_budget
from foretell.kv.select.coded import Coded, bounds_of
from foretell.kv.select.gates import check_sparsity, streaming_of
from foretell.kv.select.paging import extremes, inherited, upper
from foretell.kv.select.ragged import Ragged, hiding, places
from foretell.ops.attention import Attention

if TYPE_CHECKING:
    from foretell.core.model import Model

LEAST = 3  # pages that are read at least


@dataclass(frozen=True)
class Lserve(KV):
    """Counts of rows and tokens, and the share of heads."""

    budget: int = 4096  # rows in whole pages that a query head reads
    sparsity: float = 0.5  # share of the key heads that stream; 0: none, and no gates are read
    sinks: int = 128  # first rows that they see
    recent: int = 256  # last rows that they see behind the prompt
    prompt: int = 8192  # last rows that they see in it
    page: int = 64  # rows
    part: int = 16  # rows of a page that are bounded together
    reuse: int = 4  # tokens that a choice of pages holds for
    bits: int = 8  # of the rows that left the cache: 8, or 16: they are as they were
    gates: str = ""  # a file or a folder; else those that ship

    def __post_init__(self) -> None:
        check_sparsity("lserve", self.sparsity)
        if self.page < 1:
            raise BadConfig.field("lserve:page", self.page, "at least 1 row")
        for name in ("sinks", "recent", "prompt", "budget"):
            value = getattr(self, name)
            if value % self.page or value < (0 if name == "sinks" else self.page):
                raise BadConfig.field(f"lserve:{name}", value, f"whole pages of {self.page}")
        for name in ("part", "reuse"):
            value = getattr(self, name)
            if value < 1 or self.page % value:
                raise BadConfig.field(f"lserve:{name}", value, f"a divisor of {self.page}")
        if self.prompt < self.recent:
            raise BadConfig.field("lserve:prompt", self.prompt, f"at least {self.recent}")
        if self.bits not in (8, 16):
            raise BadConfig.field("lserve:bits", self.bits, "8 or 16")
        check_budget("lserve", self.budget, LEAST * self.page, f"{LEAST} pages of {self.page}")

    def policy(self, target: Model) -> Served:
        self.fits(target)
        made = Served(self.sinks, self.recent, self.page, in_prompt=self.prompt, bits=self.bits)
        made.streaming = streaming_of(target, self.sparsity, self.gates, "kv=lserve")
        made.count, made.part, made.reuse = self.budget // self.page, self.part, self.reuse
        return made


@dataclass
class Served(Ragged):
    """A block is a page. `bounds`: of each layer's other heads (2, KV, parts, D)."""

    count: int = 0  # pages that a query head reads
    part: int = 1
    reuse: int = 1
    in_prompt: int = 0
    bits: int = 16
    bounds: Mapping[int, torch.Tensor] = field(default_factory=dict)
    # Pages chosen by the other query heads of each layer, bool: what holds for the newest
    # committed token (H, pages), and for the scratch rows (H, rows, pages).
    chosen: Mapping[int, torch.Tensor] = field(default_factory=dict)
    pending: Mapping[int, torch.Tensor] = field(default_factory=dict)
    choosing: tuple[Any, list[int]] | None = None  # of the last job, see `_sources`
    read: torch.Tensor | None = None  # pages that the running layer's nodes read (H, n, pages)

    @property
    def leaves(self) -> bool:
        return self.bits < 16 or super().leaves

    def last(self, length: int) -> int:
        return self.in_prompt if length < self.prompt else self.recent

    def clear(self) -> None:
        super().clear()
        self.bounds, self.chosen, self.pending = {}, {}, {}
        self.choosing, self.read = None, None

    @property
    def bytes(self) -> int:
        return super().bytes + bytes_of(self.bounds.values())

    def selects(self, length: int) -> bool:
        return length >= self.prompt and length // self.block >= self.count

    def room(self, length: int) -> int:
        if length < self.prompt:
            return min(super().room(length), self.prompt - length)
        return self.block - length % self.block

    def watches(self, job: Any) -> bool:
        return super().watches(job) or self.selects(job.cache.length)

    # --- what is committed

    def change(self, cache: Any) -> None:
        gone = cache.length - cache.base
        end = cache.length // self.block * self.block - gone
        bounds = dict(self.bounds)
        for layer, streaming in enumerate(self.streaming):
            known = bounds.get(layer)
            first = 0 if known is None else known.shape[1] * self.part - gone
            if end > first and not bool(streaming.all()):
                keys = cache.k[layer][~streaming, first:end]
                made = extremes(keys, self.part) if self.bits == 16 else bounds_of(keys, self.part)
                bounds[layer] = made if known is None else torch.cat([known, made], 1)
        self.bounds = bounds
        super().change(cache)

    def joined(self, held: Any, keys: torch.Tensor, values: torch.Tensor) -> Any:
        if self.bits == 16:
            return super().joined(held, keys, values)
        new = Coded.of(keys, values)
        return new if held is None else held.followed(new)

    def keep(self, cache: Any, nodes: Sequence[int]) -> None:
        if nodes and self.pending:
            chosen = {layer: own[:, nodes[-1]].clone() for layer, own in self.pending.items()}
            self.chosen = {**self.chosen, **chosen}
        self.pending, self.read = {}, None

    # --- what is read

    def attend(self, job: Any, asked: Attention) -> torch.Tensor:
        others = self.others(asked)
        chooses = self.selects(job.cache.length) and bool(others.any())
        self.read = self._reads(job, asked.layer, asked.q[others]) if chooses else None
        self.masks = {}  # as pages differ from layer to layer
        return super().attend(job, asked)

    def seen(self, job: Any, asked: Attention) -> torch.Tensor | None:
        seen = super().seen(job, asked)
        if self.read is None:
            return seen
        _, columns = places(job)
        if seen is None:
            seen = asked.q.new_ones(*asked.q.shape[:2], len(columns), dtype=torch.bool)
        seen[self.others(asked)] = self.read[..., columns // self.block]
        return seen

    def held_mask(self, job: Any, asked: Attention, q: torch.Tensor) -> torch.Tensor | None:
        if self.read is None:
            return None
        gone = job.cache.length - job.cache.base
        columns = torch.arange(self.first, self.first + gone, device=q.device)
        read = self.read[..., columns // self.block]
        return hiding(read, q)

    def _reads(self, job: Any, layer: int, q: torch.Tensor) -> torch.Tensor:
        """The pages that each new node (H, n) reads, bool (H, n, pages)."""
        base, sources = job.start - job.cache.base, self._sources(job)
        pages = job.cache.length // self.block + 1
        chosen = q.new_zeros(len(q), 1 + len(sources), pages, dtype=torch.bool)
        if -1 in sources[base:]:
            chosen[:, 0] = self.chosen[layer]
        if base:
            chosen[:, 1 : 1 + base] = self.pending[layer][:, :base]
        fresh = [row for row in range(base, len(sources)) if sources[row] == row]
        if fresh:
            own = self.best(q[:, [row - base for row in fresh]], self.bounds[layer])
            chosen[:, [1 + row for row in fresh]] = own
        held = chosen[:, [1 + source for source in sources]]
        self.pending = {**self.pending, layer: held}
        return held[:, base:]

    def best(self, q: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        """The pages that queries (H, n) choose, the newest at the end, bool (H, n, pages + 1)."""
        above = upper(q, bounds).unflatten(-1, (-1, self.block // self.part)).amax(-1)
        best = above.topk(self.count - 1, -1).indices
        chosen = torch.zeros_like(above, dtype=torch.bool).scatter_(-1, best, True)
        return torch.nn.functional.pad(chosen, (0, 1), value=True)

    def _sources(self, job: Any) -> list[int]:
        """Of each scratch row the one whose choice holds for it; -1: that of committed tokens."""
        nodes = (tuple(job.cache.plan.parents), tuple(job.scratch_positions))
        if self.choosing is None or self.choosing[0] != nodes:
            anew = [at % self.reuse == 0 or at == self.prompt for at in nodes[1]]
            self.choosing = nodes, inherited(nodes[0], anew)
        return self.choosing[1]
