"""The network of multi-token prediction: one decoder layer that is used again for every token.

Sources: DeepSeek-AI, "DeepSeek-V3 Technical Report" (arXiv 2412.19437), section 2.2; Cai et al.,
"FastMTP: Accelerating LLM Inference with Enhanced Multi-Token Prediction" (arXiv 2509.18362).
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from foretell.cache.buffers import Shape
from foretell.drafters.heads.networks.base import HeadConfig
from foretell.drafters.heads.networks.eagle import OneLayer
from foretell.drafters.heads.networks.family import Family
from foretell.drafters.heads.networks.layers import Layer, Norm


class Mtp(OneLayer):
    """The normed token beside the normed state, through a matrix, a layer and a norm.

    It reads the target's normed last state, and hands on its own, which the output matrix reads: so
    states are of one kind at every depth. A `family` makes its layer and its norms those of a
    target that it was made with, which may also read and hand on states in another way.
    """

    kind = "mtp"
    options: ClassVar[dict[str, Any]] = {
        "family": {},  # the configuration of a family whose layer and norms it has; {}: of its own
        "reads_normed": True,  # whether it reads the target's state through its last norm
        "hands_on_normed": True,  # whether nodes below are given what leaves its own
        "sees_first": True,  # whether its rows see that of the first token
        "own_matrix": 0,  # rows of an output matrix of its own; 0: the target's
    }
    depths = 3
    decay = 0.6

    layer: Any
    token_norm: Any
    state_norm: Any
    norm: Any

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        shape = self.shape
        hidden, matrix_rows = shape.hidden, self.own_rows()
        self.reads_normed = bool(self.option("reads_normed"))
        self.hands_on_normed = bool(self.option("hands_on_normed"))
        self.sees_first = bool(self.option("sees_first"))
        family_fields = self.option("family")
        self.family = Family(family_fields) if family_fields else None
        self.by_library = self.family is None and self.sees_first
        if self.family is not None:
            self.rotation = self.family.build_rotation()
        self.token_norm = self._build_norm()
        self.state_norm = self._build_norm()
        self.enter = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = Layer(shape) if self.family is None else self.family.build_layer()
        self.norm = self._build_norm()
        if matrix_rows:
            self.matrix = nn.Linear(hidden, matrix_rows, bias=False)

    def _build_norm(self) -> nn.Module:
        shape = self.shape
        return Norm(shape.hidden, shape.eps) if self.family is None else self.family.build_norm()

    @property
    def layout(self) -> tuple[Shape, ...]:
        return super().layout if self.family is None else (self.family.stored,)

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.config.target.layers,)
