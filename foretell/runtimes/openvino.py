"""The forward on OpenVINO's CPU runtime: a Decoder's own layer loop, converted once.

The loop is recorded with attention as one operation of ours, which becomes the runtime's paged
attention: it stores the new rows in the caches' own memory (pool.py) and lets every request's nodes
see their cache and, by a mask, each other. Each key-value head is a sequence of its own there, so
that caches keep the form torch reads. Any family whose loop is ours is converted, whatever its
layers are made of, and kept if a probe's logits agree with torch's; the rest, and all that is asked
besides (hidden states, layer subsets), stays with torch.
"""

from __future__ import annotations

import copy
import importlib
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from foretell.core.cache import Cache
from foretell.core.model import STEP
from foretell.core.tree import ancestors
from foretell.families.loop import Loop
from foretell.memory.buffers import Layout
from foretell.memory.job import Job
from foretell.ops.rows import Lent
from foretell.runtimes.pool import BLOCK, Pool, Pooled, Segment

NUMBERS = {torch.float32: "f32", torch.bfloat16: "bf16"}  # what it can compute in
HELD = {torch.float32: np.float32, torch.bfloat16: np.uint16}  # numpy knows no bfloat16
SIZES = (
    1,
    8,
    16,
    32,
    64,
    128,
)  # nodes that small models have graphs of their own for; one more takes any number
PIECE = 128  # nodes of a forward of theirs, where more can be had one after another
SMALL = (
    64 << 20
)  # bytes of weights up to which that pays: each graph has a copy, and takes a millisecond less
GROUP = 32  # activations of a row that share a scale where the weights have 8 bits
FULL = 32  # nodes up to which a graph of that size gives everyone's logits, wanted or not
ROWS = 2  # which input says whose logits are wanted
PLANS = 64  # tables that are kept
PLANNED, MASK = (
    (0, 1, 3, 7, 8),
    7,
)  # tables that the numbers of nodes decide, and which of them says who sees whom
TABLES = 9  # inputs that say whose nodes are whose, see Step


@torch.library.custom_op("foretell::attend", mutates_args=())
def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    past: torch.Tensor,
    begins: torch.Tensor,
    blocks: torch.Tensor,
    block_begins: torch.Tensor,
    longest: torch.Tensor,
    bias: torch.Tensor,
    bias_begins: torch.Tensor,
    scale: float,
    window: int,
    width: int,
    wide: int,
) -> torch.Tensor:
    """Stands for attention in a recording: q (S, G D), k (S, D), v (S, E) -> (S, G E), S the nodes
    of every head.
    """
    return q.new_zeros(len(q), q.shape[1] // width * wide)


@cache
def runtime() -> tuple[Any, Any, Any]:
    """The package, its compiler, and its reader of recorded modules: one of each a process.

    They are never let go: a graph that outlives the library it came from takes the process down.
    Raises ImportError.
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

    scores, alibi, rotated = (
        empty(np.int32),
        empty(np.float32),
        [empty(np.int32), empty(np.int32), empty(np.float32)],
    )
    sparse, sinks = (
        [empty(np.float32), number(128, np.int32), number(8, np.int32)],
        empty(np.float32, 0, 0, 0, 0),
    )
    evicted = [number(0, np.int32), empty(np.int32), empty(np.int32), empty(np.int32)]
    node = paged(
        [
            q,
            k,
            v,
            keys,
            values,
            past,
            begins,
            blocks,
            block_begins,
            number(scale, np.float32),
            number(window, np.int32),
            alibi,
            longest,
            scores,
            *rotated,
            *sparse,
            sinks,
            *evicted,
            empty(np.int32),
            bias,
            bias_begins,
        ]
    )
    about = node.get_rt_info()
    about["num_k_heads"] = about["num_v_heads"] = 1
    about["k_head_size"], about["v_head_size"] = width, wide
    return [node.output(0)]


def _linear8(context: Any) -> list[Any]:
    """The rule for `linear8`: a matrix of 8 bits and its scales, as the runtime's own products take
    them.
    """
    ops = importlib.import_module("openvino.opset13")
    x, weight, scale = (context.get_input(i) for i in range(3))
    held = weight.get_node()
    while held.get_type_name() != "Constant":
        held = held.input_value(0).get_node()
    # Without a sign: only then are activations rounded too, and the product computed in 8 bits.
    shifted = ops.constant((held.get_data().astype(np.int16) + 128).astype(np.uint8))
    zero = ops.convert(ops.constant(np.array([[128]], np.uint8)), "f32")
    matrix = ops.multiply(
        ops.subtract(ops.convert(shifted, "f32"), zero),
        ops.unsqueeze(scale, ops.constant(np.array(1))),
    )
    return [ops.convert_like(ops.matmul(ops.convert(x, "f32"), matrix, False, True), x).output(0)]


class Recorded(Job):
    """Stands for the jobs while the step is recorded: its parts are the graph's inputs."""

    def __init__(self, past: Sequence[torch.Tensor], tables: dict[int, Sequence[torch.Tensor]]):
        self.past, self.tables = past, tables

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
        """q (H, n, D), k (KV, n, D), v (KV, n, E) -> (n, H, E); the nodes of a key-value head stand
        together.
        """
        if softcap is not None or sinks is not None:
            raise LookupError("its attention has a softcap or sinks")
        heads, width, wide = len(k), q.shape[-1], v.shape[-1]
        there, back, *tables = self.tables[heads]
        parts = [
            x.transpose(0, 1).reshape(-1, len(x) // heads * x.shape[-1])[there] for x in (q, k, v)
        ]
        out = torch.ops.foretell.attend(
            *parts,
            *self.past[2 * layer : 2 * layer + 2],
            *tables,
            float(scale),
            window or 0,
            width,
            wide,
        )
        return out[back].reshape(k.shape[1], len(q), wide)


class Step(torch.nn.Module):
    """A forward as a function of tensors alone: what is recorded.

    ids (n,), positions (n,), rows (k,), then a cosine and a sine (n, D) for each kind of rotation;
    for each number of key-value heads KV and its sequences, KV times every request and then what
    only fills up: which of the n KV nodes of heads they are made of (m,), where those are found
    again (n KV,), the rows before them (S,), where their nodes begin (S + 1,), their blocks of
    memory (B,), where these begin (S + 1,), the longest's rows (), who sees whom among a sequence's
    nodes (sum of squares,), where that begins (S + 1,); at last the pool's keys and values (blocks,
    1, BLOCK, D) of each layer -> logits (k, V).
    """

    def __init__(self, loop: Loop, layout: Layout):
        super().__init__()
        self.loop, self.heads = loop, sorted({shape[0] for shape in layout})
        self.kinds: list[tuple[str, ...]] = (
            [(k,) for k in dict.fromkeys(loop.kinds)] if loop.kinds else [()]
        )
        # Recording knows as constants only what a module holds.
        self.parts = torch.nn.ModuleList([loop.embed, loop.norm, loop.head, *loop.layers])

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, *rest: torch.Tensor
    ) -> torch.Tensor:
        turned = 2 * len(self.kinds)
        turns = {
            kind: (rest[2 * i][None], rest[2 * i + 1][None]) for i, kind in enumerate(self.kinds)
        }
        parts = [
            rest[i : i + TABLES] for i in range(turned, turned + TABLES * len(self.heads), TABLES)
        ]
        job = Recorded(
            rest[turned + TABLES * len(self.heads) :], dict(zip(self.heads, parts, strict=True))
        )
        token = STEP.set([job])
        try:
            h = self.loop.embedded(ids[None])
            for i, block in enumerate(self.loop.blocks):
                h = block(
                    h, turns[(self.loop.kinds[i],) if self.loop.kinds else ()], positions[None]
                )
            return self.loop.logits(h[0][rows]).float()
        finally:
            STEP.reset(token)


class Executor:
    """`executor(jobs, threads)` computes what the loop would: stores the new rows, returns logits
    (k, V).

    None: torch is to. Raises LookupError with the reason where this model or machine cannot have
    it.
    """

    name = "openvino"

    def __init__(self, loop: Loop, layout: Layout, dtype: torch.dtype, vocab: int):
        if dtype not in NUMBERS:
            raise LookupError(f"it does not compute in {dtype}")
        try:
            self.ov, self.core, (_, self.frontend) = runtime()
        except ImportError as error:
            raise LookupError(
                "the package openvino is missing: pip install 'foretell[cpu]'"
            ) from error
        self.loop, self.layout, self.dtype, self.vocab = loop, layout, dtype, vocab
        kind = self.ov.Type
        self.numbers = {
            torch.int64: kind.i64,
            torch.int32: kind.i32,
            torch.uint8: kind.u8,
            torch.float32: kind.f32,
            torch.bfloat16: kind.bf16,
        }
        self.step = Step(loop, layout).eval()
        self.like = torch.empty(0, dtype=dtype)
        # Windows are counted in rows, not positions: the same thing where nobody has siblings
        # before it.
        self.window = min((w for w in loop.windows if w is not None), default=0)
        self.pool = Pool(layout, dtype, spare=2 * BLOCK)
        self.graph = self._convert()
        self.slots: dict[tuple[int, bool], Slot] = {}
        self.size = 0  # nodes of the last forward, with those that only filled it up
        self.threads, self.last = 0, (0, False)  # the graph that ran last
        self.lost = 0.0  # seconds lost by staying with it
        self.turned: list[np.ndarray] = []  # see turns
        size = sum(
            p.numel() * p.element_size() for p in dict.fromkeys(self.step.parts.parameters())
        )
        self.sizes = SIZES if size <= SMALL else ()

    def cache(self) -> Cache:
        return self.pool.kind(self.layout, self.dtype, torch.device("cpu"))

    def clear(self) -> None:
        """Lets go of the graphs made so far."""
        self.threads, self.slots, self.last = 0, {}, (0, False)

    def turns(self, needed: int) -> list[np.ndarray]:
        """A cosine and a sine (P, D) for each kind of rotation, of at least `needed` positions."""
        if not self.turned or len(self.turned[0]) < needed:
            parts = [
                part[0]
                for kind in self.step.kinds
                for part in self.loop.table(self.like, needed, *kind) or ()
            ]
            self.turned = [
                (p.view(torch.uint16) if p.dtype == torch.bfloat16 else p).numpy() for p in parts
            ]
        return self.turned

    def _convert(self) -> Any:
        """The graph, all that a step decides left open."""
        reader = importlib.import_module(
            "openvino.frontend.pytorch.ts_decoder"
        ).TorchScriptPythonDecoder
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
            for x in (
                torch.arange(n * heads),
                torch.arange(n * heads),
                *[some] * 4,
                every,
                some.to(torch.uint8),
                some,
            )
        ]
        past = [self.like.new_zeros(s[0], 1, BLOCK, width) for s in self.layout for width in s[1:]]
        given = [ids, ids, ids, *turns, *tables, *past]
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of shapes that are constants, and are
                recorded = torch.jit.freeze(
                    torch.jit.trace(self.step, tuple(given), check_trace=False)
                )
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
            lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()] or [
                type(error).__name__
            ]
            said = next((line for line in lines if line.startswith("No conversion")), lines[0])
            raise LookupError(said) from error
        return graph

    def _compile(self, shapes: Mapping[int, Sequence[int]]) -> Any:
        """A request of the graph with these shapes of inputs, by place; all others are free."""
        graph = self.graph.clone()
        graph.reshape(
            {
                graph.inputs[place]: self.ov.PartialShape(list(shape))
                for place, shape in shapes.items()
            }
        )
        options = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": NUMBERS[self.dtype],
            "NUM_STREAMS": 1,
            "KV_CACHE_PRECISION": NUMBERS[self.dtype],
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": GROUP,
            "INFERENCE_NUM_THREADS": self.threads,
            "ENABLE_CPU_PINNING": False,
        }
        return self.core.compile_model(graph, "CPU", options).create_infer_request()

    def __call__(self, jobs: Sequence[Job], threads: int) -> torch.Tensor | None:
        parts = [Part(job) for job in jobs if isinstance(job.cache, Pooled)]
        if len(parts) < len(jobs) or any(
            p.seen is not None and 0 < self.window < p.end for p in parts
        ):
            return None
        if self.threads != threads:
            self.clear()
            self.threads = threads
        most = PIECE if self.sizes else sum(len(part.tokens) for part in parts)
        found: list[list[torch.Tensor]] = [[] for _ in parts]
        group: list[Part] = []
        self.size = 0
        for i, part in enumerate(parts):
            for piece in part.pieces(most):
                if group and (
                    found[i] is group[-1].found  # it builds on the one before
                    or piece.lease.segment
                    is not group[-1].lease.segment  # rarely: what one memory could not hold
                    or sum(len(p.tokens) for p in group) + len(piece.tokens) > most
                ):
                    self._run(group)
                    group = []
                piece.found = found[i]
                group.append(piece)
        self._run(group)
        every = [rows for part in found for rows in part]
        return every[0] if len(every) == 1 else torch.cat(every)

    def _run(self, parts: Sequence[Part]) -> None:
        """One forward of the graph."""
        nodes, rows = sum(len(part.tokens) for part in parts), [len(part.rows) for part in parts]
        key, warm = self._size(nodes, len(parts) == 1), True
        if key not in self.slots:
            self.slots[key], warm = Slot(self, *key), False
        start = time.perf_counter()
        logits = self.slots[key].run(parts, parts[0].lease.segment, nodes, sum(rows))
        if warm and key[0]:  # the first run of a graph still builds a part of it
            pace = self.slots[key].seconds
            seconds, again = time.perf_counter() - start, key == self.last
            pace[again] = seconds if not pace[again] else pace[again] + (seconds - pace[again]) / 8
        self.last, self.size = key, self.size + (key[0] or nodes)
        low = 0
        for part, count in zip(parts, rows, strict=True):
            part.found.append(logits[low : (low := low + count)])

    def _size(self, n: int, alone: bool) -> tuple[int, bool]:
        """The graph for n nodes: its size, 0 for any number, and whether it is that of one request
        alone.

        The last one serves on as long as changing, which loads other weights into the processor's
        cache, costs more than has been lost by staying with a larger one.
        """
        size = next((s for s in self.sizes if s >= n), 0)
        key = size, alone and size > 0
        if (
            self.last[0] > size > 0
            and self.last[1] == key[1]
            and key in self.slots
            and self.last in self.slots
        ):
            (change, stay), larger = self.slots[key].seconds, self.slots[self.last].seconds[True]
            self.lost += max(0.0, larger - stay)
            if stay and change and self.lost < change - stay:
                return self.last
        self.lost = 0.0
        return key


class Part:
    """What a job asks of the graph: nodes, all behind rows that each of them sees.

    `seen`: who sees whom among them, bool (m, m); None: a chain. Where nodes do not see all rows of
    an earlier forward that were kept for them, these are computed once more.
    """

    def __init__(self, job: Job):
        assert isinstance(job.cache, Pooled)
        self.lease, self.seen = job.cache.lease, None if job.seen is None else job.seen.numpy()
        self.past, self.tokens, self.positions, self.rows = (
            job.start,
            job.tokens,
            job.columns,
            job.rows,
        )
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
        """The same in turn: chains of `size` nodes, of which all that follow see all, and then the
        rest.
        """
        if len(self.tokens) <= size or self.rows != sorted(self.rows):
            return [self]  # rows in an order of their own, which pieces would lose, are rare
        if self.seen is not None and not self.seen[size:, :size].all():
            return [self]
        first, rest = copy.copy(self), copy.copy(self)
        first.tokens, first.positions, first.seen = self.tokens[:size], self.positions[:size], None
        first.rows, first.end = [row for row in self.rows if row < size], self.past + size
        rest.tokens, rest.positions, rest.past = (
            self.tokens[size:],
            self.positions[size:],
            first.end,
        )
        rest.rows = [row - size for row in self.rows if row >= size]
        rest.seen = None if self.seen is None else self.seen[size:, size:]
        return [first, *rest.pieces(size)]


class Slot:
    """A compiled graph with the memory it reads, of which a step renews what has changed.

    `size` nodes, what is missing is filled up; 0: any number. `alone`: for one request, so that no
    shape ever changes.
    """

    def __init__(self, owner: Executor, size: int, alone: bool):
        self.owner, self.size, self.alone = owner, size, alone
        self.first = 3 + len(owner.turns(1))  # input of the first table
        # Each number of key-value heads, and the input of its first table.
        self.groups = [(heads, self.first + TABLES * i) for i, heads in enumerate(owner.step.heads)]
        self.most = (
            -(-(owner.loop.context + PIECE) // BLOCK) + 1
        )  # blocks that one request may have, and one of nobody
        self.held: dict[int, np.ndarray] = {}  # what the request reads, by input
        self.home: Segment | None = None  # whose memory is read and written
        self.counts: list[
            int
        ] = []  # nodes of each request as the tables have them; []: these must be renewed
        self.chains = False  # whether all of them are
        self.ranges: list[tuple[int, int]] = []  # where their rows lie
        self.plans: dict[tuple[int, ...], list[list[np.ndarray]]] = {}
        self.lent = Lent(lambda memory: owner.ov.Tensor(memory, shared_memory=True))
        self.seconds = [
            0.0,
            0.0,
        ]  # of a run behind another graph's, and behind one of its own: running means
        shapes: dict[int, Sequence[int]] = {}
        if size:
            shapes |= {0: (size,), 1: (size,)}
            shapes |= {i: (size, table.shape[-1]) for i, table in enumerate(owner.turns(1), 3)}
        if 0 < size <= FULL:
            shapes[ROWS] = (size,)
        if alone:
            for (heads, at), tables in zip(self.groups, self._plan((size,)), strict=True):
                shapes |= {at + i: table.shape for i, table in zip(PLANNED, tables, strict=True)}
                shapes |= {
                    at + i: table.shape for i, table in enumerate(self._blocks(heads, [(0, 0)]), 4)
                }
                shapes[at + 2] = (2 * heads,)
        self.request = owner._compile(shapes)

    def _plan(self, counts: tuple[int, ...]) -> list[list[np.ndarray]]:
        """For each number of key-value heads the tables PLANNED: what the numbers of nodes decide,
        for chains.

        A node that is alone comes twice: for a single one the runtime would take another way, of
        other rounding. What fills up is the first node, as a last sequence, which writes to rows of
        nobody.
        """
        if counts in self.plans:
            return self.plans[counts]
        sizes, least = [max(2, count) for count in counts], max(2, self.size)
        if self.size:
            sizes.append((least if sum(sizes) <= least else 2 * least) - sum(sizes))
        starts, ends = _begins(counts), _begins(sizes)
        nodes, found = np.zeros(ends[-1], np.int64), np.zeros(self.size or starts[-1], np.int64)
        for low, at, size, count in zip(starts[:-1], ends, sizes, counts, strict=False):
            nodes[at : at + size] = low + np.minimum(np.arange(size), count - 1)
            found[low : low + count] = np.arange(at, at + count)
        plan = []
        for heads, _ in self.groups:
            mask = np.zeros(
                heads * (least**2 if self.alone else sum(n * n for n in sizes)), np.uint8
            )
            seen = np.tile(
                np.concatenate([np.tri(n, dtype=np.uint8).reshape(-1) for n in sizes]), heads
            )
            mask[: len(seen)] = seen
            plan.append(
                [
                    (nodes * heads + np.arange(heads)[:, None]).reshape(-1),
                    (found[:, None] + len(nodes) * np.arange(heads)).reshape(-1),
                    _begins(sizes * heads),
                    mask,
                    _begins([n * n for n in sizes] * heads),
                ]
            )
        if self.size:  # long ones would fill the memory
            if len(self.plans) >= PLANS:
                self.plans.clear()
            self.plans[counts] = plan
        return plan

    def _blocks(
        self, heads: int, ranges: Sequence[tuple[int, int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Which blocks each sequence has, and where they begin. Behind a cache's end there are rows
        of nobody.
        """
        tables = []
        for h in range(heads):
            for low, high in ranges:
                own = (high - low) // BLOCK
                tables.append(table := np.zeros(self.most if self.alone else own + 1, np.int32))
                own = min(own, len(table))
                table[:own] = (heads * low + h * (high - low)) // BLOCK + np.arange(own)
            if self.size:
                tables.append(np.zeros(2 * self.size // BLOCK + 1, np.int32))
        return np.concatenate(tables), _begins([len(table) for table in tables])

    def _give(self, place: int, values: np.ndarray, dtype: torch.dtype | None = None) -> None:
        """Lets the request read these values where they lie."""
        ov = self.owner.ov
        tensor = (
            ov.Tensor(values, shared_memory=True)
            if dtype is None
            else ov.Tensor(values, list(values.shape), self.owner.numbers[dtype])
        )
        self.request.set_input_tensor(place, tensor)
        self.held[place] = values

    def _put(self, place: int, values: np.ndarray) -> None:
        """Lets it read a copy of these, where it reads already if they fit there."""
        if place in self.held and self.held[place].shape == values.shape:
            self.held[place][...] = values
        else:
            self._give(place, values.copy())

    def _room(self, place: int, rows: int, width: int = 0) -> np.ndarray:
        """Memory that it reads, (rows,) numbers or (rows, width) of the model's."""
        if place not in self.held or len(self.held[place]) != rows:
            if width:
                self._give(place, np.zeros((rows, width), HELD[self.owner.dtype]), self.owner.dtype)
            else:
                self._give(place, np.zeros(rows, np.int64))
        return self.held[place]

    def _bind(self, home: Segment) -> None:
        """Takes a segment for the memory that rows lie in."""
        owner, self.home, self.ranges = self.owner, None, []
        first, groups = self.first + TABLES * len(owner.step.heads), sorted(set(owner.layout))
        order = [groups.index(shape) for shape in owner.layout]
        for i, g in enumerate(order):
            for j, memory in enumerate((home.keys, home.values)):
                part = memory[g][order[:i].count(g)]
                values, shape = (
                    part.view(torch.uint8).numpy(),
                    [len(part) // BLOCK, 1, BLOCK, part.shape[1]],
                )
                tensor = owner.ov.Tensor(values.reshape(-1), shape, owner.numbers[owner.dtype])
                self.request.set_input_tensor(first + 2 * i + j, tensor)
        self.home = home

    def _tables(self, parts: Sequence[Part]) -> None:
        """Whose nodes are whose, see Step."""
        counts, ranges = (
            [len(p.tokens) for p in parts],
            [(p.lease.low, p.lease.high) for p in parts],
        )
        trees = [(i, p.seen) for i, p in enumerate(parts) if p.seen is not None and len(p.seen) > 1]
        longest = max(p.past + max(2, len(p.tokens)) for p in parts)
        past = [p.past for p in parts] + [0] * (self.size > 0)
        same, masked, there = (
            self.counts == counts,
            self.chains and not trees,
            self.ranges == ranges,
        )
        if not (same and masked and there):
            self.counts, self.ranges = (
                [],
                [],
            )  # an interrupted step must not be taken for a finished one
            for (heads, at), tables in zip(self.groups, self._plan(tuple(counts)), strict=True):
                for i, table in zip(PLANNED, tables, strict=True):
                    if not same or (i == MASK and not masked):
                        self._put(at + i, table)
                for i, seen in trees:
                    mask = self.held[at + MASK]
                    for low in self.held[at + MASK + 1][i :: len(past)][:heads]:
                        mask[low : low + seen.size] = seen.reshape(-1)
                for i, values in enumerate(() if there else self._blocks(heads, ranges), 4):
                    self._put(at + i, values)
            self.counts, self.ranges, self.chains = counts, ranges, not trees
        for heads, at in self.groups:
            self._put(at + 2, np.array(past * heads, np.int32))
            self._put(at + 6, _reach(longest))

    def run(self, parts: Sequence[Part], home: Segment, nodes: int, wanted: int) -> torch.Tensor:
        """The parts' nodes and wanted rows, in all so many -> logits (at least `wanted`, V)."""
        owner, size = self.owner, self.size or nodes
        count = size if 0 < self.size <= FULL else max(1, wanted)
        ids, positions, rows = self._room(0, size), self._room(1, size), self._room(ROWS, count)
        if self.home is not home:
            self._bind(home)
        n = k = 0
        for part in parts:
            m, r = len(part.tokens), len(part.rows)
            ids[n : n + m], positions[n : n + m] = part.tokens, part.positions
            rows[k : k + r] = part.rows
            rows[k : k + r] += n
            n, k = n + m, k + r
        here = positions[:n]
        for i, table in enumerate(owner.turns(int(here.max()) + 1), 3):
            self._room(i, size, table.shape[-1])[:n] = table[here]
        self._tables(parts)
        logits, tensor = self.lent.take(count, owner.vocab)
        self.request.set_output_tensor(0, tensor)
        self.request.infer(share_outputs=True)
        return torch.from_numpy(logits)


@cache
def _reach(rows: int) -> np.ndarray:
    """A length that so many rows are within, (): a new one makes attention build its code again,
    for milliseconds.
    """
    return np.array(max(256, 1 << (rows - 1).bit_length()), np.int32)


def _begins(sizes: Sequence[int]) -> np.ndarray:
    return np.cumsum([0, *sizes], dtype=np.int32)
