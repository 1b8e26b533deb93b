"""The layout of Hydra and Hydra++ as their authors publish it.

`hydra_mlp.{i}.{m}` are the blocks of head i and `hydra_lm_head.{i}` is its output matrix; with
`hydra_head_arch` "prefix-mlp" (Hydra++) every second place is a dropout's, and
`prefix_embeding_layer` is the layer before.
"""

from __future__ import annotations

from typing import Any

import torch

from foretell.drafters.heads.formats.base import Format
from foretell.drafters.heads.formats.checkpoint import Checkpoint, layer_names, layer_options
from foretell.drafters.heads.networks.base import Head
from foretell.drafters.heads.networks.folder import build, target_shape

PREFIX = "prefix_embeding_layer."  # so it is spelt
ARCHITECTURES = ("mlp", "prefix-mlp")


class HydraFormat(Format):
    """Hydra's."""

    name = "hydra"
    kind = "hydra"
    ways = ()

    def matches(self, checkpoint: Checkpoint) -> bool:
        named = "hydra_head_arch" in checkpoint.config
        return named or "hydra_mlp.0.0.linear.weight" in checkpoint

    def load(
        self, checkpoint: Checkpoint, target: Any, taps: str = ""
    ) -> tuple[Head, torch.Tensor | None]:
        config, shape = checkpoint.config, target_shape(target)
        architecture = config.get("hydra_head_arch", ARCHITECTURES[0])
        for name, supported in (
            ("hydra_head_arch", ARCHITECTURES),
            ("grounded_heads", (True,)),
            ("hidden_state_offset", (0,)),
        ):
            if config.get(name, supported[0]) not in supported:
                loads = " or ".join(repr(value) for value in supported)
                raise checkpoint.bad(f"{name}={config[name]!r}, and this version loads {loads}")
        plus = architecture == "prefix-mlp"
        # Dropouts have numbers, too.
        step, first, matrix = (2, 1, ".1") if plus else (1, 0, "")
        found = checkpoint.numbers(rf"hydra_mlp\.(\d+)\.{first}\.linear\.weight")
        heads = checkpoint.counted(found, "hydra_num_heads", "the block of head")
        blocks = self.blocks(checkpoint, step, first)
        options = {"heads": heads, "blocks": blocks, "own_matrix": shape.vocab}
        if plus:
            self.check_prefix(checkpoint, target)
            options |= {"prefix": True, "prefix_norm": True, "sees_first": False}
        head = build(self.kind, shape, options)
        names, used = {}, {f"{PREFIX}embed_tokens.weight", "input_embed_fn.weight"}
        for i in range(heads):
            parts = {f"{first}.linear": "gated", f"{first}.res_connection": "direct"}
            shared = self.shared(checkpoint, i, step, first)
            if blocks > 1:
                parts[f"{shared[0] if shared else first + step}.linear"] = "again"
            for part in ("weight", "bias"):
                for theirs, ours in parts.items():
                    names[f"hydra_mlp.{i}.{theirs}.{part}"] = f"heads.{i}.{ours}.{part}"
                names[f"hydra_lm_head.{i}{matrix}.{part}"] = f"matrix.{i}.{part}"
                same = [f"hydra_mlp.{i}.{place}.linear.{part}" for place in shared]
                if same:
                    checkpoint.check_same([name for name in same if name in checkpoint])
                used |= {*same[1:]}
        if plus:
            names |= layer_names(f"{PREFIX}layers.0.", "prefix.")
            names[f"{PREFIX}layers.0.input_layernorm.weight"] = "prefix.input_layernorm.weight"
            names[f"{PREFIX}norm.weight"] = "prefix_norm.weight"
            used.add(f"{PREFIX}layers.0.self_attn.rotary_emb.inv_freq")
        if "input_embed_fn.weight" in checkpoint:  # the target's, which it was trained beside
            checkpoint.check_table("input_embed_fn.weight", target)
        checkpoint.check_tokens(target)
        checkpoint.fill(head, names, used)
        return head, None

    def blocks(self, checkpoint: Checkpoint, step: int, first: int) -> int:
        """How many a head has. All but the first are one, which a file may have once or several
        times. Raises BadModel.
        """
        found = checkpoint.numbers(r"hydra_mlp\.\d+\.(\d+)\.linear\.weight")
        most = max((place - first) // step for place in found) + 1
        told = checkpoint.config.get("hydra_num_layers", most)
        fits = type(told) is int and (told == most or 2 <= most < told)
        if not fits:
            raise checkpoint.bad(f"hydra_num_layers={told!r}, and the file has {most}")
        return int(told)

    def shared(self, checkpoint: Checkpoint, head: int, step: int, first: int) -> list[int]:
        """The places of a head's further blocks in the file."""
        places = checkpoint.numbers(rf"hydra_mlp\.{head}\.(\d+)\.linear\.weight")
        return sorted(place for place in places if place > first and (place - first) % step == 0)

    def check_prefix(self, checkpoint: Checkpoint, target: Any) -> None:
        """Its layer is one of the target's build. Raises BadModel."""
        layer_options(
            checkpoint, {**target.config.to_dict(), "num_hidden_layers": 1}, target_shape(target)
        )
