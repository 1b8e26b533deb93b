"""The layout of Medusa heads that draft with the target's output matrix (version 2).

`{i}.0.linear` is the block of head i. Heads that have output matrices of their own are refused.
"""

from __future__ import annotations

from typing import Any

import torch

from foretell.heads.base import Head
from foretell.heads.folder import build, target_shape
from foretell.heads.formats.base import Format
from foretell.heads.formats.checkpoint import Checkpoint


class MedusaFormat(Format):
    """Medusa's, as its authors publish it."""

    name = "medusa"
    kind = "medusa"

    def matches(self, checkpoint: Checkpoint) -> bool:
        return "medusa_num_heads" in checkpoint.config and "0.0.linear.weight" in checkpoint

    def load(
        self, checkpoint: Checkpoint, target: Any, taps: str = ""
    ) -> tuple[Head, torch.Tensor | None]:
        layers = checkpoint.config.get("medusa_num_layers", 1)
        if layers != 1:
            raise checkpoint.bad(f"medusa_num_layers={layers!r}, and this version loads 1")
        if "0.1.weight" in checkpoint:
            what = "0.1.weight is an output matrix of a head's own"
            raise checkpoint.bad(f"{what}, and this version loads heads that use the target's")
        # Configurations often name fewer heads than the file holds.
        count = sum(name.endswith(".0.linear.weight") for name in checkpoint.shapes)
        head = build(self.kind, target_shape(target), {"blocks": count})
        parts = [(i, part) for i in range(count) for part in ("weight", "bias")]
        names = {f"{i}.0.linear.{part}": f"blocks.{i}.linear.{part}" for i, part in parts}
        checkpoint.fill(head, names, set())
        return head, None
