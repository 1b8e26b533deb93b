"""A Decoder's fused layers as a graph in ONNX Runtime's format.

A layer becomes a dozen operations. Three stand for themselves in the recording and are replaced in
the export by what the runtime has beyond the standard: attention, which writes new rows into the
caches' own memory; a sum with its norm; and products with weights of 8 or 4 bits.
"""

from __future__ import annotations

import importlib
import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from foretell.cache.buffers import Layout
from foretell.errors import first_message_line
from foretell.models.decoder.fused import Fused
from foretell.models.decoder.loop import Loop
from foretell.models.decoder.packed import recorded_layer, weight_bytes
from foretell.native.packing import centred_numbers, unpack_matrix

LARGEST = (1 << 31) - (1 << 20)  # bytes of weights that the format can hold
OPSET = 18
DOMAIN = "com.microsoft"  # where the runtime's own operations are
ATTENTION_INPUTS = 6  # inputs that all layers share, see ForwardGraph


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
    mask: torch.Tensor,
    scale: float,
    window: int,
    heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stands for attention in a recording: qkv (1, n, (H + 2 KV) D) over keys, values (1, KV, C, D)
    -> (1, n, H D), and keys and values with the new rows.
    """
    width = keys.shape[-1]
    return qkv[..., : heads * width].clone(), keys.clone(), values.clone()


@torch.library.custom_op("foretell::add_norm", mutates_args=())
def add_norm(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for a sum x + y (..., E) and its norm in a recording: returns the norm, the sum."""
    return torch.zeros_like(x), torch.zeros_like(x)


@cache
def load_package() -> Any:
    """Imports the package onnxruntime. Raises ImportError."""
    importlib.import_module("onnx")  # which torch's exporter needs
    package = importlib.import_module("onnxruntime")
    package.disable_telemetry_events()  # builds for Windows would send some
    return package


class ForwardGraph(torch.nn.Module):
    """A forward of one job as a function of tensors alone, which can be recorded.

    Inputs: what enters the first layer (1, n, E); rows (k,), the nodes whose logits are wanted;
    then the ATTENTION_INPUTS: the place of the last new row in the cache (1,), the number of rows
    with the new ones (1,), cosines and sines of every position (P, D / 2) each, positions (1, n),
    which nodes see which rows (1, 1, n, rows) as 0 or -inf; and of each layer the keys and values
    (1, KV, C, D).

    Outputs: logits (k, V); the keys and values again, which are the same memory; and for each tap i
    hidden states (n, E).
    """

    def __init__(self, loop: Loop, taps: Sequence[int] = ()):
        super().__init__()
        self.loop = loop
        self.taps = tuple(taps)
        self.parts = torch.nn.ModuleList([loop.norm, loop.head, *loop.layers])

    def forward(
        self, states: torch.Tensor, rows: torch.Tensor, *graph_inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        shared_inputs = graph_inputs[:ATTENTION_INPUTS]
        cached_rows = list(graph_inputs[ATTENTION_INPUTS:])  # keys and values of each layer in turn
        blocks = [block for block in self.loop.blocks if isinstance(block, Fused)]
        first_norm = blocks[0].before_attention
        assert first_norm is not None, "the backend refuses layers of another build"
        x = first_norm(states)
        hidden = {}
        for layer, block in enumerate(blocks):
            hidden[layer] = states
            output, keys, values = torch.ops.foretell.attend_cached(
                self._norm_heads(block, block.qkv(x)),
                *cached_rows[2 * layer : 2 * layer + 2],
                *shared_inputs,
                block.scale,
                block.window or -1,
                block.queries,
            )
            cached_rows[2 * layer : 2 * layer + 2] = keys, values
            x, states = self._add_norm(states, block.out(output), block.before_mlp)
            x = block.gate_up(x)
            gate, up = x.split(x.shape[-1] // 2, -1)
            output = block.down(block.activate_gate(gate) * up)
            if block is blocks[-1]:
                states = states + output
            else:
                x, states = self._add_norm(states, output, blocks[layer + 1].before_attention)
        hidden[len(blocks)] = states
        logits = self.loop.logits(states[0][rows])
        return (logits, *cached_rows, *(hidden[tap][0] for tap in self.taps))

    @staticmethod
    def _norm_heads(block: Fused, qkv: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values (1, n, (H + 2 KV) D), normed where the layer does so."""
        if block.norms is None:
            return qkv
        heads = qkv.unflatten(-1, (-1, block.width))
        q, k, v = heads.split([block.queries, block.keys, block.keys], 2)
        normed_heads = [block.norm(norm, x) for norm, x in zip(block.norms, (q, k), strict=True)]
        return torch.cat([*normed_heads, v], 2).flatten(2)

    @staticmethod
    def _add_norm(h: torch.Tensor, x: torch.Tensor, norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
        outputs: tuple[torch.Tensor, torch.Tensor] = torch.ops.foretell.add_norm(
            h, x, norm.weight, norm.eps
        )
        return outputs


def row_names(layout: Layout) -> list[str]:
    """The graph's names for keys and values of each layer in turn."""
    return [f"{part}{i}" for i in range(len(layout)) for part in ("keys", "values")]


def output_name(row_name: str) -> str:
    """The name of keys or values among the outputs."""
    return f"{row_name}_out"


def tap_name(tap: int) -> str:
    """The name of hidden states among the outputs."""
    return f"hidden{tap}"


def export_graph(graph: ForwardGraph, layout: Layout, rotations: Sequence[torch.Tensor]) -> bytes:
    """Exports the graph in the runtime's format; the numbers of nodes and rows are left open.

    `rotations`: cosines and sines (P, D / 2) of a few positions. Raises LookupError.
    """
    if weight_bytes(graph.parts) > LARGEST:
        raise LookupError("its weights have more than 2 GB, which the format cannot hold")
    node_count, capacity = 3, 8
    token_ids = torch.arange(node_count)[None]
    examples = {
        "states": graph.loop.embedded(token_ids),
        "rows": torch.arange(node_count),
        "last": torch.tensor([node_count - 1], dtype=torch.int32),
        "total": torch.tensor([node_count], dtype=torch.int32),
        "cos": rotations[0],
        "sin": rotations[1],
        "positions": token_ids,
        "mask": torch.zeros(1, 1, node_count, node_count),
    }
    dynamic_axes = {
        "states": {1: "n"},
        "rows": {0: "k"},
        "last": {},
        "total": {},
        "cos": {0: "p"},
        "sin": {0: "p"},
        "positions": {1: "n"},
        "mask": {2: "n", 3: "all"},
        "logits": {0: "k"},
    }
    widths = [(heads, width) for heads, *head_widths in layout for width in head_widths]
    row_labels = row_names(layout)
    for input_name, (heads, width) in zip(row_labels, widths, strict=True):
        examples[input_name] = torch.zeros(1, heads, capacity, width)
        dynamic_axes[input_name] = dynamic_axes[output_name(input_name)] = {2: "capacity"}
    tap_labels = [tap_name(tap) for tap in graph.taps]
    for input_name in tap_labels:
        dynamic_axes[input_name] = {0: "n"}
    model_file: Any = io.BytesIO()
    try:
        with torch.no_grad(), warnings.catch_warnings(), _export_rules():
            # It warns of shapes that it takes for constants, which they are, and of a newer
            # exporter.
            warnings.simplefilter("ignore")
            torch.onnx.export(
                graph,
                tuple(examples.values()),
                model_file,
                dynamo=False,
                opset_version=OPSET,
                input_names=list(examples),
                output_names=["logits", *map(output_name, row_labels), *tap_labels],
                dynamic_axes=dynamic_axes,
                custom_opsets={DOMAIN: 1},
            )
    except Exception as error:  # recording and exporting raise nearly anything
        raise LookupError(first_message_line(error)) from error
    return model_file.getvalue()  # type: ignore[no-any-return]


@contextmanager
def _export_rules() -> Iterator[None]:
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
        mask: Any,
        scale: float,
        window: int,
        heads: int,
    ) -> Any:
        absent = helper._optional_input_placeholder_tensor(g)
        width = helper._get_tensor_dim_size(keys, 3)
        output, *rows = g.op(
            f"{DOMAIN}::GroupQueryAttention",
            qkv,
            absent,
            absent,
            *(keys, values, last, total, cos, sin, positions, mask),
            outputs=3,
            num_heads_i=heads,
            kv_num_heads_i=helper._get_tensor_dim_size(keys, 1),
            scale_f=scale,
            local_window_size_i=window,
            do_rotary_i=1,
        )
        output.setType(keys.type().with_sizes([1, None, heads * width]))
        for cache_rows in rows:
            cache_rows.setType(keys.type())
        return output, *rows

    @helper.parse_args("v", "v", "i")
    def linear(g: Any, x: Any, sums: Any, layer: int) -> Any:
        packed = recorded_layer(layer).packed

        def constant(value: torch.Tensor) -> Any:
            return g.op("Constant", value_t=value.contiguous())

        shape = [*helper._get_tensor_sizes(x)[:-1], packed.outputs]
        if not packed.is_whole:
            y = g.op("MatMul", x, constant(unpack_matrix(packed).float().t()))
            y.setType(x.type().with_sizes(shape))
            return y
        whole_numbers, bits, scales, minima = centred_numbers(packed)
        if bits == 4:
            whole_numbers = whole_numbers[:, ::2] | whole_numbers[:, 1::2] << 4
        whole_numbers = whole_numbers.view(*scales.shape, -1)
        y = g.op(
            f"{DOMAIN}::MatMulNBits",
            x,
            constant(whole_numbers),
            constant(scales),
            K_i=packed.inputs,
            N_i=packed.outputs,
            bits_i=bits,
            block_size_i=packed.group,
            accuracy_level_i=4,
        )
        y.setType(x.type().with_sizes(shape))
        if minima is not None:
            # With zero points that are no whole numbers it would leave its products of whole
            # numbers, so minima are a second product, with the sums of the groups.
            y = g.op("Add", y, g.op("MatMul", sums, constant(minima.t())))
            y.setType(x.type().with_sizes(shape))
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
        name = f"{DOMAIN}::SkipSimplifiedLayerNormalization"
        normed, _, _, total = g.op(name, x, y, weight, epsilon_f=eps, outputs=4)
        for value in (normed, total):
            value.setType(x.type())
        return normed, total

    rules = {
        "foretell::add_norm": add_and_norm,
        "foretell::attend_cached": attention,
        "foretell::packed_linear": linear,
        "aten::rms_norm": norm,
    }
    for rule_name, rule in rules.items():
        torch.onnx.register_custom_op_symbolic(rule_name, rule, OPSET)
    try:
        yield
    finally:
        for rule_name in rules:
            torch.onnx.unregister_custom_op_symbolic(rule_name, OPSET)
