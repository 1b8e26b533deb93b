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
from foretell.kv.base import KV, Watching, best
from foretell.kv.slots import Turn, turning
from foretell.kv.store.spilling import BlockStore, blocks_in
from foretell.ops.attention import FEW, Attention, jointly
from foretell.ops.memory import trim

if TYPE_CHECKING:
    from foretell.core.model import Model

# What some nodes read beside the cache's rows
Beside = Callable[[slice], Sequence[Attention]]
AT_ONCE = 16  # nodes that are computed together, which bounds the memory that it takes
IN_PIECES = 64  # the same of nodes that all read the same


class Settings(Protocol):
    """What such policies are set by; counts of tokens, but for those named."""

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


def check(kv: Settings) -> None:
    """Raises BadConfig for settings that cannot be."""
    least = (
        ("initial", 0),
        ("local", 1),
        ("block", 1),
        ("blocks", 1),
        ("representatives", 1),
        ("every", 1),
        ("alone", 1),
        ("cached", 1),
    )
    for name, low in least:
        if getattr(kv, name) < low:
            raise BadConfig.field(f"{kv.name}:{name}", getattr(kv, name), f"at least {low}")
    if kv.representatives > kv.block:
        allowed = f"at most block={kv.block}"
        raise BadConfig.field(f"{kv.name}:representatives", kv.representatives, allowed)
    if kv.dir and not Path(kv.dir).is_dir():
        raise BadConfig.field(f"{kv.name}:dir", kv.dir, "a folder that exists")


def parts_of(kv: KV, target: Model) -> dict[str, Any]:
    """What a policy with these settings is made of. Raises Unsupported, BadConfig."""
    kv.fits(target)
    return {"turn": turning(kv.name, target), "context": int(target.context)}


@dataclass(kw_only=True)
class Remembering(Watching):
    """`scores` decides which blocks a query reads; subclasses may change it and its parts.

    Nothing below is changed in place, so copies share it; of each layer:
    """

    kv: Settings
    turn: Turn
    context: int  # positions that the model tells apart
    plain = False
    pieces = True

    store: BlockStore | None = None
    slots: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    found: dict[int, torch.Tensor] = field(default_factory=dict)  # representatives (blocks, KV, D)
    opening: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    spanned: dict[int, torch.Tensor] = field(default_factory=dict)  # queries of the span (H, m, D)
    fresh: dict[int, torch.Tensor] = field(default_factory=dict)  # the same, not yet committed
    chosen: dict[int, torch.Tensor] = field(default_factory=dict)  # what the span reads (1, some)
    # Keys of the first rows as they were cached, and by how far they have moved back since (m,).
    made: dict[int, torch.Tensor] = field(default_factory=dict)
    moved: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    turned: tuple[Any, Any] = (None, None)  # positions, and the turns of their queries

    def __post_init__(self) -> None:
        kv = self.kv
        # Rows that there may be, and the tokens that come before any leave.
        longest = kv.initial + kv.local + kv.block + 2 * max(kv.every, kv.block)
        self.endless = longest <= self.context

    def begin(self, prompt: int) -> None:
        super().begin(prompt)
        self.drop()
        self.slots = torch.empty(0, dtype=torch.long)
        self.found, self.opening = {}, {}
        self.spanned, self.fresh, self.chosen = {}, {}, {}
        self.made, self.moved = {}, torch.empty(0, dtype=torch.long)

    def drop(self) -> None:
        self.store = None

    @property
    def bytes(self) -> int:
        held = 0 if self.store is None else self.store.bytes
        opening = [part for pair in self.opening.values() for part in pair]
        return held + bytes_of([*opening, *self.found.values(), *self.made.values()])

    # --- when rows leave

    @property
    def switch(self) -> int:
        """Tokens of the text that choose in spans; those behind them choose by themselves."""
        return max(0, self.prompt - self.kv.alone)

    def room(self, length: int) -> int:
        kv = self.kv
        if length < self.switch:
            return min(self.switch - length, kv.every - length % kv.every)
        beyond = length - kv.initial - kv.local
        return kv.block - (beyond % kv.block if beyond > 0 else beyond)

    def change(self, cache: Any) -> None:
        """Blocks leave, and the next span's are chosen."""
        extra = 0 if self.opening else self.kv.initial
        blocks = (cache.base - extra - self.kv.local) // self.kv.block
        if blocks > 0:
            self._hold(cache, extra, blocks)
            trim()  # texts are long here, and the memory they take is to be bounded
        probes = {layer: self.probe(layer, asked) for layer, asked in self.spanned.items()}
        self.spanned, self.chosen = {}, {}
        if self.holds and cache.length < self.switch:
            count = min(self.kv.blocks, len(self.slots))
            for layer, probe in probes.items():
                self.chosen[layer] = best(self.scores(layer, probe), count)
        gap = max(self.kv.every, self.kv.block)
        if self.endless and self.holds and cache.length - cache.offset + gap > self.context:
            self._move_back(cache)

    @property
    def holds(self) -> bool:
        """Whether anything has left the cache."""
        return bool(self.opening)

    def _hold(self, cache: Any, extra: int, blocks: int) -> None:
        """Takes the first rows out: `extra` initial ones, then so many blocks."""
        kv, count = self.kv, extra + blocks * self.kv.block
        first = cache.length - cache.offset - cache.base
        keys, values = cache.give(count)
        cache.positions = None  # those that are left follow each other
        known = min(count, len(self.moved))
        at = torch.arange(first, first + count, device=cache.device)
        if known:
            at[:known] += self.moved[:known]
        found, opening = {}, dict(self.opening)
        for layer, cached in enumerate(keys):
            if known:
                cached = torch.cat([self.made[layer][:, :known], cached[:, known:]], 1)
            unturned = self.turn(cached, -at)
            if not self.opening:
                opening[layer] = (unturned[:, :extra], values[layer][:, :extra].clone())
            keys[layer] = unturned[:, extra:].unflatten(1, (blocks, kv.block))
            values[layer] = values[layer][:, extra:].unflatten(1, (blocks, kv.block))
            got = self.received[layer]
            masses = got[:, extra:count].unflatten(1, (blocks, kv.block))
            found[layer] = representatives(keys[layer], masses, kv.representatives)
            if layer in self.found:
                found[layer] = torch.cat([self.found[layer], found[layer]])
        if self.store is None:
            self.store = blocks_in(kv.dir, kv.cached, cache.device)
        slots = torch.tensor(self.store.add(keys, values), device=cache.device)
        self.slots = torch.cat([self.slots.to(cache.device), slots])
        self.found, self.opening = found, opening
        self.received = {layer: got[:, count:] for layer, got in self.received.items()}
        self.made = {layer: made[:, known:] for layer, made in self.made.items()}
        self.moved = self.moved[known:]

    def _move_back(self, cache: Any) -> None:
        """Moves the cache's rows to its first positions, each turned once from where it was."""
        cache.reserve(cache.base)
        by = cache.length - cache.offset - cache.base
        known = len(self.moved)
        new = torch.zeros(cache.base - known, dtype=torch.long, device=cache.device)
        self.moved = torch.cat([self.moved.to(cache.device), new]) + by
        made = {}
        for layer, keys in enumerate(cache.k):
            made[layer] = keys[:, known : cache.base].clone()
            if known:
                made[layer] = torch.cat([self.made[layer], made[layer]], 1)
            keys[:, : cache.base] = self.turn(made[layer], -self.moved)
        self.made = made
        cache.offset += by

    # --- what blocks are chosen by

    def probe(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """One query (H, 1, D) for a span's (H, m, D), of all that `spanned` keeps of them."""
        raise NotImplementedError

    def digest(self, queries: torch.Tensor) -> torch.Tensor:
        """What `spanned` keeps of some queries (H, n, D) of a span, any number of them."""
        return queries

    def scores(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """How well each block suits each of these queries (H, n, D): (n, blocks)."""
        found = self.found[layer]
        return grouped(queries, found.shape[1]).flatten(1) @ found.flatten(1).T

    def reads(self, job: Any, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Which blocks each of these nodes' queries (H, n, D) reads, (n, some).

        Called once for all nodes of a job that choose by themselves.
        """
        scores = self.scores(layer, queries)
        return best(scores, min(self.kv.blocks, scores.shape[1]))

    # --- attention

    def watches(self, job: Any) -> bool:
        return True

    def keep(self, cache: Any, nodes: Sequence[int]) -> None:
        super().keep(cache, nodes)
        if nodes:
            for layer, queries in self.fresh.items():
                before = self.spanned.get(layer)
                queries = queries if before is None else torch.cat([before, queries], 1)
                self.spanned = {**self.spanned, layer: queries}
        self.fresh = {}

    def attend(self, job: Any, asked: Attention) -> torch.Tensor:
        layer, spanning = asked.layer, self.place(job) < self.switch
        queries = asked.q
        if spanning or self.holds:
            queries = self._far(job, asked.q)
        if spanning:
            self.fresh = {**self.fresh, layer: self.digest(queries)}
        if not self.holds:
            self._attended(job, asked, IN_PIECES, None)
            return asked.whole()
        read = self.chosen[layer] if spanning else self.reads(job, layer, queries)
        keys, values = self.opening[layer]
        far = replace(asked, q=queries, keys=keys, values=values, mask=None, sinks=None)
        if queries.shape[1] > FEW:
            far = far.in_type(queries.dtype)
        alike = self._blocks(far, read) if len(read) == 1 else None

        def beside(part: slice) -> list[Attention]:
            blocks = alike or self._blocks(far, read[part])
            return [replace(one, q=queries[:, part]) for one in (far, blocks)]

        out = self._attended(job, asked, IN_PIECES if alike else AT_ONCE, beside)
        return out.to(asked.q.dtype)

    def _attended(
        self, job: Any, asked: Attention, step: int, beside: Beside | None
    ) -> torch.Tensor:
        """Takes note of what the nodes give to the cache's rows, so many nodes at once; what they
        get of these and of other parts (n, H, D), where there are any.
        """
        heads, nodes = len(asked.keys), asked.q.shape[1]
        certain = -job.first >= nodes  # then they count together
        if nodes > FEW:  # once for all pieces
            asked = asked.in_type(torch.promote_types(asked.q.dtype, torch.float32))
        outputs, given = [], []
        for start in range(0, nodes, step):
            part = slice(start, start + step)
            mask = None if asked.mask is None else asked.mask[..., part, :]
            near = replace(asked, q=asked.q[:, part], mask=mask)
            if beside is None:
                numbers = near.weights()
                total = torch.ones_like(numbers[..., :1])
            else:
                out, numbers, total = jointly([near, *beside(part)])
                outputs.append(out)
            given.append(shared(numbers, total, heads, certain))
        found = torch.cat(given, 1)
        self.note(job, asked.layer, found.sum(1, keepdim=True) if certain else found)
        return torch.cat(outputs) if outputs else asked.q[:, :0]

    def _far(self, job: Any, q: torch.Tensor) -> torch.Tensor:
        """The nodes' queries (H, n, D) where they see what left the cache, in float32 or wider."""
        wide = torch.promote_types(q.dtype, torch.float32)
        if self.turned[0] != job.positions:
            width = q.shape[-1]
            by = self.kv.local - 1 - torch.tensor(job.positions, device=q.device)
            ones = torch.eye(width, dtype=wide, device=q.device).expand(len(by), -1, -1)
            # A turn is linear, and the same in all layers.
            self.turned = (job.positions, self.turn(ones, by[:, None].expand(-1, width)))
        return (q.to(wide).transpose(0, 1) @ self.turned[1]).transpose(0, 1)

    def _blocks(self, far: Attention, read: torch.Tensor) -> Attention:
        """The part over blocks: which ones all nodes read (1, some), or each of them (n, some)."""
        mask = None
        if len(read) == 1:
            together = read[0]
        else:
            together, places = read.unique(return_inverse=True)
            mask = torch.full((len(read), len(together)), -torch.inf, device=far.q.device)
            mask = mask.scatter_(1, places, 0).to(far.q.dtype)
            mask = mask.repeat_interleave(self.kv.block, 1)
        assert self.store is not None
        keys, values = self.store.read(far.layer, self.slots[together])
        blocks = replace(far, keys=keys.flatten(1, 2), values=values.flatten(1, 2), mask=mask)
        return blocks.in_type(far.q.dtype) if far.q.shape[1] > FEW else blocks


def representatives(keys: torch.Tensor, masses: torch.Tensor, count: int) -> torch.Tensor:
    """Of each block the mean of its `count` keys of the largest masses, in float32 or wider.

    keys (KV, blocks, block, D), masses (KV, blocks, block) -> (blocks, KV, D).
    """
    places = best(masses, count)[..., None].expand(-1, -1, -1, keys.shape[-1])
    wide = torch.promote_types(keys.dtype, torch.float32)
    return keys.gather(2, places).mean(2, dtype=wide).transpose(0, 1)


def grouped(queries: torch.Tensor, heads: int) -> torch.Tensor:
    """The sum over the query heads that share a key head: (H, n, D) -> (n, KV, D)."""
    return queries.unflatten(0, (heads, -1)).sum(1).transpose(0, 1)


def shared(numbers: torch.Tensor, total: torch.Tensor, heads: int, together: bool) -> torch.Tensor:
    """The mean over the query heads that share a key head of what queries give to rows, as
    `jointly` has it (H, n, rows) and (H, n, 1): of each (KV, n, rows) or, `together`, the sum over
    all nodes (KV, 1, rows).
    """
    count = len(numbers) // heads
    if together:
        shares = (1 / (count * total)).reshape(heads, 1, -1)
        return shares @ numbers.view(heads, -1, numbers.shape[-1])
    return (numbers / total).unflatten(0, (heads, -1)).mean(1)
