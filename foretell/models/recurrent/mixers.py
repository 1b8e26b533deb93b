"""Recurrent layers of transformers, computed on the packed row of a forward: one class a kind.

    StateSpaceDual     Mamba-2 and other kinds of state space model: chains and trees by a closed
                       form (scans.py)
    ShortConvolution   LFM2: a convolution and no state
    (stepwise.py)      kinds that go from node to node

A mixer stands in the place of transformers' own and uses its weights and modules. All tokens are
projected together; convolution and state belong to each job, whose cache holds what they need
(`StateCache`). A text's state is never changed by a forward: drafted nodes leave what each would do
to it, and what the accepted ones do is done when they are committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from foretell.cache.job import Job
from foretell.cache.masks import ancestors
from foretell.core.model import STEP
from foretell.models.recurrent.scans import (
    advance_dual,
    by_head,
    convolve_rows,
    dual_outputs,
    slide_window,
)

BLOCK = 64  # tokens of a chain that are computed together

Parts = tuple[torch.Tensor, ...]  # each with a row for every node


@dataclass(frozen=True)
class State:
    """A layer's memory of a text: window (K - 1, C), state of the layer's own shape."""

    window: torch.Tensor
    state: torch.Tensor

    @property
    def bytes(self) -> int:
        return tensor_bytes(self.window) + tensor_bytes(self.state)


@dataclass
class Held:
    """The memory that a cache holds of one layer.

    `text`: after the committed tokens; `ahead`: after the last forward's pending tokens as well,
    where its tree hangs. Of the tree's nodes `rows` (N, C), what the convolution read of them, and
    `steps`, what each does to the state; `end`, the state after all of them if it is known.
    """

    text: State
    ahead: State
    rows: torch.Tensor
    steps: Parts = field(default=())
    end: torch.Tensor | None = None

    @classmethod
    def of(cls, start: State) -> Held:
        return cls(start, start, start.window[:0])

    def clear(self) -> None:
        """Forgets the last forward."""
        self.ahead, self.rows, self.steps = self.text, self.text.window[:0], ()
        self.end = None


class Mixer(nn.Module):
    """The base: convolution and state for chains and trees; a kind says what its steps are."""

    convolution = "conv1d"  # the module's name in the layer
    activated = True  # whether the layer's activation follows it

    def __init__(self, stock: nn.Module, layer: int):
        super().__init__()
        self.stock: Any = stock
        self.layer = layer

    # --- what a kind says

    def refusal_reason(self) -> str | None:
        """Why this layer cannot be computed right, as what it lacks; None: it can."""
        return None

    def state_shape(self) -> tuple[int, ...]:
        """The shape of the state of one text."""
        raise NotImplementedError

    def project_inputs(
        self, hidden_states: torch.Tensor, forward_inputs: dict[str, Any]
    ) -> tuple[torch.Tensor, Parts, Any]:
        """Projects h (T, E) -> what is convolved (T, C), what else a step needs, the gate of the
        output.
        """
        raise NotImplementedError

    def node_steps(self, convolved: torch.Tensor, side_inputs: Parts) -> tuple[Parts, Parts]:
        """Steps that nodes do to the state, and how they read it, of `convolved` (n, C) and
        `side_inputs`.
        """
        raise NotImplementedError

    def run_chain(
        self, state: torch.Tensor, steps: Parts, reads: Parts
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs a chain: what its nodes read, (n, ...), and the state after them."""
        raise NotImplementedError

    def run_tree(
        self, state: torch.Tensor, steps: Parts, reads: Parts, parents: tuple[int, ...]
    ) -> torch.Tensor:
        """Runs a tree: what its last nodes read; `steps` of all nodes, `reads` of those n."""
        raise NotImplementedError

    def advance_state(self, state: torch.Tensor, steps: Parts) -> torch.Tensor:
        """The state after a chain of these steps."""
        raise NotImplementedError

    def project_output(self, node_outputs: torch.Tensor, gate: Any) -> torch.Tensor:
        """Output states (T, E) of what all nodes read."""
        raise NotImplementedError

    # --- the rest is common

    def first_state(self, dtype: torch.dtype, device: torch.device) -> State:
        """The memory before the first token."""
        channels, taps = self._weight.shape
        window = torch.zeros(taps - 1, channels, dtype=dtype, device=device)
        return State(
            window, torch.zeros(self.state_shape(), dtype=state_dtype(dtype), device=device)
        )

    @property
    def _weight(self) -> torch.Tensor:
        """The convolution's weight (C, K)."""
        weight: torch.Tensor = getattr(self.stock, self.convolution).weight
        return weight.squeeze(1)

    def forward(self, hidden_states: torch.Tensor, *_: Any, **forward_inputs: Any) -> Any:
        """Computes (1, T, E) -> (1, T, E), of all jobs of the running step."""
        rows, side_inputs, gate = self.project_inputs(hidden_states[0], forward_inputs)
        node_outputs = []
        first_node = 0
        for job in STEP.get():
            end_node = first_node + len(job.tokens)
            node_outputs += self._of_job(
                job,
                rows[first_node:end_node],
                tuple(side_part[first_node:end_node] for side_part in side_inputs),
            )
            first_node = end_node
        return self.project_output(torch.cat(node_outputs), gate).to(hidden_states.dtype)[None]

    def _of_job(self, job: Job, rows: torch.Tensor, side_inputs: Parts) -> list[torch.Tensor]:
        """Computes what a job's new nodes read: pending tokens, which are a chain, then the tree's
        nodes.
        """
        layer_memory: Held = job.cache.held[self.layer]
        plan = job.cache.plan
        node_outputs = []
        pending_count = 0
        if not plan.shared:
            layer_memory.clear()
            pending_count = plan.pending
            if pending_count:
                convolved = self._convolve_rows(
                    rows[:pending_count], None, 0, layer_memory.text.window
                )
                steps, reads = self.node_steps(
                    convolved, tuple(part[:pending_count] for part in side_inputs)
                )
                output, state = self.run_chain(layer_memory.text.state, steps, reads)
                layer_memory.ahead = State(
                    slide_window(layer_memory.text.window, rows[:pending_count]), state
                )
                node_outputs.append(output)
        if pending_count < len(rows):
            first_node = max(0, plan.shared - plan.pending)
            parents = tuple(parent - plan.pending for parent in plan.parents[plan.pending :])
            layer_memory.rows = torch.cat([layer_memory.rows[:first_node], rows[pending_count:]])
            tree_parents = None if job.seen is None else parents
            convolved = self._convolve_rows(
                layer_memory.rows, tree_parents, first_node, layer_memory.ahead.window
            )
            new_steps, reads = self.node_steps(
                convolved, tuple(part[pending_count:] for part in side_inputs)
            )
            known_steps = (part[:first_node] for part in layer_memory.steps)
            layer_memory.steps = join_parts(known_steps, new_steps) if first_node else new_steps
            if first_node or tree_parents is not None:
                output, layer_memory.end = (
                    self.run_tree(layer_memory.ahead.state, layer_memory.steps, reads, parents),
                    None,
                )
            else:
                output, layer_memory.end = self.run_chain(
                    layer_memory.ahead.state, layer_memory.steps, reads
                )
            node_outputs.append(output)
        return node_outputs

    def _convolve_rows(
        self,
        rows: torch.Tensor,
        parents: tuple[int, ...] | None,
        first_node: int,
        window: torch.Tensor,
    ) -> torch.Tensor:
        bias = getattr(self.stock, self.convolution).bias
        convolved = convolve_rows(rows, parents, first_node, window, self._weight, bias)
        return self._activate(convolved) if self.activated else convolved

    def _activate(self, convolved: torch.Tensor) -> torch.Tensor:
        activation = getattr(self.stock, "act", None)
        activated: torch.Tensor = F.silu(convolved) if activation is None else activation(convolved)
        return activated

    def memory_after(self, layer_memory: Held, path: Sequence[int]) -> State:
        """The memory after these nodes of the tree, which follow each other."""
        if not path:
            return layer_memory.ahead
        path_nodes = torch.tensor(list(path), device=layer_memory.rows.device)
        state = layer_memory.end
        if state is None or len(path) < len(layer_memory.rows):
            state = self.advance_state(
                layer_memory.ahead.state, tuple(part[path_nodes] for part in layer_memory.steps)
            )
        return State(slide_window(layer_memory.ahead.window, layer_memory.rows[path_nodes]), state)


def tensor_bytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor."""
    return tensor.numel() * tensor.element_size()


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The number format that states are kept in."""
    return torch.promote_types(dtype, torch.float32)


def join_parts(first_parts: Any, second_parts: Parts) -> Parts:
    return tuple(
        torch.cat([first_part, second_part])
        for first_part, second_part in zip(first_parts, second_parts, strict=True)
    )


def split_blocks(rows: Parts, block_size: int) -> list[Parts]:
    """Splits rows into blocks of `block_size`."""
    row_count = len(rows[0])
    return [
        tuple(part[first_row : first_row + block_size] for part in rows)
        for first_row in range(0, row_count, block_size)
    ]


class StateSpaceDual(Mixer):
    """A layer with one decay a head and token."""

    def refusal_reason(self) -> str | None:
        shortest, longest = self.stock.time_step_limit
        if shortest > 0 or longest < float("inf"):
            return (
                "the same time steps in a prompt and after it, and transformers keeps those of its "
                f"prompts alone between {shortest} and {longest}"
            )
        return None

    def state_shape(self) -> tuple[int, ...]:
        stock = self.stock
        return stock.num_heads, stock.head_dim, stock.ssm_state_size

    def project_inputs(
        self, hidden_states: torch.Tensor, forward_inputs: dict[str, Any]
    ) -> tuple[torch.Tensor, Parts, Any]:
        stock = self.stock
        has_multipliers = hasattr(stock, "mup_vector")  # Falcon-H1's
        projected = stock.in_proj(
            hidden_states * stock.ssm_in_multiplier if has_multipliers else hidden_states
        )
        if has_multipliers:
            projected = projected * stock.mup_vector[0]
        sizes = [stock.intermediate_size, stock.conv_dim, stock.num_heads]
        gate, rows, step = projected.split(sizes, -1)
        return rows, (step,), gate

    def node_steps(self, convolved: torch.Tensor, side_inputs: Parts) -> tuple[Parts, Parts]:
        stock = self.stock
        node_count = len(convolved)
        group_width = stock.n_groups * stock.ssm_state_size
        x, b, c = convolved.to(state_dtype(convolved.dtype)).split(
            [stock.intermediate_size, group_width, group_width], -1
        )
        x = x.reshape(node_count, stock.num_heads, stock.head_dim)
        b, c = (part.reshape(node_count, stock.n_groups, stock.ssm_state_size) for part in (b, c))
        step = F.softplus(side_inputs[0] + stock.dt_bias).to(x)
        decays = -stock.A_log.to(x).exp() * step
        return (decays, x * step[..., None], b), (c, x * stock.D.to(x)[:, None])

    def run_chain(
        self, state: torch.Tensor, steps: Parts, reads: Parts
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if len(steps[0]) == 1:
            state = advance_dual(state, *steps)
            c, skipped = reads
            return torch.einsum("nhs,hps->nhp", by_head(c, len(state)), state) + skipped, state
        outputs = []
        for block_steps, block_reads in zip(
            split_blocks(steps, BLOCK), split_blocks(reads, BLOCK), strict=True
        ):
            outputs.append(
                self.run_tree(
                    state, block_steps, block_reads, tuple(range(-1, len(block_steps[0]) - 1))
                )
            )
            state = advance_dual(state, *block_steps)
        return torch.cat(outputs), state

    def run_tree(
        self, state: torch.Tensor, steps: Parts, reads: Parts, parents: tuple[int, ...]
    ) -> torch.Tensor:
        ancestor_mask = ancestors(parents).to(state.device)
        decays, x, b = steps
        read_vectors, skipped = reads
        return dual_outputs(state, decays, x, b, read_vectors, ancestor_mask) + skipped

    def advance_state(self, state: torch.Tensor, steps: Parts) -> torch.Tensor:
        return advance_dual(state, *steps)

    def project_output(self, node_outputs: torch.Tensor, gate: Any) -> torch.Tensor:
        stock = self.stock
        flat_outputs = node_outputs.reshape(1, len(node_outputs), -1)
        if getattr(stock, "mamba_rms_norm", True):
            normed = stock.norm(flat_outputs, gate[None])
        else:
            normed = flat_outputs * F.silu(gate)
        output: torch.Tensor = stock.out_proj(normed.to(gate.dtype))[0]
        return output


class ShortConvolution(Mixer):
    """A layer with no state beside the convolution's window."""

    convolution = "conv"
    activated = False

    def state_shape(self) -> tuple[int, ...]:
        return (0,)

    def project_inputs(
        self, hidden_states: torch.Tensor, forward_inputs: dict[str, Any]
    ) -> tuple[torch.Tensor, Parts, Any]:
        b, c, x = self.stock.in_proj(hidden_states).chunk(3, -1)
        return b * x, (), c

    def node_steps(self, convolved: torch.Tensor, side_inputs: Parts) -> tuple[Parts, Parts]:
        return (), (convolved,)

    def run_chain(
        self, state: torch.Tensor, steps: Parts, reads: Parts
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return reads[0], state

    def run_tree(
        self, state: torch.Tensor, steps: Parts, reads: Parts, parents: tuple[int, ...]
    ) -> torch.Tensor:
        return reads[0]

    def advance_state(self, state: torch.Tensor, steps: Parts) -> torch.Tensor:
        return state

    def project_output(self, node_outputs: torch.Tensor, gate: Any) -> torch.Tensor:
        output: torch.Tensor = self.stock.out_proj(gate * node_outputs)
        return output
