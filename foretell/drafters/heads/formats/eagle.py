"""The layout of EAGLE-1 and EAGLE-2 as their authors publish it, also in vLLM's wrapper.

`fc` and `layers.0`, which has no norm in front; the configuration is one of the target's kind.
"""

from __future__ import annotations

from typing import Any

import torch

from foretell.drafters.heads.formats.base import Format
from foretell.drafters.heads.formats.checkpoint import Checkpoint, layer_names, layer_options
from foretell.drafters.heads.networks.base import Head
from foretell.drafters.heads.networks.folder import build_head, target_shape

LAYER = "layers.0."


class EagleFormat(Format):
    """EAGLE-1's and EAGLE-2's."""

    name = "eagle"
    kind = "eagle"
    ways = ()

    def matches_folder(self, checkpoint: Checkpoint) -> bool:
        names_library = "speculators_model_type" in checkpoint.config
        has_state_norm = f"{LAYER}hidden_norm.weight" in checkpoint
        has_layer = f"{LAYER}self_attn.q_proj.weight" in checkpoint
        has_block = "hidden_norm.weight" in checkpoint  # DFlash's norm of the text's rows
        return (
            "fc.weight" in checkpoint
            and has_layer
            and not (has_state_norm or names_library or has_block)
        )

    def load_head(
        self, checkpoint: Checkpoint, target: Any, taps: str = ""
    ) -> tuple[Head, torch.Tensor | None]:
        config, shape = checkpoint.config, target_shape(target)
        truncated_size = config.get("truncated_vocab_size")
        if truncated_size not in (None, shape.vocab):
            complaint = f"truncated_vocab_size={truncated_size}, and this version loads none but"
            raise checkpoint.bad_model(f"{complaint} {shape.vocab}, the target's")
        bias = bool(config.get("bias", config.get("eagle_fc_bias", True)))
        options = {"layer": layer_options(checkpoint, config, shape), "bias": bias}
        head = build_head(self.kind, shape, options)
        names = {"fc.weight": "enter.weight", **layer_names(LAYER)}
        if bias:
            names["fc.bias"] = "enter.bias"
        checkpoint.check_tokens(target)
        # Both tables are frozen copies of the target's.
        checkpoint.fill_head(head, names, {"embed_tokens.weight", "lm_head.weight"})
        return head, None
