"""The network of multi-token prediction: one decoder layer that is used again for every token.

Sources: DeepSeek-AI, "DeepSeek-V3 Technical Report" (arXiv 2412.19437), section 2.2; Cai et al.,
"FastMTP: Accelerating LLM Inference with Enhanced Multi-Token Prediction" (arXiv 2509.18362).
"""

from __future__ import annotations

from torch import nn

from foretell.heads.base import HeadConfig
from foretell.heads.eagle import OneLayer
from foretell.heads.layers import Layer, Norm


class Mtp(OneLayer):
    """The normed token beside the normed state, through a matrix, a layer and a norm.

    It reads the target's normed last state, and hands on its own, which the output matrix reads:
    so states are of one kind at every depth.
    """

    kind = "mtp"
    depths = 3
    decay = 0.6
    reads_normed = True
    hands_on_normed = True

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        shape = self.shape
        self.token_norm = Norm(shape.hidden, shape.eps)
        self.state_norm = Norm(shape.hidden, shape.eps)
        self.enter = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.layer = Layer(shape)
        self.norm = Norm(shape.hidden, shape.eps)

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.config.target.layers,)
