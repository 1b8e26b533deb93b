"""The forward on ONNX Runtime's CPU provider, for steps of one request.

With weights of 8 or 4 bits it is the quickest where the C library of ours cannot be had: one graph
serves any number of nodes, and another number of nodes costs nothing more, where OpenVINO has a
graph, and a copy of the weights, for each (openvino.py). Long pieces of texts, and several requests
in one forward, are left to the fallback, which computes them quicker. onnxruntime_graph.py records
the forward.
"""

from __future__ import annotations

import importlib.util
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from foretell.backends.buffers import OutputBuffers
from foretell.backends.onnxruntime_graph import (
    LARGEST,
    ForwardGraph,
    export,
    library,
    output_name,
    row_names,
    tap_name,
)
from foretell.cache.buffers import Layout
from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.core.model import Computed
from foretell.errors import ForetellWarning, first_line
from foretell.models.decoder.fused import Fused, fits
from foretell.models.decoder.loop import Loop
from foretell.models.decoder.packed import WHOLE_NUMBERS, PackedLinear, weight_bytes
from foretell.models.executor import Executor, join
from foretell.native.library import available

DEVICE = "cpu"
PRIORITY = 2
DTYPE = torch.float32
WHOLE = False
TEXT_NODES = 32  # of a text in one forward; longer pieces are quicker elsewhere
HEAD_MULTIPLE = 16  # of which the width of a head must be a multiple


def suits(hf: Any, named: bool = False) -> bool:
    """Whether a model has weights of 8 or 4 bits and, unless it is `named`, is of a build and a
    size that this executor takes, with the packages installed and the C library missing.
    """
    packed = [m for m in hf.modules() if isinstance(m, PackedLinear)]
    narrow = any(layer.packed.format in WHOLE_NUMBERS for layer in packed)
    if not narrow or named:
        return narrow
    layers = getattr(hf.get_decoder(), "layers", ())
    installed = all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime"))
    fitting = weight_bytes(hf) <= LARGEST and all(map(fits, layers))
    return installed and fitting and not available()


def make(
    loop: Loop,
    layout: Layout,
    dtype: torch.dtype,
    vocab: int,
    fallback: Executor | None = None,
) -> Executor:
    """The executor of a model. Raises LookupError, with the reason, where it cannot be had."""
    return OnnxRuntimeExecutor(loop, layout, dtype, vocab, fallback)


class OnnxRuntimeExecutor(Executor):
    """Computes one plain job in a forward, in the caches of its fallback.

    It leaves to the fallback: several jobs at once, texts of more than TEXT_NODES nodes, and where
    a layer has a sliding window, trees that reach beyond it and caches that have evicted rows.
    Raises LookupError with the reason where this model or machine cannot have it.
    """

    name = "onnxruntime"
    sizes: tuple[int, ...] = ()

    def __init__(
        self,
        loop: Loop,
        layout: Layout,
        dtype: torch.dtype,
        vocab: int,
        fallback: Executor | None = None,
    ):
        try:
            self.package = library()
        except ImportError as error:
            raise LookupError(
                f"the package {error.name} is missing: pip install 'foretell[cpu]'"
            ) from error
        if dtype != torch.float32:
            raise LookupError(
                f"it computes in float32 what has no weights of 8 or 4 bits, and not in {dtype}"
            )
        if not all(type(block) is Fused for block in loop.blocks):
            raise LookupError("its layers are of another build than the llama family's")
        if any(block.basis is not None for block in loop.blocks):  # type: ignore[attr-defined]
            raise LookupError("its rotated keys are projected to fewer heads")
        if any(width % HEAD_MULTIPLE for _, *widths in layout for width in widths):
            raise LookupError(f"its heads are no multiple of {HEAD_MULTIPLE} wide")
        self.loop = loop
        self.layout = layout
        self.dtype = dtype
        self.vocab = vocab
        self.fallback = fallback
        self.size = 0
        # The runtime counts windows in rows and not in positions, which is the same only where no
        # node has siblings before it and no row was evicted.
        self.window = min((w for w in loop.windows if w is not None), default=0)
        self.width = loop.embedded(torch.zeros(1, 1, dtype=torch.long)).shape[-1]
        self.row_names = row_names(layout)
        # Makes of an array what a session reads and writes in place.
        self.value = self.package.OrtValue.ortvalue_from_numpy
        self.logits_memory = OutputBuffers(self.value)
        self.rotation_tables: list[tuple[np.ndarray, Any]] = []  # cosines and sines (P, D / 2)
        # Memory that sessions read, by the input's name and shape.
        self.input_memory: dict[tuple[str, tuple[int, ...]], tuple[np.ndarray, Any]] = {}
        self.refused_taps = False  # whether a graph with hidden states could not be built
        try:
            self._open(torch.get_num_threads(), ())
        except LookupError:
            raise
        except Exception as error:  # a session may refuse what was exported
            raise LookupError(f"it fails: {first_line(error)}") from error

    def cache(self) -> Cache:
        if self.fallback is None:
            return Cache(self.layout, self.dtype, torch.device("cpu"))
        return self.fallback.cache()

    def release(self) -> None:
        self._close()
        if self.fallback is not None:
            self.fallback.release()

    def __call__(
        self, jobs: Sequence[Job], threads: int, taps: Sequence[int] = ()
    ) -> Computed | None:
        if not all(job.plain for job in jobs):
            return None
        job = jobs[0]
        new = len(job.tokens)
        text = min(new, max(0, 1 - job.first))  # nodes that are no draft
        long_text = text > TEXT_NODES and self.fallback is not None
        beyond_window = job.seen is not None and 0 < self.window < job.start + new
        evicted = job.compacted and (self.window > 0 or not job.start)
        if len(jobs) > 1 or beyond_window or evicted or (long_text and text == new):
            return self._leave(jobs, threads, taps)
        if not self._ready(threads, taps):
            return self._leave(jobs, threads, taps)
        # Below no rows the runtime takes positions to be 0, 1, 2 and so on, which with siblings
        # they are not: then the text goes first.
        if not long_text and (job.seen is None or job.start > 0):
            self.size = new
            return self._run(job)
        # Who computes a token must not depend on whether it was drafted, as the two round
        # differently: the fallback has a long text with and without a draft behind it.
        first, rest = _split(job, text)
        above = self._leave([first], threads, taps) if long_text else self._run(first)
        if above is None:
            return None
        both = join([above, self._run(rest)])
        self.size = new
        order = [row for row in job.rows if row < text] + [row for row in job.rows if row >= text]
        if order != job.rows:
            both.logits = both.logits[[order.index(row) for row in job.rows]]
        return both

    def _leave(self, jobs: Sequence[Job], threads: int, taps: Sequence[int]) -> Computed | None:
        """What the fallback answers."""
        if self.fallback is None:
            self.size = 0
            return None
        computed = self.fallback(jobs, threads, taps)
        self.size = self.fallback.size
        return computed

    def _ready(self, threads: int, taps: Sequence[int]) -> bool:
        """Makes the session have so many threads and give these hidden states, from now on; False
        if it cannot.
        """
        if not set(taps) <= set(self.graph.taps):
            if self.refused_taps:
                return False
            recorded = self.graph.taps
            try:
                self._open(threads, sorted({*recorded, *taps}))
            except Exception as error:  # exporting and sessions raise nearly anything
                self.refused_taps = True
                warnings.warn(
                    f"executor 'onnxruntime' cannot give hidden states ({first_line(error)}); "
                    "others compute the steps of methods that read them",
                    ForetellWarning,
                    stacklevel=2,
                )
                self._open(threads, recorded)
                return False
        if self.threads != threads:
            self._open(threads, self.graph.taps)
        return True

    def _rotations(self, needed: int) -> list[tuple[np.ndarray, Any]]:
        """Cosines and sines of at least so many positions, each beside what the session reads."""
        if not self.rotation_tables or len(self.rotation_tables[0][0]) < needed:
            table = None
            if not self.loop.kinds:
                table = self.loop.table(torch.empty(0, dtype=self.dtype), needed)
            halves = [part[0].chunk(2, -1) for part in table or ()]
            widths = {width for _, *both in self.layout for width in both}
            if (
                len(halves) != 2
                or {2 * first.shape[-1] for first, _ in halves} != widths
                or not all(torch.equal(first, second) for first, second in halves)
            ):
                raise LookupError(
                    "its rotation is no table of cosines and sines that both halves of a head share"
                )
            tables = [first.contiguous().numpy() for first, _ in halves]
            self.rotation_tables = [(table, self.value(table)) for table in tables]
        return self.rotation_tables

    def _close(self) -> None:
        """Lets go of the session, and with it of its copy of the weights."""
        self.session: Any = None
        self.binding: Any = None
        self.bound: dict[str, Any] = {}  # what the session reads now, by input
        # The cache that is bound, by its first layer's keys.
        self.bound_keys: weakref.ref[torch.Tensor] | None = None
        self.threads = 0

    def _open(self, threads: int, taps: Sequence[int]) -> None:
        """A session with so many threads, which gives these hidden states.

        What is exported for it is not kept: it is as large as the model.
        """
        self._close()
        self.graph = ForwardGraph(self.loop, taps).eval()
        self.hidden_memory = OutputBuffers(self._values_by_tap)
        options = self.package.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Threads take small shares of the work, and more as they finish.
        options.add_session_config_entry("session.dynamic_block_base", "4")
        rotations = [torch.from_numpy(table) for table, _ in self._rotations(3)]
        exported = export(self.graph, self.layout, rotations)
        providers = ["CPUExecutionProvider"]
        self.session = self.package.InferenceSession(exported, options, providers=providers)
        self.binding = self.session.io_binding()
        self.threads = threads

    def _values_by_tap(self, memory: np.ndarray) -> list[Any]:
        """(taps * n, E): what the session writes to, for each tap."""
        return [self.value(part) for part in np.split(memory, len(self.graph.taps))]

    def _give(self, name: str, value: Any) -> None:
        """Lets the session read this."""
        if self.bound.get(name) is not value:
            self.binding.bind_ortvalue_input(name, value)
            self.bound[name] = value

    def _input(self, name: str, dtype: Any, *shape: int) -> np.ndarray:
        """Memory that the session reads under this name."""
        if (name, shape) not in self.input_memory:
            memory = np.zeros(shape, dtype)
            self.input_memory[name, shape] = (memory, self.value(memory))
        memory, value = self.input_memory[name, shape]
        self._give(name, value)
        return memory

    def _bind(self, cache: Cache) -> None:
        """Lets the session read and write a cache's rows where they lie."""
        if self.bound_keys is not None and self.bound_keys() is cache.k[0]:
            return
        self.bound_keys = None  # until all of them are bound
        rows = [part for both in zip(cache.k, cache.v, strict=True) for part in both]
        for name, part in zip(self.row_names, rows, strict=True):
            place = (np.float32, (1, *part.shape), part.data_ptr())
            self.binding.bind_input(name, "cpu", 0, *place)
            self.binding.bind_output(output_name(name), "cpu", 0, *place)
        self.bound_keys = weakref.ref(cache.k[0])

    def _run(self, job: Job) -> Computed:
        """One forward of the session."""
        new = len(job.tokens)
        # A single node is computed twice: the runtime's products of one row round differently.
        nodes = max(2, new)
        end = job.start + nodes
        job.cache.reserve(end)
        self._bind(job.cache)
        # Where rows were evicted, positions lie beyond the rows.
        rotations = self._rotations(max(end, max(job.positions) + 1))
        for name, (_, value) in zip(("cos", "sin"), rotations, strict=True):
            self._give(name, value)
        wanted = max(1, len(job.rows))
        entering = self._input("states", np.float32, 1, nodes, self.width)
        entering[:] = self.loop.embedded(torch.tensor([job.tokens])).numpy()
        self._input("positions", np.int64, 1, nodes)[:] = job.positions
        self._input("rows", np.int64, wanted)[:] = job.rows or 0
        self._input("last", np.int32, 1)[:] = end - 1
        self._input("total", np.int32, 1)[:] = end
        self._give("mask", self.value(_mask(job, nodes, end)))
        logits, value = self.logits_memory.take(wanted, self.vocab)
        self.binding.bind_ortvalue_output("logits", value)
        hidden = {}
        if self.graph.taps:
            memory, values = self.hidden_memory.take(len(self.graph.taps) * nodes, self.width)
            states = torch.from_numpy(memory).view(-1, nodes, self.width)
            for tap, value, h in zip(self.graph.taps, values, states, strict=True):
                self.binding.bind_ortvalue_output(tap_name(tap), value)
                hidden[tap] = h[:new]
        self.session.run_with_iobinding(self.binding)
        return Computed(torch.from_numpy(logits)[: len(job.rows)], hidden)


def _mask(job: Job, nodes: int, end: int) -> np.ndarray:
    """Which nodes see which rows, (1, 1, nodes, end), 0 or -inf, beyond what is causal."""
    mask = np.zeros((1, 1, nodes, end), np.float32)
    if job.seen is not None:
        new, scratch = job.seen.shape
        last = job.start + len(job.tokens)
        mask[0, 0, :new, last - scratch : last][~job.seen.numpy()] = -np.inf
    return mask


def _split(job: Job, at: int) -> tuple[Job, Job]:
    """The first new nodes, a chain, and those that follow them."""
    new = len(job.tokens)
    first = replace(
        job,
        tokens=job.tokens[:at],
        scratch_positions=job.scratch_positions[: len(job.scratch_positions) - new + at],
        seen=None,
        rows=[row for row in job.rows if row < at],
    )
    rest = replace(
        job,
        tokens=job.tokens[at:],
        start=job.start + at,
        seen=None if job.seen is None else job.seen[at:],
        rows=[row - at for row in job.rows if row >= at],
        first=job.first + at,
    )
    return first, rest
