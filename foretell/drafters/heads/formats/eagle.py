"""The layout of EAGLE-1 and EAGLE-2 as their authors publish it, also in vLLM's wrapper.

`fc` and `layers.0`, which has no norm in front; the configuration is one of the target's kind.
"""

from __future__ import annotations

from typing import Any

import torch

from foretell.drafters.heads.formats.base import Format
from foretell.drafters.heads.formats.checkpoint import Checkpoint, layer_names, layer_options
from foretell.drafters.heads.networks.base import Head
from foretell.drafters.heads.networks.folder import build, target_shape

LAYER = "layers.0."


class EagleFormat(Format):
    """EAGLE-1's and EAGLE-2's."""

    name = "eagle"
    kind = "eagle"
    ways = ()

    def matches(self, checkpoint: Checkpoint) -> bool:
        named = "speculators_model_type" in checkpoint.config
        beside = f"{LAYER}hidden_norm.weight" in checkpoint
        layer = f"{LAYER}self_attn.q_proj.weight" in checkpoint
        block = "hidden_norm.weight" in checkpoint  # DFlash's norm of the text's rows
        return "fc.weight" in checkpoint and layer and not (beside or named or block)

    def load(
        self, checkpoint: Checkpoint, target: Any, taps: str = ""
    ) -> tuple[Head, torch.Tensor | None]:
        config, shape = checkpoint.config, target_shape(target)
        truncated = config.get("truncated_vocab_size")
        if truncated not in (None, shape.vocab):
            what = f"truncated_vocab_size={truncated}, and this version loads none but"
            raise checkpoint.bad(f"{what} {shape.vocab}, the target's")
        bias = bool(config.get("bias", config.get("eagle_fc_bias", True)))
        options = {"layer": layer_options(checkpoint, config, shape), "bias": bias}
        head = build(self.kind, shape, options)
        names = {"fc.weight": "enter.weight", **layer_names(LAYER)}
        if bias:
            names["fc.bias"] = "enter.bias"
        checkpoint.check_tokens(target)
        # Both tables are frozen copies of the target's.
        checkpoint.fill(head, names, {"embed_tokens.weight", "lm_head.weight"})
        return head, None
