"""The maps of Hidden Transfer: what enters a layer in the middle at a node becomes, by one linear
map for each depth, what rows of later places enter it with.

Source: Wu et al., "Parallel Decoding via Hidden Transfer for Lossless Large Language Model
Acceleration" (arXiv 2404.12022), section 3.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from foretell.drafters.heads.networks.anchored import Anchored
from foretell.drafters.heads.networks.base import HeadConfig
from foretell.errors import BadConfig


class HiddenTransfer(Anchored):
    """Maps that begin as the identity. `entry` -1: a third of the target's layers."""

    kind = "hidden-transfer"
    options: ClassVar[dict[str, Any]] = {"rows": 3, "entry": -1}
    rate = 0.001

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        layers, entry = config.target.layers, self.option("entry")
        if type(entry) is not int or not -1 <= entry <= layers:
            allowed_layers = f"between 0 and {layers}, or -1 (a third of the layers)"
            raise BadConfig.field("hidden-transfer:entry", entry, allowed_layers)
        hidden = config.target.hidden
        self.maps = nn.Parameter(torch.eye(hidden).repeat(self.deepest, 1, 1))

    @property
    def entry(self) -> int:
        entry: int = self.option("entry")
        return self.config.target.layers // 3 if entry < 0 else entry
