"""Recurrent layers of transformers, computed on the packed row of a forward: one class a kind.

    StateSpaceDual     Mamba-2 and its relatives: chains and trees by a closed form
    (models/recurrent/scans.py) ShortConvolution   LFM2: a convolution and no state (stepwise.py)
    kinds that go from node to node

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
from foretell.models.recurrent.scans import advance_dual, by_head, convolve, dual_outputs, slide

BLOCK = 64  # tokens of a chain that are computed together

Parts = tuple[torch.Tensor, ...]  # each with a row for every node


@dataclass(frozen=True)
class State:
    """A layer's memory of a text: window (K - 1, C), state of the layer's own shape."""

    window: torch.Tensor
    state: torch.Tensor

    @property
    def bytes(self) -> int:
        return size(self.window) + size(self.state)


@dataclass
class Held:
    """What a cache holds of one layer.

    `text`: behind the committed tokens; `ahead`: behind the last forward's pending tokens as well,
    where its tree hangs. Of the tree's nodes `rows` (N, C), what the convolution read of them, and
    `steps`, what each does to the state; `end`, the state behind all of them if it is known.
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

    def refusal(self) -> str | None:
        """Why this layer cannot be computed right, as what it lacks; None: it can."""
        return None

    def state_shape(self) -> tuple[int, ...]:
        """Of the state of one text."""
        raise NotImplementedError

    def project(self, h: torch.Tensor, given: dict[str, Any]) -> tuple[torch.Tensor, Parts, Any]:
        """h (T, E) -> what is convolved (T, C), what else a step needs, the gate of the output."""
        raise NotImplementedError

    def steps(self, mixed: torch.Tensor, side: Parts) -> tuple[Parts, Parts]:
        """What nodes do to the state and how they read it, of `mixed` (n, C) and `side`."""
        raise NotImplementedError

    def chain(
        self, state: torch.Tensor, steps: Parts, reads: Parts
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the nodes of a chain read, (n, ...), and the state behind them."""
        raise NotImplementedError

    def tree(
        self, state: torch.Tensor, steps: Parts, reads: Parts, parents: tuple[int, ...]
    ) -> torch.Tensor:
        """What the last nodes of a tree read; `steps` of all nodes, `reads` of those n."""
        raise NotImplementedError

    def advance(self, state: torch.Tensor, steps: Parts) -> torch.Tensor:
        """The state behind a chain of these steps."""
        raise NotImplementedError

    def output(self, read: torch.Tensor, gate: Any) -> torch.Tensor:
        """(T, E) of what all nodes read."""
        raise NotImplementedError

    # --- the rest is common

    def start(self, dtype: torch.dtype, device: torch.device) -> State:
        """Before the first token."""
        channels, taps = self._weight.shape
        window = torch.zeros(taps - 1, channels, dtype=dtype, device=device)
        return State(window, torch.zeros(self.state_shape(), dtype=wide(dtype), device=device))

    @property
    def _weight(self) -> torch.Tensor:
        """(C, K)."""
        weight: torch.Tensor = getattr(self.stock, self.convolution).weight
        return weight.squeeze(1)

    def forward(self, hidden_states: torch.Tensor, *_: Any, **given: Any) -> Any:
        """(1, T, E) -> (1, T, E), of all jobs of the running step."""
        rows, side, gate = self.project(hidden_states[0], given)
        read = []
        start = 0
        for job in STEP.get():
            end = start + len(job.tokens)
            read += self._of_job(job, rows[start:end], tuple(part[start:end] for part in side))
            start = end
        return self.output(torch.cat(read), gate).to(hidden_states.dtype)[None]

    def _of_job(self, job: Job, rows: torch.Tensor, side: Parts) -> list[torch.Tensor]:
        """What a job's new nodes read: pending tokens, which are a chain, then the tree's nodes."""
        held: Held = job.cache.held[self.layer]
        plan = job.cache.plan
        read = []
        fresh = 0
        if not plan.shared:
            held.clear()
            fresh = plan.pending
            if fresh:
                mixed = self._convolve(rows[:fresh], None, 0, held.text.window)
                steps, reads = self.steps(mixed, tuple(part[:fresh] for part in side))
                out, state = self.chain(held.text.state, steps, reads)
                held.ahead = State(slide(held.text.window, rows[:fresh]), state)
                read.append(out)
        if fresh < len(rows):
            first = max(0, plan.shared - plan.pending)
            parents = tuple(parent - plan.pending for parent in plan.parents[plan.pending :])
            held.rows = torch.cat([held.rows[:first], rows[fresh:]])
            shape = None if job.seen is None else parents
            mixed = self._convolve(held.rows, shape, first, held.ahead.window)
            new, reads = self.steps(mixed, tuple(part[fresh:] for part in side))
            known = (part[:first] for part in held.steps)
            held.steps = joined(known, new) if first else new
            if first or shape is not None:
                out, held.end = self.tree(held.ahead.state, held.steps, reads, parents), None
            else:
                out, held.end = self.chain(held.ahead.state, held.steps, reads)
            read.append(out)
        return read

    def _convolve(
        self,
        rows: torch.Tensor,
        parents: tuple[int, ...] | None,
        first: int,
        window: torch.Tensor,
    ) -> torch.Tensor:
        bias = getattr(self.stock, self.convolution).bias
        out = convolve(rows, parents, first, window, self._weight, bias)
        return self._act(out) if self.activated else out

    def _act(self, mixed: torch.Tensor) -> torch.Tensor:
        act = getattr(self.stock, "act", None)
        out: torch.Tensor = F.silu(mixed) if act is None else act(mixed)
        return out

    def after(self, held: Held, path: Sequence[int]) -> State:
        """The memory behind these nodes of the tree, which follow each other."""
        if not path:
            return held.ahead
        chosen = torch.tensor(list(path), device=held.rows.device)
        state = held.end
        if state is None or len(path) < len(held.rows):
            state = self.advance(held.ahead.state, tuple(part[chosen] for part in held.steps))
        return State(slide(held.ahead.window, held.rows[chosen]), state)


def size(part: torch.Tensor) -> int:
    """Its bytes."""
    return part.numel() * part.element_size()


def wide(dtype: torch.dtype) -> torch.dtype:
    """What states are kept in."""
    return torch.promote_types(dtype, torch.float32)


def joined(first: Any, second: Parts) -> Parts:
    return tuple(torch.cat([one, other]) for one, other in zip(first, second, strict=True))


def pieces(rows: Parts, size: int) -> list[Parts]:
    """These rows in blocks of `size`."""
    count = len(rows[0])
    return [tuple(part[at : at + size] for part in rows) for at in range(0, count, size)]


class StateSpaceDual(Mixer):
    """One decay a head and token."""

    def refusal(self) -> str | None:
        low, high = self.stock.time_step_limit
        if low > 0 or high < float("inf"):
            return (
                "the same time steps in a prompt and after it, and transformers keeps those of its "
                f"prompts alone between {low} and {high}"
            )
        return None

    def state_shape(self) -> tuple[int, ...]:
        stock = self.stock
        return stock.num_heads, stock.head_dim, stock.ssm_state_size

    def project(self, h: torch.Tensor, given: dict[str, Any]) -> tuple[torch.Tensor, Parts, Any]:
        stock = self.stock
        scaled = hasattr(stock, "mup_vector")  # Falcon-H1's
        projected = stock.in_proj(h * stock.ssm_in_multiplier if scaled else h)
        if scaled:
            projected = projected * stock.mup_vector[0]
        sizes = [stock.intermediate_size, stock.conv_dim, stock.num_heads]
        gate, rows, step = projected.split(sizes, -1)
        return rows, (step,), gate

    def steps(self, mixed: torch.Tensor, side: Parts) -> tuple[Parts, Parts]:
        stock = self.stock
        count = len(mixed)
        shared = stock.n_groups * stock.ssm_state_size
        x, b, c = mixed.to(wide(mixed.dtype)).split([stock.intermediate_size, shared, shared], -1)
        x = x.reshape(count, stock.num_heads, stock.head_dim)
        b, c = (part.reshape(count, stock.n_groups, stock.ssm_state_size) for part in (b, c))
        step = F.softplus(side[0] + stock.dt_bias).to(x)
        decays = -stock.A_log.to(x).exp() * step
        return (decays, x * step[..., None], b), (c, x * stock.D.to(x)[:, None])

    def chain(
        self, state: torch.Tensor, steps: Parts, reads: Parts
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if len(steps[0]) == 1:
            state = advance_dual(state, *steps)
            c, skipped = reads
            return torch.einsum("nhs,hps->nhp", by_head(c, len(state)), state) + skipped, state
        outs = []
        for piece, read in zip(pieces(steps, BLOCK), pieces(reads, BLOCK), strict=True):
            outs.append(self.tree(state, piece, read, tuple(range(-1, len(piece[0]) - 1))))
            state = advance_dual(state, *piece)
        return torch.cat(outs), state

    def tree(
        self, state: torch.Tensor, steps: Parts, reads: Parts, parents: tuple[int, ...]
    ) -> torch.Tensor:
        seen = ancestors(parents).to(state.device)
        decays, x, b = steps
        read, skipped = reads
        return dual_outputs(state, decays, x, b, read, seen) + skipped

    def advance(self, state: torch.Tensor, steps: Parts) -> torch.Tensor:
        return advance_dual(state, *steps)

    def output(self, read: torch.Tensor, gate: Any) -> torch.Tensor:
        stock = self.stock
        flat = read.reshape(1, len(read), -1)
        if getattr(stock, "mamba_rms_norm", True):
            normed = stock.norm(flat, gate[None])
        else:
            normed = flat * F.silu(gate)
        out: torch.Tensor = stock.out_proj(normed.to(gate.dtype))[0]
        return out


class ShortConvolution(Mixer):
    """No state beside the convolution's window."""

    convolution = "conv"
    activated = False

    def state_shape(self) -> tuple[int, ...]:
        return (0,)

    def project(self, h: torch.Tensor, given: dict[str, Any]) -> tuple[torch.Tensor, Parts, Any]:
        b, c, x = self.stock.in_proj(h).chunk(3, -1)
        return b * x, (), c

    def steps(self, mixed: torch.Tensor, side: Parts) -> tuple[Parts, Parts]:
        return (), (mixed,)

    def chain(
        self, state: torch.Tensor, steps: Parts, reads: Parts
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return reads[0], state

    def tree(
        self, state: torch.Tensor, steps: Parts, reads: Parts, parents: tuple[int, ...]
    ) -> torch.Tensor:
        return reads[0]

    def advance(self, state: torch.Tensor, steps: Parts) -> torch.Tensor:
        return state

    def output(self, read: torch.Tensor, gate: Any) -> torch.Tensor:
        out: torch.Tensor = self.stock.out_proj(gate * read)
        return out
