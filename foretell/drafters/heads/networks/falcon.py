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
from foretell.drafters.heads.networks.layers import Attend, Layer, Rotation, turned
from foretell.errors import BadConfig

FIRST, LAST = 0.45, 0.1  # share of the wrong tokens that is shown, as training begins and ends
DROPOUT = 0.1  # between the layers of the LSTM


class Memory(nn.Module):
    """One layer of an LSTM, which gives its state at every row."""

    def __init__(self, inputs: int, hidden: int):
        super().__init__()
        self.taken = nn.Linear(inputs, 4 * hidden)
        self.kept = nn.Linear(hidden, 4 * hidden)
        for weight in self.parameters():
            nn.init.uniform_(weight, -(hidden**-0.5), hidden**-0.5)

    def forward(
        self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x (m, r, inputs), h and c (m, E) before the first row -> both (m, r, E) behind each."""
        hidden, cells = [], []
        for row in self.taken(x).unbind(1):
            enter, forget, new, leave = (row + self.kept(h)).chunk(4, -1)
            c = forget.sigmoid() * c + enter.sigmoid() * new.tanh()
            h = leave.sigmoid() * c.tanh()
            hidden.append(h)
            cells.append(c)
        return torch.stack(hidden, 1), torch.stack(cells, 1)


class Falcon(Head):
    """z = [token; state] through two layers of an LSTM and a decoder layer, `block` tokens a pass.

    A row sees all rows up to the end of its block, and what leaves the layer is the target's state
    `block` - 1 tokens behind its own. So the last rows of a text give the states of as many tokens
    as a block has, the first of which is the text's last, and these are the next block's. As keys
    and values depend on the LSTM alone, which sees no later row, any row may end a block, and what
    a cache keeps is the same for all blocks. Raises BadConfig.

    What a node hands on: the states of its block, then the LSTM's state behind it.
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
        shape, size = config.target.layer(), self.option("block")
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
        """One state, as many times over as nodes hand on states and parts of the LSTM's."""
        return (self.config.target.layers,) * (self.size + 4 + self.before)

    def remember(
        self, left: torch.Tensor, embedded: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows that follow one another: the last rows of each (m, r, block, E), its own at the end,
        and what is left behind each (m, r, W).

        left (m, W): what is left before the first; embedded, states (m, r, E).
        """
        h1, c1, h2, c2, *before = left.split(self.hidden, -1)
        low, low_c = self.lower(torch.cat([embedded, states], -1), h1, c1)
        high, high_c = self.upper(F.dropout(low, DROPOUT, self.training), h2, c2)
        line = torch.cat([torch.stack([*before, h2], 1).to(high), high], 1)
        rows = line.unfold(1, self.size, 1)[:, -high.shape[1] :].transpose(-1, -2)
        return rows, torch.cat([low, low_c, high, high_c, rows[:, :, 1:-1].flatten(2)], -1)

    def through(
        self,
        rows: torch.Tensor,
        new: torch.Tensor,
        positions: torch.Tensor,
        places: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """The states (..., n, block, E) of blocks that end at `positions` (n,).

        rows (..., n, block, E) of these blocks; new (..., m, E): the rows at `places` (m,) whose
        keys and values are not there yet.
        """
        attention = self.layer.self_attn
        heads = (attention.shape.kv_heads, -1, attention.shape.width)
        k, v = (
            part(new).unflatten(-1, heads[::2]) for part in (attention.k_proj, attention.v_proj)
        )
        k, v = (part.transpose(-3, -2) for part in (k, v))
        # (..., block, H, n, D): every row of a block is turned by its own position.
        q = attention.q_proj(rows).unflatten(-1, (-1, heads[2])).transpose(-4, -2).transpose(-4, -3)
        back = torch.arange(1 - self.size, 1, device=positions.device)
        q = turned(q, *self.rotation(positions + back[:, None]))
        # A block's queries are more heads for the same keys.
        q = q.unflatten(-3, heads[:2]).transpose(-5, -4).flatten(-5, -3)
        mixed = attend(q, turned(k, *self.rotation(places)), v)
        mixed = mixed.unflatten(-2, (heads[0], self.size, -1)).transpose(-4, -3).flatten(-3)
        h = rows + attention.o_proj(mixed)
        out: torch.Tensor = h + self.layer.mlp(self.layer.post_attention_layernorm(h))
        return out

    # --- in training

    def ends(self, texts: Texts) -> torch.Tensor:
        """(a,) the places where blocks end: in training of blocks side by side, else all."""
        places = torch.arange(texts.ids.shape[1], device=texts.ids.device)
        if not self.training:
            return places
        return places[int(texts.ids.sum()) % self.size :: self.size]

    @torch.no_grad()
    def glance(
        self, texts: Texts, answers: torch.Tensor, best: Best, progress: float
    ) -> torch.Tensor | None:
        """Coupled sequential glancing: of some blocks the first row, or the first ones, are shown
        the state and the token that they should find; the more, the more tokens were wrong.
        """
        if self.size == 1:
            return None
        answers = answers.to(texts.ids.device)
        wrong = 0
        for drafted in self.unroll(texts, self.size):
            assert drafted.anchors is not None
            learnt = texts.shifted(answers, drafted.depth + 1) & drafted.anchors
            truth = texts.shifted(texts.finals, drafted.depth)
            wrong += int((best(drafted.states[learnt]) != best(truth[learnt])).sum())
            if not drafted.depth:
                blocks = texts.shifted(learnt, self.size - 1).nonzero()
        share = LAST + (FIRST - LAST) * (1 - progress)
        draw = torch.Generator().manual_seed(int(texts.ids.sum()) + int(1e6 * progress))
        count = int(share * wrong) // (self.size if self.size > 2 else 1)
        chosen = blocks[torch.randperm(len(blocks), generator=draw)[:count].to(blocks.device)]
        shown = torch.zeros_like(answers)
        for row, place in chosen.tolist():
            further = int(torch.randint(self.size - 1, (), generator=draw))
            shown[row, place : place + further + 1] = True
        return shown

    def unroll(self, texts: Texts, depths: int) -> Iterator[Drafted]:
        """In training of blocks side by side; else of every place."""
        embedded, states = texts.embedded, texts.features[..., : self.hidden]
        if texts.shown is not None:
            shown = texts.shown[..., None]
            embedded = torch.where(shown, texts.shifted(embedded, self.size), embedded)
            states = torch.where(shown, texts.shifted(texts.finals, self.size - 1), states)
        ends = self.ends(texts)
        chosen = torch.zeros(texts.ids.shape[1], dtype=torch.bool, device=ends.device)
        chosen[ends] = True
        attend = TextAttention(ends)
        nothing = states.new_zeros(len(states), (4 + self.before) * self.hidden)
        rows, left = self.remember(nothing, embedded, states)
        places = torch.arange(len(chosen), device=ends.device)
        found = self.through(rows[:, ends], rows[..., -1, :], ends, places, attend)
        left = left[:, ends]
        for depth in range(depths):
            slot = depth % self.size
            if depth and not slot:
                found, left = self.go_on(texts, found, left, ends, depth - self.size, attend)
            drafted = found.new_zeros(*texts.ids.shape, self.hidden)
            drafted = drafted.index_copy(1, ends, found[:, :, slot])
            yield Drafted(depth, drafted, drafted, chosen if self.training else None)

    def go_on(
        self,
        texts: Texts,
        states: torch.Tensor,
        left: torch.Tensor,
        ends: torch.Tensor,
        depth: int,
        attend: Attend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The block below one whose states (B, a, block, E) are those of `depth` on, and what is
        left (B, a, W) behind it.
        """
        size = left.shape[:2]
        for slot in range(self.size):
            tokens = texts.shifted(texts.embedded, depth + slot + 1)[:, ends, None]
            rows, left = self.remember(
                left.flatten(0, 1), tokens.flatten(0, 1), states[:, :, slot, None].flatten(0, 1)
            )
            rows, left = rows[:, 0].unflatten(0, size), left[:, 0].unflatten(0, size)
            places = ends + depth + slot + 1
            found = self.through(rows, rows[..., -1, :], places, places, attend)
        return found, left

    # --- in drafting

    def step(self, nodes: Nodes, attend: Attend) -> tuple[torch.Tensor, torch.Tensor]:
        """States (n, block, E) that begin at each node's own, and (n, F)."""
        assert nodes.depths is not None
        states = nodes.features.unflatten(-1, (-1, self.hidden))
        known = nodes.features[:, self.size * self.hidden :]
        rows = states[:, : self.size].clone()
        left = known.clone()
        for run, before in nodes.runs:
            start = before[None, self.size * self.hidden :]
            made = self.remember(start, nodes.embedded[None, run], states[None, run, 0])
            rows[run], left[run] = (part[0].to(rows) for part in made)
        for slot in range(self.size):
            here = (nodes.depths > 0) & ((nodes.depths - 1) % self.size == slot)
            if here.any():
                # The tokens of its block up to its own, with the states that were handed on.
                tokens = nodes.embedded[here, None]
                if slot:
                    assert nodes.earlier is not None
                    tokens = torch.cat([nodes.earlier[here, :slot].flip(1), tokens], 1)
                made = self.remember(known[here], tokens, states[here, : slot + 1])
                rows[here], left[here] = (part[:, -1].to(rows) for part in made)
        out = self.through(rows, rows[:, -1], nodes.positions, nodes.positions, attend)
        return out, torch.cat([out.flatten(1), left], -1)
