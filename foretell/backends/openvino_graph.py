"""A Decoder's layer loop as an OpenVINO graph.

The loop is recorded once. Attention is one operation of ours in the recording, which the conversion
replaces by the runtime's paged attention: that stores the new rows in the caches' memory (pool.py),
and lets the nodes of every job see their own cache and, by a mask, each other. Each key-value head
is a sequence of its own there, so that caches keep the form that torch reads.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from foretell.backends.pool import BLOCK
from foretell.cache.buffers import Layout
from foretell.cache.job import Job
from foretell.core.model import STEP
from foretell.models.decoder.fused import Fused
from foretell.models.decoder.loop import Loop
from foretell.models.decoder.packed import recorded_layer
from foretell.native.packing import GROUP, centred_numbers, unpack_matrix
from foretell.ops.attention import LayerQuery

FLOAT_TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}  # of packed matrices
PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16"}  # what it can compute in
NUMPY = {torch.float32: np.float32, torch.bfloat16: np.uint16}  # numpy knows no bfloat16
STATES, POSITIONS, ROWS, ROTATIONS = range(4)  # the first inputs of the graph, see ForwardGraph
# The inputs that follow for each number of key-value heads, see ForwardGraph.
TABLES = 9
GATHER, SCATTER, PAST, BEGINS, BLOCKS, BLOCK_BEGINS, LONGEST, MASK, MASK_BEGINS = range(TABLES)


@torch.library.custom_op("foretell::attend", mutates_args=())
def attend_paged(
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
    mask: torch.Tensor,
    mask_begins: torch.Tensor,
    scale: float,
    window: int,
    key_width: int,
    value_width: int,
) -> torch.Tensor:
    """Stands for attention in a recording: q (S, G D), k (S, D), v (S, E) -> (S, G E).

    S: the nodes of all sequences; G: query heads that share a key-value head; D, E: widths of a key
    and a value.
    """
    return q.new_zeros(len(q), q.shape[1] // key_width * value_width)


def as_numpy(x: torch.Tensor) -> np.ndarray:
    """A tensor's memory as an array; bfloat16 as in NUMPY."""
    memory: np.ndarray = (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()
    return memory


class Library(NamedTuple):
    """The package openvino, its compiler, and its reader of recorded modules.

    `manager` is held because a reader that outlives it takes the process down.
    """

    package: Any
    compiler: Any
    reader: Any
    manager: Any


@cache
def load_library() -> Library:
    """Loads the library, once in a process: a graph that outlives its library takes the process
    down.

    Raises ImportError.
    """
    # Importing openvino would send telemetry through this package; without it, it sends none.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    package = importlib.import_module("openvino")
    manager = importlib.import_module("openvino.frontend").FrontEndManager()
    reader = manager.load_by_framework("pytorch")
    rule = importlib.import_module("openvino.frontend.pytorch").ConversionExtension
    reader.add_extension(rule("foretell::attend", _convert_attend))
    reader.add_extension(rule("foretell::packed_linear", _convert_packed_linear))
    return Library(package, package.Core(), reader, manager)


def _convert_attend(context: Any) -> list[Any]:
    """Converts `attend_paged` to the runtime's paged attention; the features we do not use get
    empty inputs.
    """
    ops = importlib.import_module("openvino.opset13")
    paged_attention = importlib.import_module("openvino.op")._PagedAttentionExtension
    tensors = [context.get_input(index) for index in range(12)]
    constants = [context.get_values_from_const_input(index) for index in range(12, 16)]
    q, k, v, keys, values, past, begins, blocks, block_begins, longest, mask, mask_begins = tensors
    scale, window, key_width, value_width = constants

    def empty(dtype: Any, *shape: int) -> Any:
        return ops.constant(np.zeros(shape or (0,), dtype)).output(0)

    def number(value: float, dtype: Any) -> Any:
        return ops.constant(np.array(value, dtype)).output(0)

    alibi_slopes = empty(np.float32)
    score_windows = empty(np.int32)
    rotated_blocks = [empty(np.int32), empty(np.int32), empty(np.float32)]
    sparse_attention = [empty(np.float32), number(128, np.int32), number(8, np.int32)]
    sinks = empty(np.float32, 0, 0, 0, 0)
    eviction = [number(0, np.int32), empty(np.int32), empty(np.int32), empty(np.int32)]
    token_types = empty(np.int32)
    node = paged_attention(
        [
            *(q, k, v, keys, values),
            *(past, begins, blocks, block_begins),
            number(scale, np.float32),
            number(window, np.int32),
            alibi_slopes,
            longest,
            score_windows,
            *rotated_blocks,
            *sparse_attention,
            sinks,
            *eviction,
            token_types,
            mask,
            mask_begins,
        ]
    )
    info = node.get_rt_info()
    info["num_k_heads"] = info["num_v_heads"] = 1
    info["k_head_size"] = key_width
    info["v_head_size"] = value_width
    return [node.output(0)]


def _convert_packed_linear(context: Any) -> list[Any]:
    """Converts `packed_linear` to a product with whole numbers and their scales, the form that the
    runtime recognizes. Only of numbers without a sign does it round activations too.

    Minima are a second product, with the sums of the groups: its quick kernels have none.
    """
    ops = importlib.import_module("openvino.opset13")
    x = context.get_input(0)
    packed = recorded_layer(context.get_values_from_const_input(2)).packed
    float_input = ops.convert(x, "f32")
    if not packed.is_whole:
        shape = [packed.outputs, packed.inputs]
        weight_bytes = unpack_matrix(packed).contiguous().view(torch.uint8)
        matrix = ops.convert(_make_constant(weight_bytes, FLOAT_TYPES[packed.format], shape), "f32")
        product = ops.matmul(float_input, matrix, False, True)
        return [ops.convert_like(product, x).output(0)]
    whole_numbers, bits, scales, minima = centred_numbers(packed)
    if bits == 4:
        whole_numbers = whole_numbers[:, ::2] | whole_numbers[:, 1::2] << 4
    shape = [packed.outputs, packed.inputs]
    grouped_shape = [*scales.shape, packed.group]
    centred = ops.subtract(
        ops.convert(_make_constant(whole_numbers, f"u{bits}", grouped_shape), "f32"),
        ops.convert(ops.constant(np.full((1, 1, 1), 1 << bits - 1, np.uint8)), "f32"),
    )
    scaled = ops.multiply(centred, ops.constant(scales[..., None].numpy()))
    matrix = ops.reshape(scaled, ops.constant(np.array(shape)), False)
    product = ops.matmul(float_input, matrix, False, True)
    if minima is not None:
        group_sums = context.get_input(1)
        product = ops.add(
            product, ops.matmul(group_sums, ops.constant(minima.numpy()), False, True)
        )
    return [ops.convert_like(product, x).output(0)]


def _make_constant(value_bytes: torch.Tensor, type_name: str, shape: Sequence[int]) -> Any:
    """A constant of this kind and shape from its bytes, which it copies."""
    package = importlib.import_module("openvino")
    tensor = package.Tensor(getattr(package.Type, type_name), package.Shape(list(shape)))
    tensor.data.view(np.uint8).reshape(-1)[:] = value_bytes.numpy().reshape(-1)
    return package.op.Constant(tensor)


class TracedJob(Job):
    """Stands for all jobs while the forward is recorded: what belongs to jobs are inputs of the
    graph.
    """

    def __init__(
        self, cached_rows: Sequence[torch.Tensor], tables: Mapping[int, Sequence[torch.Tensor]]
    ):
        """`cached_rows`: keys and values of each layer in turn; `tables`: by number of key-value
        heads.
        """
        self.cached_rows = cached_rows
        self.tables = tables

    def attend(self, query: LayerQuery) -> torch.Tensor:
        """q (H, n, D), k (KV, n, D), v (KV, n, E) -> (n, H, E)."""
        if (query.softcap, query.sinks, query.bias) != (None, None, None):
            raise LookupError("its attention has a softcap, sinks or a bias")
        q, k, v = query.q, query.k, query.v
        rows = self.cached_rows[2 * query.layer : 2 * query.layer + 2]
        key_heads = len(k)  # a number, where `shape` has tensors in a recording
        key_width, value_width = q.shape[-1], v.shape[-1]
        gather, scatter, *tables = self.tables[key_heads]

        def sequences(x: torch.Tensor) -> torch.Tensor:
            """(H, n, D) -> (S, H / KV * D): a row for each node of each sequence."""
            width = len(x) // key_heads * x.shape[-1]
            return x.transpose(0, 1).reshape(-1, width)[gather]

        output = torch.ops.foretell.attend(
            sequences(q),
            sequences(k),
            sequences(v),
            *rows,
            *tables,
            float(query.scale),
            query.window or 0,
            key_width,
            value_width,
        )
        return output[scatter].reshape(k.shape[1], len(q), value_width)


class ForwardGraph(torch.nn.Module):
    """A forward as a function of tensors alone, which can be recorded.

    Inputs, for n nodes whose heads form S sequences (for each key-value head one of every job, and
    one of padding), m nodes in all sequences:

    - what enters the first layer (n, E), positions (n,), rows (k,), the nodes whose logits are
      wanted;
    - for each kind of rotation cosines and sines (n, D);
    - for each number of key-value heads KV the TABLES: which of the n KV pairs of a node and a head
      each node of a sequence is (m,), where each pair is found again (n KV,), the rows before each
      sequence (S,), where its nodes begin (S + 1,), the blocks of memory of all sequences (B,),
      where a sequence's begin (S + 1,), at least as many rows as the longest sequence has (), which
      nodes of a sequence see which (sum of squares,), where a sequence's begin (S + 1,);
    - of each layer the pool's keys and values (blocks, 1, BLOCK, D).

    Outputs: logits (k, V), and for each tap i hidden states (n, E), both in float32.
    """

    def __init__(self, loop: Loop, layout: Layout, taps: Sequence[int] = ()):
        super().__init__()
        self.loop = loop
        self.taps = tuple(taps)
        self.heads = sorted({heads for heads, _, _ in layout})
        self.rotation_kinds: list[tuple[str, ...]] = [()]
        if loop.kinds:
            self.rotation_kinds = [(kind,) for kind in dict.fromkeys(loop.kinds)]
        if any(isinstance(block, Fused) and _crashes(block) for block in loop.blocks):
            raise LookupError("the runtime crashes over layers that widen without a gate")
        if loop.positions is not None:
            raise LookupError("it learnt its positions, which the graph does not add")
        # A recording takes for constants only the weights of modules that it holds.
        self.parts = torch.nn.ModuleList([loop.norm, loop.head, *loop.layers])

    def forward(
        self,
        states: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        *graph_inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        inputs = iter(graph_inputs)
        rotations = {
            rotation_kind: (next(inputs)[None], next(inputs)[None])
            for rotation_kind in self.rotation_kinds
        }
        tables = {head_count: [next(inputs) for _ in range(TABLES)] for head_count in self.heads}
        context_token = STEP.set([TracedJob(list(inputs), tables)])
        hidden = {}
        try:
            hidden_states = states[None]
            for layer, block in enumerate(self.loop.blocks):
                hidden[layer] = hidden_states
                rotation_kind = (self.loop.kinds[layer],) if self.loop.kinds else ()
                hidden_states = block(hidden_states, rotations[rotation_kind], positions[None])
            hidden[len(self.loop.blocks)] = hidden_states
            logits = self.loop.logits(hidden_states[0][rows]).float()
        finally:
            STEP.reset(context_token)
        return (logits, *(hidden[tap][0].float() for tap in self.taps))


def _crashes(block: Fused) -> bool:
    """Whether the runtime's compiler ends the process over such a layer: StarCoder 2's and Arcee's,
    which widen without a gate, one half after the other (2026.4).
    """
    described = block.description
    has_gate = described.gate or described.gate_up or described.experts
    return not has_gate and not described.parallel


class Recording:
    """The graph of one model, all that a step decides left open, and its compiler.

    Raises LookupError with the reason where this model or machine cannot have it.
    """

    def __init__(self, loop: Loop, layout: Layout, dtype: torch.dtype, vocab_size: int):
        if dtype not in PRECISIONS:
            raise LookupError(f"it does not compute in {dtype}")
        try:
            self.library = load_library()
        except ImportError as error:
            raise LookupError(
                "the package openvino is missing: pip install 'foretell[cpu]'"
            ) from error
        self.loop = loop
        self.layout = layout
        self.dtype = dtype
        self.vocab = vocab_size
        self.package = self.library.package
        types = self.package.Type
        self.types = {
            torch.int64: types.i64,
            torch.int32: types.i32,
            torch.uint8: types.u8,
            torch.float32: types.f32,
            torch.bfloat16: types.bf16,
        }
        self.example = torch.empty(0, dtype=dtype)
        self.rotation_tables: list[np.ndarray] = []
        self.record(())

    def record(self, taps: Sequence[int]) -> None:
        """Records the forward, with these hidden states among its outputs.

        After a LookupError the graph has the taps that it had before.
        """
        previous = getattr(self, "forward_graph", None)
        self.forward_graph = ForwardGraph(self.loop, self.layout, taps).eval()
        self.graph: Any = None  # its weights leave the memory before the new ones come
        try:
            self.graph = self._convert_graph()
        except LookupError:
            if previous is not None:
                self.forward_graph = previous
                self.graph = self._convert_graph()
            raise

    def embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """States (n, E) that enter the first layer for these ids (n,)."""
        return self.loop.embedded(token_ids).detach().to(self.dtype)

    def rotations(self, position_count: int) -> list[np.ndarray]:
        """Cosines and sines (P, D) of each kind of rotation, of at least `position_count`
        positions.
        """
        if not self.rotation_tables or len(self.rotation_tables[0]) < position_count:
            tables = []
            for rotation_kind in self.forward_graph.rotation_kinds:
                for table_part in (
                    self.loop.table(self.example, position_count, *rotation_kind) or ()
                ):
                    tables.append(as_numpy(table_part[0]))
            self.rotation_tables = tables
        return self.rotation_tables

    def compile(self, shapes: Mapping[int, Sequence[int]], threads: int) -> Any:
        """Compiles a request of the graph for so many threads. `shapes`: of inputs by their places;
        all others stay open.
        """
        graph = self.graph.clone()
        fixed_shapes = {}
        for input_index, shape in shapes.items():
            fixed_shapes[graph.inputs[input_index]] = self.package.PartialShape(list(shape))
        graph.reshape(fixed_shapes)
        options = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": PRECISIONS[self.dtype],
            "NUM_STREAMS": 1,
            "KV_CACHE_PRECISION": PRECISIONS[self.dtype],
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": GROUP,
            "INFERENCE_NUM_THREADS": threads,
            "ENABLE_CPU_PINNING": False,
        }
        return self.library.compiler.compile_model(graph, "CPU", options).create_infer_request()

    def _example_inputs(self) -> list[torch.Tensor]:
        """Inputs for the recording, in order."""
        node_count = 3
        token_ids = torch.arange(node_count)
        rotations = []
        for rotation_kind in self.forward_graph.rotation_kinds:
            table = self.loop.table(self.example, node_count, *rotation_kind)
            if table is None or len(table) != 2:
                raise LookupError("its rotation is no table of cosines and sines")
            rotations += [table_part[0, :node_count] for table_part in table]
        tables = []
        for head_count in self.forward_graph.heads:
            group_tables = [torch.zeros(1, dtype=torch.int32)] * TABLES
            group_tables[GATHER] = group_tables[SCATTER] = torch.arange(node_count * head_count)
            group_tables[LONGEST] = torch.zeros((), dtype=torch.int32)
            group_tables[MASK] = torch.zeros(1, dtype=torch.uint8)
            tables += group_tables
        rows = []
        for head_count, *widths in self.layout:
            rows += [self.example.new_zeros(head_count, 1, BLOCK, width) for width in widths]
        return [self.embedded(token_ids), token_ids, token_ids, *rotations, *tables, *rows]

    def _convert_graph(self) -> Any:
        decoder = importlib.import_module("openvino.frontend.pytorch.ts_decoder")
        examples = self._example_inputs()
        try:
            with torch.no_grad(), warnings.catch_warnings():
                # Tracing warns of shapes that it takes for constants; here they are constants.
                warnings.simplefilter("ignore")
                traced = torch.jit.trace(self.forward_graph, tuple(examples), check_trace=False)
                # The source must live until it is converted.
                traced_source = decoder.TorchScriptPythonDecoder(
                    torch.jit.freeze(traced), skip_freeze=True
                )
                graph = self.library.reader.convert(self.library.reader.load(traced_source))
            if len(graph.inputs) != len(examples):
                raise LookupError("a part of its input does not reach the graph")
            for graph_input, example in zip(graph.inputs, examples, strict=True):
                shape = [-1, *example.shape[1:]] if example.ndim else []
                graph_input.get_node().set_partial_shape(self.package.PartialShape(shape))
                graph_input.get_node().set_element_type(self.types[example.dtype])
            graph.validate_nodes_and_infer_types()
        except LookupError:
            raise
        except Exception as error:  # recording and converting raise nearly anything
            raise LookupError(_conversion_error(error)) from error
        return graph


def _conversion_error(error: Exception) -> str:
    """The line of a conversion's error that says what it cannot convert, else its first line."""
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return next((line for line in lines if line.startswith("No conversion")), lines[0])
