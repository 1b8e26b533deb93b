"""A compiled OpenVINO graph, and the inputs that each forward writes for it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from foretell.backends.buffers import OutputBuffers
from foretell.backends.openvino_graph import (
    BEGINS,
    BLOCK_BEGINS,
    BLOCKS,
    GATHER,
    LONGEST,
    MASK,
    MASK_BEGINS,
    NUMPY,
    PAST,
    POSITIONS,
    ROTATIONS,
    ROWS,
    SCATTER,
    STATES,
    TABLES,
    Recording,
    as_numpy,
)
from foretell.backends.pool import BLOCK, PooledCache, Segment
from foretell.cache.job import Job
from foretell.cache.masks import ancestors
from foretell.core.model import Computed

PIECE = 128  # nodes of a forward of a small model: a longer chain takes several
ALL_ROWS = 32  # a graph of at most so many nodes gives the logits of all, wanted or not
KEPT_PLANS = 64  # tables that are kept, see CompiledGraph._plan
# The tables that the numbers of nodes decide.
PLANNED = (GATHER, SCATTER, BEGINS, MASK, MASK_BEGINS)


class JobSlice:
    """Nodes of a job that one forward computes, all below rows that each of them sees.

    `seen`: which nodes see which, bool (m, m); None: a chain. `repeated`: how many of the first
    nodes had rows already and are computed again, as not every new node sees all of these rows.
    """

    def __init__(self, job: Job):
        assert isinstance(job.cache, PooledCache)
        self.lease = job.cache.lease
        self.past = job.start
        self.tokens = job.tokens
        self.positions = job.positions
        self.rows = job.rows
        self.seen = None if job.seen is None else job.seen.numpy()
        self.repeated = 0
        if self.seen is not None:
            kept = job.start - job.cache.base
            if kept and not self.seen[:, :kept].all():
                plan = job.cache.plan
                assert plan is not None
                self.tokens = plan.tokens
                self.positions = job.scratch_positions
                self.past = job.cache.base
                self.rows = [kept + row for row in job.rows]
                self.seen = ancestors(tuple(plan.parents)).numpy()
                self.repeated = kept
            else:
                self.seen = self.seen[:, kept:]
        self.end = self.past + len(self.tokens)

    def pieces(self, size: int) -> list[JobSlice]:
        """The same in turn: chains of `size` nodes that all later nodes see, then the rest."""
        # Rows in an order of their own are rare, and pieces would lose the order.
        if len(self.tokens) <= size or self.rows != sorted(self.rows):
            return [self]
        if self.seen is not None and not self.seen[size:, :size].all():
            return [self]
        first, rest = copy.copy(self), copy.copy(self)
        first.tokens = self.tokens[:size]
        first.positions = self.positions[:size]
        first.rows = [row for row in self.rows if row < size]
        first.seen = None
        first.repeated = min(size, self.repeated)
        first.end = self.past + size
        rest.tokens = self.tokens[size:]
        rest.positions = self.positions[size:]
        rest.rows = [row - size for row in self.rows if row >= size]
        rest.seen = None if self.seen is None else self.seen[size:, size:]
        rest.repeated = self.repeated - first.repeated
        rest.past = first.end
        return [first, *rest.pieces(size)]


class CompiledGraph:
    """A compiled graph with the memory it reads, of which a forward renews what has changed.

    `size`: the number of nodes, to which fewer are padded; 0: any number. `alone`: for one job at a
    time, so that no input ever changes its shape.
    """

    def __init__(self, recording: Recording, size: int, alone: bool, threads: int):
        self.recording = recording
        self.size = size
        self.alone = alone
        # Each number of key-value heads and the place of its first table among the inputs.
        first_table = ROTATIONS + len(recording.rotations(1))
        heads = recording.forward_graph.heads
        self.groups = [(count, first_table + TABLES * i) for i, count in enumerate(heads)]
        self.first_rows = first_table + TABLES * len(heads)
        # Blocks that one job may have, and one that belongs to no cache.
        self.most_blocks = -(-(recording.loop.context + PIECE) // BLOCK) + 1
        self.inputs: dict[int, np.ndarray] = {}  # the memory that it reads, by place
        self.segment: Segment | None = None  # whose rows it reads and writes
        # What the tables say now. `counts`: nodes of each job; [] if they must be written again.
        self.counts: list[int] = []
        self.only_chains = False
        self.ranges: list[tuple[int, int]] = []  # where the jobs' rows lie
        self.plans: dict[tuple[int, ...], list[dict[int, np.ndarray]]] = {}
        # Running means of seconds: of a run after another graph's, and of one after its own.
        self.seconds_after_other = 0.0
        self.seconds_after_itself = 0.0
        self.logits_memory = OutputBuffers(self._tensor)
        self.hidden_memory = OutputBuffers(self._tensors_by_tap)
        self.width = recording.loop.embedded(torch.zeros(1, 1, dtype=torch.long)).shape[-1]
        self.request = recording.compile(self._shapes(), threads)

    def run(self, slices: Sequence[JobSlice]) -> list[Computed]:
        """The results of these slices, whose rows all lie in one segment."""
        nodes = sum(len(part.tokens) for part in slices)
        wanted = sum(len(part.rows) for part in slices)
        size = self.size or nodes
        count = size if 0 < self.size <= ALL_ROWS else max(1, wanted)
        if self.segment is not slices[0].lease.segment:
            self._bind(slices[0].lease.segment)
        self._write_nodes(slices, size, count)
        self._write_tables(slices)
        taps = self.recording.forward_graph.taps
        logits, tensor = self.logits_memory.take(count, self.recording.vocab)
        self.request.set_output_tensor(0, tensor)
        hidden = torch.empty(0, size, self.width)
        if taps:
            memory, tensors = self.hidden_memory.take(len(taps) * size, self.width)
            hidden = torch.from_numpy(memory).view(len(taps), size, self.width)
            for place, tensor in enumerate(tensors, 1):
                self.request.set_output_tensor(place, tensor)
        self.request.infer(share_outputs=True)
        return self._split(slices, torch.from_numpy(logits), hidden)

    def note(self, seconds: float, after_itself: bool) -> None:
        """Takes the seconds of a run into the running mean."""
        before = self.seconds_after_itself if after_itself else self.seconds_after_other
        mean = before + (seconds - before) / 8 if before else seconds
        if after_itself:
            self.seconds_after_itself = mean
        else:
            self.seconds_after_other = mean

    def _split(
        self, slices: Sequence[JobSlice], logits: torch.Tensor, hidden: torch.Tensor
    ) -> list[Computed]:
        results = []
        node = row = 0
        for part in slices:
            end = node + len(part.tokens)
            states = {}
            for tap, h in zip(self.recording.forward_graph.taps, hidden, strict=True):
                states[tap] = h[node + part.repeated : end].to(self.recording.dtype)
            results.append(Computed(logits[row : row + len(part.rows)], states))
            node = end
            row += len(part.rows)
        return results

    def _tensor(self, memory: np.ndarray) -> object:
        return self.recording.package.Tensor(memory, shared_memory=True)

    def _tensors_by_tap(self, memory: np.ndarray) -> list[object]:
        """(taps * size, E): a tensor for each tap."""
        taps = len(self.recording.forward_graph.taps)
        return [self._tensor(part) for part in np.split(memory, taps)]

    def _shapes(self) -> dict[int, Sequence[int]]:
        """The shapes that never change, by place."""
        shapes: dict[int, Sequence[int]] = {}
        if self.size:
            shapes[STATES] = (self.size, self.width)
            shapes[POSITIONS] = (self.size,)
            for place, table in enumerate(self.recording.rotations(1), ROTATIONS):
                shapes[place] = (self.size, table.shape[-1])
        if 0 < self.size <= ALL_ROWS:
            shapes[ROWS] = (self.size,)
        if self.alone:
            for (heads, first), plan in zip(self.groups, self._plan((self.size,)), strict=True):
                tables = plan | self._blocks(heads, [(0, 0)])
                for offset, values in tables.items():
                    shapes[first + offset] = values.shape
                shapes[first + PAST] = (2 * heads,)
        return shapes

    def _plan(self, counts: tuple[int, ...]) -> list[dict[int, np.ndarray]]:
        """For each number of key-value heads the tables PLANNED, for chains of so many nodes.

        A single node is put in twice: the runtime computes a sequence of one node in another way,
        which rounds differently. Padding repeats the first node, as a sequence behind the others,
        and writes to rows that belong to no cache.
        """
        if counts in self.plans:
            return self.plans[counts]
        lengths = [max(2, count) for count in counts]  # of each job's sequences
        least = max(2, self.size)
        if self.size:
            total = least if sum(lengths) <= least else 2 * least
            lengths.append(total - sum(lengths))
        node_begins = _begins(counts)
        begins = _begins(lengths)
        nodes = np.zeros(begins[-1], np.int64)
        places = np.zeros(self.size or node_begins[-1], np.int64)
        for job, count in enumerate(counts):
            node, at, length = node_begins[job], begins[job], lengths[job]
            nodes[at : at + length] = node + np.minimum(np.arange(length), count - 1)
            places[node : node + count] = np.arange(at, at + count)
        squares = [length * length for length in lengths]
        triangles = [np.tri(length, dtype=np.uint8).reshape(-1) for length in lengths]
        plan = []
        for heads, _ in self.groups:
            mask = np.zeros(heads * (least**2 if self.alone else sum(squares)), np.uint8)
            mask[: heads * sum(squares)] = np.tile(np.concatenate(triangles), heads)
            each_head = np.arange(heads)
            plan.append(
                {
                    GATHER: (nodes * heads + each_head[:, None]).reshape(-1),
                    SCATTER: (places[:, None] + len(nodes) * each_head).reshape(-1),
                    BEGINS: _begins(lengths * heads),
                    MASK: mask,
                    MASK_BEGINS: _begins(squares * heads),
                }
            )
        if self.size:  # those of any number of nodes would fill the memory
            if len(self.plans) >= KEPT_PLANS:
                self.plans.clear()
            self.plans[counts] = plan
        return plan

    def _blocks(self, heads: int, ranges: Sequence[tuple[int, int]]) -> dict[int, np.ndarray]:
        """The blocks of each sequence, and where they begin. A cache's blocks are followed by
        block 0, which belongs to no cache.
        """
        tables = []
        for head in range(heads):
            for low, high in ranges:
                count = (high - low) // BLOCK
                table = np.zeros(self.most_blocks if self.alone else count + 1, np.int32)
                count = min(count, len(table))
                first = (heads * low + head * (high - low)) // BLOCK
                table[:count] = first + np.arange(count)
                tables.append(table)
            if self.size:
                tables.append(np.zeros(2 * self.size // BLOCK + 1, np.int32))
        begins = _begins([len(table) for table in tables])
        return {BLOCKS: np.concatenate(tables), BLOCK_BEGINS: begins}

    def _give(self, place: int, values: np.ndarray, dtype: torch.dtype | None = None) -> None:
        """Lets the request read these values where they lie. `dtype`: what they are, where numpy
        does not know it.
        """
        if dtype is None:
            tensor = self._tensor(values)
        else:
            shape = list(values.shape)
            tensor = self.recording.package.Tensor(values, shape, self.recording.types[dtype])
        self.request.set_input_tensor(place, tensor)
        self.inputs[place] = values

    def _put(self, place: int, values: np.ndarray) -> None:
        """Writes these values to an input, in its memory if they fit there."""
        if place in self.inputs and self.inputs[place].shape == values.shape:
            self.inputs[place][...] = values
        else:
            self._give(place, values.copy())

    def _numbers(self, place: int, count: int) -> np.ndarray:
        """The memory (count,) of an input of whole numbers."""
        if place not in self.inputs or len(self.inputs[place]) != count:
            self._give(place, np.zeros(count, np.int64))
        return self.inputs[place]

    def _vectors(self, place: int, count: int, width: int) -> np.ndarray:
        """The memory (count, width) of an input in the model's own number format."""
        if place not in self.inputs or len(self.inputs[place]) != count:
            dtype = self.recording.dtype
            self._give(place, np.zeros((count, width), NUMPY[dtype]), dtype)
        return self.inputs[place]

    def _bind(self, segment: Segment) -> None:
        """Makes it read and write the rows of this segment."""
        self.segment = None  # until all inputs are set
        self.ranges = []
        layout = self.recording.layout
        shapes = sorted(set(layout))
        places = [(shapes.index(shape), layout[:i].count(shape)) for i, shape in enumerate(layout)]
        element = self.recording.types[self.recording.dtype]
        for layer, (group, place) in enumerate(places):
            for offset, memory in enumerate((segment.keys, segment.values)):
                rows = memory[group][place]
                shape = [len(rows) // BLOCK, 1, BLOCK, rows.shape[1]]
                bytes_ = rows.view(torch.uint8).numpy().reshape(-1)
                tensor = self.recording.package.Tensor(bytes_, shape, element)
                self.request.set_input_tensor(self.first_rows + 2 * layer + offset, tensor)
        self.segment = segment

    def _write_nodes(self, slices: Sequence[JobSlice], size: int, wanted: int) -> None:
        """Writes states, positions, rotations and wanted rows. What `size` has beyond the slices'
        nodes keeps old, valid values: it is padding.
        """
        states = self._vectors(STATES, size, self.width)
        positions = self._numbers(POSITIONS, size)
        rows = self._numbers(ROWS, wanted)
        node = row = 0
        for part in slices:
            end = node + len(part.tokens)
            positions[node:end] = part.positions
            last = row + len(part.rows)
            rows[row:last] = part.rows
            rows[row:last] += node
            node, row = end, last
        tokens = torch.tensor([token for part in slices for token in part.tokens])
        states[:node] = as_numpy(self.recording.embedded(tokens))
        used = positions[:node]
        tables = self.recording.rotations(int(used.max()) + 1)
        for place, table in enumerate(tables, ROTATIONS):
            self._vectors(place, size, table.shape[-1])[:node] = table[used]

    def _write_tables(self, slices: Sequence[JobSlice]) -> None:
        """Writes what has changed of the tables that say which nodes belong to which job."""
        counts = [len(part.tokens) for part in slices]
        ranges = [(part.lease.low, part.lease.high) for part in slices]
        trees = []
        for i, part in enumerate(slices):
            if part.seen is not None and len(part.seen) > 1:
                trees.append((i, part.seen))
        past = [part.past for part in slices]
        if self.size:
            past.append(0)  # of the padding
        same_counts = self.counts == counts
        same_mask = self.only_chains and not trees
        same_ranges = self.ranges == ranges
        if not (same_counts and same_mask and same_ranges):
            # Should this be interrupted, the next forward writes all of it again.
            self.counts, self.ranges = [], []
            for (heads, first), plan in zip(self.groups, self._plan(tuple(counts)), strict=True):
                for table, values in plan.items():
                    if not same_counts or (table == MASK and not same_mask):
                        self._put(first + table, values)
                mask = self.inputs[first + MASK]
                mask_begins = self.inputs[first + MASK_BEGINS]
                for i, seen in trees:
                    for begin in mask_begins[i :: len(past)][:heads]:
                        mask[begin : begin + seen.size] = seen.reshape(-1)
                if not same_ranges:
                    for table, values in self._blocks(heads, ranges).items():
                        self._put(first + table, values)
            self.counts, self.ranges, self.only_chains = counts, ranges, not trees
        longest = max(part.past + max(2, len(part.tokens)) for part in slices)
        for heads, first in self.groups:
            self._put(first + PAST, np.array(past * heads, np.int32))
            self._put(first + LONGEST, _length_bound(longest))


@cache
def _length_bound(rows: int) -> np.ndarray:
    """A length (), at least so many rows. Attention builds its code anew for each new length, for
    milliseconds, so there are few of them.
    """
    return np.array(max(256, 1 << (rows - 1).bit_length()), np.int32)


def _begins(sizes: Sequence[int]) -> np.ndarray:
    return np.cumsum([0, *sizes], dtype=np.int32)
