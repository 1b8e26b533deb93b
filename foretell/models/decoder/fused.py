"""The layers of a family with fewer, larger operations, as its description says: the same weights,
the same results up to rounding.

q, k, v and gate, up become one matrix product each, rotation is applied to queries and keys
together, and nothing of the modules' bookkeeping runs. A layer qualifies if it has the parts that
its description names and no others, by the way its heads turn and by the fields of its
configuration (fields.py); `Decoder` then compares a probe's logits with the stock modules' and
keeps the stock ones where they differ. The fused matrices are the storage: the modules' own weights
become views of them, so memory stays what it was. Products take a few sizes of rows only
(ops/memory.py): the loop pads its row to one of them, and only attention leaves the padding out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from foretell.core.model import forest_attention
from foretell.models.decoder.fields import unread_field
from foretell.models.decoder.head_merging import project_heads
from foretell.models.decoder.loop import Block, Loop
from foretell.models.decoder.packed import PackedLinear
from foretell.models.families.description import (
    ConfigFields,
    LayerDescription,
    describe_llama,
    find_family,
    find_skeleton,
)
from foretell.models.families.matrices import as_linear, is_turned
from foretell.ops.memory import release_pages, trim_memory

Product = Callable[[torch.Tensor], torch.Tensor]
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
KEY_BASIS = "self_attn.key_basis"  # see projected.py
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "clamped_silu": F.silu,  # of experts, which compute it themselves
}


def describe_layers(
    config: Any, layers: Sequence[nn.Module]
) -> tuple[list[LayerDescription], str | None]:
    """Describes the layers of a model, and says why they cannot be computed as described; None:
    they can.

    A family that no file of models/families/ names is taken for one that is built as llama is, if
    it has these parts.
    """
    fields = ConfigFields(config)
    describe = find_family(str(config.model_type)) or describe_llama
    try:
        descriptions = [
            _with_head_norms(describe(fields, index), layer) for index, layer in enumerate(layers)
        ]
    except (LookupError, TypeError, AttributeError) as error:
        return [], str(error)
    if not descriptions or not all(map(fits_layer, layers, descriptions)):
        return [], "its layers are of another build than the llama family's"
    return descriptions, unread_field(config, layers, fields.read)


def _with_head_norms(description: LayerDescription, layer: nn.Module) -> LayerDescription:
    """The description with norms of heads where a layer that is built as llama's has them."""
    is_named = description.query_norm or description != replace(
        LayerDescription(), activation=description.activation
    )
    if is_named or not hasattr(getattr(layer, "self_attn", None), "q_norm"):
        return description
    return replace(description, query_norm=HEAD_NORMS[0], key_norm=HEAD_NORMS[1])


def find_descriptions(hf_model: Any) -> list[LayerDescription]:
    """Describes the layers of a transformers model; an empty list where they cannot be computed as
    described.
    """
    config = hf_model.config.get_text_config()
    try:
        layers = find_skeleton(config).layers_of(hf_model.get_decoder())
    except LookupError:
        return []
    descriptions, reason = describe_layers(config, layers)
    return [] if reason else descriptions


def fused_blocks(
    loop: Loop, block_class: type[Fused] | None = None, owns_weights: bool = False
) -> list[Block] | None:
    """Makes a fused block for every layer, or returns None where a layer has another build, or the
    configuration a field that they do not honour: `loop.refused` says which.

    `block_class`: another way to compute it. `owns_weights`: nobody else has a tensor of this
    model, so what was joined may leave the memory.
    """
    descriptions, loop.refused = describe_layers(loop.config, loop.layers)
    layouts: list[str | None] = []
    if loop.refused is None:
        layouts = [_rotation_layout(loop, i, described) for i, described in enumerate(descriptions)]
        if None in layouts:
            loop.refused = "its heads turn in another order"
    if loop.refused is not None:
        return None
    layer_blocks: list[Block] = []
    for index, (layer, description) in enumerate(zip(loop.layers, descriptions, strict=True)):
        old_tensors = [parameter.data for parameter in layer.parameters()] if owns_weights else []
        block = (block_class or Fused)(layer, index, loop.windows[index], description)
        block.table_layout = layouts[index] or ""
        layer_blocks.append(block)
        used_addresses = {parameter.data_ptr() for parameter in layer.parameters()}
        release_pages(tensor for tensor in old_tensors if tensor.data_ptr() not in used_addresses)
        if owns_weights:
            trim_memory()
    return layer_blocks


def fits_layer(layer: nn.Module, description: LayerDescription) -> bool:
    """Whether a layer has the parts that its description names, and no others."""
    modules = dict(layer.named_modules())
    parameters = dict(layer.named_parameters())
    if any(_is_hooked(module) for module in modules.values()):
        return False
    matrices, norms = description.matrices, description.norms
    if any(name not in modules for name in (*matrices, *norms)):
        return False
    expected = {f"{name}.{part}" for name in (*matrices, *norms) for part in ("weight", "bias")}
    experts = description.experts
    others = {
        name
        for name in parameters.keys() - expected - {KEY_BASIS, description.sinks}
        if experts is None or not name.startswith(f"{experts.block}.")
    }
    if others:
        return False
    if any(f"{name}.weight" not in parameters for name in norms):
        return False
    kinds = {type(modules[name]) for name in matrices}
    if kinds not in ({nn.Linear}, {PackedLinear}) and not all(
        is_turned(modules[name]) for name in matrices
    ):
        return False
    joined = [
        (description.query, description.key, description.value) if not description.qkv else (),
        (description.gate, description.up) if description.gate else (),
    ]
    return all(len({modules[name].bias is None for name in group}) <= 1 for group in joined)


def _rotation_layout(loop: Loop, index: int, description: LayerDescription) -> str | None:
    """How a family's rotation tables are laid out, see `table_layout`; "": its heads do not turn.

    None: they turn otherwise than the description says, which is shown on random rows: with weights
    near 0 a probe of the whole model could miss it.
    """
    rotation = description.rotation
    if not rotation:
        return ""
    attention: Any = loop.layers[index].get_submodule(description.attention)
    family_module = sys.modules[type(attention).__module__]
    rotate_heads = getattr(attention, "rotate", None) or getattr(
        family_module, "apply_rotary_pos_emb", None
    )
    if rotate_heads is None:
        return None
    generator = torch.Generator().manual_seed(0)
    device = next(loop.layers[index].parameters()).device
    kind = () if loop.kinds is None else (loop.kinds[index],)
    positions = torch.tensor([[1, 5, 11]], device=device)
    tables = loop.rotation(torch.empty(0, device=device), positions, *kind)
    if not isinstance(tables, tuple) or len(tables) != 2:
        return None
    cos, sin = (table.float() for table in tables)
    width = cos.shape[-1] * (1 + description.angles_once)
    q, k = torch.randn(2, 1, 2, 3, width, generator=generator).to(device)
    try:
        theirs = rotate_heads(q, k, cos, sin)
        layout = table_layout(cos, description)
    except Exception:  # of another signature
        return None
    cos, sin = (spread_table(table, layout, rotation) for table in (cos, sin))
    sin = sin * partner_signs(sin, rotation)
    ours = [Fused.rotate(x, swap_pairs(x, rotation), cos, sin) for x in (q, k)]
    agrees = all(torch.allclose(x, y, atol=1e-5) for x, y in zip(ours, theirs, strict=True))
    return layout if agrees else None


def table_layout(table: torch.Tensor, description: LayerDescription) -> str:
    """Where a family's table (..., W) has each number a second time: in its other "halves", in a
    "neighbour", or nowhere: "once". Raises LookupError for another one.
    """
    if description.angles_once:
        return "once"
    first_half, second_half = table.chunk(2, -1)
    if torch.equal(first_half, second_half):
        return "halves"
    if torch.equal(table[..., 0::2], table[..., 1::2]):
        return "neighbour"
    raise LookupError("its rotation differs between the halves of a head")


def half_table(table: torch.Tensor, layout: str) -> torch.Tensor:
    """The table (..., W / 2) of what a family's table has twice, see `table_layout`."""
    if layout == "once":
        return table
    return table[..., 0::2] if layout == "neighbour" else table.chunk(2, -1)[0]


def spread_table(table: torch.Tensor, layout: str, rotation: str) -> torch.Tensor:
    """A family's table as numbers of heads are multiplied by it (..., W)."""
    if layout == {"halves": "halves", "interleaved": "neighbour"}[rotation]:
        return table
    half = half_table(table, layout)
    return torch.cat([half, half], -1) if rotation == "halves" else half.repeat_interleave(2, -1)


def partner_signs(table: torch.Tensor, rotation: str) -> torch.Tensor:
    """The signs (W,) of sines: the first of two partners takes the other one away."""
    signs = table.new_ones(table.shape[-1])
    if rotation == "halves":
        signs[: len(signs) // 2] = -1
    else:
        signs[0::2] = -1
    return signs


def swap_pairs(x: torch.Tensor, rotation: str) -> torch.Tensor:
    """Heads (..., W) in which each number stands where its partner did."""
    if rotation == "halves":
        return x.roll(x.shape[-1] // 2, -1)
    return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


@torch.inference_mode(False)  # else their owner could not train them any more
def _concat_weights(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Joins several tensors into one; they become views of it."""
    joint = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(
        parameters, joint.split([len(parameter) for parameter in parameters]), strict=True
    ):
        parameter.data = part
    return joint


def _is_hooked(module: nn.Module) -> bool:
    """Whether somebody else acts when it is called: here it would not be."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(hooks) or "forward" in module.__dict__


def _join_linears(linears: Sequence[nn.Module]) -> Product:
    """Makes one product for several layers with the same input, side by side; their own matrices
    become views of the joint one.
    """
    stock_layers = [linear for linear in linears if isinstance(linear, nn.Linear)]
    if not stock_layers:
        if len(linears) == 1:
            return linears[0]
        packed_layers = [linear for linear in linears if isinstance(linear, PackedLinear)]
        joint = PackedLinear.join(packed_layers) if packed_layers else None
        return joint or (lambda x: torch.cat([linear(x) for linear in linears], -1))
    if len(stock_layers) == 1:
        return partial(F.linear, weight=stock_layers[0].weight, bias=stock_layers[0].bias)
    weight = _concat_weights([linear.weight for linear in stock_layers])
    biases = [linear.bias for linear in stock_layers if linear.bias is not None]
    bias = _concat_weights(biases) if biases else None
    return partial(F.linear, weight=weight, bias=bias)


def _matrix_sizes(layer: nn.Module, name: str) -> tuple[int, int]:
    """The outputs and inputs of a matrix of a layer."""
    matrix: Any = layer.get_submodule(name)
    linear = matrix if isinstance(matrix, PackedLinear) else as_linear(matrix)
    return linear.out_features, linear.in_features


class Norm:
    """A norm of rows (..., N) by a module's weights, as a description says."""

    def __init__(self, module: Any, description: LayerDescription):
        self.module = module
        self.offset = description.norm_offset
        self.is_centered = description.norm == "layer"
        self.eps = float(getattr(module, "variance_epsilon", getattr(module, "eps", 0.0)))

    @property
    def weight(self) -> torch.Tensor:
        """Its weight (N,), in float32 where something is added to it."""
        weight: torch.Tensor = self.module.weight
        return weight.float() + self.offset if self.offset else weight

    @property
    def bias(self) -> torch.Tensor | None:
        bias: torch.Tensor | None = getattr(self.module, "bias", None)
        return bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        rows = x.to(weight.dtype) if self.offset else x
        if not self.is_centered:
            return F.rms_norm(rows, (x.shape[-1],), weight, self.eps).to(x.dtype)
        wide_bias = bias if bias is None else bias.to(weight.dtype)
        return F.layer_norm(rows, (x.shape[-1],), weight, wide_bias, self.eps).to(x.dtype)


class Fused:
    """A layer as few, large operations: (hidden (1, P, E), (cos, sin) (1, T, W), positions (1, T))
    -> hidden (1, P, E).

    Rows from T on are padding. `index`: of the layer; `window`: positions that a node sees back,
    itself included; None: all.
    """

    takes_padding = True

    def __init__(
        self,
        layer: nn.Module,
        layer_index: int,
        window: int | None,
        description: LayerDescription,
    ):
        attention: Any = layer.get_submodule(description.attention)
        self.description = description
        self.table_layout = "halves"  # of the family's rotation, see `table_layout`
        self.signs: torch.Tensor | None = None
        self.index = layer_index
        self.window = window
        self.qkv = self._join(
            layer, description.qkv, description.query, description.key, description.value
        )
        self.out = self._join(layer, description.out)
        self.block: Any = None  # computes the second half where the layer has experts
        if description.experts is not None:
            self.block = layer.get_submodule(description.experts.block)
        else:
            parts = (description.gate, description.up)
            self.gate_up = self._join(layer, description.gate_up, *parts)
            self.down = self._join(layer, description.down)
        self.act = ACTIVATIONS[description.activation]
        self.queries, self.keys, self.width = self._head_counts(layer, attention, description)
        scale = description.scale
        self.scale = float(self.width**-0.5 if scale is None else scale)
        self.score_cap = float(description.score_cap) or None
        self.sinks = layer.get_parameter(description.sinks) if description.sinks else None
        # Other products are not kept by their sizes, and padding costs them as much as real rows.
        weight = getattr(layer.get_submodule(description.out), "weight", None)
        is_narrow = weight is not None and weight.dtype in (torch.bfloat16, torch.float16)
        self.takes_padding = self.takes_padding and is_narrow
        self.basis: torch.Tensor | None = getattr(attention, "key_basis", None)  # projected.py
        names = ("before_attention", "after_attention", "before_mlp", "after_mlp")
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = (
            self._make_norm(layer, getattr(description, name)) for name in names
        )
        q_norm, k_norm = (
            self._make_norm(layer, name) for name in (description.query_norm, description.key_norm)
        )
        self.norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)

    def _make_norm(self, layer: nn.Module, name: str) -> Norm | None:
        return Norm(layer.get_submodule(name), self.description) if name else None

    @property
    def products(self) -> list[Product]:
        """The products of its second half, in the order in which they are computed."""
        return [] if self.block is not None else [self.gate_up, self.down]

    @staticmethod
    def _join(layer: nn.Module, joint: str, *parts: str) -> Product:
        """The product of one matrix that holds several, or of several side by side."""
        names = [joint] if joint else [name for name in parts if name]
        return _join_linears([layer.get_submodule(name) for name in names])

    @staticmethod
    def _head_counts(
        layer: nn.Module, attention: Any, description: LayerDescription
    ) -> tuple[int, int, int]:
        """How many query heads and key heads a layer has, and how wide each is."""
        width = int(getattr(attention, "head_dim", None) or attention.head_size)
        query_count = _matrix_sizes(layer, description.out)[1] // width
        if description.qkv:
            row_count = _matrix_sizes(layer, description.qkv)[0] // width
            return query_count, (row_count - query_count) // 2, width
        return query_count, _matrix_sizes(layer, description.key)[0] // width, width

    @staticmethod
    def norm(norm: Norm, x: torch.Tensor) -> torch.Tensor:
        return norm(x)

    @staticmethod
    def rotate(
        x: torch.Tensor, turned_rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        return torch.addcmul(x * cos, turned_rows, sin)

    def activate_gate(self, gate: torch.Tensor) -> torch.Tensor:
        return self.act(gate)

    def _norm_rows(self, norm: Norm | None, x: torch.Tensor) -> torch.Tensor:
        return x if norm is None else self.norm(norm, x)

    def add(self, states: torch.Tensor, output: torch.Tensor, after: Norm | None) -> torch.Tensor:
        """Adds what a half gave to the states that entered it."""
        output = self._norm_rows(after, output)
        residual = self.description.residual
        return states + (output if residual == 1 else output * residual)

    def __call__(self, hidden: torch.Tensor, rotary: Any, positions: torch.Tensor) -> torch.Tensor:
        if not self.description.parallel:
            return self.mlp(self.attention(hidden, rotary, positions))
        states = hidden[0]
        both = self.attended(states, rotary, positions) + self._transform(states)
        return self.add(states, both, None)[None]

    def attention(self, hidden: torch.Tensor, rotary: Any, positions: torch.Tensor) -> torch.Tensor:
        """The layer's first half, the residual stream included."""
        states = hidden[0]
        output = self.attended(states, rotary, positions)
        return self.add(states, output, self.after_attention)[None]

    def attended(self, states: torch.Tensor, rotary: Any, positions: torch.Tensor) -> torch.Tensor:
        """What attention makes (P, E) of `states` (P, E)."""
        node_count = positions.shape[1]
        padding = len(states) - node_count
        rows = self.qkv(self._norm_rows(self.before_attention, states))[:node_count]
        qk, v = self._split_heads(rows, node_count)
        if self.norms is not None:
            both = qk[:, : self.queries], qk[:, self.queries :]
            normed = [self._norm_heads(norm, x) for norm, x in zip(self.norms, both, strict=True)]
            qk = torch.cat(normed, 1)
        if self.description.rotation:
            qk = self._turn(qk, rotary)
        q, k = qk[:, : self.queries].transpose(0, 1), qk[:, self.queries :].transpose(0, 1)
        if self.basis is not None:
            q, k = project_heads(q, k, self.basis)
        output = forest_attention(
            self.index, q, k, v.transpose(0, 1), self.scale, self.window, self.score_cap, self.sinks
        ).reshape(node_count, -1)
        return self.out(F.pad(output, (0, 0, 0, padding)) if padding else output)

    def _split_heads(
        self, rows: torch.Tensor, node_count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys (n, H + KV, D), and values (n, KV, D), in a product's rows."""
        if self.description.qkv_by_head:
            q, k, v = rows.view(node_count, -1, 3, self.width).unbind(2)
            return torch.cat([q, k], 1), v
        heads = rows.view(node_count, -1, self.width)
        value_start = self.queries + self.keys
        return heads[:, :value_start], heads[:, value_start:]

    def _norm_heads(self, norm: Norm, x: torch.Tensor) -> torch.Tensor:
        """Heads (n, H, D) normed, each by itself or all at once."""
        if not self.description.whole_heads:
            return self.norm(norm, x)
        return self.norm(norm, x.flatten(1)).view_as(x)

    def _turn(self, heads: torch.Tensor, rotary: Any) -> torch.Tensor:
        """Heads (n, H, D) turned by the angles (1, n, W) of their positions, W at most D."""
        kind = self.description.rotation
        tables = (rotary[0][0, :, None], rotary[1][0, :, None])
        cos, sin = (spread_table(table, self.table_layout, kind) for table in tables)
        if self.signs is None or self.signs.dtype != sin.dtype:
            self.signs = partner_signs(sin, kind)
        sin = sin * self.signs
        turned_width = cos.shape[-1]
        turned = heads[..., :turned_width]
        turned = self.rotate(turned, swap_pairs(turned, kind), cos, sin).to(heads.dtype)
        if turned_width == self.width:
            return turned
        return torch.cat([turned, heads[..., turned_width:]], -1)

    def mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's second half."""
        states = hidden[0]
        return self.add(states, self._transform(states), self.after_mlp)[None]

    def _transform(self, states: torch.Tensor) -> torch.Tensor:
        """What the second half makes (P, E) of `states` (P, E)."""
        if self.block is not None:
            output = self.block(self._norm_rows(self.before_mlp, states)[None])
            first_output: torch.Tensor = output[0]
            return first_output.view_as(states)
        rows = self.gate_up(self._norm_rows(self.before_mlp, states))
        if not (self.description.gate or self.description.gate_up):
            return self.down(self.activate_gate(rows))
        gate, up = rows.chunk(2, -1)
        return self.down(self.activate_gate(gate) * up)
