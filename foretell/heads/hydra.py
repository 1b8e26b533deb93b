"""The network of Hydra: heads that read the drafted tokens beside the target's state.

Source: Ankner et al., "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding" (arXiv
2402.05109), section 3.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from foretell.errors import BadConfig
from foretell.heads.base import HeadConfig
from foretell.heads.eagle import LITTLE
from foretell.heads.layers import Attend, Layer, LayerShape
from foretell.heads.recurrent import Recurrent


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
    """Of each depth one head, which reads the state and the tokens drafted so far side by side.

    With `prefix` (Hydra++) the state goes through a decoder layer before, which attends to the
    text. A vector is the state with the tokens drafted so far.
    """

    kind = "hydra"
    options: ClassVar[dict[str, Any]] = {
        "heads": 4,  # levels that it drafts
        "blocks": 1,  # of each head; Hydra++ has 4
        "prefix": False,  # whether states go through a layer before: Hydra++
    }
    decay = 1.0
    reads_normed = True

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        shape = config.target.layer()
        heads, blocks = self.option("heads"), self.option("blocks")
        for name, value in (("heads", heads), ("blocks", blocks)):
            if not (isinstance(value, int) and 1 <= value <= 16):
                raise BadConfig.field(f"hydra:{name}", value, "between 1 and 16")
        self.depths = self.deepest = heads
        self.room = heads + 2
        self.heads = nn.ModuleList([Block(shape, depth + 2, blocks) for depth in range(heads)])
        self.prefix: Layer | None = None
        if self.option("prefix"):
            self.layers = 1
            self.prefix = Layer(shape)
            # The layer begins as nothing, and learns what to add to the state.
            nn.init.zeros_(self.prefix.self_attn.o_proj.weight)
            nn.init.zeros_(self.prefix.mlp.down_proj.weight)

    def vectors(
        self,
        states: torch.Tensor,
        embedded: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        if self.prefix is None:
            return states
        out: torch.Tensor = self.prefix(states, self.rotation(positions), attend)
        return out

    def draft(
        self, vectors: torch.Tensor, embedded: torch.Tensor, depth: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        path = torch.cat([vectors[..., : (depth + 1) * self.hidden], embedded], -1)
        return self.heads[depth](path), path
