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
from foretell.drafters.heads.networks.folder import build_head, target_shape

PREFIX = "prefix_embeding_layer."  # so it is spelt
ARCHITECTURES = ("mlp", "prefix-mlp")


class HydraFormat(Format):
    """Hydra's."""

    name = "hydra"
    kind = "hydra"
    ways = ()

    def matches_folder(self, checkpoint: Checkpoint) -> bool:
        names_library = "hydra_head_arch" in checkpoint.config
        return names_library or "hydra_mlp.0.0.linear.weight" in checkpoint

    def load_head(
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
                raise checkpoint.bad_model(
                    f"{name}={config[name]!r}, and this version loads {loads}"
                )
        has_prefix = architecture == "prefix-mlp"
        # Dropouts have numbers, too.
        block_step, first_block, matrix = (2, 1, ".1") if has_prefix else (1, 0, "")
        head_numbers = checkpoint.part_numbers(rf"hydra_mlp\.(\d+)\.{first_block}\.linear\.weight")
        heads = checkpoint.counted(head_numbers, "hydra_num_heads", "the block of head")
        blocks = self.count_blocks(checkpoint, block_step, first_block)
        options = {"heads": heads, "blocks": blocks, "own_matrix": shape.vocab}
        if has_prefix:
            self.check_prefix(checkpoint, target)
            options |= {"prefix": True, "prefix_norm": True, "sees_first": False}
        head = build_head(self.kind, shape, options)
        names, used = {}, {f"{PREFIX}embed_tokens.weight", "input_embed_fn.weight"}
        for i in range(heads):
            parts = {f"{first_block}.linear": "gated", f"{first_block}.res_connection": "direct"}
            shared_blocks = self.further_blocks(checkpoint, i, block_step, first_block)
            if blocks > 1:
                parts[
                    f"{shared_blocks[0] if shared_blocks else first_block + block_step}.linear"
                ] = "again"
            for part in ("weight", "bias"):
                for theirs, ours in parts.items():
                    names[f"hydra_mlp.{i}.{theirs}.{part}"] = f"heads.{i}.{ours}.{part}"
                names[f"hydra_lm_head.{i}{matrix}.{part}"] = f"matrix.{i}.{part}"
                shared_names = [
                    f"hydra_mlp.{i}.{block_place}.linear.{part}" for block_place in shared_blocks
                ]
                if shared_names:
                    checkpoint.check_same([name for name in shared_names if name in checkpoint])
                used |= {*shared_names[1:]}
        if has_prefix:
            names |= layer_names(f"{PREFIX}layers.0.", "prefix.")
            names[f"{PREFIX}layers.0.input_layernorm.weight"] = "prefix.input_layernorm.weight"
            names[f"{PREFIX}norm.weight"] = "prefix_norm.weight"
            used.add(f"{PREFIX}layers.0.self_attn.rotary_emb.inv_freq")
        if "input_embed_fn.weight" in checkpoint:  # the target's, which it was trained beside
            checkpoint.check_table("input_embed_fn.weight", target)
        checkpoint.check_tokens(target)
        checkpoint.fill_head(head, names, used)
        return head, None

    def count_blocks(self, checkpoint: Checkpoint, step: int, first_block: int) -> int:
        """How many a head has. All but the first are one, which a file may have once or several
        times. Raises BadModel.
        """
        block_places = checkpoint.part_numbers(r"hydra_mlp\.\d+\.(\d+)\.linear\.weight")
        block_count = max((block_place - first_block) // step for block_place in block_places) + 1
        declared = checkpoint.config.get("hydra_num_layers", block_count)
        fits = type(declared) is int and (declared == block_count or 2 <= block_count < declared)
        if not fits:
            raise checkpoint.bad_model(
                f"hydra_num_layers={declared!r}, and the file has {block_count}"
            )
        return int(declared)

    def further_blocks(
        self, checkpoint: Checkpoint, head: int, step: int, first_block: int
    ) -> list[int]:
        """The places of a head's further blocks in the file."""
        block_places = checkpoint.part_numbers(rf"hydra_mlp\.{head}\.(\d+)\.linear\.weight")
        return sorted(
            block_place
            for block_place in block_places
            if block_place > first_block and (block_place - first_block) % step == 0
        )

    def check_prefix(self, checkpoint: Checkpoint, target: Any) -> None:
        """Raises BadModel where the prefix layer is not one of the target's build."""
        layer_options(
            checkpoint, {**target.config.to_dict(), "num_hidden_layers": 1}, target_shape(target)
        )
