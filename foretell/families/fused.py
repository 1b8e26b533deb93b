"""The layers of the llama family with fewer, larger operations: the same weights, the same results
up to rounding.

q, k, v and gate, up become one matrix product each, rotation is applied to queries and keys
together, and nothing of the modules' bookkeeping runs. A layer qualifies by its parts; `Decoder`
then compares a probe's logits with the stock modules' and keeps the stock ones where they differ
(residual multipliers, layers without rotation, and so on). The fused matrices are the storage: the
modules' own weights become views of them, so memory stays what it was. Products take a few sizes of
rows only (ops/memory.py): the loop fills its row up, and attention alone leaves the filling out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from foretell.core.model import forest_attention
from foretell.families.decoder import Block, Loop
from foretell.families.int8 import Linear8
from foretell.ops.memory import release

Product = Callable[[torch.Tensor], torch.Tensor]


def blocks(loop: Loop, kind: type[Fused] | None = None, ours: bool = False) -> list[Block] | None:
    """A fused block for every layer, or None where a layer has another build. `kind`: another way
    to compute it.

    `ours`: nobody else has a tensor of this model, so that what was joined may leave the memory.
    """
    if not all(fits(layer) for layer in loop.layers):
        return None
    made: list[Block] = []
    for i, (layer, window) in enumerate(zip(loop.layers, loop.windows, strict=True)):
        before = [p.data for p in layer.parameters()] if ours else []
        made.append((kind or Fused)(layer, i, window))
        kept = {p.data_ptr() for p in layer.parameters()}
        release(t for t in before if t.data_ptr() not in kept)
    return made


def fits(layer: nn.Module) -> bool:
    """Whether a layer has the parts that are joined here."""
    names = {name for name, _ in layer.named_modules()} | {
        name for name, _ in layer.named_parameters()
    }
    linears = [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ]
    wanted = {"input_layernorm.weight", "post_attention_layernorm.weight", "mlp.act_fn", *linears}
    kinds = {type(layer.get_submodule(name)) for name in linears if name in names}
    children = {name for name, _ in layer.named_children()}
    return (
        wanted <= names
        and children == {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
        and len(kinds) == 1
        and kinds <= {nn.Linear, Linear8}
        and len({(layer.get_submodule(n).bias is None) for n in linears[:3]}) == 1
        and all(
            hasattr(m, "variance_epsilon")
            for m in (layer.input_layernorm, layer.post_attention_layernorm)
        )
        and ("self_attn.q_norm.weight" in names) == ("self_attn.k_norm.weight" in names)
    )


def _join(linears: Sequence[nn.Linear | Linear8]) -> Product:
    """One product for several layers with the same input, side by side; their own matrices become
    views of its.
    """
    if isinstance(linears[0], Linear8):
        if len(linears) == 1:
            return linears[0].forward
        return Linear8.join([m for m in linears if isinstance(m, Linear8)]).forward
    if len(linears) == 1:
        return partial(F.linear, weight=linears[0].weight, bias=linears[0].bias)
    weight, sizes = torch.cat([m.weight.data for m in linears]), [m.out_features for m in linears]
    for module, part in zip(linears, weight.split(sizes), strict=True):
        module.weight.data = part
    biases = [m.bias for m in linears if m.bias is not None]
    if not biases:
        return partial(F.linear, weight=weight)
    bias = torch.cat([b.data for b in biases])
    for own, part in zip(biases, bias.split(sizes), strict=True):
        own.data = part
    return partial(F.linear, weight=weight, bias=bias)


class Fused:
    """One layer: (hidden (1, P, E), (cos, sin) (1, T, D), positions (1, T)) -> hidden; rows from T
    on only fill up.
    """

    fills = True  # whether there may be such rows

    def __init__(self, layer: nn.Module, index: int, window: int | None):
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        self.index, self.width = index, int(attention.head_dim)
        self.scale, self.window = float(attention.scaling), window
        self.qkv = _join([attention.q_proj, attention.k_proj, attention.v_proj])
        self.gate_up, self.act = _join([mlp.gate_proj, mlp.up_proj]), mlp.act_fn
        self.out, self.down = _join([attention.o_proj]), _join([mlp.down_proj])
        # Products of 8 bits are not kept by their sizes, and rows that only fill up cost them as
        # much as others.
        self.fills = self.fills and attention.q_proj.weight.dtype in (torch.bfloat16, torch.float16)
        self.queries = attention.q_proj.out_features // self.width
        self.keys = attention.k_proj.out_features // self.width
        self.before, self.after = layer.input_layernorm, layer.post_attention_layernorm
        half = layer.get_parameter("input_layernorm.weight").new_ones(self.width // 2)
        self.sign = torch.cat([-half, half])
        self.norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None

    @staticmethod
    def norm(module: Any, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)

    @staticmethod
    def rotate(
        x: torch.Tensor, turned: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        return torch.addcmul(x * cos, turned, sin)

    def activate(self, gate: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.act(gate)
        return out

    def __call__(self, hidden: torch.Tensor, rotary: Any, positions: torch.Tensor) -> torch.Tensor:
        h, new = hidden[0], positions.shape[1]
        heads, both, filling = self.queries, self.queries + self.keys, len(h) - new
        x = self.qkv(self.norm(self.before, h))[:new].view(new, -1, self.width)
        qk, v = x[:, :both], x[:, both:]
        if self.norms is not None:
            qk = torch.cat(
                [self.norm(self.norms[0], qk[:, :heads]), self.norm(self.norms[1], qk[:, heads:])],
                1,
            )
        cos, sin = rotary[0][0, :, None], rotary[1][0, :, None]
        qk = self.rotate(qk, qk.roll(self.width // 2, -1), cos, sin * self.sign)
        q, k, v = (part.transpose(0, 1) for part in (qk[:, :heads], qk[:, heads:], v))
        out = forest_attention(self.index, q, k, v, self.scale, self.window)
        out = out.reshape(new, -1)
        h = h + self.out(F.pad(out, (0, 0, 0, filling)) if filling else out)
        gate, up = self.gate_up(self.norm(self.after, h)).chunk(2, -1)
        h = h + self.down(self.activate(gate) * up)
        return h[None]
