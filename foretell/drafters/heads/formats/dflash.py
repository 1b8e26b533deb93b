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
from foretell.drafters.heads.networks.folder import build, target_shape
from foretell.errors import BadConfig

FULL = "full_attention"


class DflashFormat(Format):
    """DFlash's."""

    name = "dflash"
    kind = "dflash"

    def matches(self, checkpoint: Checkpoint) -> bool:
        named = "speculators_model_type" in checkpoint.config
        block = "hidden_norm.weight" in checkpoint and "fc.weight" in checkpoint
        return block and not named

    def load(
        self, checkpoint: Checkpoint, target: Any, taps: str = ""
    ) -> tuple[Head, torch.Tensor | None]:
        config, shape = checkpoint.config, target_shape(target)
        inner = config.get("dflash_config")
        told = {**config, **(inner if isinstance(inner, dict) else {})}
        if told.get("sample_from_anchor"):
            raise checkpoint.bad("sample_from_anchor=true, and this version loads none but false")
        kinds = told.get("layer_types") or [FULL]
        if any(kind != FULL for kind in kinds):
            raise checkpoint.bad(f"layer_types={kinds}, and this version loads {FULL!r} alone")
        layers = checkpoint.whole_number(told, "num_hidden_layers", 1, 64)
        head_norms = "layers.0.self_attn.q_norm.weight" in checkpoint
        options = {
            "block": checkpoint.whole_number(told, "block_size", 2, 256),
            "layers": layers,
            "taps": list(read_taps(checkpoint, told, shape.layers, layers, taps or "output")),
            "layer": layer_options(checkpoint, {**config, "num_hidden_layers": 1}, shape),
            "head_norms": head_norms,
        }
        mask = checkpoint.whole_number(told, "mask_token_id", 0, shape.vocab - 1)
        head: Any = build(self.kind, shape, options)
        checkpoint.check_tokens(target)
        # The one tensor that no file has: what the target makes of the mask.
        with torch.no_grad():
            head.blank.copy_(target.embedded(torch.tensor([mask], device=target.device))[0])
        names = tensor_names(layers, head_norms)
        checkpoint.fill(head, names, {"embed_tokens.weight", "lm_head.weight"}, {"blank"})
        return head, None


def read_taps(
    checkpoint: Checkpoint, told: dict[str, Any], layers: int, own: int, convention: str
) -> tuple[int, ...]:
    """What it reads of a target of `layers` layers; it has `own` ones. Raises BadModel."""
    if convention not in CONVENTIONS:
        raise BadConfig.field("taps", convention, f"one of {', '.join(CONVENTIONS)}")
    wanted = told.get("num_target_layers", layers)
    if wanted != layers:
        raise checkpoint.bad(f"num_target_layers={wanted!r}, and the target has {layers}")
    ids = told.get("target_layer_ids")
    if ids is None:
        # Evenly spaced from the second layer to the third last.
        ids = [round(1 + i * (layers - 4) / (own - 1)) for i in range(own)] if own > 1 else []
        ids = ids or [layers // 2]
    if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
        raise checkpoint.bad(f"target_layer_ids={ids!r}: must be numbers of layers")
    taps = tuple(i + (convention == "output") for i in ids)
    if any(not 0 <= i <= layers for i in taps):
        raise checkpoint.bad(f"target_layer_ids={ids}, and the target has {layers} layers")
    return taps


def tensor_names(layers: int, head_norms: bool) -> dict[str, str]:
    """The names in files of a head's tensors -> ours."""
    names = {"fc.weight": "fc.weight", "hidden_norm.weight": "state_norm.weight"}
    names["norm.weight"] = "norm.weight"
    parts = ["input_layernorm"]
    if head_norms:
        parts += ["self_attn.q_norm", "self_attn.k_norm"]
    for i in range(layers):
        names |= layer_names(f"layers.{i}.", f"stack.{i}.")
        names |= {f"layers.{i}.{part}.weight": f"stack.{i}.{part}.weight" for part in parts}
    return names
