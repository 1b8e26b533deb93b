"""Recurrent layers that go from node to node, each from its parent's state (see mixers.py).

    Selective        Mamba and its relatives
    DeltaRule        the gated delta rule of Qwen3-Next; long chains as transformers computes them
    SplitDeltaRule   the same, of Qwen3.5
    GatedLinear      RG-LRU, of RecurrentGemma

A tree takes as many steps as it has nodes; all else is computed for all nodes at once.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F

from foretell.models.recurrent.mixers import BLOCK, Mixer, Parts, pieces, wide

LONG = 32  # tokens from which on a chain is worth transformers' way for prompts


class Stepwise(Mixer):
    """Kinds that go from node to node, each from its parent's state."""

    def ready(self, steps: Parts) -> Parts:
        """What `follow` takes of each node, made for several at once."""
        return steps

    def follow(self, state: torch.Tensor, *step: torch.Tensor) -> torch.Tensor:
        """The state behind one more node."""
        raise NotImplementedError

    def read(self, states: torch.Tensor, reads: Parts) -> torch.Tensor:
        """What n nodes read of the states (n, ...) behind them."""
        raise NotImplementedError

    def chain(
        self, state: torch.Tensor, steps: Parts, reads: Parts
    ) -> tuple[torch.Tensor, torch.Tensor]:
        outs = []
        for piece, read in zip(pieces(steps, BLOCK), pieces(reads, BLOCK), strict=True):
            states = []
            for step in zip(*self.ready(piece), strict=True):
                state = self.follow(state, *step)
                states.append(state)
            outs.append(self.read(torch.stack(states), read))
        return torch.cat(outs), state

    def tree(
        self, state: torch.Tensor, steps: Parts, reads: Parts, parents: tuple[int, ...]
    ) -> torch.Tensor:
        states: list[torch.Tensor] = []
        for parent, *step in zip(parents, *self.ready(steps), strict=True):
            before = state if parent < 0 else states[parent]
            states.append(self.follow(before, *step))
        return self.read(torch.stack(states[-len(reads[0]) :]), reads)

    def advance(self, state: torch.Tensor, steps: Parts) -> torch.Tensor:
        for step in zip(*self.ready(steps), strict=True):
            state = self.follow(state, *step)
        return state


class Selective(Stepwise):
    """A decay for each number of the state."""

    def state_shape(self) -> tuple[int, ...]:
        return self.stock.intermediate_size, self.stock.ssm_state_size

    def project(self, h: torch.Tensor, given: dict[str, Any]) -> tuple[torch.Tensor, Parts, Any]:
        rows, gate = self.stock.in_proj(h).chunk(2, -1)
        return rows, (), gate

    def steps(self, mixed: torch.Tensor, side: Parts) -> tuple[Parts, Parts]:
        stock = self.stock
        sizes = [stock.time_step_rank, stock.ssm_state_size, stock.ssm_state_size]
        step, b, c = stock.x_proj(mixed).split(sizes, -1)
        if hasattr(stock, "dt_layernorm"):
            step, b, c = stock.dt_layernorm(step), stock.b_layernorm(b), stock.c_layernorm(c)
        step = F.softplus(stock.dt_proj(step))
        x = mixed.to(wide(mixed.dtype))
        return (step.to(x), x, b.to(x)), (c.to(x), x)

    def ready(self, steps: Parts) -> Parts:
        step, x, b = steps
        decays = torch.exp(-self.stock.A_log.to(x).exp() * step[..., None])
        return decays, (step * x)[..., None] * b[:, None]

    def follow(self, state: torch.Tensor, *step: torch.Tensor) -> torch.Tensor:
        decay, added = step
        return decay * state + added

    def read(self, states: torch.Tensor, reads: Parts) -> torch.Tensor:
        c, x = reads
        return (states @ c[..., None])[..., 0] + x * self.stock.D.to(x)

    def output(self, read: torch.Tensor, gate: Any) -> torch.Tensor:
        gated = (read * F.silu(gate)).to(gate.dtype)
        out: torch.Tensor = self.stock.out_proj(gated)
        return out


class DeltaRule(Stepwise):
    """A key's old value is taken out of the state before its new one is added."""

    def state_shape(self) -> tuple[int, ...]:
        stock = self.stock
        return stock.num_v_heads, stock.head_k_dim, stock.head_v_dim

    def project(self, h: torch.Tensor, given: dict[str, Any]) -> tuple[torch.Tensor, Parts, Any]:
        stock = self.stock
        mixed = stock.in_proj_qkvz(h)[None], stock.in_proj_ba(h)[None]
        query, key, value, gate, b, a = stock.fix_query_key_value_ordering(*mixed)
        rows = torch.cat([part[0].flatten(1) for part in (query, key, value)], -1)
        return rows, (b[0], a[0]), gate[0]

    def steps(self, mixed: torch.Tensor, side: Parts) -> tuple[Parts, Parts]:
        stock = self.stock
        count = len(mixed)
        b, a = side
        x = mixed.to(wide(mixed.dtype))
        query, key, value = x.split([stock.key_dim, stock.key_dim, stock.value_dim], -1)
        times = stock.num_v_heads // stock.num_k_heads
        query, key = (
            unit(part.reshape(count, -1, stock.head_k_dim)).repeat_interleave(times, 1)
            for part in (query, key)
        )
        value = value.reshape(count, -1, stock.head_v_dim)
        rate = b.sigmoid().to(x)
        decays = -stock.A_log.to(x).exp() * F.softplus(a.to(x) + stock.dt_bias.to(x))
        return (decays, key, value, rate), (query,)

    def chain(
        self, state: torch.Tensor, steps: Parts, reads: Parts
    ) -> tuple[torch.Tensor, torch.Tensor]:
        decays, key, value, rate = steps
        if len(key) < LONG or key.dtype != torch.float32:
            return super().chain(state, steps, reads)
        by_blocks = vars(sys.modules[type(self.stock).__module__])["torch_chunk_gated_delta_rule"]
        given = (part[None] for part in (reads[0], key, value, decays, rate))
        out, last = by_blocks(*given, initial_state=state[None], output_final_state=True)
        return out[0], last[0]

    def follow(self, state: torch.Tensor, *step: torch.Tensor) -> torch.Tensor:
        decay, key, value, rate = step
        state = state * decay.exp()[:, None, None]
        old = (state * key[..., None]).sum(-2)
        return state + key[..., None] * ((value - old) * rate[:, None])[:, None]

    def read(self, states: torch.Tensor, reads: Parts) -> torch.Tensor:
        query = reads[0] * self.stock.head_k_dim**-0.5
        return (states * query[..., None]).sum(-2)

    def output(self, read: torch.Tensor, gate: Any) -> torch.Tensor:
        width = read.shape[-1]
        normed = self.stock.norm(read.to(gate.dtype).reshape(-1, width), gate.reshape(-1, width))
        out: torch.Tensor = self.stock.out_proj(normed.reshape(len(read), -1))
        return out


class SplitDeltaRule(DeltaRule):
    """The same with a projection for each of its inputs (Qwen3.5)."""

    def project(self, h: torch.Tensor, given: dict[str, Any]) -> tuple[torch.Tensor, Parts, Any]:
        stock = self.stock
        gate = stock.in_proj_z(h).reshape(len(h), -1, stock.head_v_dim)
        return stock.in_proj_qkv(h), (stock.in_proj_b(h), stock.in_proj_a(h)), gate


def unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors of length 1, as the delta rule's kernels make them."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class GatedLinear(Stepwise):
    """A decay for each channel; the text's first token enters at full strength."""

    convolution = "conv_1d"
    activated = False

    def state_shape(self) -> tuple[int, ...]:
        return (self.stock.lru_width,)

    def forward(self, hidden_states: torch.Tensor, *_: Any, **given: Any) -> Any:
        return super().forward(hidden_states, **given), None

    def project(self, h: torch.Tensor, given: dict[str, Any]) -> tuple[torch.Tensor, Parts, Any]:
        gate = self.stock.act_fn(self.stock.linear_y(h))
        begins = given["position_ids"][0] == 0
        return self.stock.linear_x(h), (begins,), gate

    def steps(self, mixed: torch.Tensor, side: Parts) -> tuple[Parts, Parts]:
        gates = self.stock.rg_lru
        begins = side[0][:, None]
        by_block = mixed.reshape(len(mixed), gates.num_attention_heads, -1)

        def gate(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            mapped = torch.einsum("nhi,hio->nho", by_block, weight) + bias
            return mapped.flatten(1).sigmoid()

        taken = gate(gates.input_gate_weight, gates.input_gate_bias)
        kept = gate(gates.recurrent_gate_weight, gates.recurrent_gate_bias)
        logarithm = -8.0 * kept * F.softplus(gates.recurrent_param)
        strength = torch.where(begins, 1.0, (1 - torch.exp(2 * logarithm)).sqrt())
        decays = torch.exp(logarithm) * ~begins
        added = mixed * taken * strength.to(mixed.dtype)
        return (decays.to(wide(mixed.dtype)), added.to(wide(mixed.dtype))), (mixed,)

    def follow(self, state: torch.Tensor, *step: torch.Tensor) -> torch.Tensor:
        decay, added = step
        return decay * state + added

    def read(self, states: torch.Tensor, reads: Parts) -> torch.Tensor:
        return states.to(reads[0].dtype)

    def output(self, read: torch.Tensor, gate: Any) -> torch.Tensor:
        out: torch.Tensor = self.stock.linear_out(read * gate)
        return out
