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
from foretell.models.decoder.fields import unread
from foretell.models.decoder.head_merging import project
from foretell.models.decoder.loop import Block, Loop
from foretell.models.decoder.packed import PackedLinear
from foretell.ops.memory import release, trim

Product = Callable[[torch.Tensor], torch.Tensor]
NORMS = ("input_layernorm", "post_attention_layernorm")
INPUTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATES = ("mlp.gate_proj", "mlp.up_proj")
LINEARS = (*INPUTS, "self_attn.o_proj", *GATES, "mlp.down_proj")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
PARTS = {f"{name}.weight" for name in (*LINEARS, *NORMS, *HEAD_NORMS)}
PARTS |= {f"{name}.bias" for name in LINEARS} | {"self_attn.key_basis"}


def blocks(loop: Loop, kind: type[Fused] | None = None, ours: bool = False) -> list[Block] | None:
    """A fused block for every layer, or None where a layer has another build, or the configuration
    a field that they do not honour: `loop.refused` says which.

    `kind`: another way to compute it. `ours`: nobody else has a tensor of this model, so what was
    joined may leave the memory.
    """
    if not all(fits(layer) for layer in loop.layers):
        return None
    loop.refused = unread(loop.config, loop.layers)
    if loop.refused is None and not all(
        _turns(layer.get_submodule("self_attn")) for layer in loop.layers
    ):
        loop.refused = "its heads turn in another order"
    if loop.refused is not None:
        return None
    made: list[Block] = []
    for i, (layer, window) in enumerate(zip(loop.layers, loop.windows, strict=True)):
        before = [p.data for p in layer.parameters()] if ours else []
        made.append((kind or Fused)(layer, i, window))
        kept = {p.data_ptr() for p in layer.parameters()}
        release(t for t in before if t.data_ptr() not in kept)
        if ours:
            trim()
    return made


def fits(layer: nn.Module) -> bool:
    """Whether a layer has the parts that are joined here, and no others."""
    modules = dict(layer.named_modules())
    parameters = dict(layer.named_parameters())
    wanted = {*LINEARS, *NORMS, "mlp.act_fn"}
    if any(_watched(module) for module in modules.values()):
        return False
    if not wanted <= modules.keys() or any(f"{name}.weight" not in parameters for name in NORMS):
        return False
    if {name for name, _ in layer.named_children()} != {"self_attn", "mlp", *NORMS}:
        return False
    if not parameters.keys() <= PARTS:
        return False
    if {type(modules[name]) for name in LINEARS} not in ({nn.Linear}, {PackedLinear}):
        return False
    if any(len({modules[name].bias is None for name in group}) > 1 for group in (INPUTS, GATES)):
        return False
    if not all(hasattr(modules[name], "variance_epsilon") for name in NORMS):
        return False
    return len({f"{name}.weight" in parameters for name in HEAD_NORMS}) == 1


def _turns(attention: Any) -> bool:
    """Whether a family turns the first half of a head against the second, shown on random rows:
    with weights near 0 a probe of the whole model could miss it.
    """
    family = sys.modules[type(attention).__module__]
    rotate = getattr(attention, "rotate", None) or getattr(family, "apply_rotary_pos_emb", None)
    if rotate is None:
        return False
    draw = torch.Generator().manual_seed(0)
    width = int(attention.head_dim)
    q, k = torch.randn(2, 1, 2, 3, width, generator=draw)
    cos, sin = torch.randn(2, 1, 3, width // 2, generator=draw).repeat(1, 1, 1, 2)
    sign = torch.ones(width)
    sign[: width // 2] = -1
    try:
        theirs = rotate(q, k, cos, sin)
    except Exception:  # of another signature
        return False
    ours = [Fused.rotate(x, x.roll(width // 2, -1), cos, sin * sign) for x in (q, k)]
    return all(torch.allclose(x, y, atol=1e-5) for x, y in zip(ours, theirs, strict=True))


@torch.inference_mode(False)  # else their owner could not train them any more
def _beside(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor of several, which become views of it."""
    joined = torch.cat([p.data for p in parameters])
    for p, part in zip(parameters, joined.split([len(p) for p in parameters]), strict=True):
        p.data = part
    return joined


def _watched(module: nn.Module) -> bool:
    """Whether somebody else acts when it is called: here it would not be."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(hooks) or "forward" in module.__dict__


def _join(linears: Sequence[nn.Linear | PackedLinear]) -> Product:
    """One product for several layers with the same input, side by side; their own matrices become
    views of the joined one.
    """
    packed = [m for m in linears if isinstance(m, PackedLinear)]
    if packed:
        if len(packed) == 1:
            return packed[0]
        return PackedLinear.join(packed) or (lambda x: torch.cat([m(x) for m in packed], -1))
    stock = [m for m in linears if isinstance(m, nn.Linear)]
    if len(stock) == 1:
        return partial(F.linear, weight=stock[0].weight, bias=stock[0].bias)
    weight = _beside([m.weight for m in stock])
    biases = [m.bias for m in stock if m.bias is not None]
    bias = _beside(biases) if biases else None
    return partial(F.linear, weight=weight, bias=bias)


class Fused:
    """One layer: (hidden (1, P, E), (cos, sin) (1, T, D), positions (1, T)) -> hidden (1, P, E).

    Rows from T on are padding.
    """

    takes_padding = True

    def __init__(self, layer: nn.Module, index: int, window: int | None):
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        self.index = index
        self.window = window
        self.width = int(attention.head_dim)
        self.scale = float(attention.scaling)
        self.qkv = _join([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = _join([attention.o_proj])
        self.gate_up = _join([mlp.gate_proj, mlp.up_proj])
        self.down = _join([mlp.down_proj])
        self.act = mlp.act_fn
        # Other products are not kept by their sizes, and padding costs them as much as real rows.
        weight = getattr(attention.q_proj, "weight", None)
        narrow = weight is not None and weight.dtype in (torch.bfloat16, torch.float16)
        self.takes_padding = self.takes_padding and narrow
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
        x: torch.Tensor, turned: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        return torch.addcmul(x * cos, turned, sin)

    def activate(self, gate: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.act(gate)
        return out

    def __call__(self, hidden: torch.Tensor, rotary: Any, positions: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.attention(hidden, rotary, positions))

    def attention(self, hidden: torch.Tensor, rotary: Any, positions: torch.Tensor) -> torch.Tensor:
        """The layer's first half, the residual stream included."""
        h = hidden[0]
        return (h + self.attended(h, rotary, positions))[None]

    def attended(self, h: torch.Tensor, rotary: Any, positions: torch.Tensor) -> torch.Tensor:
        """What attention adds to h (P, E)."""
        count = positions.shape[1]
        padding = len(h) - count
        x = self.qkv(self.norm(self.before, h))[:count].view(count, -1, self.width)
        heads = self.queries
        qk = x[:, : heads + self.keys]
        v = x[:, heads + self.keys :].transpose(0, 1)
        if self.norms is not None:
            q_norm, k_norm = self.norms
            qk = torch.cat([self.norm(q_norm, qk[:, :heads]), self.norm(k_norm, qk[:, heads:])], 1)
        cos = rotary[0][0, :, None]
        sin = rotary[1][0, :, None]
        qk = self.rotate(qk, qk.roll(self.width // 2, -1), cos, sin * self.sign)
        q = qk[:, :heads].transpose(0, 1)
        k = qk[:, heads:].transpose(0, 1)
        if self.basis is not None:
            q, k = project(q, k, self.basis)
        out = forest_attention(self.index, q, k, v, self.scale, self.window).reshape(count, -1)
        return self.out(F.pad(out, (0, 0, 0, padding)) if padding else out)

    def mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's second half."""
        h = hidden[0]
        gate, up = self.gate_up(self.norm(self.after, h)).chunk(2, -1)
        return (h + self.down(self.activate(gate) * up))[None]
