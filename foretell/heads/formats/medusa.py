"""The layout of Medusa heads that draft with the target's output matrix, their authors' version 2.

`{i}.0.linear` is the block of head i, in vLLM's names `blocks.{i}.layers.0`. Heads that have output
matrices of their own are refused.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from foretell.heads.base import Head
from foretell.heads.folder import build, target_shape
from foretell.heads.formats.base import Format
from foretell.heads.formats.checkpoint import Checkpoint

BLOCK = re.compile(r"(?:medusa_heads\.)?(?:(\d+)\.0\.linear|blocks\.(\d+)\.layers\.0)\.weight")
MATRIX = re.compile(r"\d+\.\d+\.weight|(?:medusa_heads\.)?lm_heads?\.(?:\d+\.)?weight")
MOST = 16  # heads that the network can have


class MedusaFormat(Format):
    """Medusa's, by its authors and as vLLM names it."""

    name = "medusa"
    kind = "medusa"
    counts = False

    def matches(self, checkpoint: Checkpoint) -> bool:
        return bool(blocks(checkpoint))

    def load(
        self, checkpoint: Checkpoint, target: Any, taps: str = ""
    ) -> tuple[Head, torch.Tensor | None]:
        config = checkpoint.config
        vllm = config.get("model_type") == "medusa"
        layers = "num_hidden_layers" if vllm else "medusa_num_layers"
        if config.get(layers, 1) != 1:
            raise checkpoint.bad(f"{layers}={config[layers]!r}, and this version loads 1")
        matrices = [name for name in sorted(checkpoint.shapes) if MATRIX.fullmatch(name)]
        if matrices:
            what = f"{matrices[0]} is an output matrix of a head's own"
            raise checkpoint.bad(f"{what}, and this version loads heads that use the target's")
        found = blocks(checkpoint)
        count = self.count(checkpoint, found, "num_heads" if vllm else "medusa_num_heads")
        head = build(self.kind, target_shape(target), {"blocks": count})
        names, filled = {}, set()
        for i in range(count):
            names[f"{found[i]}.weight"] = f"blocks.{i}.linear.weight"
            bias = f"blocks.{i}.linear.bias"
            # vLLM's heads have a bias only where they say so; else it stays zero, as it begins.
            if vllm and not config.get("medusa_fc_bias"):
                filled.add(bias)
            else:
                names[f"{found[i]}.bias"] = bias
        checkpoint.check_tokens(target)
        checkpoint.fill(head, names, set(), filled)
        return head, None

    def count(self, checkpoint: Checkpoint, found: dict[int, str], field: str) -> int:
        """Of heads in the file: often more than the configuration names, never fewer."""
        told = checkpoint.config.get(field, 1)
        if sorted(found) != list(range(len(found))):
            missing = min(set(range(len(found))) - found.keys())
            raise checkpoint.bad(f"lacks the block of head {missing}; fetch it again")
        if type(told) is not int or told < 1:
            raise checkpoint.bad(f"{field}={told!r} must be a number from 1")
        if told > len(found):
            what = f"{field}={told}, and the file has the blocks of {len(found)}"
            raise checkpoint.bad(f"{what}; fetch it again")
        if len(found) > MOST:
            raise checkpoint.bad(f"has {len(found)} heads, and this version loads {MOST} at most")
        return len(found)


def blocks(checkpoint: Checkpoint) -> dict[int, str]:
    """The names of the blocks' parts without their ends, by the number of the head."""
    found = {}
    for name in checkpoint.shapes:
        match = BLOCK.fullmatch(name)
        if match is not None:
            found[int(match[1] or match[2])] = name.removesuffix(".weight")
    return found
