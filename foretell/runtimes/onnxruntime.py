"""The forward on ONNX Runtime, for steps of one request of a small model.

With weights of 8 bits it is the quickest on a CPU there: one graph serves any number of nodes with
one copy of the weights, and a step of another size costs nothing more, where OpenVINO has a graph,
and a copy, for each (openvino.py). Fused layers (fused.py) become a dozen operations each, of which
attention writes new rows into the caches' own memory. Long pieces of texts, and several requests in
one forward, are left to `others`, which computes them quicker.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from foretell.core.cache import Cache
from foretell.families.decoder import Executor as Other
from foretell.families.fused import Fused, fits
from foretell.families.loop import Loop
from foretell.memory.buffers import Layout
from foretell.memory.job import Job
from foretell.ops.rows import Lent
from foretell.runtimes.openvino import SMALL

NODES = 32  # of a text in one forward; longer pieces are quicker elsewhere
# activations of a row that share a scale where the weights have 8 bits; with it all rows round
# alike
GROUP = 64
OPSET, UINT8, INT32 = 18, 2, 6  # of the format, and its numbers for two types
WIDTH = 16  # of which heads are multiples
LARGEST = (1 << 31) - (1 << 20)  # bytes of weights that the format holds
PLACE = 6  # inputs that say where the new rows are
OURS = "com.microsoft"  # where the operations are that the standard lacks


@torch.library.custom_op("foretell::attend_cached", mutates_args=())
def attend_cached(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    last: torch.Tensor,
    total: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
    window: int,
    heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stands for attention in a recording: qkv (1, n, (H + 2 KV) D) over keys, values (1, KV, C, D)
    -> (1, n, H D).
    """
    width = keys.shape[-1]
    return qkv[..., : heads * width].clone(), keys.clone(), values.clone()


@torch.library.custom_op("foretell::add_norm", mutates_args=())
def add_norm(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for a sum x + y (..., E) and its norm: returns the norm, then the sum."""
    return torch.zeros_like(x), torch.zeros_like(x)


@cache
def runtime() -> Any:
    """The package. Raises ImportError."""
    importlib.import_module("onnx")  # which torch's exporter asks for
    package = importlib.import_module("onnxruntime")
    package.disable_telemetry_events()  # builds for Windows would report home
    return package


def suits(hf: Any, asked: bool = False) -> bool:
    """Whether it is the executor to have: of a small model with weights of 8 bits, where its
    packages are installed.

    `asked`: somebody wants it by name, so that only the weights count. What it cannot take is found
    out later.
    """
    weights = [p for p in dict.fromkeys(hf.parameters()) if p.dtype == torch.int8]
    if not weights or asked:
        return bool(weights)
    layers = getattr(hf.get_decoder(), "layers", ())
    there = all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime"))
    return there and sum(p.nbytes for p in weights) <= SMALL and all(map(fits, layers))


class Step(torch.nn.Module):
    """A forward of one request as a function of tensors alone: what is recorded.

    ids (1, n), rows (k,), the last row's place in the cache (1,), all rows with the new ones (1,),
    cosines and sines of every position (P, D / 2), positions (1, n), who sees whom (1, 1, n, rows)
    as 0 or -inf, and the keys and values (1, KV, C, D) of each layer -> logits (k, V), and the keys
    and values again, which are the same memory.
    """

    def __init__(self, loop: Loop):
        super().__init__()
        self.loop = loop
        self.parts = torch.nn.ModuleList([loop.embed, loop.norm, loop.head, *loop.layers])

    def forward(
        self, ids: torch.Tensor, rows: torch.Tensor, *given: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        place, held = given[:PLACE], list(given[PLACE:])
        blocks = [block for block in self.loop.blocks if isinstance(block, Fused)]
        h = self.loop.embedded(ids)
        x = Fused.norm(blocks[0].before, h)
        for i, block in enumerate(blocks):
            x, heads = block.qkv(x), block.queries
            if block.norms is not None:
                parts = x.unflatten(-1, (-1, block.width)).split([heads, block.keys, block.keys], 2)
                normed = [
                    block.norm(module, part)
                    for module, part in zip(block.norms, parts, strict=False)
                ]
                x = torch.cat([*normed, parts[2]], 2).flatten(2)
            out, *held[2 * i : 2 * i + 2] = torch.ops.foretell.attend_cached(
                x, *held[2 * i : 2 * i + 2], *place, block.scale, block.window or -1, heads
            )
            x, h = self._add(h, block.out(out), block.after)
            x = block.gate_up(x)
            gate, up = x.split(x.shape[-1] // 2, -1)
            out = block.down(block.activate(gate) * up)
            if block is blocks[-1]:
                h = h + out
            else:
                x, h = self._add(h, out, blocks[i + 1].before)
        return self.loop.logits(h[0][rows]), *held

    @staticmethod
    def _add(h: torch.Tensor, x: torch.Tensor, norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out: tuple[torch.Tensor, torch.Tensor] = torch.ops.foretell.add_norm(
            h, x, norm.weight, norm.variance_epsilon
        )
        return out


@contextmanager
def _rules() -> Iterator[None]:
    """Inside, the exporter knows our operations, and norms as one operation of the runtime's."""
    helper = importlib.import_module("torch.onnx.symbolic_helper")

    @helper.parse_args("v", "v", "v", "v", "v", "v", "v", "v", "v", "f", "i", "i")
    def attention(
        g: Any,
        qkv: Any,
        keys: Any,
        values: Any,
        last: Any,
        total: Any,
        cos: Any,
        sin: Any,
        positions: Any,
        bias: Any,
        scale: float,
        window: int,
        heads: int,
    ) -> Any:
        none, groups = (
            helper._optional_input_placeholder_tensor(g),
            helper._get_tensor_dim_size(keys, 1),
        )
        out, *held = g.op(
            f"{OURS}::GroupQueryAttention",
            qkv,
            none,
            none,
            keys,
            values,
            last,
            total,
            cos,
            sin,
            positions,
            bias,
            outputs=3,
            num_heads_i=heads,
            kv_num_heads_i=groups,
            scale_f=scale,
            local_window_size_i=window,
            do_rotary_i=1,
        )
        out.setType(keys.type().with_sizes([1, None, heads * helper._get_tensor_dim_size(keys, 3)]))
        for part in held:
            part.setType(keys.type())
        return out, *held

    def linear(g: Any, x: Any, weight: Any, scale: Any) -> Any:
        out, wide = helper._get_tensor_sizes(weight)
        whole = -(-wide // GROUP) * GROUP

        def number(*values: int) -> Any:
            return g.op("Constant", value_t=torch.tensor(values))

        # The session computes these once: whole groups of numbers without a sign, and for each
        # group its row's scale.
        zero = g.op("Constant", value_t=torch.tensor(128, dtype=torch.int32))
        shifted = g.op("Add", g.op("Cast", weight, to_i=INT32), zero)
        if whole > wide:
            shifted = g.op("Pad", shifted, number(0, 0, 0, whole - wide), zero)
        packed = g.op(
            "Reshape", g.op("Cast", shifted, to_i=UINT8), number(out, whole // GROUP, GROUP)
        )
        scales = g.op("Tile", g.op("Reshape", scale, number(out, 1)), number(1, whole // GROUP))
        scales = g.op("Reshape", scales, number(-1))
        y = g.op(
            f"{OURS}::MatMulNBits",
            x,
            packed,
            scales,
            K_i=wide,
            N_i=out,
            bits_i=8,
            block_size_i=GROUP,
            accuracy_level_i=4,
        )
        y.setType(x.type().with_sizes([*helper._get_tensor_sizes(x)[:-1], out]))
        return y

    def norm(g: Any, x: Any, shape: Any, weight: Any, eps: Any) -> Any:
        y = g.op(
            "SimplifiedLayerNormalization",
            x,
            weight,
            axis_i=-1,
            epsilon_f=helper._parse_arg(eps, "f"),
        )
        y.setType(x.type())
        return y

    @helper.parse_args("v", "v", "v", "f")
    def add_and_norm(g: Any, x: Any, y: Any, weight: Any, eps: float) -> Any:
        normed, _, _, total = g.op(
            f"{OURS}::SkipSimplifiedLayerNormalization", x, y, weight, epsilon_f=eps, outputs=4
        )
        for out in (normed, total):
            out.setType(x.type())
        return normed, total

    rules = {
        "foretell::add_norm": add_and_norm,
        "foretell::attend_cached": attention,
        "foretell::linear8": linear,
        "aten::rms_norm": norm,
    }
    for name, rule in rules.items():
        torch.onnx.register_custom_op_symbolic(name, rule, OPSET)
    try:
        yield
    finally:
        for name in rules:
            torch.onnx.unregister_custom_op_symbolic(name, OPSET)


class Executor:
    """`executor(jobs, threads)` computes what the loop would: stores the new rows, returns logits
    (k, V).

    `others` computes what this does not, and has the caches; None: torch. Raises LookupError with
    the reason where this model or machine cannot have it.
    """

    name = "onnxruntime"
    sizes: tuple[int, ...] = ()  # it fills nothing up

    def __init__(
        self,
        loop: Loop,
        layout: Layout,
        dtype: torch.dtype,
        vocab: int,
        others: Other | None = None,
    ):
        try:
            self.package = runtime()
        except ImportError as error:
            raise LookupError(
                f"the package {error.name} is missing: pip install 'foretell[cpu]'"
            ) from error
        if dtype != torch.float32:
            raise LookupError(
                f"it computes in float32 what has no weights of 8 bits, and not in {dtype}"
            )
        if not all(type(block) is Fused for block in loop.blocks):
            raise LookupError("its layers are of another build than the llama family's")
        if any(width % WIDTH for _, *both in layout for width in both):
            raise LookupError(f"its heads are no multiple of {WIDTH} wide")
        self.loop, self.layout, self.dtype, self.vocab, self.others = (
            loop,
            layout,
            dtype,
            vocab,
            others,
        )
        self.step = Step(loop).eval()
        self.window = min((w for w in loop.windows if w is not None), default=0)
        self.held = [
            f"{part}{i}" for i in range(len(layout)) for part in ("keys", "values")
        ]  # their names
        self.value = (
            self.package.OrtValue.ortvalue_from_numpy
        )  # an array as a session reads and writes it, in place
        self.turned: list[tuple[np.ndarray, Any]] = []  # cosines and sines (P, D / 2)
        self.size = 0
        self.rooms: dict[
            tuple[str, tuple[int, ...]], tuple[np.ndarray, Any]
        ] = {}  # what it reads, by name and shape
        self.given: dict[str, Any] = {}  # what it reads now
        # the cache that is bound, by its first layer's keys
        self.home: weakref.ref[torch.Tensor] | None = None
        self.lent = Lent(self.value)
        try:
            self._start(torch.get_num_threads())
        except LookupError:
            raise
        except Exception as error:  # a session may refuse what was exported
            raise LookupError(
                f"it fails: {(str(error).splitlines() or [type(error).__name__])[0]}"
            ) from error

    def cache(self) -> Cache:
        return (
            Cache(self.layout, self.dtype, torch.device("cpu"))
            if self.others is None
            else self.others.cache()
        )

    def __call__(self, jobs: Sequence[Job], threads: int) -> torch.Tensor | None:
        job, new = jobs[0], len(jobs[0].tokens)
        text = min(new, max(0, 1 - job.first))  # nodes that are no draft
        others = self.others if text > NODES else None
        # Windows are counted in rows, not positions: the same thing where nobody has siblings
        # before it.
        beyond = job.seen is not None and 0 < self.window < job.start + new
        if len(jobs) > 1 or beyond or (others is not None and text == new):
            found = None if self.others is None else self.others(jobs, threads)
            self.size = 0 if self.others is None else self.others.size
            return found
        if self.threads != threads:
            self._start(threads)
        self.size = new
        # Behind no rows the runtime takes positions to be 0, 1, 2 and so on, which with siblings
        # they are not. And who computes a token must not depend on whether it was drafted: they
        # round in different ways.
        if others is None and (job.seen is None or job.start > 0):
            return self._run(job)
        first, rest = _split(job, text)
        ahead = self._run(first) if others is None else others([first], threads)
        if ahead is None:
            return None
        both, self.size = torch.cat([ahead, self._run(rest)]), new
        order = [row for row in job.rows if row < text] + [row for row in job.rows if row >= text]
        return both if order == job.rows else both[[order.index(row) for row in job.rows]]

    def _turns(self, needed: int) -> list[tuple[np.ndarray, Any]]:
        """Cosines and sines of at least so many positions, and as the session reads them."""
        if not self.turned or len(self.turned[0][0]) < needed:
            table = (
                None
                if self.loop.kinds
                else self.loop.table(torch.empty(0, dtype=self.dtype), needed)
            )
            halves = [part[0].chunk(2, -1) for part in table or ()]
            widths = {width for _, *both in self.layout for width in both}
            if (
                len(halves) != 2
                or {2 * h[0].shape[-1] for h in halves} != widths
                or not all(map(_equal, halves))
            ):
                raise LookupError(
                    "its rotation is no table of cosines and sines, the same for both halves of a head"
                )
            tables = [half.contiguous().numpy() for half, _ in halves]
            self.turned = [(table, self.value(table)) for table in tables]
        return self.turned

    def _export(self) -> bytes:
        """The recorded step in the runtime's format, the numbers of nodes and rows left open."""
        n, rows = 3, 8
        if sum(p.nbytes for p in dict.fromkeys(self.step.parts.parameters())) > LARGEST:
            raise LookupError("its weights have more than 2 GB, which the format cannot hold")
        last, total = torch.tensor([n - 1], dtype=torch.int32), torch.tensor([n], dtype=torch.int32)
        turns = [torch.from_numpy(part) for part, _ in self._turns(n)]
        past = [
            torch.zeros(1, heads, rows, width) for heads, *widths in self.layout for width in widths
        ]
        ids = torch.arange(n)[None]
        given = (ids, torch.arange(n), last, total, *turns, ids, torch.zeros(1, 1, n, n), *past)
        free = {
            "ids": {1: "n"},
            "rows": {0: "k"},
            "last": {},
            "total": {},
            "cos": {0: "p"},
            "sin": {0: "p"},
            "positions": {1: "n"},
            "bias": {2: "n", 3: "all"},
        }
        names = [*free, *self.held]
        free |= {name: {2: "capacity"} for name in self.held} | {
            _out(name): {2: "capacity"} for name in self.held
        }
        memory: Any = io.BytesIO()
        try:
            with torch.no_grad(), warnings.catch_warnings(), _rules():
                warnings.simplefilter(
                    "ignore"
                )  # of shapes that are constants, and are, and of a newer exporter
                torch.onnx.export(
                    self.step,
                    given,
                    memory,
                    dynamo=False,
                    opset_version=OPSET,
                    input_names=names,
                    output_names=["logits", *map(_out, self.held)],
                    dynamic_axes={**free, "logits": {0: "k"}},
                    custom_opsets={OURS: 1},
                )
        except Exception as error:  # recording and exporting raise nearly anything
            raise LookupError(
                (str(error).strip().splitlines() or [type(error).__name__])[0]
            ) from error
        return memory.getvalue()

    def _start(self, threads: int) -> None:
        """A session with so many threads. What was exported is not kept: it is as large as the
        model.
        """
        options = self.package.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = (
            threads,
            1,
            3,
        )
        options.add_session_config_entry(
            "session.dynamic_block_base", "4"
        )  # smaller shares, as they need them
        self.session = self.package.InferenceSession(
            self._export(), options, providers=["CPUExecutionProvider"]
        )
        self.binding, self.given, self.home, self.threads = (
            self.session.io_binding(),
            {},
            None,
            threads,
        )

    def _give(self, name: str, value: Any) -> None:
        """Lets the session read this."""
        if self.given.get(name) is not value:
            self.binding.bind_ortvalue_input(name, value)
            self.given[name] = value

    def _room(self, name: str, kind: Any, *shape: int) -> np.ndarray:
        """Memory that the session reads under this name."""
        if (name, shape) not in self.rooms:
            room = np.zeros(shape, kind)
            self.rooms[name, shape] = room, self.value(room)
        room, value = self.rooms[name, shape]
        self._give(name, value)
        return room

    def _bind(self, rows: Cache) -> None:
        """Lets the session read and write a cache where it lies."""
        if self.home is None or self.home() is not rows.k[0]:
            parts = [part for both in zip(rows.k, rows.v, strict=True) for part in both]
            for name, part in zip(self.held, parts, strict=True):
                place = np.float32, (1, *part.shape), part.data_ptr()
                self.binding.bind_input(name, "cpu", 0, *place)
                self.binding.bind_output(_out(name), "cpu", 0, *place)
            self.home = weakref.ref(rows.k[0])

    def _run(self, job: Job) -> torch.Tensor:
        """One forward of a job."""
        # A node alone is computed twice: of a single one attention's products would round in
        # another way.
        n, rows = max(2, len(job.tokens)), job.cache
        end, wanted = job.start + n, max(1, len(job.rows))
        rows._own(end)
        self._bind(rows)
        for name, table in zip(("cos", "sin"), self._turns(end), strict=True):
            self._give(name, table[1])
        self._room("ids", np.int64, 1, n)[:] = job.tokens
        self._room("positions", np.int64, 1, n)[:] = job.positions
        self._room("rows", np.int64, wanted)[:] = job.rows or 0
        self._room("last", np.int32, 1)[:], self._room("total", np.int32, 1)[:] = end - 1, end
        bias = np.zeros((1, 1, n, end), np.float32)
        if job.seen is not None:
            (new, scratch), there = job.seen.shape, job.start + len(job.tokens)
            bias[0, 0, :new, there - scratch : there][~job.seen.numpy()] = -np.inf
        self._give("bias", self.value(bias))
        logits, value = self.lent.take(wanted, self.vocab)
        self.binding.bind_ortvalue_output("logits", value)
        self.session.run_with_iobinding(self.binding)
        return torch.from_numpy(logits)[: len(job.rows)]


def _split(job: Job, at: int) -> tuple[Job, Job]:
    """The first new nodes, a chain, and those that follow them."""
    n = len(job.tokens)
    first = replace(
        job,
        tokens=job.tokens[:at],
        columns=job.columns[: len(job.columns) - n + at],
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


def _equal(halves: Sequence[torch.Tensor]) -> bool:
    return torch.equal(halves[0], halves[1])


def _out(name: str) -> str:
    return f"{name}_out"
