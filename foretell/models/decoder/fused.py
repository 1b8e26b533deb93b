"""The layers of the llama family with fewer, larger operations: the same weights, the same results
up to rounding.

q, k, v and gate, up become one matrix product each, rotation is applied to queries and keys
together, and nothing of the modules' bookkeeping runs. A layer qualifies by its parts, by the way
its heads turn and by the fields of its configuration (fields.py); `Decoder` then compares a probe's
logits with the stock modules' and keeps the stock ones where they differ. The fused matrices are
the storage: the modules' own weights become views of them, so memory stays what it was. Products
take a few sizes of rows only (ops/memory.py): the loop pads its row to one of them, and only
attention leaves the padding out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
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
from foretell.ops.memory import release_pages, trim_memory

Product = Callable[[torch.Tensor], torch.Tensor]
NORMS = ("input_layernorm", "post_attention_layernorm")
INPUTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATES = ("mlp.gate_proj", "mlp.up_proj")
LINEARS = (*INPUTS, "self_attn.o_proj", *GATES, "mlp.down_proj")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
PARTS = {f"{name}.weight" for name in (*LINEARS, *NORMS, *HEAD_NORMS)}
PARTS |= {f"{name}.bias" for name in LINEARS} | {"self_attn.key_basis"}


def fused_blocks(
    loop: Loop, block_class: type[Fused] | None = None, owns_weights: bool = False
) -> list[Block] | None:
    """Makes a fused block for every layer, or returns None where a layer has another build, or the
    configuration a field that they do not honour: `loop.refused` says which.

    `block_class`: another way to compute it. `owns_weights`: nobody else has a tensor of this
    model, so what was joined may leave the memory.
    """
    if not all(fits_layer(layer) for layer in loop.layers):
        return None
    loop.refused = unread_field(loop.config, loop.layers)
    if loop.refused is None and not all(
        _turns_halves(layer.get_submodule("self_attn")) for layer in loop.layers
    ):
        loop.refused = "its heads turn in another order"
    if loop.refused is not None:
        return None
    layer_blocks: list[Block] = []
    for index, (layer, window) in enumerate(zip(loop.layers, loop.windows, strict=True)):
        old_tensors = [parameter.data for parameter in layer.parameters()] if owns_weights else []
        layer_blocks.append((block_class or Fused)(layer, index, window))
        used_addresses = {parameter.data_ptr() for parameter in layer.parameters()}
        release_pages(tensor for tensor in old_tensors if tensor.data_ptr() not in used_addresses)
        if owns_weights:
            trim_memory()
    return layer_blocks


def fits_layer(layer: nn.Module) -> bool:
    """Whether a layer has the parts that are joined here, and no others."""
    modules = dict(layer.named_modules())
    parameters = dict(layer.named_parameters())
    expected_modules = {*LINEARS, *NORMS, "mlp.act_fn"}
    if any(_is_hooked(module) for module in modules.values()):
        return False
    if not expected_modules <= modules.keys() or any(
        f"{part_name}.weight" not in parameters for part_name in NORMS
    ):
        return False
    if {part_name for part_name, _ in layer.named_children()} != {"self_attn", "mlp", *NORMS}:
        return False
    if not parameters.keys() <= PARTS:
        return False
    if {type(modules[part_name]) for part_name in LINEARS} not in ({nn.Linear}, {PackedLinear}):
        return False
    if any(
        len({modules[part_name].bias is None for part_name in linear_group}) > 1
        for linear_group in (INPUTS, GATES)
    ):
        return False
    if not all(hasattr(modules[part_name], "variance_epsilon") for part_name in NORMS):
        return False
    return len({f"{part_name}.weight" in parameters for part_name in HEAD_NORMS}) == 1


def _turns_halves(attention: Any) -> bool:
    """Whether a family turns the first half of a head against the second, shown on random rows:
    with weights near 0 a probe of the whole model could miss it.
    """
    family_module = sys.modules[type(attention).__module__]
    rotate_heads = getattr(attention, "rotate", None) or getattr(
        family_module, "apply_rotary_pos_emb", None
    )
    if rotate_heads is None:
        return False
    generator = torch.Generator().manual_seed(0)
    head_width = int(attention.head_dim)
    q, k = torch.randn(2, 1, 2, 3, head_width, generator=generator)
    cos, sin = torch.randn(2, 1, 3, head_width // 2, generator=generator).repeat(1, 1, 1, 2)
    signs = torch.ones(head_width)
    signs[: head_width // 2] = -1
    try:
        their_rotation = rotate_heads(q, k, cos, sin)
    except Exception:  # of another signature
        return False
    our_rotation = [Fused.rotate(x, x.roll(head_width // 2, -1), cos, sin * signs) for x in (q, k)]
    return all(
        torch.allclose(x, y, atol=1e-5) for x, y in zip(our_rotation, their_rotation, strict=True)
    )


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


def _join_linears(linears: Sequence[nn.Linear | PackedLinear]) -> Product:
    """Makes one product for several layers with the same input, side by side; their own matrices
    become views of the joint one.
    """
    packed_layers = [linear for linear in linears if isinstance(linear, PackedLinear)]
    if packed_layers:
        if len(packed_layers) == 1:
            return packed_layers[0]
        return PackedLinear.join(packed_layers) or (
            lambda x: torch.cat([linear(x) for linear in packed_layers], -1)
        )
    stock_layers = [linear for linear in linears if isinstance(linear, nn.Linear)]
    if len(stock_layers) == 1:
        return partial(F.linear, weight=stock_layers[0].weight, bias=stock_layers[0].bias)
    weight = _concat_weights([linear.weight for linear in stock_layers])
    biases = [linear.bias for linear in stock_layers if linear.bias is not None]
    bias = _concat_weights(biases) if biases else None
    return partial(F.linear, weight=weight, bias=bias)


class Fused:
    """A layer as few, large operations: (hidden (1, P, E), (cos, sin) (1, T, D), positions (1, T))
    -> hidden (1, P, E).

    Rows from T on are padding.
    """

    takes_padding = True

    def __init__(self, layer: nn.Module, layer_index: int, window: int | None):
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        self.index = layer_index
        self.window = window
        self.width = int(attention.head_dim)
        self.scale = float(attention.scaling)
        self.qkv = _join_linears([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = _join_linears([attention.o_proj])
        self.gate_up = _join_linears([mlp.gate_proj, mlp.up_proj])
        self.down = _join_linears([mlp.down_proj])
        self.act = mlp.act_fn
        # Other products are not kept by their sizes, and padding costs them as much as real rows.
        weight = getattr(attention.q_proj, "weight", None)
        is_narrow = weight is not None and weight.dtype in (torch.bfloat16, torch.float16)
        self.takes_padding = self.takes_padding and is_narrow
        self.queries = attention.q_proj.out_features // self.width
        self.keys = attention.k_proj.out_features // self.width
        self.basis: torch.Tensor | None = getattr(attention, "key_basis", None)  # projected.py
        self.before: Any = layer.input_layernorm
        self.after: Any = layer.post_attention_layernorm
        half = layer.get_parameter("input_layernorm.weight").new_ones(self.width // 2)
        self.sign = torch.cat([-half, half])
        self.norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None

    @staticmethod
    def norm(module: Any, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)

    @staticmethod
    def rotate(
        x: torch.Tensor, turned_rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        return torch.addcmul(x * cos, turned_rows, sin)

    def activate_gate(self, gate: torch.Tensor) -> torch.Tensor:
        activated: torch.Tensor = self.act(gate)
        return activated

    def __call__(self, hidden: torch.Tensor, rotary: Any, positions: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.attention(hidden, rotary, positions))

    def attention(self, hidden: torch.Tensor, rotary: Any, positions: torch.Tensor) -> torch.Tensor:
        """The layer's first half, the residual stream included."""
        states = hidden[0]
        return (states + self.attended(states, rotary, positions))[None]

    def attended(self, states: torch.Tensor, rotary: Any, positions: torch.Tensor) -> torch.Tensor:
        """The states (P, E) that attention adds to `states` (P, E)."""
        node_count = positions.shape[1]
        padding = len(states) - node_count
        x = self.qkv(self.norm(self.before, states))[:node_count].view(node_count, -1, self.width)
        query_heads = self.queries
        qk = x[:, : query_heads + self.keys]
        v = x[:, query_heads + self.keys :].transpose(0, 1)
        if self.norms is not None:
            q_norm, k_norm = self.norms
            qk = torch.cat(
                [self.norm(q_norm, qk[:, :query_heads]), self.norm(k_norm, qk[:, query_heads:])], 1
            )
        cos = rotary[0][0, :, None]
        sin = rotary[1][0, :, None]
        qk = self.rotate(qk, qk.roll(self.width // 2, -1), cos, sin * self.sign)
        q = qk[:, :query_heads].transpose(0, 1)
        k = qk[:, query_heads:].transpose(0, 1)
        if self.basis is not None:
            q, k = project_heads(q, k, self.basis)
        output = forest_attention(self.index, q, k, v, self.scale, self.window).reshape(
            node_count, -1
        )
        return self.out(F.pad(output, (0, 0, 0, padding)) if padding else output)

    def mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's second half."""
        states = hidden[0]
        gate, up = self.gate_up(self.norm(self.after, states)).chunk(2, -1)
        return (states + self.down(self.activate_gate(gate) * up))[None]
