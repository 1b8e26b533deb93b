"""Policies that move older rows out of a cache in blocks, and read back those that are asked for.

    tokens   0 .. initial-1 | blocks of `block`        | the last ones, at least `local`
             beside the     | in a store; a node reads | in the cache, at their
             cache          | `blocks` of them         | distances

What left the cache is read as if all of it stood at one distance: its keys are held at position 0,
and queries turn to position `local` - 1. So no distance is ever longer than the cache.

A block is found by its representatives: the mean key of those of its tokens that got the most
attention while they were in the cache. Which blocks are read is decided by committed tokens and by
a node's own query alone. In a prompt that is once for every span of `every` tokens, by the queries
of the span before it; the prompt's last `alone` tokens and all that follow choose by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from foretell.cache.buffers import bytes_of
from foretell.errors import BadConfig
from foretell.kv.base import KV, Watching, top_rows
from foretell.kv.slots import Turn, find_turn
from foretell.kv.store.spilling import BlockStore, blocks_in
from foretell.ops.attention import FEW, Attention, attend_jointly
from foretell.ops.memory import trim_memory

if TYPE_CHECKING:
    from foretell.core.model import Model

# What some nodes read beside the cache's rows
Beside = Callable[[slice], Sequence[Attention]]
AT_ONCE = 16  # nodes that are computed together, which bounds the memory that it takes
IN_PIECES = 64  # the same of nodes that all read the same


class Settings(Protocol):
    """Settings of policies that remember blocks; counts of tokens, but for those named."""

    @property
    def name(self) -> str: ...
    @property
    def initial(self) -> int: ...
    @property
    def local(self) -> int: ...
    @property
    def block(self) -> int: ...
    @property
    def blocks(self) -> int: ...  # read
    @property
    def representatives(self) -> int: ...
    @property
    def every(self) -> int: ...
    @property
    def alone(self) -> int: ...
    @property
    def cached(self) -> int: ...  # blocks
    @property
    def dir(self) -> str: ...


def check_settings(settings: Settings) -> None:
    """Raises BadConfig for settings that do not fit together."""
    if settings.representatives > settings.block:
        allowed_values = f"at most block={settings.block}"
        raise BadConfig.field(
            f"{settings.name}:representatives", settings.representatives, allowed_values
        )
    if settings.dir and not Path(settings.dir).is_dir():
        raise BadConfig.field(f"{settings.name}:dir", settings.dir, "a folder that exists")


def parts_of(kv: KV, target: Model) -> dict[str, Any]:
    """Arguments of a policy with these settings. Raises Unsupported, BadConfig."""
    kv.check_target(target)
    return {"turn": find_turn(kv.name, target), "context": int(target.context)}


@dataclass(kw_only=True)
class Remembering(Watching):
    """`score_blocks` decides which blocks a query reads; subclasses may change it and its parts.

    Nothing below is changed in place, so copies share it; of each layer:
    """

    kv: Settings
    turn: Turn
    context: int  # positions that the model tells apart
    plain = False
    pieces = True

    store: BlockStore | None = None
    slots: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    block_keys: dict[int, torch.Tensor] = field(
        default_factory=dict
    )  # representatives (blocks, KV, D)
    opening: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    spanned: dict[int, torch.Tensor] = field(default_factory=dict)  # queries of the span (H, m, D)
    fresh: dict[int, torch.Tensor] = field(default_factory=dict)  # the same, not yet committed
    span_blocks: dict[int, torch.Tensor] = field(
        default_factory=dict
    )  # what the span reads (1, some)
    # Keys of the first rows as they were cached, and by how far they have moved back since (m,).
    original_keys: dict[int, torch.Tensor] = field(default_factory=dict)
    moved_by: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    turned: tuple[Any, Any] = (None, None)  # positions, and the turns of their queries

    def __post_init__(self) -> None:
        kv = self.kv
        # Rows that there may be, and the tokens that come before any leave.
        max_rows = kv.initial + kv.local + kv.block + 2 * max(kv.every, kv.block)
        self.endless = max_rows <= self.context

    def begin_text(self, prompt: int) -> None:
        super().begin_text(prompt)
        self.drop()
        self.slots = torch.empty(0, dtype=torch.long)
        self.block_keys, self.opening = {}, {}
        self.spanned, self.fresh, self.span_blocks = {}, {}, {}
        self.original_keys, self.moved_by = {}, torch.empty(0, dtype=torch.long)

    def drop(self) -> None:
        self.store = None

    @property
    def bytes(self) -> int:
        store_bytes = 0 if self.store is None else self.store.bytes
        opening_rows = [row_part for pair in self.opening.values() for row_part in pair]
        return store_bytes + bytes_of(
            [*opening_rows, *self.block_keys.values(), *self.original_keys.values()]
        )

    # --- when rows leave

    @property
    def span_end(self) -> int:
        """Tokens of the text that choose in spans; those after them choose by themselves."""
        return max(0, self.prompt - self.kv.alone)

    def room_left(self, length: int) -> int:
        kv = self.kv
        if length < self.span_end:
            return min(self.span_end - length, kv.every - length % kv.every)
        tokens_beyond = length - kv.initial - kv.local
        return kv.block - (tokens_beyond % kv.block if tokens_beyond > 0 else tokens_beyond)

    def change_rows(self, cache: Any) -> None:
        """Blocks leave, and the next span's are chosen."""
        opening_count = 0 if self.opening else self.kv.initial
        block_count = (cache.base - opening_count - self.kv.local) // self.kv.block
        if block_count > 0:
            self._store_blocks(cache, opening_count, block_count)
            trim_memory()  # texts are long here, and the memory they take is to be bounded
        probe_queries = {
            layer: self.probe_query(layer, span_queries)
            for layer, span_queries in self.spanned.items()
        }
        self.spanned, self.span_blocks = {}, {}
        if self.holds_blocks and cache.length < self.span_end:
            read_count = min(self.kv.blocks, len(self.slots))
            for layer, probe in probe_queries.items():
                self.span_blocks[layer] = top_rows(self.score_blocks(layer, probe), read_count)
        longest_gap = max(self.kv.every, self.kv.block)
        if (
            self.endless
            and self.holds_blocks
            and cache.length - cache.offset + longest_gap > self.context
        ):
            self._move_back(cache)

    @property
    def holds_blocks(self) -> bool:
        """Whether anything has left the cache."""
        return bool(self.opening)

    def _store_blocks(self, cache: Any, opening_count: int, block_count: int) -> None:
        """Takes the first rows out: `opening_count` initial ones, then so many blocks."""
        kv, row_count = self.kv, opening_count + block_count * self.kv.block
        first_position = cache.length - cache.offset - cache.base
        keys, values = cache.give_rows(row_count)
        cache.positions = None  # those that are left follow each other
        moved_count = min(row_count, len(self.moved_by))
        key_positions = torch.arange(
            first_position, first_position + row_count, device=cache.device
        )
        if moved_count:
            key_positions[:moved_count] += self.moved_by[:moved_count]
        block_keys, opening_rows = {}, dict(self.opening)
        for layer, cached_keys in enumerate(keys):
            if moved_count:
                cached_keys = torch.cat(
                    [self.original_keys[layer][:, :moved_count], cached_keys[:, moved_count:]], 1
                )
            unturned = self.turn(cached_keys, -key_positions)
            if not self.opening:
                opening_rows[layer] = (
                    unturned[:, :opening_count],
                    values[layer][:, :opening_count].clone(),
                )
            keys[layer] = unturned[:, opening_count:].unflatten(1, (block_count, kv.block))
            values[layer] = values[layer][:, opening_count:].unflatten(1, (block_count, kv.block))
            layer_received = self.received[layer]
            block_masses = layer_received[:, opening_count:row_count].unflatten(
                1, (block_count, kv.block)
            )
            block_keys[layer] = mean_top_keys(keys[layer], block_masses, kv.representatives)
            if layer in self.block_keys:
                block_keys[layer] = torch.cat([self.block_keys[layer], block_keys[layer]])
        if self.store is None:
            self.store = blocks_in(kv.dir, kv.cached, cache.device)
        new_slots = torch.tensor(self.store.add_blocks(keys, values), device=cache.device)
        self.slots = torch.cat([self.slots.to(cache.device), new_slots])
        self.block_keys, self.opening = block_keys, opening_rows
        self.received = {
            layer: layer_received[:, row_count:] for layer, layer_received in self.received.items()
        }
        self.original_keys = {
            layer: layer_keys[:, moved_count:] for layer, layer_keys in self.original_keys.items()
        }
        self.moved_by = self.moved_by[moved_count:]

    def _move_back(self, cache: Any) -> None:
        """Moves the cache's rows to its first positions, each turned once from where it was."""
        cache.reserve(cache.base)
        shift = cache.length - cache.offset - cache.base
        moved_count = len(self.moved_by)
        fresh_moves = torch.zeros(cache.base - moved_count, dtype=torch.long, device=cache.device)
        self.moved_by = torch.cat([self.moved_by.to(cache.device), fresh_moves]) + shift
        original_keys = {}
        for layer, keys in enumerate(cache.k):
            original_keys[layer] = keys[:, moved_count : cache.base].clone()
            if moved_count:
                original_keys[layer] = torch.cat(
                    [self.original_keys[layer], original_keys[layer]], 1
                )
            keys[:, : cache.base] = self.turn(original_keys[layer], -self.moved_by)
        self.original_keys = original_keys
        cache.offset += shift

    # --- what blocks are chosen by

    def probe_query(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Makes one query (H, 1, D) for a span's (H, m, D), of all that `spanned` keeps of them."""
        raise NotImplementedError

    def digest_queries(self, queries: torch.Tensor) -> torch.Tensor:
        """The part that `spanned` keeps of some queries (H, n, D) of a span, any number of them."""
        return queries

    def score_blocks(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """How well each block suits each of these queries (H, n, D): (n, blocks)."""
        block_keys = self.block_keys[layer]
        return sum_by_key_head(queries, block_keys.shape[1]).flatten(1) @ block_keys.flatten(1).T

    def select_blocks(self, job: Any, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Which blocks each of these nodes' queries (H, n, D) reads, (n, some).

        Called once for all nodes of a job that choose by themselves.
        """
        block_scores = self.score_blocks(layer, queries)
        return top_rows(block_scores, min(self.kv.blocks, block_scores.shape[1]))

    # --- attention

    def watches_job(self, job: Any) -> bool:
        return True

    def keep_nodes(self, cache: Any, nodes: Sequence[int]) -> None:
        super().keep_nodes(cache, nodes)
        if nodes:
            for layer, node_queries in self.fresh.items():
                earlier_queries = self.spanned.get(layer)
                node_queries = (
                    node_queries
                    if earlier_queries is None
                    else torch.cat([earlier_queries, node_queries], 1)
                )
                self.spanned = {**self.spanned, layer: node_queries}
        self.fresh = {}

    def attend_job(self, job: Any, attention: Attention) -> torch.Tensor:
        layer, spanning = attention.layer, self.job_position(job) < self.span_end
        far_queries = attention.q
        if spanning or self.holds_blocks:
            far_queries = self._far_queries(job, attention.q)
        if spanning:
            self.fresh = {**self.fresh, layer: self.digest_queries(far_queries)}
        if not self.holds_blocks:
            self._attend_pieces(job, attention, IN_PIECES, None)
            return attention.full_output()
        read_blocks = (
            self.span_blocks[layer] if spanning else self.select_blocks(job, layer, far_queries)
        )
        keys, values = self.opening[layer]
        far_attention = replace(
            attention, q=far_queries, keys=keys, values=values, mask=None, sinks=None
        )
        if far_queries.shape[1] > FEW:
            far_attention = far_attention.in_type(far_queries.dtype)
        shared_blocks = (
            self._block_attention(far_attention, read_blocks) if len(read_blocks) == 1 else None
        )

        def far_parts(node_range: slice) -> list[Attention]:
            block_part = shared_blocks or self._block_attention(
                far_attention, read_blocks[node_range]
            )
            return [
                replace(attention_part, q=far_queries[:, node_range])
                for attention_part in (far_attention, block_part)
            ]

        node_outputs = self._attend_pieces(
            job, attention, IN_PIECES if shared_blocks else AT_ONCE, far_parts
        )
        return node_outputs.to(attention.q.dtype)

    def _attend_pieces(
        self, job: Any, attention: Attention, piece_size: int, far_parts: Beside | None
    ) -> torch.Tensor:
        """Takes note of what the nodes give to the cache's rows, so many nodes at once; what they
        get of these and of other parts (n, H, D), where there are any.
        """
        head_count, node_count = len(attention.keys), attention.q.shape[1]
        count_together = -job.first >= node_count  # then they count together
        if node_count > FEW:  # once for all pieces
            attention = attention.in_type(torch.promote_types(attention.q.dtype, torch.float32))
        outputs, given_scores = [], []
        for start in range(0, node_count, piece_size):
            node_range = slice(start, start + piece_size)
            part_mask = None if attention.mask is None else attention.mask[..., node_range, :]
            near_attention = replace(attention, q=attention.q[:, node_range], mask=part_mask)
            if far_parts is None:
                part_scores = near_attention.weights()
                score_total = torch.ones_like(part_scores[..., :1])
            else:
                part_output, part_scores, score_total = attend_jointly(
                    [near_attention, *far_parts(node_range)]
                )
                outputs.append(part_output)
            given_scores.append(
                mean_by_key_head(part_scores, score_total, head_count, count_together)
            )
        node_scores = torch.cat(given_scores, 1)
        self.note_scores(
            job,
            attention.layer,
            node_scores.sum(1, keepdim=True) if count_together else node_scores,
        )
        return torch.cat(outputs) if outputs else attention.q[:, :0]

    def _far_queries(self, job: Any, q: torch.Tensor) -> torch.Tensor:
        """The nodes' queries (H, n, D) where they see what left the cache, in float32 or wider."""
        wide_type = torch.promote_types(q.dtype, torch.float32)
        if self.turned[0] != job.positions:
            width = q.shape[-1]
            position_shifts = self.kv.local - 1 - torch.tensor(job.positions, device=q.device)
            unit_keys = torch.eye(width, dtype=wide_type, device=q.device).expand(
                len(position_shifts), -1, -1
            )
            # A turn is linear, and the same in all layers.
            self.turned = (
                job.positions,
                self.turn(unit_keys, position_shifts[:, None].expand(-1, width)),
            )
        return (q.to(wide_type).transpose(0, 1) @ self.turned[1]).transpose(0, 1)

    def _block_attention(self, far_attention: Attention, read_blocks: torch.Tensor) -> Attention:
        """The part over blocks: which ones all nodes read (1, some), or each of them (n, some)."""
        block_mask = None
        if len(read_blocks) == 1:
            block_indices = read_blocks[0]
        else:
            block_indices, block_places = read_blocks.unique(return_inverse=True)
            block_mask = torch.full(
                (len(read_blocks), len(block_indices)), -torch.inf, device=far_attention.q.device
            )
            block_mask = block_mask.scatter_(1, block_places, 0).to(far_attention.q.dtype)
            block_mask = block_mask.repeat_interleave(self.kv.block, 1)
        assert self.store is not None
        keys, values = self.store.read_blocks(far_attention.layer, self.slots[block_indices])
        block_attention = replace(
            far_attention, keys=keys.flatten(1, 2), values=values.flatten(1, 2), mask=block_mask
        )
        return (
            block_attention.in_type(far_attention.q.dtype)
            if far_attention.q.shape[1] > FEW
            else block_attention
        )


def mean_top_keys(keys: torch.Tensor, key_masses: torch.Tensor, count: int) -> torch.Tensor:
    """The mean of each block's `count` keys of the largest masses, in float32 or wider.

    Shapes: keys (KV, blocks, block, D), masses (KV, blocks, block) -> (blocks, KV, D).
    """
    key_indices = top_rows(key_masses, count)[..., None].expand(-1, -1, -1, keys.shape[-1])
    wide_type = torch.promote_types(keys.dtype, torch.float32)
    return keys.gather(2, key_indices).mean(2, dtype=wide_type).transpose(0, 1)


def sum_by_key_head(queries: torch.Tensor, heads: int) -> torch.Tensor:
    """The sum over the query heads that share a key head: (H, n, D) -> (n, KV, D)."""
    return queries.unflatten(0, (heads, -1)).sum(1).transpose(0, 1)


def mean_by_key_head(
    node_scores: torch.Tensor, score_total: torch.Tensor, head_count: int, sum_nodes: bool
) -> torch.Tensor:
    """The mean over the query heads that share a key head of what queries give to rows, as
    `jointly` has it (H, n, rows) and (H, n, 1): of each (KV, n, rows) or, `sum_nodes`, the sum over
    all nodes (KV, 1, rows).
    """
    group_size = len(node_scores) // head_count
    if sum_nodes:
        node_shares = (1 / (group_size * score_total)).reshape(head_count, 1, -1)
        return node_shares @ node_scores.view(head_count, -1, node_scores.shape[-1])
    return (node_scores / score_total).unflatten(0, (head_count, -1)).mean(1)
