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
    export_graph,
    load_package,
    output_name,
    row_names,
    tap_name,
)
from foretell.cache.buffers import Layout
from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.core.model import Computed
from foretell.errors import ForetellWarning, first_message_line
from foretell.models.backend import Backend, join_results
from foretell.models.decoder.fused import Fused, find_descriptions
from foretell.models.decoder.loop import Loop
from foretell.models.decoder.packed import PackedLinear, weight_bytes
from foretell.native.library import is_available

DEVICE = "cpu"
PRIORITY = 2
DTYPE = torch.float32
WHOLE = False
TEXT_NODES = 32  # of a text in one forward; longer pieces are quicker elsewhere
HEAD_MULTIPLE = 16  # of which the width of a head must be a multiple


def suits_model(hf_model: Any, by_name: bool = False) -> bool:
    """Whether a model has weights of whole numbers and, unless it is `by_name`, is of a build and a
    size that this backend takes, with the packages installed and the C library missing.
    """
    packed_layers = [module for module in hf_model.modules() if isinstance(module, PackedLinear)]
    has_whole_numbers = any(layer.packed.is_whole for layer in packed_layers)
    if not has_whole_numbers or by_name:
        return has_whole_numbers
    descriptions = find_descriptions(hf_model)
    is_plain = bool(descriptions) and all(described.is_plain for described in descriptions)
    is_installed = all(
        importlib.util.find_spec(package_name) for package_name in ("onnx", "onnxruntime")
    )
    fits_backend = weight_bytes(hf_model) <= LARGEST and is_plain
    return is_installed and fits_backend and not is_available()


def make_backend(
    loop: Loop, layout: Layout, dtype: torch.dtype, vocab_size: int, fallback: Backend | None = None
) -> Backend:
    """Makes the backend of a model. Raises LookupError, with the reason, if it cannot be had."""
    return OnnxRuntimeBackend(loop, layout, dtype, vocab_size, fallback)


class OnnxRuntimeBackend(Backend):
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
        vocab_size: int,
        fallback: Backend | None = None,
    ):
        try:
            self.package = load_package()
        except ImportError as error:
            raise LookupError(
                f"the package {error.name} is missing: pip install 'foretell[cpu]'"
            ) from error
        if dtype != torch.float32:
            raise LookupError(
                f"it computes in float32 what has no weights of 8 or 4 bits, and not in {dtype}"
            )
        if not all(type(block) is Fused and block.description.is_plain for block in loop.blocks):
            raise LookupError("its layers are of another build than the llama family's")
        if loop.kinds or loop.logit_cap or loop.positions is not None:
            raise LookupError("it caps its logits, has several rotations, or learnt its positions")
        if any(block.basis is not None for block in loop.blocks):  # type: ignore[attr-defined]
            raise LookupError("its rotated keys are projected to fewer heads")
        if any(width % HEAD_MULTIPLE for _, *widths in layout for width in widths):
            raise LookupError(f"its heads are no multiple of {HEAD_MULTIPLE} wide")
        self.loop = loop
        self.layout = layout
        self.dtype = dtype
        self.vocab = vocab_size
        self.fallback = fallback
        self.size = 0
        # The runtime counts windows in rows and not in positions, which is the same only where no
        # node has siblings before it and no row was evicted.
        self.window = min(
            (layer_window for layer_window in loop.windows if layer_window is not None), default=0
        )
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
            self._open_session(torch.get_num_threads(), ())
        except LookupError:
            raise
        except Exception as error:  # a session may refuse what was exported
            raise LookupError(f"it fails: {first_message_line(error)}") from error

    def cache(self) -> Cache:
        if self.fallback is None:
            return Cache(self.layout, self.dtype, torch.device("cpu"))
        return self.fallback.cache()

    def release(self) -> None:
        self._close_session()
        if self.fallback is not None:
            self.fallback.release()

    def __call__(
        self, jobs: Sequence[Job], threads: int, taps: Sequence[int] = ()
    ) -> Computed | None:
        if not all(job.plain for job in jobs):
            return None
        job = jobs[0]
        new_count = len(job.tokens)
        text_count = min(new_count, max(0, 1 - job.first))  # nodes that are no draft
        is_long_text = text_count > TEXT_NODES and self.fallback is not None
        beyond_window = job.seen is not None and 0 < self.window < job.start + new_count
        has_evicted = job.compacted and (self.window > 0 or not job.start)
        if (
            len(jobs) > 1
            or beyond_window
            or has_evicted
            or (is_long_text and text_count == new_count)
        ):
            return self._run_fallback(jobs, threads, taps)
        if not self._prepare_session(threads, taps):
            return self._run_fallback(jobs, threads, taps)
        # Below no rows the runtime takes positions to be 0, 1, 2 and so on, which with siblings
        # they are not: then the text goes first.
        if not is_long_text and (job.seen is None or job.start > 0):
            self.size = new_count
            return self._run_session(job)
        # Who computes a token must not depend on whether it was drafted, as the two round
        # differently: the fallback has a long text with and without a draft after it.
        first_part, second_part = _split_job(job, text_count)
        first_result = (
            self._run_fallback([first_part], threads, taps)
            if is_long_text
            else self._run_session(first_part)
        )
        if first_result is None:
            return None
        combined = join_results([first_result, self._run_session(second_part)])
        self.size = new_count
        row_order = [row for row in job.rows if row < text_count] + [
            row for row in job.rows if row >= text_count
        ]
        if row_order != job.rows:
            combined.logits = combined.logits[[row_order.index(row) for row in job.rows]]
        return combined

    def _run_fallback(
        self, jobs: Sequence[Job], threads: int, taps: Sequence[int]
    ) -> Computed | None:
        """Computes these jobs by the fallback; None: it does not, or there is none."""
        if self.fallback is None:
            self.size = 0
            return None
        computed = self.fallback(jobs, threads, taps)
        self.size = self.fallback.size
        return computed

    def _prepare_session(self, threads: int, taps: Sequence[int]) -> bool:
        """Makes the session have so many threads and give these hidden states, from now on; False
        if it cannot.
        """
        if not set(taps) <= set(self.graph.taps):
            if self.refused_taps:
                return False
            recorded_taps = self.graph.taps
            try:
                self._open_session(threads, sorted({*recorded_taps, *taps}))
            except Exception as error:  # exporting and sessions raise nearly anything
                self.refused_taps = True
                warnings.warn(
                    "backend 'onnxruntime' cannot give hidden states "
                    f"({first_message_line(error)}); "
                    "others compute the steps of methods that read them",
                    ForetellWarning,
                    stacklevel=2,
                )
                self._open_session(threads, recorded_taps)
                return False
        if self.threads != threads:
            self._open_session(threads, self.graph.taps)
        return True

    def _rotation_values(self, position_count: int) -> list[tuple[np.ndarray, Any]]:
        """Cosines and sines of at least so many positions, each beside what the session reads."""
        if not self.rotation_tables or len(self.rotation_tables[0][0]) < position_count:
            table = None
            if not self.loop.kinds:
                table = self.loop.table(torch.empty(0, dtype=self.dtype), position_count)
            halves = [part[0].chunk(2, -1) for part in table or ()]
            widths = {width for _, *head_widths in self.layout for width in head_widths}
            if (
                len(halves) != 2
                or {2 * first_half.shape[-1] for first_half, _ in halves} != widths
                or not all(
                    torch.equal(first_half, second_half) for first_half, second_half in halves
                )
            ):
                raise LookupError(
                    "its rotation is no table of cosines and sines that both halves of a head share"
                )
            tables = [first_half.contiguous().numpy() for first_half, _ in halves]
            self.rotation_tables = [(table, self.value(table)) for table in tables]
        return self.rotation_tables

    def _close_session(self) -> None:
        """Lets go of the session, and with it of its copy of the weights."""
        self.session: Any = None
        self.binding: Any = None
        self.bound: dict[str, Any] = {}  # what the session reads now, by input
        # The cache that is bound, by its first layer's keys.
        self.bound_keys: weakref.ref[torch.Tensor] | None = None
        self.threads = 0

    def _open_session(self, threads: int, taps: Sequence[int]) -> None:
        """Opens a session with so many threads, which gives these hidden states.

        What is exported for it is not kept: it is as large as the model.
        """
        self._close_session()
        self.graph = ForwardGraph(self.loop, taps).eval()
        self.hidden_memory = OutputBuffers(self._values_by_tap)
        options = self.package.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Threads take small shares of the work, and more as they finish.
        options.add_session_config_entry("session.dynamic_block_base", "4")
        rotations = [torch.from_numpy(table) for table, _ in self._rotation_values(3)]
        model_bytes = export_graph(self.graph, self.layout, rotations)
        providers = ["CPUExecutionProvider"]
        self.session = self.package.InferenceSession(model_bytes, options, providers=providers)
        self.binding = self.session.io_binding()
        self.threads = threads

    def _values_by_tap(self, memory: np.ndarray) -> list[Any]:
        """Values that the session writes (taps * n, E) to, for each tap."""
        return [self.value(tap_memory) for tap_memory in np.split(memory, len(self.graph.taps))]

    def _bind_value(self, input_name: str, value: Any) -> None:
        """Lets the session read this value."""
        if self.bound.get(input_name) is not value:
            self.binding.bind_ortvalue_input(input_name, value)
            self.bound[input_name] = value

    def _input_array(self, input_name: str, dtype: Any, *shape: int) -> np.ndarray:
        """Memory that the session reads under this name."""
        if (input_name, shape) not in self.input_memory:
            memory = np.zeros(shape, dtype)
            self.input_memory[input_name, shape] = (memory, self.value(memory))
        memory, value = self.input_memory[input_name, shape]
        self._bind_value(input_name, value)
        return memory

    def _bind_cache(self, cache: Cache) -> None:
        """Lets the session read and write a cache's rows where they lie."""
        if self.bound_keys is not None and self.bound_keys() is cache.k[0]:
            return
        self.bound_keys = None  # until all of them are bound
        rows = [
            layer_rows
            for layer_pair in zip(cache.k, cache.v, strict=True)
            for layer_rows in layer_pair
        ]
        for row_name, layer_rows in zip(self.row_names, rows, strict=True):
            buffer_place = (np.float32, (1, *layer_rows.shape), layer_rows.data_ptr())
            self.binding.bind_input(row_name, "cpu", 0, *buffer_place)
            self.binding.bind_output(output_name(row_name), "cpu", 0, *buffer_place)
        self.bound_keys = weakref.ref(cache.k[0])

    def _run_session(self, job: Job) -> Computed:
        """Computes one forward by the session."""
        new_count = len(job.tokens)
        # A single node is computed twice: the runtime's products of one row round differently.
        node_count = max(2, new_count)
        end_row = job.start + node_count
        job.cache.reserve(end_row)
        self._bind_cache(job.cache)
        # Where rows were evicted, positions lie beyond the rows.
        rotations = self._rotation_values(max(end_row, max(job.positions) + 1))
        for input_name, (_, value) in zip(("cos", "sin"), rotations, strict=True):
            self._bind_value(input_name, value)
        row_count = max(1, len(job.rows))
        entry_states = self._input_array("states", np.float32, 1, node_count, self.width)
        entry_states[:] = self.loop.embedded(torch.tensor([job.tokens])).numpy()
        self._input_array("positions", np.int64, 1, node_count)[:] = job.positions
        self._input_array("rows", np.int64, row_count)[:] = job.rows or 0
        self._input_array("last", np.int32, 1)[:] = end_row - 1
        self._input_array("total", np.int32, 1)[:] = end_row
        self._bind_value("mask", self.value(_attention_mask(job, node_count, end_row)))
        logits, value = self.logits_memory.take_block(row_count, self.vocab)
        self.binding.bind_ortvalue_output("logits", value)
        hidden = {}
        if self.graph.taps:
            memory, values = self.hidden_memory.take_block(
                len(self.graph.taps) * node_count, self.width
            )
            states = torch.from_numpy(memory).view(-1, node_count, self.width)
            for tap, value, tap_states in zip(self.graph.taps, values, states, strict=True):
                self.binding.bind_ortvalue_output(tap_name(tap), value)
                hidden[tap] = tap_states[:new_count]
        self.session.run_with_iobinding(self.binding)
        return Computed(torch.from_numpy(logits)[: len(job.rows)], hidden)


def _attention_mask(job: Job, node_count: int, end: int) -> np.ndarray:
    """Mask (1, 1, nodes, end) of 0 or -inf that says which nodes see which rows, beyond what is
    causal.
    """
    mask = np.zeros((1, 1, node_count, end), np.float32)
    if job.seen is not None:
        new_count, scratch = job.seen.shape
        end_row = job.start + len(job.tokens)
        mask[0, 0, :new_count, end_row - scratch : end_row][~job.seen.numpy()] = -np.inf
    return mask


def _split_job(job: Job, split_node: int) -> tuple[Job, Job]:
    """Splits a job into the first new nodes, a chain, and those that follow them."""
    new_count = len(job.tokens)
    first_part = replace(
        job,
        tokens=job.tokens[:split_node],
        scratch_positions=job.scratch_positions[
            : len(job.scratch_positions) - new_count + split_node
        ],
        seen=None,
        rows=[row for row in job.rows if row < split_node],
    )
    second_part = replace(
        job,
        tokens=job.tokens[split_node:],
        start=job.start + split_node,
        seen=None if job.seen is None else job.seen[split_node:],
        rows=[row - split_node for row in job.rows if row >= split_node],
        first=job.first + split_node,
    )
    return first_part, second_part
