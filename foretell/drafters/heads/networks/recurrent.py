"""What heads have in common that go on below the text from a vector of their own.

A node of the text makes its vector of the target's state, through layers that attend to the text if
it has any. A drafted node is given the vector that its parent left, and adds its own token to it:
it attends to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from foretell.drafters.heads.networks.base import Drafted, Head, HeadConfig, Nodes, Texts
from foretell.drafters.heads.networks.layers import Attend, Rotation


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of whole texts: q (B, H, n, D), k and v (B, KV, n, D) -> (B, n, H, D)."""
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2)


class Recurrent(Head):
    """A head whose drafted nodes read vectors, and no cache.

    It reads one state of the target, `room` times over: so much room have the vectors that nodes
    hand on. The last number of what is handed on is the depth of the nodes that read it.
    """

    layers = 0
    room = 2

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        shape = config.target.layer()
        self.hidden = shape.hidden
        self.rotation = Rotation(shape.width, shape.theta)

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.config.target.layers,) * self.room

    def vectors(
        self,
        states: torch.Tensor,
        embedded: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """Of nodes of the text (..., E), for the target's states before them (..., E)."""
        raise NotImplementedError

    def draft(
        self, vectors: torch.Tensor, embedded: torch.Tensor, depth: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the output matrix reads (..., R), and the vectors (..., W) of nodes below.

        `vectors` (..., W or wider) of nodes at this depth, 0 in the text, with their tokens as
        `taken` gives them. W may grow with the depth.
        """
        raise NotImplementedError

    def taken(self, embedded: torch.Tensor, ids: torch.Tensor | None, depth: int) -> torch.Tensor:
        """What `draft` reads of tokens: the target's embeddings (..., E), or those of a table of
        its own, by ids (...).
        """
        return embedded

    def unroll(self, texts: Texts, depths: int) -> Iterator[Drafted]:
        positions = torch.arange(texts.ids.shape[1], device=texts.ids.device)
        states = texts.features[..., : self.hidden]
        vectors = self.vectors(states, texts.embedded, positions, causal)
        for depth in range(min(depths, self.deepest)):
            embedded, ids = (texts.shifted(part, depth) for part in (texts.embedded, texts.ids))
            read, vectors = self.draft(vectors, self.taken(embedded, ids, depth), depth)
            yield Drafted(depth, read, read if self.regression else None)

    def step(self, nodes: Nodes, attend: Attend) -> tuple[torch.Tensor, torch.Tensor]:
        width = nodes.features.shape[1]
        # Drafted nodes go through the layers with the others, since all nodes of a forward attend
        # together. Their rows are seen by drafted nodes alone, and what comes of them is not used.
        states = nodes.features[:, : self.hidden]
        made = self.vectors(states, nodes.embedded, nodes.positions, attend)
        made = F.pad(made, (0, width - made.shape[1]))
        vectors = torch.where(nodes.drafted[:, None], nodes.features, made)
        depths = self.depths_of(nodes)
        left = torch.zeros_like(nodes.features)
        read: torch.Tensor | None = None
        for depth in depths.unique().tolist():
            here = depths == depth
            ids = None if nodes.ids is None else nodes.ids[here]
            tokens = self.taken(nodes.embedded[here], ids, depth)
            part, below = self.draft(vectors[here], tokens, depth)
            if read is None:
                read = part.new_empty(len(depths), part.shape[1])
            read[here] = part
            left[here] = F.pad(below, (0, width - below.shape[1]))
        assert read is not None, "a forward has nodes"
        left[:, -1] = (depths + 1).to(left)
        return read, left

    def depths_of(self, nodes: Nodes) -> torch.Tensor:
        return torch.where(nodes.drafted, nodes.features[:, -1].round().long(), 0)
