"""The networks of EAGLE-1 and EAGLE-3: one decoder layer over the token and the state before it.

Sources: Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty"
(arXiv 2401.15077), section 4; "EAGLE-3: Scaling up Inference Acceleration of Large Language Models
via Training-Time Test" (arXiv 2503.01840), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from foretell.drafters.heads.networks.base import Drafted, Head, HeadConfig, Nodes, Texts
from foretell.drafters.heads.networks.layers import Attend, Layer, Norm, Rotation, as_float32
from foretell.drafters.heads.networks.taking import take_layer, take_norm

LITTLE = 0.2  # what random weights are multiplied with beside weights of the target


class TextAttention:
    """Attention of whole texts, step after step, as it will be when the head drafts.

    At the first step a row sees the rows of its text up to itself. At the later ones, which stand
    for drafted nodes, it sees what it saw then, and of the later steps its own rows alone
    (EAGLE-3's training-time test). q (B, H, n, D), k and v (B, KV, n, D) -> (B, n, H, D).

    `ends` (a,): the rows that ask, if not all do; q then has these alone, and so have k and v after
    the first step. `row_pair` is as in `Attend`.
    """

    def __init__(self, ends: torch.Tensor | None = None) -> None:
        self.ends = ends
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        row_pair: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        group_size = q.shape[1] // k.shape[1]
        # Lists are made anew, so that a step that is computed again finds its own.
        self.keys = [*self.keys, k]
        self.values = [*self.values, v]
        first_key, first_value = self.keys[0], self.values[0]
        row_count = first_key.shape[2]
        row_numbers = torch.arange(row_count, device=q.device)
        ends = row_numbers if self.ends is None else self.ends
        if len(self.keys) == 1 and row_pair is None:
            asks_some = self.ends is not None
            attended = F.scaled_dot_product_attention(
                q,
                first_key,
                first_value,
                attn_mask=row_numbers <= ends[:, None] if asks_some else None,
                is_causal=not asks_some,
                enable_gqa=True,
            )
            return attended.transpose(1, 2)
        scale = q.shape[-1] ** -0.5
        later_pairs = [
            *zip(self.keys[1:], self.values[1:], strict=True),
            *([row_pair] if row_pair else []),
        ]
        grouped_queries = q.unflatten(1, (-1, group_size))  # (B, KV, times, n, D)
        scores = torch.einsum("bghnd,bgmd->bghnm", grouped_queries, first_key) * scale
        scores = as_float32(scores).masked_fill(row_numbers > ends[:, None], -torch.inf)
        later_scores = [
            as_float32((grouped_queries * key.unsqueeze(2)).sum(-1, keepdim=True)) * scale
            for key, _ in later_pairs
        ]
        weights = torch.cat([scores, *later_scores], -1).softmax(-1).to(v.dtype)
        attended = torch.einsum("bghnm,bgmd->bghnd", weights[..., :row_count], first_value)
        for step, (_, value) in enumerate(later_pairs):
            attended = attended + weights[..., row_count + step, None] * value.unsqueeze(2)
        return attended.flatten(1, 2).transpose(1, 2)


class OneLayer(Head):
    """A head of one decoder layer over tokens and states.

    `enter` makes of both what enters the layer; a layer with a `token_norm` reads the tokens beside
    that. What leaves it goes through `norm`, where there is one, to the output matrix.
    """

    layer: Layer
    enter: nn.Linear | None  # reads [token; state]
    token_norm: Norm | None  # of the token, in `enter` or beside the stream
    state_norm: Norm | None  # of the state, likewise
    norm: Norm | None
    hands_on_normed = False  # whether nodes below are given what leaves the norm
    stream_normed = False  # whether the stream begins with the normed state, in place of the state
    by_library = True  # whether it has these parts alone, which the C library computes

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        shape = self.shape
        self.rotation: nn.Module = Rotation(shape.width, shape.theta)
        self.enter = self.token_norm = self.state_norm = self.norm = None

    @torch.no_grad()
    def take_weights(self, target: Any) -> None:
        """The last norm, by which the output matrix is scaled."""
        if self.norm is not None:
            take_norm(self.norm, target.loop.norm)

    def exact_states(self, features: torch.Tensor) -> torch.Tensor:
        """The state (..., E) that the target's own (..., F) stand for."""
        return features

    def enter_layer(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Rows (..., E) that enter the layer."""
        if self.enter is None:
            return self.normed_state(states) if self.stream_normed else states
        if self.token_norm is not None:
            embedded = self.token_norm(embedded)
        if self.state_norm is not None:
            states = self.state_norm(states)
        out: torch.Tensor = self.enter(torch.cat([embedded, states], -1))
        return out

    def normed_state(self, states: torch.Tensor) -> torch.Tensor:
        assert self.state_norm is not None
        out: torch.Tensor = self.state_norm(states)
        return out

    def run_layer(
        self, embedded: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Rows (..., E) that leave the layer, for embeddings and states (..., E)."""
        h = self.enter_layer(embedded, states)
        attended = None
        if self.enter is None:
            assert self.token_norm is not None
            state = h if self.stream_normed else self.normed_state(h)
            attended = torch.cat([self.token_norm(embedded), state], -1)
        out: torch.Tensor = self.layer(h, self.rotation(positions), attend, attended)
        return out

    def leave_layer(self, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows that the output matrix reads, and states that nodes below read."""
        normed_states = out if self.norm is None else self.norm(out)
        return normed_states, normed_states if self.hands_on_normed else out

    def unroll_depths(self, texts: Texts, depths: int) -> Iterator[Drafted]:
        states = self.exact_states(texts.features)
        attend = TextAttention()
        positions = torch.arange(texts.ids.shape[1], device=texts.ids.device)
        for depth in range(depths):
            embedded = texts.shift_left(texts.embedded, depth)
            out = self.run_layer(embedded, states, positions + depth, attend)
            output_states, states = self.leave_layer(out)
            yield Drafted(depth, output_states, states if self.regression else None)

    def node_states(self, nodes: Nodes) -> torch.Tensor:
        """(n, E): the target's, or those of drafted nodes."""
        width = nodes.embedded.shape[1]
        given_states = nodes.features[:, :width]
        if bool(nodes.drafted.all()):
            return given_states
        return torch.where(nodes.drafted[:, None], given_states, self.exact_states(nodes.features))

    def step(self, nodes: Nodes, attend: Attend) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.run_layer(nodes.embedded, self.node_states(nodes), nodes.positions, attend)
        output_states, state = self.leave_layer(out)
        return output_states, F.pad(state, (0, nodes.features.shape[1] - state.shape[1]))


class Eagle(OneLayer):
    """EAGLE-1: z = fc([token; state]), one layer, which gives the next state.

    What it reads is the target's normed last state. Its layer has no norm in front, and nothing is
    normed before the output matrix: its states stand for the target's.
    """

    kind = "eagle"
    options: ClassVar[dict[str, Any]] = {
        "layer": {},  # fields of its layer that are not the target's
        "bias": True,  # of fc
    }
    depths = 1
    regression = 1.0
    agreement = 0.1
    noise = 0.2
    reads_normed = True

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        shape = self.shape
        self.enter = nn.Linear(2 * shape.hidden, shape.hidden, bool(self.option("bias")))
        self.layer = Layer(shape, normed=False)

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.config.target.layers,)


class Eagle3(OneLayer):
    """EAGLE-3: three taps through fc, one layer that reads token and state beside each other.

    Below the root the head's own states take the place of fc's.
    """

    kind = "eagle3"
    depths = 7
    options: ClassVar[dict[str, Any]] = {
        "taps": (),  # (): what enters layers 2, L / 2 and L - 3
        "layer": {},  # fields of its layer that are not the target's
        "own_matrix": 0,  # rows of an output matrix of its own; 0: the target's
        "stream_normed": False,  # whether its stream begins with the normed state
        "hands_on_normed": False,  # whether nodes below are given the state after the last norm
        "last_norm": True,  # whether a norm stands before the output matrix
        "tap_norms": "",  # "each": a norm for each tap before fc, "all": one for all; "": none
    }

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        shape = self.shape
        tap_count, norm_kind, matrix_rows = (
            len(self.taps),
            self.option("tap_norms"),
            self.own_rows(),
        )
        self.fc = nn.Linear(tap_count * shape.hidden, shape.hidden, bias=False)
        norm_widths = {"each": [shape.hidden] * tap_count, "all": [tap_count * shape.hidden]}.get(
            norm_kind, []
        )
        self.tap_norms = nn.ModuleList([Norm(width, shape.eps) for width in norm_widths])
        self.token_norm = Norm(shape.hidden, shape.eps)
        self.state_norm = Norm(shape.hidden, shape.eps)
        self.layer = Layer(shape, inputs=2 * shape.hidden)
        self.norm = Norm(shape.hidden, shape.eps) if self.option("last_norm") else None
        self.hands_on_normed = bool(self.option("hands_on_normed"))
        self.stream_normed = bool(self.option("stream_normed"))
        if matrix_rows:
            self.matrix = nn.Linear(shape.hidden, matrix_rows, bias=False)

    @torch.no_grad()
    def take_weights(self, target: Any) -> None:
        """The target's last layer over the highest tap, with little of the tokens."""
        super().take_weights(target)
        last_layer, width = target.loop.layers[-1], self.config.target.hidden
        take_layer(self.layer, last_layer, LITTLE)
        first_norm = getattr(last_layer, "input_layernorm", None)
        if self.state_norm is not None and first_norm is not None:
            take_norm(self.state_norm, first_norm)
        self.fc.weight *= LITTLE
        self.fc.weight[:, 2 * width :] += torch.eye(width).to(self.fc.weight)

    @property
    def taps(self) -> tuple[int, ...]:
        layers = self.config.target.layers
        # A target of one or two layers has no layer 2 or L - 3: the nearest that it has.
        return self.chosen_taps() or (min(2, layers), layers // 2, max(layers - 3, 0))

    def exact_states(self, features: torch.Tensor) -> torch.Tensor:
        if self.tap_norms:
            tap_parts = features.chunk(len(self.tap_norms), -1)
            norm_pairs = zip(self.tap_norms, tap_parts, strict=True)
            features = torch.cat([tap_norm(tap_part) for tap_norm, tap_part in norm_pairs], -1)
        out: torch.Tensor = self.fc(features)
        return out
