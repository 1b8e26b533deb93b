"""The network of Chimera: the last three tokens under one layer over all of the target's states.

Source: Zeng et al., "Chimera: A Lossless Decoding Method for Accelerating Large Language Models
Inference by Fusing all Tokens" (arXiv 2402.15758), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from foretell.drafters.heads.networks.base import Drafted, Head, HeadConfig, Nodes, Texts
from foretell.drafters.heads.networks.caches import KnownTokens
from foretell.drafters.heads.networks.eagle import TextAttention
from foretell.drafters.heads.networks.layers import Attend, Layer, Rotation
from foretell.errors import BadConfig


class Words(nn.Module):
    """y = out(u + silu(again u)) of the last tokens u side by side (count times E), the oldest
    first.
    """

    def __init__(self, count: int, hidden: int):
        super().__init__()
        width = count * hidden
        self.again = nn.Linear(width, width)
        self.out = nn.Linear(width, hidden, bias=False)
        nn.init.zeros_(self.again.weight)
        nn.init.zeros_(self.again.bias)

    def forward(self, embedded: torch.Tensor, earlier: torch.Tensor) -> torch.Tensor:
        """(..., E) of the newest tokens, (..., count - 1, E) of those before, the nearest first."""
        u = torch.cat([earlier.flip(-2).flatten(-2), embedded], -1)
        out: torch.Tensor = self.out(u + F.silu(self.again(u)))
        return out


class Chimera(Head):
    """Words give a row that stands for its token's state. It sees the states of all tokens before,
    and itself; what leaves the layer is the estimate of that state, and takes its place below.

    The cache row of a node holds the state of the token before it, so all nodes below see it; the
    words' own key is seen by their node alone. Each depth has a matrix of its own over the anchor's
    state and the estimate.

    Options for ablations: `words` 1 reads the newest token alone; without `attention` the words are
    the estimate. Raises BadConfig.
    """

    kind = "chimera"
    options: ClassVar[dict[str, Any]] = {
        "heads": 4,  # levels that it drafts
        "words": 3,  # last tokens that are read side by side
        "attention": True,  # whether there is a layer over all states
    }
    trained = ("heads", "words", "attention")
    cache = KnownTokens
    by_depth = True
    depths = 4
    decay = 0.8
    regression = 1.0
    reads_normed = True

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        shape, heads, words = (
            config.target.layer_shape(),
            self.option("heads"),
            self.option("words"),
        )
        for name, value in (("heads", heads), ("words", words)):
            if type(value) is not int or not 1 <= value <= 16:
                raise BadConfig.field(f"chimera:{name}", value, "between 1 and 16")
        if type(self.option("attention")) is not bool:
            raise BadConfig.field("chimera:attention", self.option("attention"), "true or false")
        self.depths = self.deepest = heads
        self.reach = words - 1
        self.hidden = shape.hidden
        self.words = Words(words, shape.hidden)
        self.layer = Layer(shape) if self.option("attention") else None
        self.layers = 0 if self.layer is None else 1
        self.rotation = Rotation(shape.width, shape.theta)
        self.heads = nn.ModuleList(
            nn.Linear(2 * shape.hidden, shape.hidden, bias=False) for _ in range(heads)
        )

    @property
    def taps(self) -> tuple[int, ...]:
        """The last state, twice over: below the text nodes get an estimate and the anchor's."""
        return (self.config.target.layers,) * 2

    @torch.no_grad()
    def take_weights(self, target: Any) -> None:
        """Matrices that add up the anchor's state and the estimate, which is small at first: the
        output matrix stands twice in the paper's.
        """
        for linear in self.heads:
            assert isinstance(linear, nn.Linear)
            linear.weight.copy_(torch.eye(self.hidden).repeat(1, 2))

    def estimate_states(
        self, words: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """(..., n, E) the states of tokens at `positions` (n,), by their words and the states of
        the tokens before them.
        """
        if self.layer is None:
            return words
        layer, attention = self.layer, self.layer.self_attn
        assert layer.input_layernorm is not None
        _, k, v = attention.project_rows(
            layer.input_layernorm(states), self.rotation(positions - 1)
        )
        q, *word_pair = attention.project_rows(
            layer.input_layernorm(words), self.rotation(positions)
        )
        h = words + attention.o_proj(attend(q, k, v, tuple(word_pair)).flatten(-2))
        out: torch.Tensor = h + layer.mlp(layer.post_attention_layernorm(h))
        return out

    def unroll_depths(self, texts: Texts, depths: int) -> Iterator[Drafted]:
        positions = torch.arange(texts.ids.shape[1], device=texts.ids.device)
        offsets = torch.arange(1, self.reach + 1, device=positions.device)
        earlier = texts.embedded[:, (positions[:, None] - offsets).clamp(min=0)]
        words = self.words(texts.embedded, earlier)
        anchors = states = texts.features[..., : self.hidden]
        attend = TextAttention()
        for depth, head in enumerate(self.heads[:depths]):
            shifted_words = texts.shift_left(words, depth)
            states = self.estimate_states(shifted_words, states, positions + depth, attend)
            yield Drafted(depth, head(torch.cat([anchors, states], -1)), states)

    def step(self, nodes: Nodes, attend: Attend) -> tuple[torch.Tensor, torch.Tensor]:
        assert nodes.depths is not None
        earlier = nodes.embedded[:, None, :0] if nodes.earlier is None else nodes.earlier
        states, anchors = nodes.features.split(self.hidden, -1)
        words = self.words(nodes.embedded, earlier)
        estimates = self.estimate_states(words, states, nodes.positions, attend)
        joint_states = torch.cat([anchors, estimates], -1)
        output_states = torch.empty_like(estimates)
        for depth in nodes.depths.unique().tolist():
            at_depth = nodes.depths == depth
            output_states[at_depth] = self.heads[min(depth, self.deepest - 1)](
                joint_states[at_depth]
            )
        return output_states, torch.cat([estimates, anchors], -1)
