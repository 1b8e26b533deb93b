"""What cache policies are made of: rows given up at certain lengths, and the attention they got.

A policy that evicts decides which rows of a cache stay. Rows change at lengths that committed
tokens alone decide, and drafts end there; so a text is the same with drafts and without. Between
two changes the rows are ordinary ones: any executor reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from foretell.cache.buffers import bytes_of as bytes_of
from foretell.cache.policy import NEVER as NEVER
from foretell.cache.policy import CachePolicy as CachePolicy
from foretell.errors import BadConfig, Unsupported
from foretell.ops.attention import Attention
from foretell.ops.row_attention import attend_noting

if TYPE_CHECKING:
    from foretell.core.model import Model

Chosen = list[torch.Tensor | None]  # of each layer, the rows (KV, n) of its heads that stay


@dataclass(frozen=True)
class KV:
    """The base of what `kv=` takes: a frozen dataclass of settings."""

    # What it does where several are joined: evictor, selector, encoder or store, see
    # kv.store.composition; "": it goes alone.
    role: ClassVar[str] = ""
    aligned: ClassVar[bool] = False  # an encoder for which a row is one token's in all layers
    settles: ClassVar[bool] = False  # an evictor that gives up rows of a prompt alone, behind it

    def policy(self, target: Model) -> CachePolicy:
        """The policy of a request's caches. Raises Unsupported where the target has no such
        rows.
        """
        raise NotImplementedError

    def view(self, target: Model) -> CachePolicy:
        """The policy by which drafts read a cache that keeps all rows; see kv/select/view_model.py.
        Raises Unsupported as `policy` does.
        """
        return self.policy(target)

    def named(self, target: Model) -> CachePolicy:
        """The policy, which knows what users call it."""
        made = self.policy(target)
        made.name = self.name
        return made

    def with_budget(self, rows: int) -> KV | None:
        """The same, which holds or reads so many rows, or as many of them as make whole pages; None
        where no setting says how many. Raises BadConfig where they are too few.
        """
        settings: Any = self
        if not hasattr(settings, "budget"):
            return None
        page = getattr(settings, "page", 1)
        return replace(settings, budget=rows // page * page)  # type: ignore[no-any-return]

    @property
    def name(self) -> str:
        """As users know it."""
        return type(self).__module__.rpartition(".")[2].replace("_", "-")

    def fits(self, target: Model) -> None:
        """Raises Unsupported for a target whose rows cannot be given up one by one."""
        check_rows(f"kv={self.name}", target, "leave kv out")


def check_rows(what: str, target: Model, cure: str) -> None:
    """Raises Unsupported for a target that has no rows of all of a text in every layer."""
    loop = getattr(target, "loop", None)
    need = ""
    if "source" in target.caps:  # its attention tells rows apart by their number
        need = "a decoder without an encoder"
    elif not any(target.layout) or not target.layout or None in target.layout:
        need = "cache rows of every layer"
    elif loop is not None and any(loop.windows):
        need = "layers that see all of a text: some see a window of it"
    if need:
        raise Unsupported.missing(what, target.name, need, cure)


def check_budget(name: str, budget: int, least: int, what: str) -> None:
    """Raises BadConfig for a budget of rows that does not hold what always stays."""
    if budget < least:
        raise BadConfig.field(f"{name}:budget", budget, f"at least {least}, for {what}")


def check_every(name: str, every: int) -> None:
    """Raises BadConfig."""
    if every < 1:
        raise BadConfig.field(f"{name}:every", every, "at least 1 token between two evictions")


@dataclass
class Evicting(CachePolicy):
    """Holds at most `budget` rows of a text behind its prompt, and `every` - 1 more in between.

    A prompt is read as a whole, and what it has too much is given up behind it. `every` 0: what
    follows the prompt stays.
    """

    budget: int
    every: int

    @property
    def first(self) -> int:
        """The length at which rows are given up for the first time."""
        if self.prompt > self.budget:
            return self.prompt
        return self.budget + self.every if self.every else NEVER

    def room(self, length: int) -> int:
        if length < self.first:
            return self.first - length
        return self.every - (length - self.first) % self.every if self.every else NEVER

    def next_change(self, length: int) -> int:
        """The length at which rows are given up next, of a cache this long before it."""
        if length < self.first:
            return self.first
        return length + Evicting.room(self, length)

    def due(self, length: int) -> bool:
        """Whether rows are given up at this length. `room` may end pieces elsewhere too."""
        beyond = length - self.first
        return beyond % self.every == 0 if self.every and beyond > 0 else beyond == 0

    def change(self, cache: Any) -> None:
        """Gives up rows where there are too many of them."""
        if self.due(cache.length) and cache.base > self.budget:
            self.evict(cache)

    def evict(self, cache: Any) -> None:
        """Leaves `budget` rows of a cache that has more."""
        raise NotImplementedError


@dataclass
class Watching(CachePolicy):
    """Knows what attention rows got from certain nodes, those that `counts` names.

    The mean over the query heads that share a key head is added up for each row of it, in float32.
    Scratch rows that are rejected leave no trace: theirs counts when they are committed.
    """

    received: dict[int, torch.Tensor] = field(default_factory=dict)  # of each layer (parts, base)
    # Of each layer what the scratch rows gave: all pending ones together (parts, rows), and each
    # node of a tree by its scratch row.
    pending: dict[int, torch.Tensor] = field(default_factory=dict)
    nodes: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)

    def begin(self, prompt: int) -> None:
        super().begin(prompt)
        self.received, self.pending, self.nodes = {}, {}, {}

    def fork(self) -> Watching:
        twin = super().fork()
        assert isinstance(twin, Watching)
        twin.received, twin.pending = dict(self.received), dict(self.pending)
        twin.nodes = {layer: dict(rows) for layer, rows in self.nodes.items()}
        return twin

    def counts(self, place: int) -> bool:
        """Whether the token at this place of the text is one that rows are judged by.

        `room` ends there and where such tokens end, so that all nodes of a forward count or none.
        """
        raise NotImplementedError

    def watches(self, job: Any) -> bool:
        return self.counts(self.place(job))

    def place(self, job: Any) -> int:
        """The place in the text of a job's first new node."""
        return int(job.positions[0] + job.cache.offset)

    def scored(self, job: Any, given: torch.Tensor) -> torch.Tensor:
        """What is added up of the attention that new nodes gave (KV, n, rows), in as many parts as
        a policy likes (parts, n, rows).
        """
        return given

    def attend(self, job: Any, asked: Attention) -> torch.Tensor:
        out, given = attend_noting(asked)
        self.note(job, asked.layer, self.scored(job, given))
        return out

    def note(self, job: Any, layer: int, given: torch.Tensor) -> None:
        """Takes note of what new nodes gave to all rows (parts, n, rows)."""
        row = job.start - job.cache.base
        if not row:
            self.pending.pop(layer, None)
        certain = max(0, -job.first)
        if certain:
            total = given[:, :certain].sum(1)
            before = self.pending.get(layer)
            if before is not None:
                total[:, : before.shape[1]] += before
            self.pending[layer] = total
        known = self.nodes.get(layer, {}) if row else {}
        kept = {node: rows for node, rows in known.items() if node < row}
        kept |= {row + i: given[:, i] for i in range(certain, given.shape[1])}
        self.nodes[layer] = kept

    def keep(self, cache: Any, nodes: Sequence[int]) -> None:
        received: dict[int, torch.Tensor] = {}
        rows = [*range(cache.base), *(cache.base + node for node in nodes)]
        for layers in self._alike() if nodes else ():
            first = layers[0]
            # What they got of the pending nodes and of each node of the path.
            given = [[self.pending[layer] for layer in layers]] if first in self.pending else []
            known = [node for node in nodes if node in self.nodes[first]]
            given += [[self.nodes[layer][node] for layer in layers] for node in known]
            longest = max(rows) + 1
            wide = [_padded(torch.stack(parts), longest) for parts in given]
            summed = wide[0] if len(wide) == 1 else torch.stack(wide).sum(0)
            if len(rows) < longest:
                summed = summed[..., rows]
            held = [self.received[layer] for layer in layers if layer in self.received]
            if held:
                summed[..., : held[0].shape[1]] += torch.stack(held)
            received |= dict(zip(layers, summed, strict=True))
        for layer, alone in self.received.items():
            if layer not in received:
                received[layer] = _padded(alone, alone.shape[1] + len(nodes))
        self.received, self.pending, self.nodes = received, {}, {}

    def _alike(self) -> list[list[int]]:
        """The layers that took notes, those together whose notes are of one shape."""
        groups: dict[Any, list[int]] = {}
        for layer, known in self.nodes.items():
            noted = [*known.values(), *([self.pending[layer]] if layer in self.pending else ())]
            shapes = tuple(note.shape for note in noted)
            kind = shapes, tuple(known), layer in self.pending, layer in self.received
            groups.setdefault(kind, []).append(layer)
        return list(groups.values())


@dataclass
class Attended(Watching, Evicting):
    """Evicts by the attention that rows got."""

    def evict(self, cache: Any) -> None:
        chosen: Chosen = []
        for layer in range(len(cache.layout)):
            rows = self.chosen(cache, layer, self.received[layer]).sort(-1).values
            chosen.append(rows)
            self.received[layer] = self.received[layer].gather(1, rows)
        cache.keep_rows(chosen)

    def chosen(self, cache: Any, layer: int, received: torch.Tensor) -> torch.Tensor:
        """The rows (KV, budget) that stay of those that received so much (KV, base)."""
        raise NotImplementedError


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    """With zeros behind them, so many in all (..., count)."""
    missing = count - rows.shape[-1]
    return torch.nn.functional.pad(rows, (0, missing)) if missing else rows


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` rows of the highest scores (..., rows), of equal ones the later."""
    order = scores.flip(-1).argsort(dim=-1, descending=True, stable=True)
    return scores.shape[-1] - 1 - order[..., :count]
