"""The forward on OpenVINO's CPU runtime: a Decoder's own layer loop, converted once.

The loop is recorded with attention as one operation of ours, which becomes the runtime's paged attention: it stores
the new rows in the caches' own memory (pool.py) and lets every request's nodes see their cache and, by a mask, each
other. Each key-value head is a sequence of its own there, so that caches keep the form torch reads. Any family whose
loop is ours is converted, whatever its layers are made of, and kept if a probe's logits agree with torch's; the rest,
and all that is asked besides (hidden states, layer subsets), stays with torch.
"""

from __future__ import annotations

import copy
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
from foretell.models.loop import Loop
from foretell.models.pool import BLOCK, Pool, Pooled, Segment
from foretell.tree import ancestors

NUMBERS = {torch.float32: "f32", torch.bfloat16: "bf16"}  # what it can compute in
HELD = {torch.float32: np.float32, torch.bfloat16: np.uint16}  # numpy knows no bfloat16
SIZES = (1, 8, 16, 32, 64, 128)  # nodes that small models have graphs of their own for; one more takes any number
PIECE = 128  # nodes of a forward of theirs, where more can be had one after another
SMALL = 64 << 20  # bytes of weights up to which that pays: each graph has a copy, and takes a millisecond less
GROUP = 32  # activations of a row that share a scale where the weights have 8 bits
ROWS = 2  # which input says whose logits are wanted
TABLES = 9  # inputs that say whose nodes are whose, see Step


@torch.library.custom_op("foretell::attend", mutates_args=())
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
           past: torch.Tensor, begins: torch.Tensor, blocks: torch.Tensor, block_begins: torch.Tensor,
           longest: torch.Tensor, bias: torch.Tensor, bias_begins: torch.Tensor,
           scale: float, window: int, width: int, wide: int) -> torch.Tensor:  # fmt: skip
    """Stands for attention in a recording: q (S, G D), k (S, D), v (S, E) -> (S, G E), S the nodes of every head."""
    return q.new_zeros(len(q), q.shape[1] // width * wide)


@cache
def runtime() -> tuple[Any, Any, Any]:
    """The package, its compiler, and its reader of recorded modules: one of each a process.

    They are never let go: a graph that outlives the library it came from takes the process down. Raises ImportError.
    """
    # Importing it would report home through this package, and does without where that is missing.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    ov = importlib.import_module("openvino")
    manager = importlib.import_module("openvino.frontend").FrontEndManager()
    reader = manager.load_by_framework("pytorch")
    rules = importlib.import_module("openvino.frontend.pytorch").ConversionExtension
    reader.add_extension(rules("foretell::attend", _attention))
    reader.add_extension(rules("foretell::linear8", _linear8))
    return ov, ov.Core(), (manager, reader)


def _attention(context: Any) -> list[Any]:
    """The rule for `attend`: the runtime's paged attention, without what we have no use for."""
    ops = importlib.import_module("openvino.opset13")
    paged = importlib.import_module("openvino.op")._PagedAttentionExtension
    q, k, v, keys, values, past, begins, blocks, block_begins, longest, bias, bias_begins = (
        context.get_input(i) for i in range(12)
    )
    scale, window, width, wide = (context.get_values_from_const_input(i) for i in range(12, 16))

    def empty(dtype: Any, *shape: int) -> Any:
        return ops.constant(np.zeros(shape or (0,), dtype)).output(0)

    def number(value: float, dtype: Any) -> Any:
        return ops.constant(np.array(value, dtype)).output(0)

    scores, alibi, rotated = empty(np.int32), empty(np.float32), [empty(np.int32), empty(np.int32), empty(np.float32)]
    sparse, sinks = [empty(np.float32), number(128, np.int32), number(8, np.int32)], empty(np.float32, 0, 0, 0, 0)
    evicted = [number(0, np.int32), empty(np.int32), empty(np.int32), empty(np.int32)]
    node = paged([
        q, k, v, keys, values, past, begins, blocks, block_begins, number(scale, np.float32),
        number(window, np.int32), alibi, longest, scores, *rotated, *sparse, sinks, *evicted, empty(np.int32),
        bias, bias_begins,
    ])  # fmt: skip
    about = node.get_rt_info()
    about["num_k_heads"] = about["num_v_heads"] = 1
    about["k_head_size"], about["v_head_size"] = width, wide
    return [node.output(0)]


def _linear8(context: Any) -> list[Any]:
    """The rule for `linear8`: a matrix of 8 bits and its scales, as the runtime's own products take them."""
    ops = importlib.import_module("openvino.opset13")
    x, weight, scale = (context.get_input(i) for i in range(3))
    held = weight.get_node()
    while held.get_type_name() != "Constant":
        held = held.input_value(0).get_node()
    # Without a sign: only then are activations rounded too, and the product computed in 8 bits.
    shifted = ops.constant((held.get_data().astype(np.int16) + 128).astype(np.uint8))
    zero = ops.convert(ops.constant(np.array([[128]], np.uint8)), "f32")
    matrix = ops.multiply(
        ops.subtract(ops.convert(shifted, "f32"), zero), ops.unsqueeze(scale, ops.constant(np.array(1)))
    )
    return [ops.convert_like(ops.matmul(ops.convert(x, "f32"), matrix, False, True), x).output(0)]


class Recorded(Job):
    """Stands for the jobs while the step is recorded: its parts are the graph's inputs."""

    def __init__(self, past: Sequence[torch.Tensor], tables: dict[int, Sequence[torch.Tensor]]):
        self.past, self.tables = past, tables

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None,
               softcap: float | None, sinks: torch.Tensor | None) -> torch.Tensor:  # fmt: skip
        """q (H, n, D), k (KV, n, D), v (KV, n, E) -> (n, H, E); the nodes of a key-value head stand together."""
        if softcap is not None or sinks is not None:
            raise LookupError("its attention has a softcap or sinks")
        heads, width, wide = len(k), q.shape[-1], v.shape[-1]
        there, back, *tables = self.tables[heads]
        parts = [x.transpose(0, 1).reshape(-1, len(x) // heads * x.shape[-1])[there] for x in (q, k, v)]
        out = torch.ops.foretell.attend(
            *parts, *self.past[2 * layer : 2 * layer + 2], *tables, float(scale), window or 0, width, wide
        )
        return out[back].reshape(k.shape[1], len(q), wide)


class Step(torch.nn.Module):
    """A forward as a function of tensors alone: what is recorded.

    ids (n,), positions (n,), rows (k,), then a cosine and a sine (n, D) for each kind of rotation; for each number of
    key-value heads KV and its sequences, KV times every request and then what only fills up: which of the n KV nodes
    of heads they are made of (m,), where those are found again (n KV,), the rows before them (S,), where their nodes
    begin (S + 1,), their blocks of memory (B,), where these begin (S + 1,), the longest's rows (), who sees whom
    among a sequence's nodes (sum of squares,), where that begins (S + 1,); at last the pool's keys and values
    (blocks, 1, BLOCK, D) of each layer -> logits (k, V).
    """

    def __init__(self, loop: Loop, layout: Layout):
        super().__init__()
        self.loop, self.heads = loop, sorted({shape[0] for shape in layout})
        self.kinds: list[tuple[str, ...]] = [(k,) for k in dict.fromkeys(loop.kinds)] if loop.kinds else [()]
        # Recording knows as constants only what a module holds.
        self.parts = torch.nn.ModuleList([loop.embed, loop.norm, loop.head, *loop.layers])

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor,
                *rest: torch.Tensor) -> torch.Tensor:  # fmt: skip
        turned = 2 * len(self.kinds)
        turns = {kind: (rest[2 * i][None], rest[2 * i + 1][None]) for i, kind in enumerate(self.kinds)}
        parts = [rest[i : i + TABLES] for i in range(turned, turned + TABLES * len(self.heads), TABLES)]
        job = Recorded(rest[turned + TABLES * len(self.heads) :], dict(zip(self.heads, parts, strict=True)))
        token = STEP.set([job])
        try:
            h = self.loop.embedded(ids[None])
            for i, block in enumerate(self.loop.blocks):
                h = block(h, turns[(self.loop.kinds[i],) if self.loop.kinds else ()], positions[None])
            return self.loop.logits(h[0][rows]).float()
        finally:
            STEP.reset(token)


class Executor:
    """`executor(jobs, threads)` computes what the loop would: stores the new rows, returns logits (k, V).

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
        kind = self.ov.Type
        self.numbers = {torch.int64: kind.i64, torch.int32: kind.i32, torch.uint8: kind.u8,
                        torch.float32: kind.f32, torch.bfloat16: kind.bf16}  # fmt: skip
        self.step = Step(loop, layout).eval()
        self.like = torch.empty(0, dtype=dtype)
        # Windows are counted in rows, not positions: the same thing where nobody has siblings before it.
        self.window = min((w for w in loop.windows if w is not None), default=0)
        self.pool = Pool(layout, dtype, spare=2 * BLOCK)
        self.graph, self.threads = self._convert(), 0
        self.slots: dict[int, Slot] = {}
        self.size = 0  # nodes of the last forward, with those that only filled it up
        self.last, self.lost = 0, 0.0  # the graph that ran last, and the seconds lost by staying with it
        self.turned: list[np.ndarray] = []  # see turns
        size = sum(p.numel() * p.element_size() for p in dict.fromkeys(self.step.parts.parameters()))
        self.sizes = SIZES if size <= SMALL else ()

    def cache(self) -> Cache:
        return self.pool.kind(self.layout, self.dtype, torch.device("cpu"))

    def turns(self, needed: int) -> list[np.ndarray]:
        """A cosine and a sine (P, D) for each kind of rotation, of at least `needed` positions."""
        if not self.turned or len(self.turned[0]) < needed:
            parts = [part[0] for kind in self.step.kinds for part in self.loop.table(self.like, needed, *kind) or ()]
            self.turned = [(p.view(torch.uint16) if p.dtype == torch.bfloat16 else p).numpy() for p in parts]
        return self.turned

    def _convert(self) -> Any:
        """The graph, all that a step decides left open."""
        reader = importlib.import_module("openvino.frontend.pytorch.ts_decoder").TorchScriptPythonDecoder
        n, ids, turns = 3, torch.arange(3), []
        for kind in self.step.kinds:
            table = self.loop.table(self.like, n, *kind)
            if table is None or len(table) != 2:
                raise LookupError("its rotation is no table of cosines and sines")
            turns += [part[0, :n] for part in table]
        some, every = torch.zeros(1, dtype=torch.int32), torch.zeros((), dtype=torch.int32)
        tables = [
            x
            for heads in self.step.heads
            for x in (torch.arange(n * heads), torch.arange(n * heads), *[some] * 4, every, some.to(torch.uint8), some)
        ]
        past = [self.like.new_zeros(s[0], 1, BLOCK, width) for s in self.layout for width in s[1:]]
        self.count = 3 + len(turns)  # inputs that the number of nodes shapes
        given = [ids, ids, ids, *turns, *tables, *past]
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of shapes that are constants, and are
                recorded = torch.jit.freeze(torch.jit.trace(self.step, tuple(given), check_trace=False))
                source = reader(recorded, skip_freeze=True)  # to be held until it is converted
                graph = self.frontend.convert(self.frontend.load(source))
            if len(graph.inputs) != len(given):
                raise LookupError("a part of its input does not reach the graph")
            for entry, tensor in zip(graph.inputs, given, strict=True):
                shape = [-1, *tensor.shape[1:]] if tensor.ndim else []
                entry.get_node().set_partial_shape(self.ov.PartialShape(shape))
                entry.get_node().set_element_type(self.numbers[tensor.dtype])
            graph.validate_nodes_and_infer_types()
        except LookupError:
            raise
        except Exception as error:  # recording and converting raise nearly anything
            lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            said = next((line for line in lines if line.startswith("No conversion")), lines[0])
            raise LookupError(said) from error
        return graph

    def _compile(self, size: int) -> Any:
        """A request of the graph for `size` nodes; 0: for any number."""
        graph = self.graph.clone()
        if size:
            fixed = {}
            for i, entry in enumerate(graph.inputs):
                shape = entry.partial_shape
                if i < self.count and i != ROWS:
                    shape[0] = size
                fixed[entry] = shape
            graph.reshape(fixed)
        options = {
            "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": NUMBERS[self.dtype], "NUM_STREAMS": 1,
            "KV_CACHE_PRECISION": NUMBERS[self.dtype], "DYNAMIC_QUANTIZATION_GROUP_SIZE": GROUP,
            "INFERENCE_NUM_THREADS": self.threads, "ENABLE_CPU_PINNING": False,
        }  # fmt: skip
        return self.core.compile_model(graph, "CPU", options).create_infer_request()

    def __call__(self, jobs: Sequence[Job], threads: int) -> torch.Tensor | None:
        parts = [Part(job) for job in jobs if isinstance(job.cache, Pooled)]
        if len(parts) < len(jobs) or any(p.seen is not None and 0 < self.window < p.end for p in parts):
            return None
        if self.threads != threads:
            self.threads, self.slots, self.last = threads, {}, 0
        most = PIECE if self.sizes else sum(len(part.tokens) for part in parts)
        found: list[list[torch.Tensor]] = [[] for _ in parts]
        group: list[Part] = []
        self.size = 0
        for i, part in enumerate(parts):
            for piece in part.pieces(most):
                if group and (
                    found[i] is group[-1].found  # it builds on the one before
                    or piece.lease.segment is not group[-1].lease.segment  # rarely: what one memory could not hold
                    or sum(len(p.tokens) for p in group) + len(piece.tokens) > most
                ):
                    self._run(group)
                    group = []
                piece.found = found[i]
                group.append(piece)
        self._run(group)
        return torch.cat([rows for part in found for rows in part])

    def _run(self, parts: Sequence[Part]) -> None:
        """One forward of the graph."""
        nodes, rows = sum(len(part.tokens) for part in parts), [len(part.rows) for part in parts]
        key, warm = self._size(nodes), True
        if key not in self.slots:
            self.slots[key], warm = Slot(self, self._compile(key)), False
        start = time.perf_counter()
        logits = self.slots[key].run(parts, parts[0].lease.segment, key or nodes, max(1, sum(rows)))
        if warm and key:  # the first run of a graph still builds a part of it
            pace = self.slots[key].seconds
            seconds, again = time.perf_counter() - start, key == self.last
            pace[again] = seconds if not pace[again] else pace[again] + (seconds - pace[again]) / 8
        self.last, self.size = key, self.size + (key or nodes)
        for part, mine in zip(parts, logits[: sum(rows)].split(rows), strict=True):
            part.found.append(mine)

    def _size(self, n: int) -> int:
        """The graph for n nodes, 0: that for any number. The last one serves on as long as changing, which loads
        other weights into the processor's cache, costs more than has been lost by staying with a larger one.
        """
        size = next((s for s in self.sizes if s >= n), 0)
        if self.last > size > 0 and size in self.slots and self.last in self.slots:
            (change, stay), larger = self.slots[size].seconds, self.slots[self.last].seconds[True]
            self.lost += max(0.0, larger - stay)
            if stay and change and self.lost < change - stay:
                return self.last
        self.lost = 0.0
        return size


class Part:
    """What a job asks of the graph: nodes, all behind rows that each of them sees.

    `seen`: who sees whom among them, bool (m, m); None: a chain. Where nodes do not see all rows of an earlier forward
    that were kept for them, these are computed once more.
    """

    def __init__(self, job: Job):
        assert isinstance(job.cache, Pooled)
        self.lease, self.seen = job.cache.lease, None if job.seen is None else job.seen.numpy()
        self.past, self.tokens, self.positions, self.rows = job.start, job.tokens, job.columns, job.rows
        if self.seen is not None:
            kept = job.start - job.cache.length
            if kept and not self.seen[:, :kept].all():
                self.tokens, parents, _ = job.cache.next
                self.past, self.rows = job.cache.length, [kept + r for r in job.rows]
                self.seen = ancestors(tuple(parents)).numpy()
            else:
                self.seen = self.seen[:, kept:]
        if len(self.tokens) < len(self.positions):
            self.positions = job.positions
        self.end = self.past + len(self.tokens)
        self.found: list[torch.Tensor] = []  # where its rows of logits go

    def pieces(self, size: int) -> list[Part]:
        """The same in turn: chains of `size` nodes, of which all that follow see all, and then the rest."""
        if len(self.tokens) <= size or self.rows != sorted(self.rows):
            return [self]  # rows in an order of their own, which pieces would lose, are rare
        if self.seen is not None and not self.seen[size:, :size].all():
            return [self]
        first, rest = copy.copy(self), copy.copy(self)
        first.tokens, first.positions, first.seen = self.tokens[:size], self.positions[:size], None
        first.rows, first.end = [row for row in self.rows if row < size], self.past + size
        rest.tokens, rest.positions, rest.past = self.tokens[size:], self.positions[size:], first.end
        rest.rows = [row - size for row in self.rows if row >= size]
        rest.seen = None if self.seen is None else self.seen[size:, size:]
        return [first, *rest.pieces(size)]


class Slot:
    """A compiled graph with the memory it reads and writes, of which a step renews what has changed."""

    def __init__(self, owner: Executor, request: Any):
        self.owner, self.request = owner, request
        self.size = self.count = 0  # nodes and rows that the memory is for
        self.home: Segment | None = None  # whose memory is read and written
        self.counts: list[int] = []  # nodes of each sequence
        self.chains = False  # whether all of them are
        self.places: tuple[Any, ...] | None = None  # where their rows lie
        self.held: dict[int, np.ndarray] = {}  # what the request reads, by input
        self.seconds = [0.0, 0.0]  # of a run behind another graph's, and behind one of its own: running means

    def _give(self, place: int, values: np.ndarray, dtype: torch.dtype | None = None) -> np.ndarray:
        """Lets the request read these values where they lie."""
        ov = self.owner.ov
        tensor = ov.Tensor(values, shared_memory=True) if dtype is None else ov.Tensor(
            values, list(values.shape), self.owner.numbers[dtype])  # fmt: skip
        self.request.set_input_tensor(place, tensor)
        self.held[place] = values
        return values

    def _shape(self, size: int, count: int) -> None:
        """Memory for so many nodes and rows."""
        owner, old = self.owner, self.size
        self.size = self.count = 0  # until all is there: an interrupted step must not be taken for a finished one
        if old != size:
            self.ids, self.positions = (self._give(i, np.zeros(size, np.int64)) for i in (0, 1))
            self.turns = [
                self._give(i, np.zeros((size, table.shape[-1]), HELD[owner.dtype]), owner.dtype)
                for i, table in enumerate(owner.turns(1), 3)
            ]
        self.rows = self._give(ROWS, np.zeros(count, np.int64))
        self.size, self.count = size, count

    def _bind(self, home: Segment) -> None:
        """Takes a segment for the memory that rows lie in."""
        owner, self.home, self.places = self.owner, None, None
        first, groups = 3 + len(self.turns) + TABLES * len(owner.step.heads), sorted(set(owner.layout))
        order = [groups.index(shape) for shape in owner.layout]
        for i, g in enumerate(order):
            for j, memory in enumerate((home.keys, home.values)):
                part = memory[g][order[:i].count(g)]
                values, shape = part.view(torch.uint8).numpy(), [len(part) // BLOCK, 1, BLOCK, part.shape[1]]
                tensor = owner.ov.Tensor(values.reshape(-1), shape, owner.numbers[owner.dtype])
                self.request.set_input_tensor(first + 2 * i + j, tensor)
        self.home = home

    def _tables(self, parts: Sequence[Part], fill: int) -> None:
        """Whose nodes are whose, see Step. What fills up writes to rows of nobody.

        A node that is alone comes twice: for a single one the runtime would take another way, of other rounding.
        """
        past, counts = [p.past for p in parts], [len(p.tokens) for p in parts]
        ranges = [(p.lease.low, p.lease.high) for p in parts]
        if fill:
            past, counts, ranges = [*past, 0], [*counts, fill], [*ranges, (0, 0)]
        sizes = [max(2, count) for count in counts]
        used = [-(-(p + size) // BLOCK) for p, size in zip(past, sizes, strict=True)]
        chains, first = all(p.seen is None for p in parts), 3 + len(self.turns)
        same, there = self.counts == [*counts, fill], self.places == (ranges, used)
        masked = same and chains and self.chains
        self.counts, self.places = [], None  # as in _shape
        if not same:
            starts, ends = _begins(counts), _begins(sizes)
            every = zip(starts, ends, sizes, counts, strict=False)
            nodes, found = np.empty(ends[-1], np.int64), np.empty(starts[-1], np.int64)
            for low, at, size, count in every:
                nodes[at : at + size], found[low : low + count] = np.arange(low, low + size), np.arange(at, at + count)
                nodes[at + count : at + size] = low + count - 1
        if not masked:
            masks = [np.tri(size, dtype=np.uint8).reshape(-1) for size in sizes]
            for i, p in enumerate(parts):
                masks[i] = masks[i] if p.seen is None or len(p.seen) == 1 else p.seen.astype(np.uint8).reshape(-1)
            mask = np.concatenate(masks)
        for place, heads in enumerate(self.owner.step.heads):
            at = first + TABLES * place
            if not same:
                self._give(at, (nodes * heads + np.arange(heads)[:, None]).reshape(-1))
                self._give(at + 1, (found[:, None] + len(nodes) * np.arange(heads)).reshape(-1))
                self._give(at + 2, np.zeros(len(past) * heads, np.int32))
                self._give(at + 3, _begins(sizes * heads))
                self._give(at + 6, np.zeros((), np.int32))
                self._give(at + 8, _begins([size * size for size in sizes] * heads))
            if not masked:
                self._give(at + 7, np.tile(mask, heads))
            if not there:
                blocks = [
                    # Behind a cache's end there are rows of nobody again.
                    np.where(
                        (own := np.arange(n)) < (high - low) // BLOCK,
                        (heads * low + h * (high - low)) // BLOCK + own,
                        0,
                    )
                    for h in range(heads)
                    for (low, high), n in zip(ranges, used, strict=True)
                ]
                self._give(at + 4, np.concatenate(blocks).astype(np.int32))
                self._give(at + 5, _begins(used * heads))
            self.held[at + 2][:] = past * heads
            self.held[at + 6][...] = max(p + size for p, size in zip(past, sizes, strict=True))
        self.counts, self.chains, self.places = [*counts, fill], chains, (ranges, used)

    def run(self, parts: Sequence[Part], home: Segment, size: int, count: int) -> torch.Tensor:
        """The parts' nodes, filled up to `size`, and their rows, filled up to `count` -> logits (count, V)."""
        if (self.size, self.count) != (size, count):
            self._shape(size, count)
        if self.home is not home:
            self._bind(home)
        ids, positions, rows = self.ids, self.positions, self.rows
        n = k = 0
        for part in parts:
            m, r = len(part.tokens), len(part.rows)
            ids[n : n + m], positions[n : n + m] = part.tokens, part.positions
            rows[k : k + r] = part.rows
            rows[k : k + r] += n
            n, k = n + m, k + r
        here = positions[:n]
        for turn, table in zip(self.turns, self.owner.turns(int(here.max()) + 1), strict=True):
            turn[:n] = table[here]
        self._tables(parts, size - n)
        logits = np.empty((count, self.owner.vocab), np.float32)
        self.request.set_output_tensor(0, self.owner.ov.Tensor(logits, shared_memory=True))
        self.request.infer()
        return torch.from_numpy(logits)


def _begins(sizes: Sequence[int]) -> np.ndarray:
    return np.cumsum([0, *sizes], dtype=np.int32)
