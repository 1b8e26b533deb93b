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
from foretell.models.backend import Backend, join_results
from foretell.models.decoder.loop import Loop
from foretell.models.decoder.packed import weight_bytes

DEVICE = "cpu"
PRIORITY = 1
DTYPE = None
WHOLE = False
# Small models have a graph for each of these numbers of nodes, and one more for any number. Each
# holds a copy of the weights, and takes a millisecond less than the one for any number.
SIZES = (1, 8, 16, 32, 64, 128)
SMALL = 64 << 20  # bytes of weights up to which copies pay


def suits_model(hf_model: Any, by_name: bool = False) -> bool:
    """Returns True: any model may be tried."""
    return True


def make_backend(
    loop: Loop, layout: Layout, dtype: torch.dtype, vocab_size: int, fallback: Backend | None = None
) -> Backend:
    """Makes the backend of a model. What it leaves is torch's, whatever the fallback."""
    return OpenVinoBackend(loop, layout, dtype, vocab_size)


class OpenVinoBackend(Backend):
    """Computes plain jobs of any number of requests in one forward.

    It leaves to torch: jobs whose caches are not its own, and where a layer has a sliding window,
    trees that reach beyond it and caches that have evicted rows. Raises LookupError with the reason
    where this model or machine cannot have it.
    """

    name = "openvino"
    fallback: Backend | None = None

    def __init__(self, loop: Loop, layout: Layout, dtype: torch.dtype, vocab_size: int):
        self.recording = Recording(loop, layout, dtype, vocab_size)
        # The runtime counts windows in rows and not in positions, which is the same only where no
        # node has siblings before it and no row was evicted.
        self.window = min(
            (layer_window for layer_window in loop.windows if layer_window is not None), default=0
        )
        self.pool = Pool(layout, dtype, spare_rows=2 * BLOCK)
        self.size = 0
        is_small = weight_bytes(self.recording.forward_graph.parts) <= SMALL
        self.sizes = SIZES if is_small else ()
        self.threads = 0
        # By number of nodes (0: any) and whether it is for one job alone.
        self.compiled: dict[tuple[int, bool], CompiledGraph] = {}
        self.last = (0, False)  # the graph that ran last
        self.seconds_lost = 0.0  # by staying with it, see _choose_graph
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
        if any(
            job_slice.seen is not None and 0 < self.window < job_slice.end for job_slice in slices
        ):
            return None
        if self.window and any(job.compacted for job in jobs):
            return None
        if not self._ensure_taps(taps):
            return None
        if self.threads != threads:
            self.release()
            self.threads = threads
        self.size = 0
        results = []
        for group in self._group_slices(slices):
            results += self._run_graph(group)
        return join_results(results)

    def _ensure_taps(self, taps: Sequence[int]) -> bool:
        """Makes the graph give these hidden states, from now on; False if it cannot."""
        recorded_taps = self.recording.forward_graph.taps
        if set(taps) <= set(recorded_taps):
            return True
        if self.refused_taps:
            return False
        self.release()  # before the new graph comes: each one holds the weights
        try:
            self.recording.record(sorted({*recorded_taps, *taps}))
        except LookupError as error:
            self.refused_taps = True
            warnings.warn(
                f"backend 'openvino' cannot give hidden states ({error}); torch computes the "
                "steps of methods that read them",
                ForetellWarning,
                stacklevel=2,
            )
        return not self.refused_taps

    def _group_slices(self, slices: Sequence[JobSlice]) -> list[list[JobSlice]]:
        """Groups slices by the forward that computes them, in order."""
        node_limit = PIECE if self.sizes else sum(len(job_slice.tokens) for job_slice in slices)
        groups: list[list[JobSlice]] = []
        group_nodes = 0  # nodes of the last group
        for full_slice in slices:
            for index, piece in enumerate(full_slice.split_pieces(node_limit)):
                group_nodes += len(piece.tokens)
                # A piece builds on the one before it; jobs lie in several segments where one
                # could not hold them all.
                if (
                    not groups
                    or index > 0
                    or piece.lease.segment is not groups[-1][-1].lease.segment
                    or group_nodes > node_limit
                ):
                    groups.append([])
                    group_nodes = len(piece.tokens)
                groups[-1].append(piece)
        return groups

    def _run_graph(self, slices: Sequence[JobSlice]) -> list[Computed]:
        """Computes one forward by a graph."""
        node_count = sum(len(job_slice.tokens) for job_slice in slices)
        graph_key = self._choose_graph(node_count, len(slices) == 1)
        size, is_single = graph_key
        is_new = graph_key not in self.compiled
        if is_new:
            self.compiled[graph_key] = CompiledGraph(self.recording, size, is_single, self.threads)
        graph = self.compiled[graph_key]
        start_seconds = time.perf_counter()
        results = graph.run_slices(slices)
        if size and not is_new:  # the first run of a graph still builds a part of it
            graph.note_seconds(time.perf_counter() - start_seconds, graph_key == self.last)
        self.last = graph_key
        self.size += size or node_count
        return results

    def _choose_graph(self, node_count: int, is_single: bool) -> tuple[int, bool]:
        """Chooses the graph for so many nodes, see `compiled`.

        A change of graph loads other weights into the processor's cache. So the one that ran last
        serves on, if it is large enough, until staying with it has cost as much as a change.
        """
        size = next((graph_size for graph_size in self.sizes if graph_size >= node_count), 0)
        graph_key = (size, is_single and size > 0)
        last_size, last_alone = self.last
        if last_size > size > 0 and last_alone == graph_key[1]:
            last_graph, smaller_graph = self.compiled.get(self.last), self.compiled.get(graph_key)
            if last_graph is not None and smaller_graph is not None:
                stay_seconds, change_seconds = (
                    smaller_graph.seconds_after_itself,
                    smaller_graph.seconds_after_other,
                )
                self.seconds_lost += max(0.0, last_graph.seconds_after_itself - stay_seconds)
                if (
                    stay_seconds
                    and change_seconds
                    and self.seconds_lost < change_seconds - stay_seconds
                ):
                    return self.last
        self.seconds_lost = 0.0
        return graph_key
