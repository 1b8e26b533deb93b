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
KEPT_PLANS = 64  # tables that are kept, see CompiledGraph._plan_tables
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
            existing_rows = job.start - job.cache.base
            if existing_rows and not self.seen[:, :existing_rows].all():
                plan = job.cache.plan
                assert plan is not None
                self.tokens = plan.tokens
                self.positions = job.scratch_positions
                self.past = job.cache.base
                self.rows = [existing_rows + row for row in job.rows]
                self.seen = ancestors(tuple(plan.parents)).numpy()
                self.repeated = existing_rows
            else:
                self.seen = self.seen[:, existing_rows:]
        self.end = self.past + len(self.tokens)

    def split_pieces(self, piece_size: int) -> list[JobSlice]:
        """Splits the nodes in turn: chains of `piece_size` nodes that all later nodes see, then the
        rest.
        """
        # Rows in an order of their own are rare, and pieces would lose the order.
        if len(self.tokens) <= piece_size or self.rows != sorted(self.rows):
            return [self]
        if self.seen is not None and not self.seen[piece_size:, :piece_size].all():
            return [self]
        first_piece, remainder = copy.copy(self), copy.copy(self)
        first_piece.tokens = self.tokens[:piece_size]
        first_piece.positions = self.positions[:piece_size]
        first_piece.rows = [row for row in self.rows if row < piece_size]
        first_piece.seen = None
        first_piece.repeated = min(piece_size, self.repeated)
        first_piece.end = self.past + piece_size
        remainder.tokens = self.tokens[piece_size:]
        remainder.positions = self.positions[piece_size:]
        remainder.rows = [row - piece_size for row in self.rows if row >= piece_size]
        remainder.seen = None if self.seen is None else self.seen[piece_size:, piece_size:]
        remainder.repeated = self.repeated - first_piece.repeated
        remainder.past = first_piece.end
        return [first_piece, *remainder.split_pieces(piece_size)]


class CompiledGraph:
    """A compiled graph with the memory it reads, of which a forward renews what has changed.

    `size`: the number of nodes, to which fewer are padded; 0: any number. `alone`: for one job at a
    time, so that no input ever changes its shape.
    """

    def __init__(self, recording: Recording, size: int, is_single: bool, threads: int):
        self.recording = recording
        self.size = size
        self.alone = is_single
        # Each number of key-value heads and the place of its first table among the inputs.
        first_table = ROTATIONS + len(recording.rotations(1))
        head_counts = recording.forward_graph.heads
        self.groups = [
            (head_count, first_table + TABLES * group_index)
            for group_index, head_count in enumerate(head_counts)
        ]
        self.first_rows = first_table + TABLES * len(head_counts)
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
        self.logits_memory = OutputBuffers(self._make_tensor)
        self.hidden_memory = OutputBuffers(self._tensors_by_tap)
        self.width = recording.loop.embedded(torch.zeros(1, 1, dtype=torch.long)).shape[-1]
        self.request = recording.compile(self._fixed_shapes(), threads)

    def run_slices(self, slices: Sequence[JobSlice]) -> list[Computed]:
        """The results of these slices, whose rows all lie in one segment."""
        node_count = sum(len(job_slice.tokens) for job_slice in slices)
        row_count = sum(len(job_slice.rows) for job_slice in slices)
        padded_size = self.size or node_count
        logit_rows = padded_size if 0 < self.size <= ALL_ROWS else max(1, row_count)
        if self.segment is not slices[0].lease.segment:
            self._bind_segment(slices[0].lease.segment)
        self._write_nodes(slices, padded_size, logit_rows)
        self._write_tables(slices)
        taps = self.recording.forward_graph.taps
        logits, tensor = self.logits_memory.take_block(logit_rows, self.recording.vocab)
        self.request.set_output_tensor(0, tensor)
        hidden = torch.empty(0, padded_size, self.width)
        if taps:
            memory, tensors = self.hidden_memory.take_block(len(taps) * padded_size, self.width)
            hidden = torch.from_numpy(memory).view(len(taps), padded_size, self.width)
            for output_index, tensor in enumerate(tensors, 1):
                self.request.set_output_tensor(output_index, tensor)
        self.request.infer(share_outputs=True)
        return self._split_results(slices, torch.from_numpy(logits), hidden)

    def note_seconds(self, seconds: float, after_itself: bool) -> None:
        """Takes the seconds of a run into the running mean."""
        previous = self.seconds_after_itself if after_itself else self.seconds_after_other
        mean = previous + (seconds - previous) / 8 if previous else seconds
        if after_itself:
            self.seconds_after_itself = mean
        else:
            self.seconds_after_other = mean

    def _split_results(
        self, slices: Sequence[JobSlice], logits: torch.Tensor, hidden: torch.Tensor
    ) -> list[Computed]:
        results = []
        first_node = first_row = 0
        for job_slice in slices:
            end_node = first_node + len(job_slice.tokens)
            slice_states = {}
            for tap, tap_states in zip(self.recording.forward_graph.taps, hidden, strict=True):
                slice_states[tap] = tap_states[first_node + job_slice.repeated : end_node].to(
                    self.recording.dtype
                )
            results.append(
                Computed(logits[first_row : first_row + len(job_slice.rows)], slice_states)
            )
            first_node = end_node
            first_row += len(job_slice.rows)
        return results

    def _make_tensor(self, memory: np.ndarray) -> object:
        return self.recording.package.Tensor(memory, shared_memory=True)

    def _tensors_by_tap(self, memory: np.ndarray) -> list[object]:
        """Splits memory (taps * size, E) into a tensor for each tap."""
        taps = len(self.recording.forward_graph.taps)
        return [self._make_tensor(tap_memory) for tap_memory in np.split(memory, taps)]

    def _fixed_shapes(self) -> dict[int, Sequence[int]]:
        """Shapes that never change, by the input's place."""
        shapes: dict[int, Sequence[int]] = {}
        if self.size:
            shapes[STATES] = (self.size, self.width)
            shapes[POSITIONS] = (self.size,)
            for input_index, table in enumerate(self.recording.rotations(1), ROTATIONS):
                shapes[input_index] = (self.size, table.shape[-1])
        if 0 < self.size <= ALL_ROWS:
            shapes[ROWS] = (self.size,)
        if self.alone:
            for (head_count, first_table), plan in zip(
                self.groups, self._plan_tables((self.size,)), strict=True
            ):
                tables = plan | self._block_tables(head_count, [(0, 0)])
                for offset, values in tables.items():
                    shapes[first_table + offset] = values.shape
                shapes[first_table + PAST] = (2 * head_count,)
        return shapes

    def _plan_tables(self, counts: tuple[int, ...]) -> list[dict[int, np.ndarray]]:
        """The tables PLANNED for each number of key-value heads, for chains of so many nodes.

        A single node is put in twice: the runtime computes a sequence of one node in another way,
        which rounds differently. Padding repeats the first node, as a sequence after the others,
        and writes to rows that belong to no cache.
        """
        if counts in self.plans:
            return self.plans[counts]
        lengths = [max(2, count) for count in counts]  # of each job's sequences
        min_nodes = max(2, self.size)
        if self.size:
            padded_total = min_nodes if sum(lengths) <= min_nodes else 2 * min_nodes
            lengths.append(padded_total - sum(lengths))
        node_begins = _sequence_begins(counts)
        sequence_begins = _sequence_begins(lengths)
        node_of_row = np.zeros(sequence_begins[-1], np.int64)
        row_of_node = np.zeros(self.size or node_begins[-1], np.int64)
        for job, count in enumerate(counts):
            node, first_row, length = node_begins[job], sequence_begins[job], lengths[job]
            node_of_row[first_row : first_row + length] = node + np.minimum(
                np.arange(length), count - 1
            )
            row_of_node[node : node + count] = np.arange(first_row, first_row + count)
        squares = [length * length for length in lengths]
        triangles = [np.tri(length, dtype=np.uint8).reshape(-1) for length in lengths]
        plan = []
        for head_count, _ in self.groups:
            mask = np.zeros(head_count * (min_nodes**2 if self.alone else sum(squares)), np.uint8)
            mask[: head_count * sum(squares)] = np.tile(np.concatenate(triangles), head_count)
            head_indices = np.arange(head_count)
            plan.append(
                {
                    GATHER: (node_of_row * head_count + head_indices[:, None]).reshape(-1),
                    SCATTER: (row_of_node[:, None] + len(node_of_row) * head_indices).reshape(-1),
                    BEGINS: _sequence_begins(lengths * head_count),
                    MASK: mask,
                    MASK_BEGINS: _sequence_begins(squares * head_count),
                }
            )
        if self.size:  # those of any number of nodes would fill the memory
            if len(self.plans) >= KEPT_PLANS:
                self.plans.clear()
            self.plans[counts] = plan
        return plan

    def _block_tables(
        self, head_count: int, ranges: Sequence[tuple[int, int]]
    ) -> dict[int, np.ndarray]:
        """The blocks of each sequence, and where they begin. A cache's blocks are followed by block
        0, which belongs to no cache.
        """
        tables = []
        for head in range(head_count):
            for first_row, end_row in ranges:
                block_count = (end_row - first_row) // BLOCK
                table = np.zeros(self.most_blocks if self.alone else block_count + 1, np.int32)
                block_count = min(block_count, len(table))
                first_block = (head_count * first_row + head * (end_row - first_row)) // BLOCK
                table[:block_count] = first_block + np.arange(block_count)
                tables.append(table)
            if self.size:
                tables.append(np.zeros(2 * self.size // BLOCK + 1, np.int32))
        block_begins = _sequence_begins([len(table) for table in tables])
        return {BLOCKS: np.concatenate(tables), BLOCK_BEGINS: block_begins}

    def _bind_value(
        self, input_index: int, values: np.ndarray, dtype: torch.dtype | None = None
    ) -> None:
        """Lets the request read these values where they lie. `dtype`: what they are, where numpy
        does not know it.
        """
        if dtype is None:
            tensor = self._make_tensor(values)
        else:
            shape = list(values.shape)
            tensor = self.recording.package.Tensor(values, shape, self.recording.types[dtype])
        self.request.set_input_tensor(input_index, tensor)
        self.inputs[input_index] = values

    def _put_values(self, input_index: int, values: np.ndarray) -> None:
        """Writes these values to an input, in its memory if they fit there."""
        if input_index in self.inputs and self.inputs[input_index].shape == values.shape:
            self.inputs[input_index][...] = values
        else:
            self._bind_value(input_index, values.copy())

    def _number_memory(self, input_index: int, count: int) -> np.ndarray:
        """The memory (count,) of an input of whole numbers."""
        if input_index not in self.inputs or len(self.inputs[input_index]) != count:
            self._bind_value(input_index, np.zeros(count, np.int64))
        return self.inputs[input_index]

    def _vector_memory(self, input_index: int, count: int, width: int) -> np.ndarray:
        """The memory (count, width) of an input in the model's own number format."""
        if input_index not in self.inputs or len(self.inputs[input_index]) != count:
            dtype = self.recording.dtype
            self._bind_value(input_index, np.zeros((count, width), NUMPY[dtype]), dtype)
        return self.inputs[input_index]

    def _bind_segment(self, segment: Segment) -> None:
        """Makes it read and write the rows of this segment."""
        self.segment = None  # until all inputs are set
        self.ranges = []
        layout = self.recording.layout
        shapes = sorted(set(layout))
        layer_places = [
            (shapes.index(shape), layout[:layer_index].count(shape))
            for layer_index, shape in enumerate(layout)
        ]
        element = self.recording.types[self.recording.dtype]
        for layer, (group, position) in enumerate(layer_places):
            for offset, memory in enumerate((segment.keys, segment.values)):
                rows = memory[group][position]
                shape = [len(rows) // BLOCK, 1, BLOCK, rows.shape[1]]
                row_bytes = rows.view(torch.uint8).numpy().reshape(-1)
                tensor = self.recording.package.Tensor(row_bytes, shape, element)
                self.request.set_input_tensor(self.first_rows + 2 * layer + offset, tensor)
        self.segment = segment

    def _write_nodes(self, slices: Sequence[JobSlice], size: int, row_count: int) -> None:
        """Writes states, positions, rotations and wanted rows. What `size` has beyond the slices'
        nodes keeps old, valid values: it is padding.
        """
        states = self._vector_memory(STATES, size, self.width)
        positions = self._number_memory(POSITIONS, size)
        rows = self._number_memory(ROWS, row_count)
        first_node = first_row = 0
        for job_slice in slices:
            end_node = first_node + len(job_slice.tokens)
            positions[first_node:end_node] = job_slice.positions
            end_row = first_row + len(job_slice.rows)
            rows[first_row:end_row] = job_slice.rows
            rows[first_row:end_row] += first_node
            first_node, first_row = end_node, end_row
        tokens = torch.tensor([token for job_slice in slices for token in job_slice.tokens])
        states[:first_node] = as_numpy(self.recording.embedded(tokens))
        used_positions = positions[:first_node]
        tables = self.recording.rotations(int(used_positions.max()) + 1)
        for input_index, table in enumerate(tables, ROTATIONS):
            self._vector_memory(input_index, size, table.shape[-1])[:first_node] = table[
                used_positions
            ]

    def _write_tables(self, slices: Sequence[JobSlice]) -> None:
        """Writes what has changed of the tables that say which nodes belong to which job."""
        node_counts = [len(job_slice.tokens) for job_slice in slices]
        ranges = [(job_slice.lease.low, job_slice.lease.high) for job_slice in slices]
        trees = []
        for slice_index, job_slice in enumerate(slices):
            if job_slice.seen is not None and len(job_slice.seen) > 1:
                trees.append((slice_index, job_slice.seen))
        past_rows = [job_slice.past for job_slice in slices]
        if self.size:
            past_rows.append(0)  # of the padding
        same_counts = self.counts == node_counts
        same_mask = self.only_chains and not trees
        same_ranges = self.ranges == ranges
        if not (same_counts and same_mask and same_ranges):
            # Should this be interrupted, the next forward writes all of it again.
            self.counts, self.ranges = [], []
            for (head_count, first_table), plan in zip(
                self.groups, self._plan_tables(tuple(node_counts)), strict=True
            ):
                for table, values in plan.items():
                    if not same_counts or (table == MASK and not same_mask):
                        self._put_values(first_table + table, values)
                mask = self.inputs[first_table + MASK]
                mask_begins = self.inputs[first_table + MASK_BEGINS]
                for slice_index, visible in trees:
                    for mask_begin in mask_begins[slice_index :: len(past_rows)][:head_count]:
                        mask[mask_begin : mask_begin + visible.size] = visible.reshape(-1)
                if not same_ranges:
                    for table, values in self._block_tables(head_count, ranges).items():
                        self._put_values(first_table + table, values)
            self.counts, self.ranges, self.only_chains = node_counts, ranges, not trees
        longest_length = max(job_slice.past + max(2, len(job_slice.tokens)) for job_slice in slices)
        for head_count, first_table in self.groups:
            self._put_values(first_table + PAST, np.array(past_rows * head_count, np.int32))
            self._put_values(first_table + LONGEST, _length_bound(longest_length))


@cache
def _length_bound(rows: int) -> np.ndarray:
    """A length (), at least so many rows. Attention builds its code anew for each new length, for
    milliseconds, so there are few of them.
    """
    return np.array(max(256, 1 << (rows - 1).bit_length()), np.int32)


def _sequence_begins(sizes: Sequence[int]) -> np.ndarray:
    return np.cumsum([0, *sizes], dtype=np.int32)
