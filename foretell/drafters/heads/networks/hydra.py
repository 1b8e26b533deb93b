"""The network of Hydra: heads that read the drafted tokens beside the target's state.

Source: Ankner et al., "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding" (arXiv
2402.05109), section 3.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from foretell.drafters.heads.networks.base import HeadConfig
from foretell.drafters.heads.networks.eagle import LITTLE
from foretell.drafters.heads.networks.layers import Attend, Layer, LayerShape, Norm
from foretell.drafters.heads.networks.recurrent import Recurrent


class Block(nn.Module):
    """z = direct(c) + silu(gated(c)) for inputs c of `parts` times E numbers, and further blocks z
    + silu(again(z)), which share their weights.

    It begins as what the first part says, with little of the others.
    """

    def __init__(self, shape: LayerShape, parts: int, blocks: int):
        super().__init__()
        width = shape.hidden
        self.blocks = blocks
        self.direct = nn.Linear(parts * width, width)
        self.gated = nn.Linear(parts * width, width)
        self.again = nn.Linear(width, width) if blocks > 1 else None
        with torch.no_grad():
            self.direct.weight[:, :width] = torch.eye(width)
            self.direct.weight[:, width:] *= LITTLE
            self.direct.bias.zero_()
            for linear in (self.gated, self.again):
                if linear is not None:
                    linear.weight.zero_()
                    linear.bias.zero_()

    def forward(self, c: torch.Tensor) -> torch.Tensor:
        z: torch.Tensor = self.direct(c) + F.silu(self.gated(c))
        for _ in range(self.blocks - 1):
            assert self.again is not None
            z = z + F.silu(self.again(z))
        return z


class Hydra(Recurrent):
    """Heads, one a depth, that read the state and the tokens drafted so far side by side.

    With `prefix` (Hydra++) the state goes through a decoder layer before, which attends to the
    text. A vector is the state with the tokens drafted so far.
    """

    kind = "hydra"
    options: ClassVar[dict[str, Any]] = {
        "heads": 4,  # levels that it drafts
        "blocks": 1,  # of each head; Hydra++ has 4
        "prefix": False,  # whether states go through a layer before: Hydra++
        "prefix_norm": False,  # whether a norm follows that layer
        "sees_first": True,  # whether that layer sees the row of the first token
        "own_matrix": 0,  # rows of the heads' own output matrices, with biases; 0: the target's
    }
    trained = ("heads", "blocks", "prefix", "prefix_norm")
    decay = 1.0
    reads_normed = True

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        shape = config.target.layer_shape()
        heads, blocks = self.whole_option("heads", 1, 16), self.whole_option("blocks", 1, 16)
        rows = self.own_rows()
        self.depths = self.deepest = heads
        self.room = heads + 2
        self.heads = nn.ModuleList([Block(shape, depth + 2, blocks) for depth in range(heads)])
        if rows:
            self.matrix = nn.ModuleList(nn.Linear(shape.hidden, rows) for _ in range(heads))
        self.sees_first = bool(self.option("sees_first"))
        self.prefix: Layer | None = None
        self.prefix_norm = Norm(shape.hidden, shape.eps) if self.option("prefix_norm") else None
        if self.option("prefix"):
            self.layers = 1
            self.prefix = Layer(shape)
            # The layer begins as nothing, and learns what to add to the state.
            nn.init.zeros_(self.prefix.self_attn.o_proj.weight)
            nn.init.zeros_(self.prefix.mlp.down_proj.weight)

    def text_vectors(
        self, states: torch.Tensor, embedded: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        if self.prefix is None:
            return states
        out: torch.Tensor = self.prefix(states, self.rotation(positions), attend)
        return out if self.prefix_norm is None else self.prefix_norm(out)

    def draft_rows(
        self, vectors: torch.Tensor, embedded: torch.Tensor, depth: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        path = torch.cat([vectors[..., : (depth + 1) * self.hidden], embedded], -1)
        return self.heads[depth](path), path
