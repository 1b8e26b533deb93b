"""A branch's rows in llama.cpp's memory.

llama.cpp takes no mask: a token sees the rows that carry the first of its own sequence ids, up to
its position. So a chain has one id, and in a tree every path from the root to a leaf has one; a
node carries the ids of all leaves below it. Ids share rows, so that a copy costs bookkeeping alone.
The path that was accepted stays under its id, which becomes the branch's first; the others keep the
committed rows they have and are given the later ones when they are needed again.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from foretell.cache.cache import Cache


class SequenceMemory(Protocol):
    """The rows and sequence ids of all branches of a model."""

    dtype: torch.dtype
    device: torch.device
    branches: Any  # those that live

    def cut(self, number: int, start: int) -> None:
        """Takes an id off the rows from position `start` on."""

    def share(self, source: int, number: int, start: int, end: int) -> None:
        """Gives an id to the rows from `start` to `end` that carry the id `source`."""

    def release(self, number: int) -> None:
        """Takes an id off all rows; another branch may have it."""

    def reserve(self, count: int, busy: set[Cache], owner: Branch) -> list[int]:
        """So many ids that no row carries."""


class SequenceId:
    """A sequence id. Its rows are the first `base` committed ones and then the scratch nodes of
    `path`, from the root down.
    """

    __slots__ = ("base", "number", "path")

    def __init__(self, number: int):
        self.number = number
        self.base = 0
        self.path: list[int] = []


class Branch(Cache):
    """A cache whose rows lie in llama.cpp's memory. Its first id always has all committed rows."""

    any_length = False
    own_memory = False  # engine/lanes.py reads it

    def __init__(self, memory: SequenceMemory):
        super().__init__((), memory.dtype, memory.device)
        self.memory = memory
        self.sequences: list[SequenceId] = []
        self.last_used = 0  # the model's count of forwards at this branch's last one
        # Whether a change of the memory has begun: if it is set when the next one begins, the last
        # was interrupted.
        self.changing = False
        memory.branches.add(self)

    def fork(self) -> Branch:
        """A copy that shares the committed rows, and the scratch rows where they are one chain."""
        twin = copy.copy(self)
        twin.sequences = []
        twin._clear_scratch()
        twin.synced = 0
        self.memory.branches.add(twin)
        if not self.sequences or self.changing:
            twin.length = twin.base = 0
            return twin
        first = self.sequences[0]
        copied = SequenceId(self.memory.reserve(1, {self}, self)[0])
        copied.base = end = self.length
        if len(first.path) == len(self.tokens) == len(self.parents):
            twin.tokens, twin.parents = [*self.tokens], [*self.parents]
            twin.done, twin.trusted, twin.synced = self.done, self.trusted, self.synced
            copied.path = [*first.path]
            end += len(first.path)
        self.memory.share(first.number, copied.number, 0, end)
        twin.sequences = [copied]
        return twin

    def drop(self) -> None:
        sequences, self.sequences = self.sequences, []
        for sequence in sequences:
            self.memory.release(sequence.number)

    def forget(self) -> None:
        """Gives up all rows. They are computed again when they are needed."""
        self.drop()
        super().forget()
        self.changing = False

    def __del__(self) -> None:
        if getattr(self, "sequences", None):
            self.drop()

    def sync(self, tokens: Sequence[int]) -> int:
        if self.changing:
            self.forget()
        return super().sync(tokens)

    def keep(self, nodes: Sequence[int]) -> int:
        self.changing = True
        sequences = self.sequences
        if nodes:
            # The id whose path was accepted becomes the first.
            depth = len(nodes) - 1
            accepted = next(
                place
                for place, sequence in enumerate(sequences)
                if len(sequence.path) > depth and sequence.path[depth] == nodes[-1]
            )
            sequences[0], sequences[accepted] = sequences[accepted], sequences[0]
        for sequence in sequences:
            if not sequence.path:
                continue
            kept = _common(sequence.path, nodes)
            if len(sequence.path) > kept:
                self.memory.cut(sequence.number, self.length + kept)
            sequence.base = self.length + kept
            sequence.path = []
        self.changing = False
        return len(nodes)

    def missing_ids(self, parents: Sequence[int], shared: int) -> int:
        """How many ids the new nodes, from `shared` on, need beyond those that are unused."""
        if not self.sequences:
            return 1 + _new_paths(parents, shared, (-1,))
        ends = []
        unused = 0
        for i, sequence in enumerate(self.sequences):
            path = sequence.path[: bisect_left(sequence.path, shared)]
            if path:
                ends.append(path[-1])
            elif i == 0:
                ends.append(-1)
            else:
                unused += 1
        return max(0, _new_paths(parents, shared, ends) - unused)

    def place(
        self, parents: Sequence[int], shared: int, fresh: list[int], chain: bool
    ) -> list[list[int]]:
        """Gives ids to the new nodes, from `shared` on, such that each sees its ancestors alone;
        returns each node's ids.

        `fresh`: as many ids as `missing_ids` says. `chain`: no node has two children. `changing` is
        set on return; whoever runs the forward clears it.
        """
        self.changing = True
        self.sequences += [SequenceId(number) for number in fresh]
        first = self.sequences[0]
        if chain and len(self.sequences) == 1 and len(first.path) == shared:
            first.path += range(shared, len(parents))
            return [[first.number] for _ in range(shared, len(parents))]
        carriers, ends, unused = self._cut_to(shared)
        ids: list[list[int]] = []
        for node in range(shared, len(parents)):
            parent = parents[node]
            sequence = ends.pop(parent, None)
            if sequence is None:
                sequence = unused.pop()
                source = carriers.get(parent, first)
                self._branch_off(sequence, source, parent, shared, ids)
            sequence.path.append(node)
            ends[node] = carriers[node] = sequence
            ids.append([sequence.number])
        return ids

    def _cut_to(
        self, shared: int
    ) -> tuple[dict[int, SequenceId], dict[int, SequenceId], list[SequenceId]]:
        """Cuts all paths before node `shared`. Returns by node an id that carries it, by node the
        id whose path ends there, and the unused ids.
        """
        carriers: dict[int, SequenceId] = {}
        ends: dict[int, SequenceId] = {}
        unused = []
        for i, sequence in enumerate(self.sequences):
            if sequence.path and sequence.path[-1] >= shared:
                kept = bisect_left(sequence.path, shared)
                self.memory.cut(sequence.number, self.length + kept)
                sequence.base = self.length
                sequence.path = sequence.path[:kept]
            if sequence.path or i == 0:
                ends.setdefault(sequence.path[-1] if sequence.path else -1, sequence)
                for node in sequence.path:
                    carriers.setdefault(node, sequence)
            else:
                unused.append(sequence)
        return carriers, ends, unused

    def _branch_off(
        self,
        sequence: SequenceId,
        source: SequenceId,
        parent: int,
        shared: int,
        ids: list[list[int]],
    ) -> None:
        """Gives an unused id the rows of `source` down to `parent`, and adds it to the ids of those
        new nodes among them.
        """
        path = []
        if parent >= 0:
            path = source.path[: bisect_left(source.path, parent) + 1]
        stored = bisect_left(path, shared)  # nodes of it that have rows already
        end = self.length + stored
        if sequence.base < end:
            self.memory.share(source.number, sequence.number, sequence.base, end)
        for ancestor in path[stored:]:
            ids[ancestor - shared].append(sequence.number)
        sequence.base = self.length
        sequence.path = path


def _common(path: Sequence[int], other: Sequence[int]) -> int:
    """How many of the first nodes are the same."""
    shorter = min(len(path), len(other))
    for i in range(shorter):
        if path[i] != other[i]:
            return i
    return shorter


def _new_paths(parents: Sequence[int], shared: int, ends: Iterable[int]) -> int:
    """How many of the nodes from `shared` on do not continue a path; `ends`: the paths' last nodes
    so far.
    """
    open_ends = set(ends)
    count = 0
    for node in range(shared, len(parents)):
        if parents[node] in open_ends:
            open_ends.discard(parents[node])
        else:
            count += 1
        open_ends.add(node)
    return count
