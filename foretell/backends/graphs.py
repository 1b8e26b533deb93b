"""The forward of one request as a fixed step, which a CUDA graph can hold: the same operations at
the same addresses.

A graph is launched at once, where hundreds of small operations cost the host more than the device.
It fixes shapes, so there is one for each number of nodes (SIZES, to which fewer are padded) and
length of memory; and addresses, so the caches' memory is ours and is reused by later requests. All
that differs from step to step is one small table of numbers, from which the step makes its masks on
the device. The head runs after the graph, on the rows that are asked for: its launch hides behind
the graph's own run, and its result is memory of its own.

Several requests at once, more nodes, and jobs that are not plain stay with torch, in the same
memory. Without a recorder the same step runs operation by operation, on any device: so it is
tested.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import numpy as np
import torch

from foretell.cache.buffers import Layout
from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.core.model import STEP, Computed
from foretell.core.types import Ask
from foretell.models.backend import Backend
from foretell.models.decoder.loop import Loop, use_attention
from foretell.ops.attention import LayerQuery
from foretell.ops.threads import torch_threads

DEVICE = "cuda"
PRIORITY = 1
DTYPE = None
WHOLE = False
SIZES = (1, 2, 4, 8, 16, 32, 64)  # numbers of nodes that there are steps for
SPAN = 128  # scratch rows that the mask of a tree can tell apart
SPARE = 8  # rows of a memory below its cache's; attention is quicker over a multiple of eight
KEPT = 2  # memories of one length that are kept for later requests, and have steps
# Runs before one is recorded, in which libraries choose and allocate what a recording needs ready.
WARM_RUNS = 3
# The first columns of a step's table, see FixedStep.
TOKEN, POSITION, PLACE, ALWAYS, FIRST_SEEN = range(5)


def suits_model(hf_model: Any, by_name: bool = False) -> bool:
    """Returns True: any model may be tried."""
    return True


def make_backend(
    loop: Loop, layout: Layout, dtype: torch.dtype, vocab_size: int, fallback: Backend | None = None
) -> Backend:
    """Makes the backend of a model. What it leaves is torch's, whatever the fallback."""
    return GraphsBackend(loop, layout, dtype, vocab_size)


class Recorder(Protocol):
    """Makes a function without arguments one that does the same to the same memory, faster."""

    def __init__(self, device: torch.device) -> None: ...

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]: ...


class CudaGraphs:
    """Records CUDA graphs. All share one pool of memory: no two run at once, and none reads what
    another left there.

    Raises LookupError where there is no such device.
    """

    def __init__(self, device: torch.device):
        if device.type != "cuda":
            raise LookupError(f"its device is no CUDA GPU but {device.type}")
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self.device):
            graph = torch.cuda.CUDAGraph()
            current_stream = torch.cuda.current_stream()
            self.stream.wait_stream(current_stream)
            with torch.cuda.stream(self.stream):
                for _ in range(WARM_RUNS):
                    run()
            current_stream.wait_stream(self.stream)
            # Other threads may use the device meanwhile.
            with torch.cuda.graph(
                graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                run()
        replay: Callable[[], None] = graph.replay
        return replay


class FixedMemory:
    """Cache rows at a fixed address, and the steps that work on them, by their number of nodes.

    `kept`: whether it is reused by later requests, and so has steps.
    """

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        capacity: int,
        is_reused: bool,
    ):
        # It outlives a request, and may be written inside of inference mode and outside.
        with torch.inference_mode(False):
            self.rows = Cache(layout, dtype, device, capacity + SPARE)
        self.capacity = capacity
        self.kept = is_reused
        self.steps: dict[int, FixedStep] = {}

    def clear(self) -> None:
        """Zeroes the rows of an earlier request: what is masked is still multiplied, and NaN times
        0 is NaN.
        """
        for memory_rows in (*self.rows.keys, *self.rows.values):
            memory_rows.zero_()


class Lease:
    """Holds a memory for a cache and its forks. When the last of them lets go, it is free again."""

    def __init__(self, memory: FixedMemory, free_memories: list[FixedMemory]):
        self.memory = memory
        if memory.kept:
            weakref.finalize(self, free_memories.append, memory).atexit = False


class FixedCache(Cache):
    """A cache whose rows lie in a memory of its backend's."""

    any_length = False
    own_memory = False  # engine/lanes.py reads it

    def __init__(self, owner: GraphsBackend, capacity: int):
        self.owner = owner
        super().__init__(owner.layout, owner.dtype, owner.device, capacity)

    def _allocate(self) -> None:
        # The lease before this one is let go only now, when there is another.
        self.lease: Lease | None = self.owner.lease_memory(self.capacity)
        rows = self.lease.memory.rows
        self.keys, self.values = rows.keys, rows.values
        self.k, self.v = rows.k, rows.v

    def next_length(self, rows: int) -> int:
        """Few sizes, so that memories of others who left are found again, with their graphs."""
        return self.capacity << ((rows - 1) // self.capacity).bit_length()

    def drop(self) -> None:
        super().drop()
        self.lease = None  # the rows are another request's now
        self.keys, self.values = [], []
        self.k, self.v = [], []

    def prepare(self, ask: Ask, tokens: Sequence[int], chunk: int) -> tuple[Job, bool]:
        job, is_complete = super().prepare(ask, tokens, chunk)
        # Recorded now and not in the forward, whose seconds are taken for its cost.
        self.owner.warm(job, job.taps)
        return job, is_complete


class TracedJob(Job):
    """Stands for a job inside a step: what a job knows, as tensors on the device."""

    def __init__(self, row_cache: Cache, table: torch.Tensor, positions: torch.Tensor):
        self.memory = row_cache
        self.positions_of_nodes = positions
        node_table, last_row = table[:-1], table[-1]
        base_row = last_row[0]
        self.places = node_table[:, PLACE]
        row_indices = torch.arange(row_cache.capacity, device=table.device)
        # Rows before the base are seen by all nodes, of the SPAN from there on the table says which
        # sees which, and later ones are seen by none. So each row has a column of the table.
        columns = (row_indices - base_row + 1).clamp_(0, SPAN + 1) + ALWAYS
        table_marks = (node_table != 0).index_select(1, columns)
        # Each node sees itself, padding too: a softmax over nothing is NaN.
        self.visible = table_marks | (row_indices == self.places[:, None])
        self.positions_of_rows = torch.where(
            row_indices < base_row, row_indices, last_row.index_select(0, columns)
        )
        self.masks = {}

    def mask(self, window: int | None, dtype: torch.dtype, times: int = 1) -> torch.Tensor:
        if (window, times) not in self.masks:
            visible = self.visible
            if window is not None:
                distance = self.positions_of_nodes[:, None] - self.positions_of_rows
                visible = visible & (distance < window)
            mask = torch.where(visible, 0.0, -torch.inf).to(dtype)
            self.masks[window, times] = mask.repeat(times, 1)
        cached_mask = self.masks[window, times]
        assert cached_mask is not None
        return cached_mask

    def attend(self, query: LayerQuery) -> torch.Tensor:
        """Attends over the whole memory, as Job.attend does over a cache's rows."""
        if query.bias is not None:
            raise LookupError("its attention has a bias")
        keys, values = self.memory.k[query.layer], self.memory.v[query.layer]
        keys.index_copy_(1, self.places, query.k.to(keys.dtype))
        values.index_copy_(1, self.places, query.v.to(values.dtype))
        mask = self.mask(query.window, query.q.dtype, query.mask_repeats)
        return query.attend(keys, values, mask)


class FixedStep:
    """The forward of `size` nodes in one memory: `fill_table` it with a job, `run` it, read
    `hidden` (size, E) and `tapped[i]` (size, E).

    It reads one table of whole numbers, (size + 1, FIRST_SEEN + SPAN + 1). A row is a node's: its
    token, its position, the row of the memory that it goes to, 1 (for the rows that all see), for
    each of the SPAN scratch rows whether it sees that, 0 (for the rows that none sees). The last
    row has the first scratch row's place, and below the nodes' marks the scratch rows' positions.
    """

    def __init__(
        self, owner: GraphsBackend, memory: FixedMemory, size: int, taps: Iterable[int] = ()
    ):
        self.owner = owner
        self.memory = memory
        self.size = size
        self.taps = frozenset(taps)
        position_count = min(memory.capacity, owner.loop.context)
        # Held here, since the loop may replace its tables by longer ones.
        self.rotations = {
            kind: owner.rotation_table(position_count, *kind) for kind in owner.rotation_kinds
        }
        # Positions below this have a rotation, where heads turn.
        self.end = min(
            (len(part[0]) for table in self.rotations.values() for part in table),
            default=owner.loop.context,
        )
        self.host = np.zeros((size + 1, FIRST_SEEN + SPAN + 1), np.int64)
        self.host[:-1, PLACE] = memory.capacity
        self.host[:-1, ALWAYS] = 1
        with torch.inference_mode(False):
            self.table = torch.from_numpy(self.host).to(owner.device, copy=True)
        self.hidden = torch.empty(0)
        self.tapped: dict[int, torch.Tensor] = {}
        # Runs before the first `fill_table` write no cache's rows: all nodes go to the row below.
        self.run = self.compute_nodes if owner.record is None else owner.record(self.compute_nodes)

    def compute_nodes(self) -> None:
        """Computes the forward of the nodes in the table."""
        loop = self.owner.loop
        node_table = self.table[:-1]
        token_ids = node_table[:, TOKEN]
        positions = node_table[:, POSITION].contiguous()
        rotations: dict[tuple[str, ...], Any] = {}
        for rotation_kind, table in self.rotations.items():
            rotations[rotation_kind] = tuple(part[:, positions] for part in table)
        context_token = STEP.set([TracedJob(self.memory.rows, self.table, positions)])
        entering_states = {}
        try:
            with use_attention(loop.config):
                states = loop.placed(loop.embedded(token_ids[None]), positions)
                for layer, block in enumerate(loop.blocks):
                    entering_states[layer] = states[0]
                    rotation_kind = (loop.kinds[layer],) if loop.kinds else ()
                    states = block(states, rotations.get(rotation_kind), positions[None])
        finally:
            STEP.reset(context_token)
        self.hidden = entering_states[len(loop.blocks)] = states[0]
        # What is held here no other recording overwrites.
        self.tapped = {tap: entering_states[tap] for tap in self.taps}

    def fits_job(self, job: Job) -> bool:
        """Whether the table can describe this job."""
        is_distinct = job.seen is None or len(job.scratch_positions) <= SPAN
        return is_distinct and max(job.scratch_positions) < self.end

    def fill_table(self, job: Job) -> None:
        """Writes a job of at most `size` nodes to the table."""
        host = self.host
        new_count = len(job.tokens)
        if job.seen is None:
            # A chain sees all rows before it, and their positions are their places.
            base_row = job.start
            visible = np.tri(new_count)
        else:
            base_row = job.cache.base
            visible = job.seen.numpy()
        scratch_columns = slice(FIRST_SEEN, FIRST_SEEN + visible.shape[1])
        host[:new_count, TOKEN] = job.tokens
        host[:new_count, POSITION] = job.positions
        host[:new_count, PLACE] = range(job.start, job.start + new_count)
        host[:new_count, scratch_columns] = visible
        host[:new_count, scratch_columns.stop :] = 0
        # Padding repeats the last node, so that its numbers are ordinary ones, and writes to a row
        # that no cache has.
        host[new_count:-1] = host[new_count - 1]
        host[new_count:-1, PLACE] = self.memory.capacity
        host[-1] = 0
        host[-1, 0] = base_row
        host[-1, scratch_columns] = job.scratch_positions[-visible.shape[1] :]
        table_values = torch.from_numpy(host)
        if self.table.device.type == "cuda":
            # A pinned copy: the transfer does not block, and the copy lives until it is through.
            table_values = table_values.pin_memory()
        self.table.copy_(table_values, non_blocking=True)


class GraphsBackend(Backend):
    """Computes one plain job of up to 64 nodes in a fixed step.

    `record`: what makes a step quicker; None runs it as it is. Raises LookupError with the reason
    where this model or machine cannot have it.
    """

    name = "graphs"
    sizes: tuple[int, ...] = SIZES
    fallback: Backend | None = None
    most_jobs = 1  # a step has the addresses of one cache
    start = 256  # rows of a new cache

    def __init__(
        self,
        loop: Loop,
        layout: Layout,
        dtype: torch.dtype,
        vocab_size: int,
        record: Callable[[torch.device], Recorder] | None = CudaGraphs,
    ):
        self.loop = loop
        self.layout = layout
        self.dtype = dtype
        self.vocab = vocab_size
        self.device: torch.device = loop.embed.weight.device
        self.record = None if record is None else record(self.device)
        self.size = 0
        self.taps: frozenset[int] = frozenset()  # of all steps recorded from now on
        self.rotation_kinds: list[tuple[str, ...]] = [] if loop.rotary is None else [()]
        if loop.kinds:
            self.rotation_kinds = [(kind,) for kind in dict.fromkeys(loop.kinds)]
        self.kept_counts: dict[int, int] = {}  # kept memories by their length
        self.free_memories: dict[int, list[FixedMemory]] = {}  # those that no cache holds
        self.kept_memories = weakref.WeakSet[FixedMemory]()
        self.windowed = any(window is not None for window in loop.windows)
        for kind in self.rotation_kinds:
            self.rotation_table(1, *kind)

    def rotation_table(self, position_count: int, *kind: str) -> tuple[torch.Tensor, ...]:
        """Cosines and sines of at least so many positions. Raises LookupError."""
        example = torch.empty(0, dtype=self.dtype, device=self.device)
        table = self.loop.table(example, position_count, *kind)
        if table is None:
            raise LookupError("its rotation is no table of cosines and sines")
        return table

    def cache(self) -> Cache:
        return FixedCache(self, self.start)

    def lease_memory(self, capacity: int) -> Lease:
        """Leases a memory of this length: the one that was freed last, so that single requests one
        after another always have the same.
        """
        free_memories = self.free_memories.setdefault(capacity, [])
        if free_memories:
            memory = free_memories.pop()
            memory.clear()
            return Lease(memory, free_memories)
        is_reused = self.kept_counts.get(capacity, 0) < KEPT
        memory = FixedMemory(self.layout, self.dtype, self.device, capacity, is_reused)
        if is_reused:
            self.kept_counts[capacity] = self.kept_counts.get(capacity, 0) + 1
            self.kept_memories.add(memory)
        return Lease(memory, free_memories)

    def warm(self, job: Job, taps: Sequence[int] = ()) -> None:
        self.find_step(job, taps)

    def release(self) -> None:
        for memory in self.kept_memories:
            memory.steps.clear()

    @torch.inference_mode()
    def find_step(self, job: Job, taps: Sequence[int] = ()) -> FixedStep | None:
        """The step that can compute this job, recorded if it is the first of its size in this
        memory, or the first with these hidden states; None if there is none.
        """
        cache, new_count = job.cache, len(job.tokens)
        if not job.plain or not isinstance(cache, FixedCache) or cache.owner is not self:
            return None
        if cache.lease is None or new_count > SIZES[-1]:
            return None
        if self.windowed and job.compacted:  # a step takes the place of a row for its position
            return None
        memory = cache.lease.memory
        if not memory.kept:
            return None
        size = next(size for size in SIZES if size >= new_count)
        step = memory.steps.get(size)
        if step is None or not step.taps.issuperset(taps):
            self.taps |= set(taps)
            memory.steps.pop(size, None)
            step = memory.steps[size] = FixedStep(self, memory, size, self.taps)
        return step if step.fits_job(job) else None

    @torch.inference_mode()
    def __call__(
        self, jobs: Sequence[Job], threads: int, taps: Sequence[int] = ()
    ) -> Computed | None:
        step = self.find_step(jobs[0], taps) if len(jobs) <= self.most_jobs else None
        if step is None:
            return None
        job = jobs[0]
        with torch_threads(threads) if self.record is None else nullcontext():
            step.fill_table(job)
            step.run()
            self.size = step.size
            # The next run of the step overwrites what it holds.
            new_count = len(job.tokens)
            hidden = {tap: states[:new_count].clone() for tap, states in step.tapped.items()}
            return Computed(self._compute_logits(step.hidden, job.rows), hidden)

    def _compute_logits(self, hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """Logits (k, V) of the wanted rows of `hidden` (size, E)."""
        if not rows:
            return torch.zeros(0, self.vocab, device=self.device)
        if rows == list(range(rows[0], rows[0] + len(rows))):
            row_states = hidden[rows[0] : rows[-1] + 1]
        else:
            row_states = hidden[rows]
        return self.loop.logits(row_states).to(torch.promote_types(self.dtype, torch.float32))
