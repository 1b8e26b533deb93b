"""The layout of DFlash as its authors publish it.

`fc`, `hidden_norm`, `norm` and layers of qwen3's kind; what differs from a model's configuration
stands in `dflash_config`.
"""

from __future__ import annotations

from typing import Any

import torch

from foretell.drafters.heads.formats.base import CONVENTIONS, Format
from foretell.drafters.heads.formats.checkpoint import Checkpoint, layer_names, layer_options
from foretell.drafters.heads.networks.base import Head
from foretell.drafters.heads.networks.folder import build_head, target_shape
from foretell.errors import BadConfig

FULL = "full_attention"


class DflashFormat(Format):
    """DFlash's."""

    name = "dflash"
    kind = "dflash"

    def matches_folder(self, checkpoint: Checkpoint) -> bool:
        names_library = "speculators_model_type" in checkpoint.config
        has_block = "hidden_norm.weight" in checkpoint and "fc.weight" in checkpoint
        return has_block and not names_library

    def load_head(
        self, checkpoint: Checkpoint, target: Any, taps: str = ""
    ) -> tuple[Head, torch.Tensor | None]:
        config, shape = checkpoint.config, target_shape(target)
        inner_config = config.get("dflash_config")
        fields = {**config, **(inner_config if isinstance(inner_config, dict) else {})}
        if fields.get("sample_from_anchor"):
            raise checkpoint.bad_model(
                "sample_from_anchor=true, and this version loads none but false"
            )
        layer_kinds = fields.get("layer_types") or [FULL]
        if any(kind != FULL for kind in layer_kinds):
            raise checkpoint.bad_model(
                f"layer_types={layer_kinds}, and this version loads {FULL!r} alone"
            )
        layers = checkpoint.whole_number(fields, "num_hidden_layers", 1, 64)
        head_norms = "layers.0.self_attn.q_norm.weight" in checkpoint
        options = {
            "block": checkpoint.whole_number(fields, "block_size", 2, 256),
            "layers": layers,
            "taps": list(read_taps(checkpoint, fields, shape.layers, layers, taps or "output")),
            "layer": layer_options(checkpoint, {**config, "num_hidden_layers": 1}, shape),
            "head_norms": head_norms,
        }
        mask_token = checkpoint.whole_number(fields, "mask_token_id", 0, shape.vocab - 1)
        head: Any = build_head(self.kind, shape, options)
        checkpoint.check_tokens(target)
        # The one tensor that no file has: what the target makes of the mask.
        with torch.no_grad():
            head.blank.copy_(target.embedded(torch.tensor([mask_token], device=target.device))[0])
        names = dflash_names(layers, head_norms)
        checkpoint.fill_head(head, names, {"embed_tokens.weight", "lm_head.weight"}, {"blank"})
        return head, None


def read_taps(
    checkpoint: Checkpoint, fields: dict[str, Any], layers: int, head_layers: int, convention: str
) -> tuple[int, ...]:
    """Taps that a head of `head_layers` layers reads of a target of `layers`. Raises BadModel."""
    if convention not in CONVENTIONS:
        raise BadConfig.field("taps", convention, f"one of {', '.join(CONVENTIONS)}")
    expected_layers = fields.get("num_target_layers", layers)
    if expected_layers != layers:
        raise checkpoint.bad_model(
            f"num_target_layers={expected_layers!r}, and the target has {layers}"
        )
    ids = fields.get("target_layer_ids")
    if ids is None:
        # Evenly spaced from the second layer to the third last.
        ids = (
            [
                round(1 + layer_number * (layers - 4) / (head_layers - 1))
                for layer_number in range(head_layers)
            ]
            if head_layers > 1
            else []
        )
        ids = ids or [layers // 2]
    if (
        not isinstance(ids, list)
        or not ids
        or any(type(layer_number) is not int for layer_number in ids)
    ):
        raise checkpoint.bad_model(f"target_layer_ids={ids!r}: must be numbers of layers")
    taps = tuple(layer_number + (convention == "output") for layer_number in ids)
    if any(not 0 <= layer_number <= layers for layer_number in taps):
        raise checkpoint.bad_model(f"target_layer_ids={ids}, and the target has {layers} layers")
    return taps


def dflash_names(layers: int, head_norms: bool) -> dict[str, str]:
    """The names in files of a head's tensors -> ours."""
    names = {"fc.weight": "fc.weight", "hidden_norm.weight": "state_norm.weight"}
    names["norm.weight"] = "norm.weight"
    parts = ["input_layernorm"]
    if head_norms:
        parts += ["self_attn.q_norm", "self_attn.k_norm"]
    for layer_index in range(layers):
        names |= layer_names(f"layers.{layer_index}.", f"stack.{layer_index}.")
        names |= {
            f"layers.{layer_index}.{part}.weight": f"stack.{layer_index}.{part}.weight"
            for part in parts
        }
    return names
