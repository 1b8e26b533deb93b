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

from foretell.models.recurrent.mixers import BLOCK, Mixer, Parts, split_blocks, state_dtype

LONG = 32  # tokens from which on a chain is worth transformers' way for prompts


class Stepwise(Mixer):
    """Kinds that go from node to node, each from its parent's state."""

    def prepare_steps(self, steps: Parts) -> Parts:
        """Makes what `follow_step` takes of each node, for several at once."""
        return steps

    def follow_step(self, state: torch.Tensor, *step: torch.Tensor) -> torch.Tensor:
        """The state after one more node."""
        raise NotImplementedError

    def read_states(self, states: torch.Tensor, reads: Parts) -> torch.Tensor:
        """Reads (n, ...) of the states after n nodes."""
        raise NotImplementedError

    def run_chain(
        self, state: torch.Tensor, steps: Parts, reads: Parts
    ) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = []
        for block_steps, block_reads in zip(
            split_blocks(steps, BLOCK), split_blocks(reads, BLOCK), strict=True
        ):
            node_states = []
            for step in zip(*self.prepare_steps(block_steps), strict=True):
                state = self.follow_step(state, *step)
                node_states.append(state)
            outputs.append(self.read_states(torch.stack(node_states), block_reads))
        return torch.cat(outputs), state

    def run_tree(
        self, state: torch.Tensor, steps: Parts, reads: Parts, parents: tuple[int, ...]
    ) -> torch.Tensor:
        node_states: list[torch.Tensor] = []
        for parent, *step in zip(parents, *self.prepare_steps(steps), strict=True):
            parent_state = state if parent < 0 else node_states[parent]
            node_states.append(self.follow_step(parent_state, *step))
        return self.read_states(torch.stack(node_states[-len(reads[0]) :]), reads)

    def advance_state(self, state: torch.Tensor, steps: Parts) -> torch.Tensor:
        for step in zip(*self.prepare_steps(steps), strict=True):
            state = self.follow_step(state, *step)
        return state


class Selective(Stepwise):
    """A layer with a decay for each number of the state."""

    def state_shape(self) -> tuple[int, ...]:
        return self.stock.intermediate_size, self.stock.ssm_state_size

    def project_inputs(
        self, hidden_states: torch.Tensor, forward_inputs: dict[str, Any]
    ) -> tuple[torch.Tensor, Parts, Any]:
        rows, gate = self.stock.in_proj(hidden_states).chunk(2, -1)
        return rows, (), gate

    def node_steps(self, convolved: torch.Tensor, side_inputs: Parts) -> tuple[Parts, Parts]:
        stock = self.stock
        sizes = [stock.time_step_rank, stock.ssm_state_size, stock.ssm_state_size]
        step, b, c = stock.x_proj(convolved).split(sizes, -1)
        if hasattr(stock, "dt_layernorm"):
            step, b, c = stock.dt_layernorm(step), stock.b_layernorm(b), stock.c_layernorm(c)
        step = F.softplus(stock.dt_proj(step))
        x = convolved.to(state_dtype(convolved.dtype))
        return (step.to(x), x, b.to(x)), (c.to(x), x)

    def prepare_steps(self, steps: Parts) -> Parts:
        step, x, b = steps
        decays = torch.exp(-self.stock.A_log.to(x).exp() * step[..., None])
        return decays, (step * x)[..., None] * b[:, None]

    def follow_step(self, state: torch.Tensor, *step: torch.Tensor) -> torch.Tensor:
        decay, added = step
        return decay * state + added

    def read_states(self, states: torch.Tensor, reads: Parts) -> torch.Tensor:
        c, x = reads
        return (states @ c[..., None])[..., 0] + x * self.stock.D.to(x)

    def project_output(self, node_outputs: torch.Tensor, gate: Any) -> torch.Tensor:
        gated = (node_outputs * F.silu(gate)).to(gate.dtype)
        output: torch.Tensor = self.stock.out_proj(gated)
        return output


class DeltaRule(Stepwise):
    """A layer that takes a key's old value out of the state before its new one is added."""

    def state_shape(self) -> tuple[int, ...]:
        stock = self.stock
        return stock.num_v_heads, stock.head_k_dim, stock.head_v_dim

    def project_inputs(
        self, hidden_states: torch.Tensor, forward_inputs: dict[str, Any]
    ) -> tuple[torch.Tensor, Parts, Any]:
        stock = self.stock
        projections = stock.in_proj_qkvz(hidden_states)[None], stock.in_proj_ba(hidden_states)[None]
        query, key, value, gate, b, a = stock.fix_query_key_value_ordering(*projections)
        rows = torch.cat([part[0].flatten(1) for part in (query, key, value)], -1)
        return rows, (b[0], a[0]), gate[0]

    def node_steps(self, convolved: torch.Tensor, side_inputs: Parts) -> tuple[Parts, Parts]:
        stock = self.stock
        node_count = len(convolved)
        b, a = side_inputs
        x = convolved.to(state_dtype(convolved.dtype))
        query, key, value = x.split([stock.key_dim, stock.key_dim, stock.value_dim], -1)
        repeats = stock.num_v_heads // stock.num_k_heads
        query, key = (
            unit_vectors(part.reshape(node_count, -1, stock.head_k_dim)).repeat_interleave(
                repeats, 1
            )
            for part in (query, key)
        )
        value = value.reshape(node_count, -1, stock.head_v_dim)
        rate = b.sigmoid().to(x)
        decays = -stock.A_log.to(x).exp() * F.softplus(a.to(x) + stock.dt_bias.to(x))
        return (decays, key, value, rate), (query,)

    def run_chain(
        self, state: torch.Tensor, steps: Parts, reads: Parts
    ) -> tuple[torch.Tensor, torch.Tensor]:
        decays, key, value, rate = steps
        if len(key) < LONG or key.dtype != torch.float32:
            return super().run_chain(state, steps, reads)
        block_kernel = vars(sys.modules[type(self.stock).__module__])[
            "torch_chunk_gated_delta_rule"
        ]
        kernel_inputs = (part[None] for part in (reads[0], key, value, decays, rate))
        output, last_state = block_kernel(
            *kernel_inputs, initial_state=state[None], output_final_state=True
        )
        return output[0], last_state[0]

    def follow_step(self, state: torch.Tensor, *step: torch.Tensor) -> torch.Tensor:
        decay, key, value, rate = step
        state = state * decay.exp()[:, None, None]
        old_value = (state * key[..., None]).sum(-2)
        return state + key[..., None] * ((value - old_value) * rate[:, None])[:, None]

    def read_states(self, states: torch.Tensor, reads: Parts) -> torch.Tensor:
        query = reads[0] * self.stock.head_k_dim**-0.5
        return (states * query[..., None]).sum(-2)

    def project_output(self, node_outputs: torch.Tensor, gate: Any) -> torch.Tensor:
        value_width = node_outputs.shape[-1]
        normed = self.stock.norm(
            node_outputs.to(gate.dtype).reshape(-1, value_width), gate.reshape(-1, value_width)
        )
        output: torch.Tensor = self.stock.out_proj(normed.reshape(len(node_outputs), -1))
        return output


class SplitDeltaRule(DeltaRule):
    """The delta rule with a projection for each of its inputs (Qwen3.5)."""

    def project_inputs(
        self, hidden_states: torch.Tensor, forward_inputs: dict[str, Any]
    ) -> tuple[torch.Tensor, Parts, Any]:
        stock = self.stock
        gate = stock.in_proj_z(hidden_states).reshape(len(hidden_states), -1, stock.head_v_dim)
        return (
            stock.in_proj_qkv(hidden_states),
            (stock.in_proj_b(hidden_states), stock.in_proj_a(hidden_states)),
            gate,
        )


def unit_vectors(x: torch.Tensor) -> torch.Tensor:
    """Vectors of length 1, as the delta rule's kernels make them."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class GatedLinear(Stepwise):
    """A layer with a decay for each channel; the text's first token enters at full strength."""

    convolution = "conv_1d"
    activated = False

    def state_shape(self) -> tuple[int, ...]:
        return (self.stock.lru_width,)

    def forward(self, hidden_states: torch.Tensor, *_: Any, **forward_inputs: Any) -> Any:
        return super().forward(hidden_states, **forward_inputs), None

    def project_inputs(
        self, hidden_states: torch.Tensor, forward_inputs: dict[str, Any]
    ) -> tuple[torch.Tensor, Parts, Any]:
        gate = self.stock.act_fn(self.stock.linear_y(hidden_states))
        is_first = forward_inputs["position_ids"][0] == 0
        return self.stock.linear_x(hidden_states), (is_first,), gate

    def node_steps(self, convolved: torch.Tensor, side_inputs: Parts) -> tuple[Parts, Parts]:
        gates = self.stock.rg_lru
        is_first = side_inputs[0][:, None]
        head_rows = convolved.reshape(len(convolved), gates.num_attention_heads, -1)

        def gate(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            mapped = torch.einsum("nhi,hio->nho", head_rows, weight) + bias
            return mapped.flatten(1).sigmoid()

        input_gate = gate(gates.input_gate_weight, gates.input_gate_bias)
        recurrent_gate = gate(gates.recurrent_gate_weight, gates.recurrent_gate_bias)
        logarithm = -8.0 * recurrent_gate * F.softplus(gates.recurrent_param)
        strength = torch.where(is_first, 1.0, (1 - torch.exp(2 * logarithm)).sqrt())
        decays = torch.exp(logarithm) * ~is_first
        entering = convolved * input_gate * strength.to(convolved.dtype)
        return (
            decays.to(state_dtype(convolved.dtype)),
            entering.to(state_dtype(convolved.dtype)),
        ), (convolved,)

    def follow_step(self, state: torch.Tensor, *step: torch.Tensor) -> torch.Tensor:
        decay, added = step
        return decay * state + added

    def read_states(self, states: torch.Tensor, reads: Parts) -> torch.Tensor:
        return states.to(reads[0].dtype)

    def project_output(self, node_outputs: torch.Tensor, gate: Any) -> torch.Tensor:
        output: torch.Tensor = self.stock.linear_out(node_outputs * gate)
        return output
