"""The layouts of heads for multi-token prediction that come with a model: among the model's own
tensors, as DeepSeek-V3 and Qwen3-Next have them, or apart, as speculators has them.

The layer and the norms are of the model's own build, whatever that is.
"""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

import torch

from foretell.drafters.heads.formats.base import Format
from foretell.drafters.heads.formats.checkpoint import TABLE, Checkpoint
from foretell.drafters.heads.networks.base import Head
from foretell.drafters.heads.networks.folder import build_head, target_shape
from foretell.errors import BadConfig

EXPERTS = ".mlp.experts."


class MtpFormat(Format):
    """The base of these layouts. `names`: names of tensors around the layer -> ours."""

    kind = "mtp"
    ways = ("normed", "stream")
    ways_are = "its head reads the target's last state as"
    default_way = "normed"
    hands_on_normed = True
    names: ClassVar[dict[str, str]]

    def tensor_prefix(self, checkpoint: Checkpoint, target: Any) -> str:
        """The prefix of the names of the head's tensors. Raises BadModel."""
        raise NotImplementedError

    def layer_part(self) -> str:
        """The part of names between the prefix and the names of the layer's tensors."""
        return ""

    def load_head(
        self, checkpoint: Checkpoint, target: Any, taps: str = ""
    ) -> tuple[Head, torch.Tensor | None]:
        shape = target_shape(target)
        config = checkpoint.config
        fields = next(
            (config[name] for name in INNER if isinstance(config.get(name), dict)), config
        )
        sizes = {"hidden_size": shape.hidden, "vocab_size": shape.vocab}
        checkpoint.check_sizes(fields, {**sizes, "num_hidden_layers": shape.layers})
        prefix = self.tensor_prefix(checkpoint, target)
        family = json.loads(target.config.to_json_string(use_diff=False))
        options = {
            "family": family,
            "reads_normed": (taps or self.default_way) == "normed",
            "hands_on_normed": self.hands_on_normed,
            "sees_first": False,
        }
        if f"{prefix}{TABLE}" in checkpoint:
            checkpoint.check_table(f"{prefix}{TABLE}", target)
        checkpoint.check_tokens(target)
        matrix_name = self.own_matrix(checkpoint, prefix, target)
        if matrix_name:
            options["own_matrix"] = target.vocab
        try:
            head = build_head(self.kind, shape, options)
        except BadConfig as error:
            raise checkpoint.bad_model(str(error)) from error
        names = {f"{prefix}{theirs}": ours for theirs, ours in self.names.items()}
        if matrix_name:
            names[matrix_name] = "matrix.weight"
        layer_prefix = f"{prefix}{self.layer_part()}"
        for ours in head.state_dict():
            if ours.startswith("layer.block."):
                names[layer_prefix + ours.removeprefix("layer.block.")] = ours
        join_experts(checkpoint, names)
        used = {f"{prefix}{name}" for name in (TABLE, "self_attn.rotary_emb.inv_freq")}
        used |= self.copy_names(prefix) | self.other_names(checkpoint, prefix)
        checkpoint.fill_head(head, names, used)
        return head, None

    def other_names(self, checkpoint: Checkpoint, prefix: str) -> set[str]:
        """Names that are not the head's: the model's own."""
        return {name for name in checkpoint.shapes if not name.startswith(prefix)}

    def own_matrix(self, checkpoint: Checkpoint, prefix: str, target: Any) -> str:
        """The name of an output matrix that is not the target's; "": there is none."""
        for name in sorted(self.copy_names(prefix) & checkpoint.shapes.keys()):
            if not checkpoint.is_targets(name, target):
                return name
        return ""

    def copy_names(self, prefix: str) -> set[str]:
        """Names under which the head has the target's output matrix again."""
        return set()


INNER = ("transformer_layer_config", "text_config")  # where a configuration has the model's


class DeepseekMtpFormat(MtpFormat):
    """After the last layer, as one more. Its state is handed on as it leaves the layer."""

    name = "mtp of deepseek"
    hands_on_normed = False
    names: ClassVar[dict[str, str]] = {
        "eh_proj.weight": "enter.weight",
        "enorm.weight": "token_norm.weight",
        "hnorm.weight": "state_norm.weight",
        "shared_head.norm.weight": "norm.weight",
    }

    def matches_folder(self, checkpoint: Checkpoint) -> bool:
        return bool(checkpoint.part_numbers(r"layers\.(\d+)\.eh_proj\.weight"))

    def tensor_prefix(self, checkpoint: Checkpoint, target: Any) -> str:
        layer_numbers = checkpoint.part_numbers(r"layers\.(\d+)\.eh_proj\.weight")
        if len(layer_numbers) > 1:
            raise checkpoint.bad_model(
                f"has {len(layer_numbers)} MTP layers, and this version loads 1"
            )
        (layer,) = layer_numbers
        layer_count = len(target.layout)
        if layer != layer_count:
            complaint = f"layers.{layer}.eh_proj.weight: {target.name} has {layer_count} layers"
            raise checkpoint.bad_model(f"{complaint}; give the model it is for")
        return f"layers.{layer}."

    def copy_names(self, prefix: str) -> set[str]:
        return {f"{prefix}shared_head.head.weight"}


class QwenMtpFormat(MtpFormat):
    """Under names of its own."""

    name = "mtp of qwen"
    names: ClassVar[dict[str, str]] = {
        "fc.weight": "enter.weight",
        "pre_fc_norm_embedding.weight": "token_norm.weight",
        "pre_fc_norm_hidden.weight": "state_norm.weight",
        "norm.weight": "norm.weight",
    }

    def matches_folder(self, checkpoint: Checkpoint) -> bool:
        return "mtp.fc.weight" in checkpoint

    def tensor_prefix(self, checkpoint: Checkpoint, target: Any) -> str:
        check_one_layer(checkpoint, r"mtp\.layers\.(\d+)\..*")
        return "mtp."

    def layer_part(self) -> str:
        return "layers.0."


class SpeculatorsMtpFormat(MtpFormat):
    """Apart, as speculators trains it further: on states that no norm was at."""

    name = "mtp of speculators"
    default_way = "stream"
    names: ClassVar[dict[str, str]] = {
        "input_proj.weight": "enter.weight",
        "token_layernorm.weight": "token_norm.weight",
        "hidden_layernorm.weight": "state_norm.weight",
        "final_layernorm.weight": "norm.weight",
    }

    def matches_folder(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.config.get("speculators_model_type") == "mtp"

    def tensor_prefix(self, checkpoint: Checkpoint, target: Any) -> str:
        check_one_layer(checkpoint, r"mtp_layers\.(\d+)\..*")
        return "mtp_layers.0."

    def copy_names(self, prefix: str) -> set[str]:
        return {"lm_head.weight"}

    def other_names(self, checkpoint: Checkpoint, prefix: str) -> set[str]:
        return {TABLE}


def check_one_layer(checkpoint: Checkpoint, pattern: str) -> None:
    """Raises BadModel where the file has several layers, or none."""
    layer_numbers = checkpoint.part_numbers(pattern)
    if layer_numbers != {0}:
        raise checkpoint.bad_model(f"has {len(layer_numbers)} MTP layers, and this version loads 1")


def join_experts(checkpoint: Checkpoint, names: dict[str, str]) -> None:
    """Takes matrices of single experts for those of all, where the file has them so."""
    for theirs in [name for name in names if EXPERTS in name and name not in checkpoint]:
        start, _, part = theirs.partition(EXPERTS)
        kinds = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(
            part, ()
        )
        pattern = rf"{re.escape(start + EXPERTS)}(\d+)\..*"
        count = len(checkpoint.part_numbers(pattern))
        if not kinds or not count:
            continue
        parts = [f"{start}{EXPERTS}{i}.{kind}.weight" for i in range(count) for kind in kinds]

        def stack_experts(*values: torch.Tensor, group_size: int = len(kinds)) -> torch.Tensor:
            groups = range(0, len(values), group_size)
            return torch.stack([torch.cat(values[i : i + group_size]) for i in groups])

        checkpoint.join_tensors(theirs, parts, stack_experts)
