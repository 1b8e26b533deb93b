"""Half of the heads see the first and last rows alone, the others read pages that may matter.

Which heads stream is told by gates, as for duo-attention. Of every part of a page the extremes of
each key channel are known: they bound what a query can give to any key of it, and a page is as good
as its best part. After the prompt each other head reads the pages of the highest bounds and the
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
- tokens choose whose place is a multiple of `reuse`, and the first one after the prompt; others of
a draft follow those above them
- rows are rounded when they leave the cache, each by its own range; the paper scales whole tensors,
and rounds weights and activations too
- torch computes it, and reads all rows that are held: no time is saved yet
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import torch

from foretell.core.settings import OneOf, Range
from foretell.errors import BadConfig
from foretell.kv.base import KV, bytes_of, check_budget
from foretell.kv.select.coded import Coded, bounds_of
from foretell.kv.select.gates import streaming_of
from foretell.kv.select.paging import inherit_choices, page_extremes, upper_bounds
from foretell.kv.select.ragged import Ragged, hiding_mask, text_positions
from foretell.ops.attention import Attention

if TYPE_CHECKING:
    from foretell.core.model import Model

LEAST = 3  # pages that are read at least


@dataclass(frozen=True)
class Lserve(KV):
    """Counts of rows and tokens, and the share of heads."""

    budget: int = 4096  # rows in whole pages that a query head reads
    # share of the key heads that stream; 0: none, and no gates are read
    sparsity: Annotated[float, Range(0, 1)] = 0.5
    sinks: int = 128  # first rows that they see
    recent: int = 256  # last rows that they see after the prompt
    prompt: int = 8192  # last rows that they see in it
    page: Annotated[int, Range(1)] = 64  # rows
    part: int = 16  # rows of a page that are bounded together
    reuse: int = 4  # tokens that a choice of pages holds for
    # of the rows that left the cache: 8, or 16: they are as they were
    bits: Annotated[int, OneOf((8, 16))] = 8
    gates: str = ""  # a file or a folder; else those that ship

    def __post_init__(self) -> None:
        super().__post_init__()
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
        check_budget("lserve", self.budget, LEAST * self.page, f"{LEAST} pages of {self.page}")

    def build_policy(self, target: Model) -> Served:
        self.check_target(target)
        served_policy = Served(
            self.sinks, self.recent, self.page, in_prompt=self.prompt, bits=self.bits
        )
        served_policy.streaming = streaming_of(target, self.sparsity, self.gates, "kv=lserve")
        served_policy.count = self.budget // self.page
        served_policy.part, served_policy.reuse = self.part, self.reuse
        return served_policy


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
    committed_pages: Mapping[int, torch.Tensor] = field(default_factory=dict)
    pending: Mapping[int, torch.Tensor] = field(default_factory=dict)
    choosing: tuple[Any, list[int]] | None = None  # of the last job, see `_choice_sources`
    layer_pages: torch.Tensor | None = (
        None  # pages that the running layer's nodes read (H, n, pages)
    )

    @property
    def drops_rows(self) -> bool:
        return self.bits < 16 or super().drops_rows

    def visible_count(self, length: int) -> int:
        return self.in_prompt if length < self.prompt else self.recent

    def clear_held(self) -> None:
        super().clear_held()
        self.bounds, self.committed_pages, self.pending = {}, {}, {}
        self.choosing, self.layer_pages = None, None

    @property
    def bytes(self) -> int:
        return super().bytes + bytes_of(self.bounds.values())

    def selects_pages(self, length: int) -> bool:
        return length >= self.prompt and length // self.block >= self.count

    def room_left(self, length: int) -> int:
        if length < self.prompt:
            return min(super().room_left(length), self.prompt - length)
        return self.block - length % self.block

    def watches_job(self, job: Any) -> bool:
        return super().watches_job(job) or self.selects_pages(job.cache.length)

    # --- what is committed

    def change_rows(self, cache: Any) -> None:
        stored_count = cache.length - cache.base
        page_end = cache.length // self.block * self.block - stored_count
        bounds = dict(self.bounds)
        for layer, streaming in enumerate(self.streaming):
            known_bounds = bounds.get(layer)
            first_row = (
                0 if known_bounds is None else known_bounds.shape[1] * self.part - stored_count
            )
            if page_end > first_row and not bool(streaming.all()):
                keys = cache.k[layer][~streaming, first_row:page_end]
                new_bounds = (
                    page_extremes(keys, self.part)
                    if self.bits == 16
                    else bounds_of(keys, self.part)
                )
                bounds[layer] = (
                    new_bounds if known_bounds is None else torch.cat([known_bounds, new_bounds], 1)
                )
        self.bounds = bounds
        super().change_rows(cache)

    def join_rows(self, held_rows: Any, keys: torch.Tensor, values: torch.Tensor) -> Any:
        if self.bits == 16:
            return super().join_rows(held_rows, keys, values)
        new_rows = Coded.from_rows(keys, values)
        return new_rows if held_rows is None else held_rows.append_rows(new_rows)

    def keep_nodes(self, cache: Any, nodes: Sequence[int]) -> None:
        if nodes and self.pending:
            last_node = nodes[-1]
            kept = {layer: pages[:, last_node].clone() for layer, pages in self.pending.items()}
            self.committed_pages = {**self.committed_pages, **kept}
        self.pending, self.layer_pages = {}, None

    # --- what is read

    def attend_job(self, job: Any, attention: Attention) -> torch.Tensor:
        full_heads = self.full_heads(attention)
        chooses_pages = self.selects_pages(job.cache.length) and bool(full_heads.any())
        self.layer_pages = None
        if chooses_pages:
            self.layer_pages = self._read_pages(job, attention.layer, attention.q[full_heads])
        self.masks = {}  # as pages differ from layer to layer
        return super().attend_job(job, attention)

    def visible_rows(self, job: Any, attention: Attention) -> torch.Tensor | None:
        visible_mask = super().visible_rows(job, attention)
        if self.layer_pages is None:
            return visible_mask
        _, positions = text_positions(job)
        if visible_mask is None:
            visible_mask = attention.q.new_ones(
                *attention.q.shape[:2], len(positions), dtype=torch.bool
            )
        visible_mask[self.full_heads(attention)] = self.layer_pages[..., positions // self.block]
        return visible_mask

    def held_mask(self, job: Any, attention: Attention, q: torch.Tensor) -> torch.Tensor | None:
        if self.layer_pages is None:
            return None
        held_count = job.cache.length - job.cache.base
        row_positions = torch.arange(self.first_rows, self.first_rows + held_count, device=q.device)
        read_mask = self.layer_pages[..., row_positions // self.block]
        return hiding_mask(read_mask, q)

    def _read_pages(self, job: Any, layer: int, q: torch.Tensor) -> torch.Tensor:
        """The pages that each new node (H, n) reads, bool (H, n, pages)."""
        base, sources = job.start - job.cache.base, self._choice_sources(job)
        page_count = job.cache.length // self.block + 1
        page_choices = q.new_zeros(len(q), 1 + len(sources), page_count, dtype=torch.bool)
        if -1 in sources[base:]:
            page_choices[:, 0] = self.committed_pages[layer]
        if base:
            page_choices[:, 1 : 1 + base] = self.pending[layer][:, :base]
        choosing = [row for row in range(base, len(sources)) if sources[row] == row]
        if choosing:
            fresh = self.best_pages(q[:, [row - base for row in choosing]], self.bounds[layer])
            page_choices[:, [1 + row for row in choosing]] = fresh
        node_pages = page_choices[:, [1 + source for source in sources]]
        self.pending = {**self.pending, layer: node_pages}
        return node_pages[:, base:]

    def best_pages(self, q: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        """The pages that queries (H, n) choose, the newest at the end, bool (H, n, pages + 1)."""
        page_bounds = upper_bounds(q, bounds).unflatten(-1, (-1, self.block // self.part)).amax(-1)
        best_indices = page_bounds.topk(self.count - 1, -1).indices
        page_mask = torch.zeros_like(page_bounds, dtype=torch.bool).scatter_(-1, best_indices, True)
        return torch.nn.functional.pad(page_mask, (0, 1), value=True)

    def _choice_sources(self, job: Any) -> list[int]:
        """The scratch row whose choice holds for each scratch row; -1: that of committed tokens."""
        job_nodes = (tuple(job.cache.plan.parents), tuple(job.scratch_positions))
        if self.choosing is None or self.choosing[0] != job_nodes:
            chooses_anew = [
                position % self.reuse == 0 or position == self.prompt for position in job_nodes[1]
            ]
            self.choosing = job_nodes, inherit_choices(job_nodes[0], chooses_anew)
        return self.choosing[1]
