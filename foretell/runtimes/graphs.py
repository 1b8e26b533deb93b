"""The forward of one request as a fixed step, which a CUDA graph can hold: the same operations at
the same addresses.

A graph is launched at once, where hundreds of small operations cost the host more than the device.
It fixes shapes, so there is one for each number of nodes (SIZES, filled up) and length of memory;
and addresses, so the caches' memory is ours and comes back to the next request. All that differs
from step to step is one small table of numbers, from which the step makes its masks on the device.
The head runs behind the graph, on the rows that are asked for: launching it hides behind the
graph's own run, and its result is nobody else's memory.

What is not fixed (several requests at once, more nodes, hidden states, layer subsets) stays with
torch, in the same memory. Without a recorder the same step runs operation by operation, on any
device: so it is tested.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Protocol

import numpy as np
import torch

from foretell.core.cache import Cache
from foretell.core.model import STEP
from foretell.core.types import Ask
from foretell.families.loop import Loop, attending
from foretell.memory.buffers import Layout
from foretell.memory.job import Job
from foretell.ops.attention import attend
from foretell.ops.threads import torch_threads

SIZES = (1, 2, 4, 8, 16, 32, 64)  # nodes that there are steps for
SPAN = 128  # scratch rows that the mask of a tree can tell apart
SPARE = 8  # rows of a memory behind its cache's; attention is quicker over a multiple of eight
KEPT = 2  # memories of one length that are kept for the next request, and have steps
# runs before one is recorded, in which libraries choose and allocate what a recording must find
# done
WARM = 3
# first columns of the numbers given: token, position, row it goes to, and one that is always seen
FIXED = 4


class Recorder(Protocol):
    """Makes a function of no arguments one that does the same to the same memory, faster."""

    def __init__(self, device: torch.device) -> None: ...

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]: ...


class Graphs:
    """Records CUDA graphs. All share one pool of memory: no two run at once, and none reads what
    another left there.

    Raises LookupError where there is no such device.
    """

    def __init__(self, device: torch.device):
        if device.type != "cuda":
            raise LookupError(f"its device is no CUDA GPU but {device.type}")
        self.device, self.pool = device, torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self.device):
            graph, usual = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            self.stream.wait_stream(usual)
            with torch.cuda.stream(self.stream):
                for _ in range(WARM):
                    run()
            usual.wait_stream(self.stream)
            # What other threads do with the device meanwhile is their business.
            with torch.cuda.graph(
                graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                run()
        replay: Callable[[], None] = graph.replay
        return replay


class Memory:
    """The rows of one cache where they always lie, and the steps that work on them."""

    def __init__(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, capacity: int, kept: bool
    ):
        with torch.inference_mode(
            False
        ):  # it outlives this request, and may be written inside the mode and outside
            self.rows = Cache(layout, dtype, device, capacity + SPARE)
        self.capacity, self.kept = capacity, kept
        self.steps: dict[int, Step] = {}

    def clear(self) -> None:
        """No row of an earlier request stays: what is masked is still multiplied, and NaN times 0
        is NaN.
        """
        for part in (*self.rows.keys, *self.rows.values):
            part.zero_()


class Lease:
    """Holds a memory for a cache and its forks. When the last of them lets go, the next request may
    have it.
    """

    def __init__(self, memory: Memory, free: list[Memory]):
        self.memory = memory
        if memory.kept:
            weakref.finalize(self, free.append, memory).atexit = False


class StaticCache(Cache):
    """A cache whose rows lie in a memory of its executor's."""

    def __init__(self, owner: Static, capacity: int):
        self.owner = owner
        super().__init__(owner.layout, owner.dtype, owner.device, capacity)

    def _allocate(self) -> None:
        self.lease: Lease | None = self.owner.lease(
            self.capacity
        )  # only then is the one before let go
        rows = self.lease.memory.rows
        self.keys, self.values, self.k, self.v = rows.keys, rows.values, rows.k, rows.v

    def drop(self) -> None:
        super().drop()
        self.lease, self.keys, self.values, self.k, self.v = (
            None,
            [],
            [],
            [],
            [],
        )  # the rows are another's now

    def prepare(self, ask: Ask, tokens: Sequence[int], chunk: int) -> tuple[Job, bool]:
        job, whole = super().prepare(ask, tokens, chunk)
        if job.layers is None and job.states is None and not ask.taps:
            self.owner.step(
                job
            )  # recorded now and not in the forward, whose seconds are taken for its cost
        return job, whole


class Fixed(Job):
    """Stands for a job inside a step: what a job knows, as tensors on the device."""

    def __init__(self, rows: Cache, given: torch.Tensor, positions: torch.Tensor):
        self.memory, self.places, self.slots = rows, positions, given[:-1, 2]
        place = torch.arange(rows.capacity, device=given.device)
        # Rows below the base are seen by all, those of the SPAN behind it by whom the numbers say,
        # the rest by nobody.
        behind = (place - given[-1, 0] + 1).clamp_(0, SPAN + 1) + FIXED - 1
        # Each node sees itself, also one that only fills up: a row of nothing has no softmax.
        self.visible = (given[:-1] != 0).index_select(1, behind) | (place == self.slots[:, None])
        self.theirs = torch.where(place < given[-1, 0], place, given[-1].index_select(0, behind))
        self.masks = {}

    def mask(self, window: int | None, dtype: torch.dtype, times: int = 1) -> torch.Tensor:
        if (window, times) not in self.masks:
            seen = self.visible
            if window is not None:
                seen = seen & (self.places[:, None] - self.theirs < window)
            self.masks[window, times] = (
                torch.where(seen, 0.0, -torch.inf).to(dtype).repeat(times, 1)
            )
        mask = self.masks[window, times]
        assert mask is not None
        return mask

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """As ops.attention.attend_job, over the whole memory."""
        times = len(q) // len(k) if softcap is None and sinks is None else 1
        keys, values = self.memory.k[layer], self.memory.v[layer]
        keys.index_copy_(1, self.slots, k.to(keys.dtype))
        values.index_copy_(1, self.slots, v.to(values.dtype))
        return attend(q, keys, values, self.mask(window, q.dtype, times), scale, softcap, sinks)


class Step:
    """The forward of `size` nodes in one memory: `fill` it with a job, `run` it, read `hidden`
    (size, E).

    It reads one table of whole numbers, (size + 1, FIXED + SPAN + 1). A row is a node's: its token,
    its position, the row of the memory that it goes to, 1, of each of the SPAN scratch rows whether
    it sees it, 0. The last one is the first scratch row, and under the others' marks the scratch
    rows' positions.
    """

    def __init__(self, owner: Static, memory: Memory, size: int):
        self.owner, self.memory, self.size = owner, memory, size
        needed = min(memory.capacity, owner.loop.context)
        self.tables = {
            kind: owner.table(needed, *kind) for kind in owner.kinds
        }  # a longer one may take their place
        self.end = min(len(part[0]) for table in self.tables.values() for part in table)
        self.host = np.zeros((size + 1, FIXED + SPAN + 1), np.int64)
        self.host[:-1, 2:4] = memory.capacity, 1
        with torch.inference_mode(False):
            self.given = torch.from_numpy(self.host).to(owner.device, copy=True)
        self.hidden = torch.empty(0)
        # Runs before the first `fill` touch no cache's rows: all of their nodes go to the one
        # behind them.
        self.run = self.compute if owner.record is None else owner.record(self.compute)

    def compute(self) -> None:
        """The forward of what stands in `given`."""
        loop, nodes = self.owner.loop, self.given[:-1]
        ids, positions = nodes[:, 0], nodes[:, 1].contiguous()
        turns = {
            kind: tuple(part[:, positions] for part in table) for kind, table in self.tables.items()
        }
        token = STEP.set([Fixed(self.memory.rows, self.given, positions)])
        try:
            with attending(loop.config):
                h = loop.embedded(ids[None])
                for i, block in enumerate(loop.blocks):
                    h = block(h, turns[(loop.kinds[i],) if loop.kinds else ()], positions[None])
        finally:
            STEP.reset(token)
        self.hidden = h[0]

    def fits(self, job: Job) -> bool:
        return (job.seen is None or len(job.columns) <= SPAN) and max(job.columns) < self.end

    def fill(self, job: Job) -> None:
        n, host = len(job.tokens), self.host
        chain = (
            job.seen is None
        )  # all rows before it are below the base, and their positions are their places
        host[-1], base = 0, job.start if chain else job.cache.length
        host[:n, 0], host[:n, 1] = job.tokens, job.positions
        host[:n, 2] = range(job.start, job.start + n)
        seen = np.tri(n) if chain else job.seen.numpy()  # type: ignore[union-attr]
        host[:n, FIXED : FIXED + seen.shape[1]] = seen
        host[:n, FIXED + seen.shape[1] :] = 0
        # Who only fills up is the last node's twin, so its numbers are as harmless, and goes where
        # nobody looks.
        host[n:-1] = host[n - 1]
        host[n:-1, 2] = self.memory.capacity
        host[-1, 0] = base
        host[-1, FIXED : FIXED + seen.shape[1]] = job.columns[-seen.shape[1] :]
        numbers = torch.from_numpy(host)
        if self.given.device.type == "cuda":
            numbers = (
                numbers.pin_memory()
            )  # a copy, which waits for nobody and is not reused before it is read
        self.given.copy_(numbers, non_blocking=True)


class Static:
    """`executor(jobs, threads)` computes one job of up to 64 nodes in fixed steps -> logits (k, V);
    None: torch is to.

    `record`: what makes a step quicker; None runs it as it is. Raises LookupError with the reason
    where this model or machine cannot have it.
    """

    sizes = SIZES
    start = 256  # rows of a new cache

    def __init__(
        self,
        loop: Loop,
        layout: Layout,
        dtype: torch.dtype,
        vocab: int,
        record: Callable[[torch.device], Recorder] | None = Graphs,
    ):
        self.loop, self.layout, self.dtype, self.vocab = loop, layout, dtype, vocab
        self.device: torch.device = loop.embed.weight.device
        self.record = None if record is None else record(self.device)
        self.name = "static" if record is None else "graphs"
        self.kinds: list[tuple[str, ...]] = (
            [(kind,) for kind in dict.fromkeys(loop.kinds)] if loop.kinds else [()]
        )
        self.made: dict[int, int] = {}  # kept memories by their length
        self.free: dict[int, list[Memory]] = {}  # those of them that nobody holds
        self.size = 0
        for kind in self.kinds:
            self.table(1, *kind)

    def table(self, needed: int, *kind: str) -> tuple[torch.Tensor, ...]:
        table = self.loop.table(torch.empty(0, dtype=self.dtype, device=self.device), needed, *kind)
        if table is None:
            raise LookupError("its rotation is no table of cosines and sines")
        return table

    def cache(self) -> Cache:
        return StaticCache(self, self.start)

    def lease(self, capacity: int) -> Lease:
        """A memory of this length: the one that was free last, so that a request alone always has
        the same.
        """
        free = self.free.setdefault(capacity, [])
        if free:
            memory = free.pop()
            memory.clear()
        else:
            kept = self.made.get(capacity, 0) < KEPT
            memory = Memory(self.layout, self.dtype, self.device, capacity, kept)
            self.made[capacity] = self.made.get(capacity, 0) + kept
        return Lease(memory, free)

    @torch.inference_mode()
    def step(self, job: Job) -> Step | None:
        """The step that can compute this job, recorded if it is the first of its size in this
        memory.
        """
        cache, n = job.cache, len(job.tokens)
        if (
            not isinstance(cache, StaticCache)
            or cache.owner is not self
            or cache.lease is None
            or n > SIZES[-1]
        ):
            return None
        memory = cache.lease.memory
        if not memory.kept:
            return None
        size = next(s for s in SIZES if s >= n)
        if size not in memory.steps:
            memory.steps[size] = Step(self, memory, size)
        return memory.steps[size] if memory.steps[size].fits(job) else None

    @torch.inference_mode()
    def __call__(self, jobs: Sequence[Job], threads: int) -> torch.Tensor | None:
        job = jobs[0]
        step = self.step(job) if len(jobs) == 1 else None
        if step is None:
            return None
        with torch_threads(threads) if self.record is None else nullcontext():
            step.fill(job)
            step.run()
            self.size, rows = step.size, job.rows
            if not rows:
                return torch.zeros(0, self.vocab, device=self.device)
            side_by_side = rows == list(range(rows[0], rows[0] + len(rows)))
            h = step.hidden[rows[0] : rows[-1] + 1] if side_by_side else step.hidden[rows]
            return self.loop.logits(h).to(torch.promote_types(self.dtype, torch.float32))
