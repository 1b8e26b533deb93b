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


def attend_causally(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of whole texts: q (B, H, n, D), k and v (B, KV, n, D) -> (B, n, H, D)."""
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return attended.transpose(1, 2)


class Recurrent(Head):
    """A head whose drafted nodes read vectors, and no cache.

    It reads one state of the target, `room` times over: so much room have the vectors that nodes
    hand on. The last number of what is handed on is the depth of the nodes that read it.
    """

    layers = 0
    room = 2

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        shape = config.target.layer_shape()
        self.hidden = shape.hidden
        self.rotation = Rotation(shape.width, shape.theta)

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.config.target.layers,) * self.room

    def text_vectors(
        self, states: torch.Tensor, embedded: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Vectors (..., E) of nodes of the text, for the target's states before them (..., E)."""
        raise NotImplementedError

    def draft_rows(
        self, vectors: torch.Tensor, embedded: torch.Tensor, depth: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows (..., R) that the output matrix reads, and vectors (..., W) of nodes below.

        `vectors` (..., W or wider) of nodes at this depth, 0 in the text, with their tokens as
        `token_rows` gives them. W may grow with the depth.
        """
        raise NotImplementedError

    def token_rows(
        self, embedded: torch.Tensor, ids: torch.Tensor | None, depth: int
    ) -> torch.Tensor:
        """Tokens as `draft_rows` reads them: the target's embeddings (..., E), or rows of a table
        of its own, by ids (...).
        """
        return embedded

    def unroll_depths(self, texts: Texts, depths: int) -> Iterator[Drafted]:
        positions = torch.arange(texts.ids.shape[1], device=texts.ids.device)
        states = texts.features[..., : self.hidden]
        vectors = self.text_vectors(states, texts.embedded, positions, attend_causally)
        for depth in range(min(depths, self.deepest)):
            embedded, ids = (texts.shift_left(part, depth) for part in (texts.embedded, texts.ids))
            output_states, vectors = self.draft_rows(
                vectors, self.token_rows(embedded, ids, depth), depth
            )
            yield Drafted(depth, output_states, output_states if self.regression else None)

    def step(self, nodes: Nodes, attend: Attend) -> tuple[torch.Tensor, torch.Tensor]:
        width = nodes.features.shape[1]
        # Drafted nodes go through the layers with the others, since all nodes of a forward attend
        # together. Their rows are seen by drafted nodes alone, and what comes of them is not used.
        states = nodes.features[:, : self.hidden]
        text_vectors = self.text_vectors(states, nodes.embedded, nodes.positions, attend)
        text_vectors = F.pad(text_vectors, (0, width - text_vectors.shape[1]))
        vectors = torch.where(nodes.drafted[:, None], nodes.features, text_vectors)
        depths = self.depths_of(nodes)
        handed_on = torch.zeros_like(nodes.features)
        output_states: torch.Tensor | None = None
        for depth in depths.unique().tolist():
            at_depth = depths == depth
            ids = None if nodes.ids is None else nodes.ids[at_depth]
            tokens = self.token_rows(nodes.embedded[at_depth], ids, depth)
            depth_states, vectors_below = self.draft_rows(vectors[at_depth], tokens, depth)
            if output_states is None:
                output_states = depth_states.new_empty(len(depths), depth_states.shape[1])
            output_states[at_depth] = depth_states
            handed_on[at_depth] = F.pad(vectors_below, (0, width - vectors_below.shape[1]))
        assert output_states is not None, "a forward has nodes"
        handed_on[:, -1] = (depths + 1).to(handed_on)
        return output_states, handed_on

    def depths_of(self, nodes: Nodes) -> torch.Tensor:
        return torch.where(nodes.drafted, nodes.features[:, -1].round().long(), 0)
