"""The forward on OpenVINO's CPU runtime: a Decoder's own layer loop, converted once.

Any family whose loop is ours is converted, whatever its layers are made of, and kept if a probe's
logits agree with torch's. openvino_graph.py records and converts; openvino_compiled.py writes the
inputs of a compiled graph; here is decided which graph computes what.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from foretell.backends.openvino_compiled import PIECE, CompiledGraph, JobSlice
from foretell.backends.openvino_graph import Recording
from foretell.backends.pool import BLOCK, Pool, PooledCache
from foretell.cache.buffers import Layout
from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.core.model import Computed
from foretell.errors import ForetellWarning
from foretell.models.decoder.loop import Loop
from foretell.models.decoder.packed import weight_bytes
from foretell.models.executor import Executor, join

DEVICE = "cpu"
PRIORITY = 1
DTYPE = None
WHOLE = False
# Small models have a graph for each of these numbers of nodes, and one more for any number. Each
# holds a copy of the weights, and takes a millisecond less than the one for any number.
SIZES = (1, 8, 16, 32, 64, 128)
SMALL = 64 << 20  # bytes of weights up to which copies pay


def suits(hf: Any, named: bool = False) -> bool:
    """Any model may be tried."""
    return True


def make(
    loop: Loop,
    layout: Layout,
    dtype: torch.dtype,
    vocab: int,
    fallback: Executor | None = None,
) -> Executor:
    """The executor of a model. What it leaves is torch's, whatever the fallback."""
    return OpenVinoExecutor(loop, layout, dtype, vocab)


class OpenVinoExecutor(Executor):
    """Computes plain jobs of any number of requests in one forward.

    It leaves to torch: jobs whose caches are not its own, and where a layer has a sliding window,
    trees that reach beyond it and caches that have evicted rows. Raises LookupError with the reason
    where this model or machine cannot have it.
    """

    name = "openvino"
    fallback: Executor | None = None

    def __init__(self, loop: Loop, layout: Layout, dtype: torch.dtype, vocab: int):
        self.recording = Recording(loop, layout, dtype, vocab)
        # The runtime counts windows in rows and not in positions, which is the same only where no
        # node has siblings before it and no row was evicted.
        self.window = min((w for w in loop.windows if w is not None), default=0)
        self.pool = Pool(layout, dtype, spare=2 * BLOCK)
        self.size = 0
        small = weight_bytes(self.recording.forward_graph.parts) <= SMALL
        self.sizes = SIZES if small else ()
        self.threads = 0
        # By number of nodes (0: any) and whether it is for one job alone.
        self.compiled: dict[tuple[int, bool], CompiledGraph] = {}
        self.last = (0, False)  # the graph that ran last
        self.seconds_lost = 0.0  # by staying with it, see _choose
        self.refused_taps = False  # whether a graph with hidden states could not be built

    def cache(self) -> Cache:
        recording = self.recording
        return self.pool.cache_type(recording.layout, recording.dtype, torch.device("cpu"))

    def release(self) -> None:
        self.compiled = {}
        self.threads = 0
        self.last = (0, False)

    def __call__(
        self, jobs: Sequence[Job], threads: int, taps: Sequence[int] = ()
    ) -> Computed | None:
        if not all(job.plain and isinstance(job.cache, PooledCache) for job in jobs):
            return None
        slices = [JobSlice(job) for job in jobs]
        if any(part.seen is not None and 0 < self.window < part.end for part in slices):
            return None
        if self.window and any(job.compacted for job in jobs):
            return None
        if not self._records(taps):
            return None
        if self.threads != threads:
            self.release()
            self.threads = threads
        self.size = 0
        results = []
        for group in self._groups(slices):
            results += self._run(group)
        return join(results)

    def _records(self, taps: Sequence[int]) -> bool:
        """Makes the graph give these hidden states, from now on; False if it cannot."""
        recorded = self.recording.forward_graph.taps
        if set(taps) <= set(recorded):
            return True
        if self.refused_taps:
            return False
        self.release()  # before the new graph comes: each one holds the weights
        try:
            self.recording.record(sorted({*recorded, *taps}))
        except LookupError as error:
            self.refused_taps = True
            warnings.warn(
                f"executor 'openvino' cannot give hidden states ({error}); torch computes the "
                "steps of methods that read them",
                ForetellWarning,
                stacklevel=2,
            )
        return not self.refused_taps

    def _groups(self, slices: Sequence[JobSlice]) -> list[list[JobSlice]]:
        """What is computed in one forward each, in order."""
        limit = PIECE if self.sizes else sum(len(part.tokens) for part in slices)
        groups: list[list[JobSlice]] = []
        size = 0  # nodes of the last group
        for whole in slices:
            for i, piece in enumerate(whole.pieces(limit)):
                size += len(piece.tokens)
                # A piece builds on the one before it; jobs lie in several segments where one
                # could not hold them all.
                if (
                    not groups
                    or i > 0
                    or piece.lease.segment is not groups[-1][-1].lease.segment
                    or size > limit
                ):
                    groups.append([])
                    size = len(piece.tokens)
                groups[-1].append(piece)
        return groups

    def _run(self, slices: Sequence[JobSlice]) -> list[Computed]:
        """One forward of a graph."""
        nodes = sum(len(part.tokens) for part in slices)
        key = self._choose(nodes, len(slices) == 1)
        size, alone = key
        new = key not in self.compiled
        if new:
            self.compiled[key] = CompiledGraph(self.recording, size, alone, self.threads)
        graph = self.compiled[key]
        start = time.perf_counter()
        results = graph.run(slices)
        if size and not new:  # the first run of a graph still builds a part of it
            graph.note(time.perf_counter() - start, key == self.last)
        self.last = key
        self.size += size or nodes
        return results

    def _choose(self, nodes: int, alone: bool) -> tuple[int, bool]:
        """The graph for so many nodes, see `compiled`.

        A change of graph loads other weights into the processor's cache. So the one that ran last
        serves on, if it is large enough, until staying with it has cost as much as a change.
        """
        size = next((s for s in self.sizes if s >= nodes), 0)
        key = (size, alone and size > 0)
        last_size, last_alone = self.last
        if last_size > size > 0 and last_alone == key[1]:
            last, smaller = self.compiled.get(self.last), self.compiled.get(key)
            if last is not None and smaller is not None:
                stay, change = smaller.seconds_after_itself, smaller.seconds_after_other
                self.seconds_lost += max(0.0, last.seconds_after_itself - stay)
                if stay and change and self.seconds_lost < change - stay:
                    return self.last
        self.seconds_lost = 0.0
        return key
