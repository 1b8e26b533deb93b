"""The rows a model keeps of one branch of a request: committed rows, and behind them the scratch
rows of its last tree.

    rows   0 ........ length-1 | length .......... length+len(scratch)-1 | free, grown by doubling
           committed tokens    | the last forest: pending chain and tree |

This file knows rows, tokens and which of them belong together; it knows no model. A cache is told
the branch's tokens and finds out by itself what it already has: `prepare` walks the scratch by
token and keeps the rows of the path that was committed. So a drafter's cache that is ahead, behind
or on another path needs no bookkeeping. The last committed token is never kept: it is the root of
the next tree and is computed again, which is what gives its row of logits.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from foretell.core.tree import ancestors
from foretell.core.types import Ask
from foretell.ops.attention import attend_job
from foretell.ops.rows import zeros

Layout = tuple[
    tuple[int, int, int], ...
]  # of each layer: key-value heads, width of a key, width of a value


@dataclass(slots=True, eq=False)
class Job:
    """The part of one forward that belongs to one cache: n new nodes, stored behind `start` rows
    already there.

    A node sees every committed row, and of the scratch rows what `seen` says, bool (n, scratch
    rows); None: a chain, each node sees all rows before it. `rows`: new nodes (0-based) whose
    logits are wanted. `states`: see types.Ask.
    """

    cache: Cache
    tokens: list[int]
    columns: list[int]  # positions of all scratch rows, the new nodes at the end
    start: int
    seen: torch.Tensor | None
    rows: list[int]
    first: int  # the tree's node that new node 0 is; below 0 where pending tokens precede the tree
    layers: tuple[int, ...] | None = None
    states: torch.Tensor | None = None
    masks: dict[tuple[int | None, int], torch.Tensor | None] = field(default_factory=dict)

    attend = attend_job

    @property
    def plain(self) -> bool:
        """Whether it is an ordinary forward over ordinary cache rows."""
        return self.layers is None and self.states is None

    @property
    def positions(self) -> list[int]:
        return self.columns[len(self.columns) - len(self.tokens) :]

    def write(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores k, v (H, n, D) of the new nodes; returns the keys and values (H, start + n, D) of
        all rows.
        """
        end = self.start + len(self.tokens)
        keys, values = self.cache.k[layer], self.cache.v[layer]
        keys[:, self.start : end] = k
        values[:, self.start : end] = v
        return keys[:, :end], values[:, :end]

    def mask(self, window: int | None, dtype: torch.dtype, times: int = 1) -> torch.Tensor | None:
        """Additive (times * n, start + n), 0 or -inf; None where every node sees all. `window` as
        in transformers.
        """
        if window is not None and self.columns and max(self.columns) < window:
            window = None
        if (window, times) not in self.masks:
            self.masks[window, times] = self._mask(window, dtype, times)
        return self.masks[window, times]

    def _mask(self, window: int | None, dtype: torch.dtype, times: int) -> torch.Tensor | None:
        length, new, total = self.cache.length, len(self.tokens), self.start + len(self.tokens)
        if new == 1 and self.seen is None and window is None:
            return None
        seen = torch.ones(new, total, dtype=torch.bool)
        if self.seen is None:
            seen = seen.tril_(self.start)
        else:
            seen[:, length:] = self.seen
        if window is not None:
            theirs = torch.tensor([*range(length), *self.columns])
            seen &= theirs[total - new :, None] - theirs[None, :] < window
        return torch.where(seen, 0.0, -torch.inf).to(self.cache.device, dtype).repeat(times, 1)


class Cache:
    """Rows of one branch for one model: keys and values (H, capacity, D) a layer, layers of one
    shape in one tensor.
    """

    def __init__(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, capacity: int = 256
    ):
        self.layout, self.dtype, self.device, self.capacity = layout, dtype, device, capacity
        self.shapes = sorted(set(layout))
        self.all = frozenset(range(len(layout)))
        self.length = 0  # committed rows
        self.tokens, self.parents = (
            list[int](),
            list[int](),
        )  # of the scratch rows; -1 is the committed text
        self.done: frozenset[int] = frozenset()  # layers whose scratch rows are written
        # tokens the branch had when the scratch was written; 0: a part of a long prompt
        self.branch = 0
        self.sharers = [
            1
        ]  # how many caches use these buffers; a writer copies them when it is not alone
        self._allocate()

    def _allocate(self) -> None:
        sizes = [(self.layout.count(s), s[0], self.capacity) for s in self.shapes]
        self.keys = [
            zeros((*n, s[1]), self.dtype, self.device)
            for n, s in zip(sizes, self.shapes, strict=True)
        ]
        self.values = [
            zeros((*n, s[2]), self.dtype, self.device)
            for n, s in zip(sizes, self.shapes, strict=True)
        ]
        self._name()

    def _name(self) -> None:
        places = [
            (self.shapes.index(s), self.layout[:i].count(s)) for i, s in enumerate(self.layout)
        ]
        self.k, self.v = ([memory[g][i] for g, i in places] for memory in (self.keys, self.values))

    def _own(self, rows: int) -> None:
        """Makes the buffers this cache's alone and at least `rows` long."""
        if rows <= self.capacity and self.sharers[0] == 1:
            return
        self.capacity <<= ((rows - 1) // self.capacity).bit_length()  # doubled until they fit
        used, old = self.length + len(self.tokens), (*self.keys, *self.values)
        self.sharers[0] -= 1
        self.sharers = [1]
        self._allocate()
        for mine, theirs in zip((*self.keys, *self.values), old, strict=True):
            mine[:, :, :used] = theirs[:, :, :used]

    def fork(self) -> Cache:
        """A copy that shares the buffers until one of the two writes."""
        self.sharers[0] += 1
        return copy.copy(self)

    def drop(self) -> None:
        self.sharers[0] -= 1  # the others need not copy on its account

    def commit(self, tokens: Sequence[int]) -> None:
        """Keeps the scratch rows on the path that `tokens`, the whole branch, took below them;
        forgets the rest.
        """
        keep, node, child, end = list[int](), -1, 0, len(self.tokens)
        for token in tokens[self.length : len(tokens) - 1] if self.done == self.all else ():
            while child < end and (self.parents[child] != node or self.tokens[child] != token):
                child += 1
            if child == end:
                break
            keep.append(child)
            node, child = child, child + 1
        self._keep(keep)
        self.length += len(keep)
        self.tokens, self.parents, self.done = [], [], frozenset()

    def _keep(self, keep: Sequence[int]) -> None:
        """Moves these scratch rows, a path, to the front. A cache whose rows lie elsewhere has a
        `_keep` of its own.
        """
        still = next((i for i, node in enumerate(keep) if i != node), len(keep))
        if still < len(keep):
            self._own(self.capacity)
            source = torch.tensor(keep[still:], device=self.device) + self.length
            for rows in (*self.keys, *self.values):
                rows[:, :, self.length + still : self.length + len(keep)] = rows[:, :, source]

    def prepare(self, ask: Ask, tokens: Sequence[int], chunk: int) -> tuple[Job, bool]:
        """The job that answers `ask` on the branch `tokens`; False beside it: it only takes in
        `chunk` pending ones.
        """
        tree = ask.tree
        if self.branch != len(tokens):
            self.commit(tokens)
        pending = len(tokens) - 1 - self.length
        shared, seen, rows, part = 0, None, ask.rows, pending > chunk
        layers, states = (
            (None, None) if part else (ask.layers, ask.states)
        )  # pending rows are kept, so all layers run
        run = self.all if layers is None else frozenset(layers)
        if part:
            whole, depths, rows = [*tokens[self.length :][:chunk]], [*range(chunk)], ()
            parents = [d - 1 for d in depths]
        else:
            whole = [*tokens[self.length : -1], *tree.tokens]
            parents = [*range(-1, pending), *(p + pending for p in tree.parents[1:])]
            depths = [*range(pending), *(d + pending for d in tree.depths)]
            if run == self.done:
                known = len(whole) - (
                    0 if states is None else len(states)
                )  # states are those of the last nodes
                end = min(len(self.tokens), known, pending + min(rows or [len(tree)]))
                while shared < end and (whole[shared], parents[shared]) == (
                    self.tokens[shared],
                    self.parents[shared],
                ):
                    shared += 1
                shared = pending if shared == len(whole) else shared
            rows = range(max(0, shared - pending), len(tree)) if rows is None else rows
            if not tree.is_chain:
                # A long prompt's is not worth remembering.
                seen = (ancestors if pending < 64 else ancestors.__wrapped__)(tuple(parents))[
                    shared:
                ]
        self.branch = 0 if part else len(tokens)
        same = (
            states is not None
            and self.tokens == whole
            and self.parents == parents
            and not run & self.done
        )
        before = self.done if same else frozenset()
        self._own(self.length + len(whole))
        # Until `finish` the rows behind `shared` are in nobody's name: an interrupted forward loses
        # only them.
        self.tokens, self.parents, self.next = (
            whole[:shared],
            parents[:shared],
            (whole, parents, run | before),
        )
        columns, wanted = [self.length + d for d in depths], [pending + r - shared for r in rows]
        start, first = self.length + shared, shared - pending
        return Job(
            self, whole[shared:], columns, start, seen, wanted, first, layers, states
        ), not part

    def finish(self) -> None:
        """The forward of the last job is through: its rows are what they claim to be."""
        self.tokens, self.parents, self.done = self.next
