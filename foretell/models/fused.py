"""The layers of the llama family with fewer, larger operations: the same weights, the same results up to rounding.

q, k, v and gate, up become one matrix product each, rotation is applied to queries and keys together, and nothing of
the modules' bookkeeping runs. A layer qualifies by its parts; `Decoder` then compares a probe's logits with the stock
modules' and keeps the stock ones where they differ (residual multipliers, layers without rotation, and so on). The
fused matrices are the storage: the modules' own weights become views of them, so memory stays what it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from foretell.model import forest_attention
from foretell.models.decoder import Block, Loop


def blocks(loop: Loop) -> list[Block] | None:
    """A fused block for every layer, or None where a layer has another build."""
    if not all(_fits(layer) for layer in loop.layers):
        return None
    return [_Fused(layer, i, window) for i, (layer, window) in enumerate(zip(loop.layers, loop.windows, strict=True))]


def _fits(layer: nn.Module) -> bool:
    names = {name for name, _ in layer.named_modules()} | {name for name, _ in layer.named_parameters()}
    linears = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
               "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]  # fmt: skip
    wanted = {"input_layernorm.weight", "post_attention_layernorm.weight", "mlp.act_fn", *linears}
    children = {name for name, _ in layer.named_children()}
    return (
        wanted <= names
        and children == {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
        and all(type(layer.get_submodule(name)) is nn.Linear for name in linears)
        and all(hasattr(m, "variance_epsilon") for m in (layer.input_layernorm, layer.post_attention_layernorm))
        and ("self_attn.q_norm.weight" in names) == ("self_attn.k_norm.weight" in names)
    )


def _join(linears: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One matrix (sum of outs, in) and bias; the modules' own become views of it."""
    weight = torch.cat([m.weight.data for m in linears])
    for module, part in zip(linears, weight.split([m.out_features for m in linears]), strict=True):
        module.weight.data = part
    if linears[0].bias is None:
        return weight, None
    bias = torch.cat([m.bias.data for m in linears])
    for module, part in zip(linears, bias.split([m.out_features for m in linears]), strict=True):
        module.bias.data = part
    return weight, bias


class _Fused:
    """One layer: (hidden (1, T, E), (cos, sin) (1, T, D), positions) -> hidden."""

    def __init__(self, layer: nn.Module, index: int, window: int | None):
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        self.index, self.width = index, int(attention.head_dim)
        self.scale, self.window = float(attention.scaling), window
        self.qkv, self.qkv_bias = _join([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out, self.out_bias = attention.o_proj.weight, attention.o_proj.bias
        self.gate_up, self.gate_up_bias = _join([mlp.gate_proj, mlp.up_proj])
        self.down, self.down_bias, self.act = mlp.down_proj.weight, mlp.down_proj.bias, mlp.act_fn
        self.queries = attention.q_proj.out_features // self.width
        self.keys = attention.k_proj.out_features // self.width
        self.before, self.after = layer.input_layernorm, layer.post_attention_layernorm
        self.norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None

    @staticmethod
    def norm(module: Any, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)

    def __call__(self, hidden: torch.Tensor, rotary: Any, positions: torch.Tensor) -> torch.Tensor:
        h = hidden[0]
        heads, both = self.queries, self.queries + self.keys
        x = F.linear(self.norm(self.before, h), self.qkv, self.qkv_bias).view(len(h), -1, self.width)
        qk, v = x[:, :both], x[:, both:]
        if self.norms is not None:
            qk = torch.cat([self.norm(self.norms[0], qk[:, :heads]), self.norm(self.norms[1], qk[:, heads:])], 1)
        cos, sin = rotary[0][0, :, None], rotary[1][0, :, None]
        low, high = qk.chunk(2, -1)
        qk = torch.addcmul(qk * cos, torch.cat([-high, low], -1), sin).transpose(0, 1)
        out = forest_attention(self.index, qk[:heads], qk[heads:], v.transpose(0, 1), self.scale, self.window)
        h = h + F.linear(out.reshape(len(h), -1), self.out, self.out_bias)
        gate, up = F.linear(self.norm(self.after, h), self.gate_up, self.gate_up_bias).chunk(2, -1)
        h = h + F.linear(self.act(gate) * up, self.down, self.down_bias)
        return h[None]
