"""The network of Falcon: an LSTM and a layer in which the tokens of a block see each other.

Source: Gao et al., "Falcon: Faster and Parallel Inference of Large Language Models through Enhanced
Semi-Autoregressive Drafting and Custom-Designed Decoding Tree" (arXiv 2412.12639), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from foretell.drafters.heads.networks.base import Best, Drafted, Head, HeadConfig, Nodes, Texts
from foretell.drafters.heads.networks.caches import KnownTokens
from foretell.drafters.heads.networks.eagle import TextAttention
from foretell.drafters.heads.networks.layers import Attend, Layer, Rotation, turn_rows
from foretell.errors import BadConfig

FIRST, LAST = 0.45, 0.1  # share of the wrong tokens that is shown, as training begins and ends
DROPOUT = 0.1  # between the layers of the LSTM


class Memory(nn.Module):
    """A layer of an LSTM, which gives its state at every row."""

    def __init__(self, inputs: int, hidden: int):
        super().__init__()
        self.taken = nn.Linear(inputs, 4 * hidden)
        self.kept = nn.Linear(hidden, 4 * hidden)
        for weight in self.parameters():
            nn.init.uniform_(weight, -(hidden**-0.5), hidden**-0.5)

    def forward(
        self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x (m, r, inputs), h and c (m, E) before the first row -> both (m, r, E) after each."""
        hidden_states, cell_states = [], []
        for row in self.taken(x).unbind(1):
            input_gate, forget_gate, candidate, output_gate = (row + self.kept(h)).chunk(4, -1)
            c = forget_gate.sigmoid() * c + input_gate.sigmoid() * candidate.tanh()
            h = output_gate.sigmoid() * c.tanh()
            hidden_states.append(h)
            cell_states.append(c)
        return torch.stack(hidden_states, 1), torch.stack(cell_states, 1)


class Falcon(Head):
    """z = [token; state] through two layers of an LSTM and a decoder layer, `block` tokens a pass.

    A row sees all rows up to the end of its block, and what leaves the layer is the target's state
    `block` - 1 tokens after its own. So the last rows of a text give the states of as many tokens
    as a block has, the first of which is the text's last, and these are the next block's. As keys
    and values depend on the LSTM alone, which sees no later row, any row may end a block, and what
    a cache keeps is the same for all blocks. Raises BadConfig.

    What a node hands on: the states of its block, then the LSTM's state after it.
    """

    kind = "falcon"
    options: ClassVar[dict[str, Any]] = {"block": 2}  # tokens of a pass
    trained = ("block",)
    cache = KnownTokens
    by_depth = True
    remembers = True
    laws = 2
    decay = 1.0
    regression = 1.0
    agreement = 0.1
    noise = 0.2
    reads_normed = True

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        shape, size = config.target.layer_shape(), self.option("block")
        if type(size) is not int or not 1 <= size <= 8:
            raise BadConfig.field("falcon:block", size, "between 1 and 8")
        self.size = self.depths = size
        self.reach = size - 1
        self.hidden = shape.hidden
        self.before = max(0, size - 2)  # rows of the LSTM, beside the last, that are handed on
        self.rotation = Rotation(shape.width, shape.theta)
        self.lower = Memory(2 * shape.hidden, shape.hidden)
        self.upper = Memory(shape.hidden, shape.hidden)
        self.layer = Layer(shape, normed=False)

    @property
    def taps(self) -> tuple[int, ...]:
        """The last state, as many times over as nodes hand on states and parts of the LSTM's."""
        return (self.config.target.layers,) * (self.size + 4 + self.before)

    def remember_steps(
        self, left_memory: torch.Tensor, embedded: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows that follow one another: the last rows of each (m, r, block, E), its own at the end,
        and what is left behind each (m, r, W).

        left_memory (m, W): what is left before the first; embedded, states (m, r, E).
        """
        h1, c1, h2, c2, *earlier_rows = left_memory.split(self.hidden, -1)
        lower_states, lower_cells = self.lower(torch.cat([embedded, states], -1), h1, c1)
        upper_states, upper_cells = self.upper(
            F.dropout(lower_states, DROPOUT, self.training), h2, c2
        )
        row_line = torch.cat(
            [torch.stack([*earlier_rows, h2], 1).to(upper_states), upper_states], 1
        )
        rows = row_line.unfold(1, self.size, 1)[:, -upper_states.shape[1] :].transpose(-1, -2)
        return rows, torch.cat(
            [lower_states, lower_cells, upper_states, upper_cells, rows[:, :, 1:-1].flatten(2)], -1
        )

    def run_layer(
        self,
        rows: torch.Tensor,
        new_rows: torch.Tensor,
        positions: torch.Tensor,
        new_positions: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """The states (..., n, block, E) of blocks that end at `positions` (n,).

        rows (..., n, block, E) of these blocks; new_rows (..., m, E): the rows at `new_positions`
        (m,) whose keys and values are not there yet.
        """
        attention = self.layer.self_attn
        head_shape = (attention.shape.kv_heads, -1, attention.shape.width)
        k, v = (
            part(new_rows).unflatten(-1, head_shape[::2])
            for part in (attention.k_proj, attention.v_proj)
        )
        k, v = (part.transpose(-3, -2) for part in (k, v))
        # (..., block, H, n, D): every row of a block is turned by its own position.
        q = (
            attention.q_proj(rows)
            .unflatten(-1, (-1, head_shape[2]))
            .transpose(-4, -2)
            .transpose(-4, -3)
        )
        offsets = torch.arange(1 - self.size, 1, device=positions.device)
        q = turn_rows(q, *self.rotation(positions + offsets[:, None]))
        # A block's queries are more heads for the same keys.
        q = q.unflatten(-3, head_shape[:2]).transpose(-5, -4).flatten(-5, -3)
        attended = attend(q, turn_rows(k, *self.rotation(new_positions)), v)
        attended = (
            attended.unflatten(-2, (head_shape[0], self.size, -1)).transpose(-4, -3).flatten(-3)
        )
        h = rows + attention.o_proj(attended)
        out: torch.Tensor = h + self.layer.mlp(self.layer.post_attention_layernorm(h))
        return out

    # --- in training

    def block_ends(self, texts: Texts) -> torch.Tensor:
        """(a,) the places where blocks end: in training of blocks side by side, else all."""
        places = torch.arange(texts.ids.shape[1], device=texts.ids.device)
        if not self.training:
            return places
        return places[int(texts.ids.sum()) % self.size :: self.size]

    @torch.no_grad()
    def glance(
        self, texts: Texts, answers: torch.Tensor, likeliest: Best, progress: float
    ) -> torch.Tensor | None:
        """Coupled sequential glancing: of some blocks the first row, or the first ones, are shown
        the state and the token that they should find; the more, the more tokens were wrong.
        """
        if self.size == 1:
            return None
        answers = answers.to(texts.ids.device)
        wrong_count = 0
        for drafted in self.unroll_depths(texts, self.size):
            assert drafted.anchors is not None
            learnt_rows = texts.shift_left(answers, drafted.depth + 1) & drafted.anchors
            true_states = texts.shift_left(texts.finals, drafted.depth)
            wrong_count += int(
                (
                    likeliest(drafted.states[learnt_rows]) != likeliest(true_states[learnt_rows])
                ).sum()
            )
            if not drafted.depth:
                blocks = texts.shift_left(learnt_rows, self.size - 1).nonzero()
        shown_share = LAST + (FIRST - LAST) * (1 - progress)
        generator = torch.Generator().manual_seed(int(texts.ids.sum()) + int(1e6 * progress))
        block_count = int(shown_share * wrong_count) // (self.size if self.size > 2 else 1)
        chosen_blocks = blocks[
            torch.randperm(len(blocks), generator=generator)[:block_count].to(blocks.device)
        ]
        is_shown = torch.zeros_like(answers)
        for row, row_index in chosen_blocks.tolist():
            further_rows = int(torch.randint(self.size - 1, (), generator=generator))
            is_shown[row, row_index : row_index + further_rows + 1] = True
        return is_shown

    def unroll_depths(self, texts: Texts, depths: int) -> Iterator[Drafted]:
        """Drafts of blocks side by side in training; else of a block at every place."""
        embedded, states = texts.embedded, texts.features[..., : self.hidden]
        if texts.shown is not None:
            is_shown = texts.shown[..., None]
            embedded = torch.where(is_shown, texts.shift_left(embedded, self.size), embedded)
            states = torch.where(is_shown, texts.shift_left(texts.finals, self.size - 1), states)
        ends = self.block_ends(texts)
        is_end = torch.zeros(texts.ids.shape[1], dtype=torch.bool, device=ends.device)
        is_end[ends] = True
        attend = TextAttention(ends)
        empty_memory = states.new_zeros(len(states), (4 + self.before) * self.hidden)
        block_rows, left_memory = self.remember_steps(empty_memory, embedded, states)
        row_positions = torch.arange(len(is_end), device=ends.device)
        block_states = self.run_layer(
            block_rows[:, ends], block_rows[..., -1, :], ends, row_positions, attend
        )
        left_memory = left_memory[:, ends]
        for depth in range(depths):
            slot = depth % self.size
            if depth and not slot:
                block_states, left_memory = self.go_on(
                    texts, block_states, left_memory, ends, depth - self.size, attend
                )
            drafted = block_states.new_zeros(*texts.ids.shape, self.hidden)
            drafted = drafted.index_copy(1, ends, block_states[:, :, slot])
            yield Drafted(depth, drafted, drafted, is_end if self.training else None)

    def go_on(
        self,
        texts: Texts,
        states: torch.Tensor,
        left_memory: torch.Tensor,
        ends: torch.Tensor,
        depth: int,
        attend: Attend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The block below one whose states (B, a, block, E) are those of `depth` on, and what is
        left (B, a, W) after it.
        """
        batch_shape = left_memory.shape[:2]
        for slot in range(self.size):
            tokens = texts.shift_left(texts.embedded, depth + slot + 1)[:, ends, None]
            block_rows, left_memory = self.remember_steps(
                left_memory.flatten(0, 1),
                tokens.flatten(0, 1),
                states[:, :, slot, None].flatten(0, 1),
            )
            block_rows, left_memory = (
                block_rows[:, 0].unflatten(0, batch_shape),
                left_memory[:, 0].unflatten(0, batch_shape),
            )
            end_positions = ends + depth + slot + 1
            block_states = self.run_layer(
                block_rows, block_rows[..., -1, :], end_positions, end_positions, attend
            )
        return block_states, left_memory

    # --- in drafting

    def step(self, nodes: Nodes, attend: Attend) -> tuple[torch.Tensor, torch.Tensor]:
        """States (n, block, E) that begin at each node's own, and (n, F)."""
        assert nodes.depths is not None
        states = nodes.features.unflatten(-1, (-1, self.hidden))
        known_memory = nodes.features[:, self.size * self.hidden :]
        block_rows = states[:, : self.size].clone()
        left_memory = known_memory.clone()
        for run, handed_on in nodes.runs:
            first_memory = handed_on[None, self.size * self.hidden :]
            block_memory = self.remember_steps(
                first_memory, nodes.embedded[None, run], states[None, run, 0]
            )
            block_rows[run], left_memory[run] = (part[0].to(block_rows) for part in block_memory)
        for slot in range(self.size):
            at_slot = (nodes.depths > 0) & ((nodes.depths - 1) % self.size == slot)
            if at_slot.any():
                # The tokens of its block up to its own, with the states that were handed on.
                tokens = nodes.embedded[at_slot, None]
                if slot:
                    assert nodes.earlier is not None
                    tokens = torch.cat([nodes.earlier[at_slot, :slot].flip(1), tokens], 1)
                block_memory = self.remember_steps(
                    known_memory[at_slot], tokens, states[at_slot, : slot + 1]
                )
                block_rows[at_slot], left_memory[at_slot] = (
                    part[:, -1].to(block_rows) for part in block_memory
                )
        out = self.run_layer(
            block_rows, block_rows[:, -1], nodes.positions, nodes.positions, attend
        )
        return out, torch.cat([out.flatten(1), left_memory], -1)
