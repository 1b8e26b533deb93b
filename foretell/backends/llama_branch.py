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

    def cut_rows(self, sequence_id: int, start: int) -> None:
        """Takes an id off the rows from position `start` on."""

    def share(self, source: int, sequence_id: int, start: int, end: int) -> None:
        """Gives an id to the rows from `start` to `end` that carry the id `source`."""

    def release(self, sequence_id: int) -> None:
        """Takes an id off all rows; another branch may have it."""

    def reserve(self, count: int, busy: set[Cache], owner: Branch) -> list[int]:
        """Reserves so many ids that no row carries."""


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
        forked = copy.copy(self)
        forked.sequences = []
        forked._clear_scratch()
        forked.synced = 0
        self.memory.branches.add(forked)
        if not self.sequences or self.changing:
            forked.length = forked.base = 0
            return forked
        first_sequence = self.sequences[0]
        copied_sequence = SequenceId(self.memory.reserve(1, {self}, self)[0])
        copied_sequence.base = end_row = self.length
        if len(first_sequence.path) == len(self.tokens) == len(self.parents):
            forked.tokens, forked.parents = [*self.tokens], [*self.parents]
            forked.done, forked.trusted, forked.synced = self.done, self.trusted, self.synced
            copied_sequence.path = [*first_sequence.path]
            end_row += len(first_sequence.path)
        self.memory.share(first_sequence.number, copied_sequence.number, 0, end_row)
        forked.sequences = [copied_sequence]
        return forked

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

    def keep_nodes(self, nodes: Sequence[int]) -> int:
        self.changing = True
        sequences = self.sequences
        if nodes:
            # The id whose path was accepted becomes the first.
            depth = len(nodes) - 1
            accepted_index = next(
                index
                for index, sequence in enumerate(sequences)
                if len(sequence.path) > depth and sequence.path[depth] == nodes[-1]
            )
            sequences[0], sequences[accepted_index] = sequences[accepted_index], sequences[0]
        for sequence in sequences:
            if not sequence.path:
                continue
            common_count = _common_length(sequence.path, nodes)
            if len(sequence.path) > common_count:
                self.memory.cut_rows(sequence.number, self.length + common_count)
            sequence.base = self.length + common_count
            sequence.path = []
        self.changing = False
        return len(nodes)

    def missing_ids(self, parents: Sequence[int], first_new: int) -> int:
        """Counts the ids that the new nodes, from `first_new` on, need beyond those that are
        unused.
        """
        if not self.sequences:
            return 1 + _count_new_paths(parents, first_new, (-1,))
        path_ends = []
        unused_count = 0
        for index, sequence in enumerate(self.sequences):
            path = sequence.path[: bisect_left(sequence.path, first_new)]
            if path:
                path_ends.append(path[-1])
            elif index == 0:
                path_ends.append(-1)
            else:
                unused_count += 1
        return max(0, _count_new_paths(parents, first_new, path_ends) - unused_count)

    def assign_ids(
        self, parents: Sequence[int], first_new: int, new_ids: list[int], is_chain: bool
    ) -> list[list[int]]:
        """Gives ids to the new nodes, from `first_new` on, such that each sees its ancestors alone;
        returns each node's ids.

        `new_ids`: as many ids as `missing_ids` says. `is_chain`: no node has two children.
        `changing` is set on return; whoever runs the forward clears it.
        """
        self.changing = True
        self.sequences += [SequenceId(number) for number in new_ids]
        first_sequence = self.sequences[0]
        if is_chain and len(self.sequences) == 1 and len(first_sequence.path) == first_new:
            first_sequence.path += range(first_new, len(parents))
            return [[first_sequence.number] for _ in range(first_new, len(parents))]
        carriers, path_ends, unused = self._cut_to(first_new)
        node_ids: list[list[int]] = []
        for node in range(first_new, len(parents)):
            parent = parents[node]
            sequence = path_ends.pop(parent, None)
            if sequence is None:
                sequence = unused.pop()
                source = carriers.get(parent, first_sequence)
                self._branch_off(sequence, source, parent, first_new, node_ids)
            sequence.path.append(node)
            path_ends[node] = carriers[node] = sequence
            node_ids.append([sequence.number])
        return node_ids

    def _cut_to(
        self, first_new: int
    ) -> tuple[dict[int, SequenceId], dict[int, SequenceId], list[SequenceId]]:
        """Cuts all paths before node `first_new`. Returns by node an id that carries it, by node
        the id whose path ends there, and the unused ids.
        """
        carriers: dict[int, SequenceId] = {}
        path_ends: dict[int, SequenceId] = {}
        unused = []
        for index, sequence in enumerate(self.sequences):
            if sequence.path and sequence.path[-1] >= first_new:
                path_length = bisect_left(sequence.path, first_new)
                self.memory.cut_rows(sequence.number, self.length + path_length)
                sequence.base = self.length
                sequence.path = sequence.path[:path_length]
            if sequence.path or index == 0:
                path_ends.setdefault(sequence.path[-1] if sequence.path else -1, sequence)
                for node in sequence.path:
                    carriers.setdefault(node, sequence)
            else:
                unused.append(sequence)
        return carriers, path_ends, unused

    def _branch_off(
        self,
        sequence: SequenceId,
        source: SequenceId,
        parent: int,
        first_new: int,
        node_ids: list[list[int]],
    ) -> None:
        """Gives an unused id the rows of `source` down to `parent`, and adds it to the ids of those
        new nodes among them.
        """
        path = []
        if parent >= 0:
            path = source.path[: bisect_left(source.path, parent) + 1]
        stored_count = bisect_left(path, first_new)  # nodes of it that have rows already
        end_row = self.length + stored_count
        if sequence.base < end_row:
            self.memory.share(source.number, sequence.number, sequence.base, end_row)
        for ancestor in path[stored_count:]:
            node_ids[ancestor - first_new].append(sequence.number)
        sequence.base = self.length
        sequence.path = path


def _common_length(path: Sequence[int], other_path: Sequence[int]) -> int:
    """The number of first nodes that are the same."""
    min_length = min(len(path), len(other_path))
    for index in range(min_length):
        if path[index] != other_path[index]:
            return index
    return min_length


def _count_new_paths(parents: Sequence[int], first_new: int, path_ends: Iterable[int]) -> int:
    """Counts the nodes from `first_new` on that do not continue a path; `path_ends`: the paths'
    last nodes so far.
    """
    open_ends = set(path_ends)
    path_count = 0
    for node in range(first_new, len(parents)):
        if parents[node] in open_ends:
            open_ends.discard(parents[node])
        else:
            path_count += 1
        open_ends.add(node)
    return path_count
