"""The forward of one request on OpenVINO's CPU runtime: the step of a Decoder's own layer loop, converted once.

The loop is recorded with a stand-in for the job, whose attention takes the cache's rows and the new ones as two parts,
so that the caches stay ours: they are handed over where they lie, whole, and rows that do not count are masked. What
comes back is logits and the new rows. Any family whose loop is ours is converted, whatever its layers are made of, and
kept if a probe's logits agree with torch's; the rest, and all that is asked besides (hidden states, layer subsets,
several requests at once), stays with torch.
"""

from __future__ import annotations

import importlib
import sys
import time
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from foretell.cache import Cache, Job, Layout
from foretell.model import STEP
from foretell.models.int8 import Linear8
from foretell.models.loop import Loop

NUMBERS = {torch.float32: "f32", torch.bfloat16: "bf16"}  # what it can compute in
BLOCKED = {torch.float32: -np.inf, torch.bfloat16: 0xFF80}  # minus infinity, as numpy holds it
SIZES = (1, 8, 16, 32, 64)  # nodes that small models have graphs of their own for
SMALL = 64 << 20  # bytes of weights up to which that pays: each graph has a copy, and takes a millisecond less
HELD = {torch.float32: np.float32, torch.bfloat16: np.uint16}  # numpy knows no bfloat16


@cache
def runtime() -> tuple[Any, Any, Any]:
    """The package, its compiler, and its reader of recorded modules: one of each a process.

    They are never let go: a graph that outlives the library it came from takes the process down. Raises ImportError.
    """
    # Importing it would report home through this package, and does without where that is missing.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    ov = importlib.import_module("openvino")
    manager = importlib.import_module("openvino.frontend").FrontEndManager()
    return ov, ov.Core(), (manager, manager.load_by_framework("pytorch"))


class Recorded(Job):
    """Stands for a job while the step is recorded: its parts are the graph's inputs."""

    def __init__(self, past: Sequence[torch.Tensor], windows: list[int | None], masks: Sequence[torch.Tensor]):
        self.past, self.limits = past, dict(zip(windows, masks, strict=True))
        self.fresh: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None,
               softcap: float | None, sinks: torch.Tensor | None) -> torch.Tensor:  # fmt: skip
        """q (H, n, D), k, v (KV, n, D) -> (n, H, D), over the rows there are and the new ones, not joined first."""
        self.fresh[layer] = k, v
        keys, values = self.past[2 * layer : 2 * layer + 2]
        heads, groups, new = q.shape[0], k.shape[0], k.shape[1]
        q = q.reshape(groups, -1, q.shape[-1]) * scale
        scores = torch.cat([q @ k.transpose(1, 2), q @ keys.transpose(1, 2)], -1)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is None:
            p = (scores + self.limits[window].repeat(heads // groups, 1)).softmax(-1)
        else:
            scores = scores.reshape(heads, new, -1) + self.limits[window]
            sink = sinks.reshape(-1, 1, 1).expand(-1, new, 1).to(scores.dtype)
            p = torch.cat([sink, scores], -1).softmax(-1)[..., 1:].reshape(groups, heads // groups * new, -1)
        out = p[..., :new] @ v + p[..., new:] @ values
        return out.reshape(heads, -1, v.shape[-1]).transpose(0, 1)


class Step(torch.nn.Module):
    """One request's step as a function of tensors alone: what is recorded.

    ids (n,), positions (n,), rows (k,), then a cosine and a sine (n, D) for each kind of rotation, a mask (n, n + C)
    for each window, keys and values (KV, C, D) of each layer -> logits (k, V), and for each shape of layers the new
    keys and values (layers, KV, n, D).
    """

    def __init__(self, loop: Loop, layout: Layout):
        super().__init__()
        self.loop, self.shapes = loop, sorted(set(layout))
        self.windows = list(dict.fromkeys(loop.windows))
        self.kinds: list[tuple[str, ...]] = [(k,) for k in dict.fromkeys(loop.kinds)] if loop.kinds else [()]
        self.groups = [[i for i, s in enumerate(layout) if s == shape] for shape in self.shapes]
        # Recording knows as constants only what a module holds.
        self.parts = torch.nn.ModuleList([loop.embed, loop.norm, loop.head, *loop.layers])

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor,
                *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:  # fmt: skip
        turned, masked = 2 * len(self.kinds), len(self.windows)
        turns = {kind: (rest[2 * i][None], rest[2 * i + 1][None]) for i, kind in enumerate(self.kinds)}
        job = Recorded(rest[turned + masked :], self.windows, rest[turned : turned + masked])
        token = STEP.set([job])
        try:
            h = self.loop.embedded(ids[None])
            for i, block in enumerate(self.loop.blocks):
                h = block(h, turns[(self.loop.kinds[i],) if self.loop.kinds else ()], positions[None])
            logits = self.loop.logits(h[0][rows]).float()
        finally:
            STEP.reset(token)
        return logits, *(torch.stack([job.fresh[i][part] for i in g]) for g in self.groups for part in (0, 1))


class Executor:
    """`executor(job, threads)` computes what the loop would: stores the new rows, returns logits (k, V).

    None: torch is to. Raises LookupError with the reason where this model or machine cannot have it.
    """

    name = "openvino"

    def __init__(self, loop: Loop, layout: Layout, dtype: torch.dtype, vocab: int):
        if dtype not in NUMBERS:
            raise LookupError(f"it does not compute in {dtype}")
        try:
            self.ov, self.core, (_, self.frontend) = runtime()
        except ImportError as error:
            raise LookupError("the package openvino is missing: pip install 'foretell[cpu]'") from error
        self.loop, self.layout, self.dtype, self.vocab = loop, layout, dtype, vocab
        self.numbers = {torch.int64: self.ov.Type.i64, torch.float32: self.ov.Type.f32,
                        torch.bfloat16: self.ov.Type.bf16}  # fmt: skip
        self.step = Step(loop, layout).eval()
        self.like = torch.empty(0, dtype=dtype)
        self.graph, self.threads = self._convert(), 0
        self.slots: dict[int, Slot] = {}
        self.size, self.lost = 0, 0.0  # of the last run; seconds lost by staying with it
        size = sum(p.numel() * p.element_size() for p in dict.fromkeys(self.step.parts.parameters()))
        self.small = size <= SMALL
        self.sizes = SIZES if self.small else ()

    def _convert(self) -> Any:
        """The graph, its numbers of nodes and rows left open."""
        reader = importlib.import_module("openvino.frontend.pytorch.ts_decoder").TorchScriptPythonDecoder
        n, rows = 3, 8
        ids, turns = torch.arange(n), []
        for kind in self.step.kinds:
            table = self.loop.table(self.like, n, *kind)
            if table is None or len(table) != 2:
                raise LookupError("its rotation is no table of cosines and sines")
            turns += [part[0, :n] for part in table]
        masks = [self.like.new_zeros(n, rows + n) for _ in self.step.windows]
        past = [self.like.new_zeros(s[0], rows, width) for s in self.layout for width in s[1:]]
        self.count = 3 + len(turns) + len(masks)  # inputs that the number of nodes shapes
        given = [ids, ids, ids, *turns, *masks, *past]
        free = [(0,)] * (3 + len(turns)) + [(0, 1)] * len(masks) + [(1,)] * len(past)
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of shapes that are constants, and are
                recorded = torch.jit.freeze(torch.jit.trace(self.step, tuple(given), check_trace=False))
                source = reader(recorded, skip_freeze=True)  # to be held until it is converted
                graph = self.frontend.convert(self.frontend.load(source))
            if len(graph.inputs) != len(given):
                raise LookupError("a part of its input does not reach the graph")
            for entry, tensor, axes in zip(graph.inputs, given, free, strict=True):
                shape = [-1 if axis in axes else size for axis, size in enumerate(tensor.shape)]
                entry.get_node().set_partial_shape(self.ov.PartialShape(shape))
                entry.get_node().set_element_type(self.numbers[tensor.dtype])
            graph.validate_nodes_and_infer_types()
            if any(isinstance(module, Linear8) for module in self.step.modules()):
                self._narrow(graph)
        except LookupError:
            raise
        except Exception as error:  # recording and converting raise nearly anything
            lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            said = next((line for line in lines if line.startswith("No conversion")), lines[0])
            raise LookupError(said) from error
        return graph

    def _narrow(self, graph: Any) -> None:
        """Gives matrices the 8 bits back that they were recorded without; the runtime then multiplies in 8 bits.

        As in int8.py a channel's largest weight is 127, so that the numbers found are those of the model.
        """
        ops, seen = importlib.import_module("openvino.opset13"), dict[str, Any]()
        for node in [n for n in graph.get_ops() if n.get_type_name() == "MatMul"]:
            source = node.input_value(1).get_node()
            while source.get_type_name() == "Convert":
                source = source.input_value(0).get_node()
            if source.get_type_name() != "Constant" or not node.get_attributes()["transpose_b"]:
                continue
            if source.get_friendly_name() not in seen:
                weight = source.get_data(dtype=np.float32)
                scale = np.maximum(np.abs(weight).max(1, keepdims=True), 1e-10) / 127
                narrow = ops.constant(np.rint(weight / scale).astype(np.int8))
                seen[source.get_friendly_name()] = ops.multiply(ops.convert(narrow, "f32"), ops.constant(scale))
            node.input(1).replace_source_output(seen[source.get_friendly_name()].output(0))
        if not seen:
            raise LookupError("its matrices of 8 bits are not found in the graph")

    def _compile(self, size: int) -> Any:
        """A request of the graph for `size` nodes; 0: for any number."""
        graph = self.graph.clone()
        if size:
            fixed = {}
            for i, entry in enumerate(graph.inputs):
                shape = entry.partial_shape
                if i < self.count:
                    shape[0] = size
                fixed[entry] = shape
            graph.reshape(fixed)
        options = {
            "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": NUMBERS[self.dtype], "NUM_STREAMS": 1,
            "INFERENCE_NUM_THREADS": self.threads, "ENABLE_CPU_PINNING": False,
        }  # fmt: skip
        return self.core.compile_model(graph, "CPU", options).create_infer_request()

    def cache(self) -> Cache:
        return Cache(self.layout, self.dtype, torch.device("cpu"))

    def __call__(self, jobs: Sequence[Job], threads: int) -> torch.Tensor | None:
        if len(jobs) > 1:
            return None
        job = jobs[0]
        if self.threads != threads:
            self.threads, self.slots, self.size = threads, {}, 0
        size, warm = self._size(len(job.tokens)), True
        if not size:
            return None  # a prompt: many rows are torch's strength, and one more copy of the weights is saved
        key = size if self.small else 0
        if key not in self.slots:
            self.slots[key], warm = Slot(self, self._compile(key)), False
        start = time.perf_counter()
        logits = self.slots[key].run(job, size)
        if warm:  # the first run of a graph still builds a part of it
            pace = self.slots[key].seconds
            seconds, again = time.perf_counter() - start, size == self.size
            pace[again] = seconds if not pace[again] else pace[again] + (seconds - pace[again]) / 8
        self.size = size
        return logits

    def _size(self, n: int) -> int:
        """The graph for n nodes, 0: none. The last one serves on as long as changing, which loads other weights into
        the processor's cache, costs more than has been lost by staying with a larger one than needed.
        """
        if not self.small:
            return n
        size = next((s for s in SIZES if s >= n), 0)
        if self.size > size > 0 and size in self.slots:
            (change, stay), larger = self.slots[size].seconds, self.slots[self.size].seconds[True]
            self.lost += max(0.0, larger - stay)
            if stay and change and self.lost < change - stay:
                return self.size
        self.lost = 0.0
        return size


def _held(x: torch.Tensor) -> np.ndarray:
    """The same memory, as numpy knows it."""
    return x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()


class Slot:
    """A compiled graph with the memory it reads and writes, which is filled anew in every step."""

    def __init__(self, owner: Executor, request: Any):
        self.owner, self.request = owner, request
        self.shape: tuple[int, ...] = ()  # nodes and rows that the memory is for
        self.bound: tuple[int, ...] = ()  # the cache whose rows are read
        self.seconds = [0.0, 0.0]  # of a run behind another graph's, and behind one of its own: running means

    def _tensor(self, x: torch.Tensor | np.ndarray, dtype: torch.dtype) -> Any:
        """The same memory, as OpenVINO knows it."""
        values = x if isinstance(x, np.ndarray) else x.view(torch.uint8).numpy().reshape(-1)
        return self.owner.ov.Tensor(values, list(x.shape), self.owner.numbers[dtype])

    def _shape(self, size: int, capacity: int, stored: list[torch.Tensor]) -> None:
        """Memory for so many nodes behind so many rows."""
        owner, step = self.owner, self.owner.step
        held = HELD[owner.dtype]
        self.shape, self.ints = (size, capacity), np.zeros((3, size), np.int64)
        tables = [t for kind in step.kinds for t in owner.loop.table(owner.like, 1, *kind) or ()]
        self.turns = [np.zeros((size, table.shape[-1]), held) for table in tables]
        self.masks = [np.zeros((size, size + capacity), held) for _ in step.windows]
        self.new = [np.zeros((*part.shape[:2], size, part.shape[3]), held) for part in stored]
        for i, values in enumerate([*self.ints, *self.turns, *self.masks]):
            self.request.set_input_tensor(i, self._tensor(values, torch.int64 if i < 3 else owner.dtype))
        for i, part in enumerate(self.new):
            self.request.set_output_tensor(1 + i, self._tensor(part, owner.dtype))

    def _mask(self, mask: np.ndarray, job: Job, window: int | None) -> None:
        """Where a node may look, among the new ones and the cache's rows behind them, (size, size + C)."""
        n, start, length, size = len(job.tokens), job.start, job.cache.length, self.shape[0]
        never = BLOCKED[self.owner.dtype]
        mask.fill(never)
        np.fill_diagonal(mask, 0)  # who only fills up sees itself: a row of nothing has no softmax
        new, old = mask[:n, :n], mask[:n, size : size + start]
        if job.seen is None:
            old.fill(0)
            new[np.tri(n, dtype=bool)] = 0
        else:
            seen = job.seen.numpy()
            old[:, :length] = 0
            old[:, length:][seen[:, : start - length]] = 0
            new[seen[:, start - length :]] = 0
        if window is not None and max(job.columns) >= window:
            theirs = np.array([*range(length), *job.columns])
            far = theirs[start:, None] - theirs >= window
            old[far[:, :start]] = never
            new[far[:, start:]] = never

    def run(self, job: Job, size: int) -> torch.Tensor:
        """The job's nodes, filled up to `size` -> logits (k, V)."""
        owner, cache, n, k = self.owner, job.cache, len(job.tokens), len(job.rows)
        stored = [part for pair in zip(cache.keys, cache.values, strict=True) for part in pair]
        if self.shape != (size, cache.capacity):
            self._shape(size, cache.capacity, stored)
        bound = (cache.capacity, *(part.data_ptr() for part in stored))
        if bound != self.bound:
            first = 3 + len(self.turns) + len(self.masks)
            for i, part in enumerate(part for pair in zip(cache.k, cache.v, strict=True) for part in pair):
                self.request.set_input_tensor(first + i, self._tensor(part, owner.dtype))
            self.bound, self.kept = bound, [_held(part) for part in stored]
        ids, positions, rows = self.ints
        ids[:n], positions[:n], rows[:k] = job.tokens, job.positions, job.rows
        needed = max(job.columns) + 1
        tables = [t for kind in owner.step.kinds for t in owner.loop.table(owner.like, needed, *kind) or ()]
        for turn, table in zip(self.turns, tables, strict=True):
            turn[:n] = _held(table[0])[positions[:n]]
        for mask, window in zip(self.masks, owner.step.windows, strict=True):
            self._mask(mask, job, window)
        logits = torch.empty(size, owner.vocab)
        self.request.set_output_tensor(0, self._tensor(logits, torch.float32))
        self.request.infer()
        for fresh, kept in zip(self.new, self.kept, strict=True):
            kept[:, :, job.start : job.start + n] = fresh[:, :, :n]
        return logits[:k]
