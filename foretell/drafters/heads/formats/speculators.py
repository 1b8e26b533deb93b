"""The layout of the speculators library, which vLLM and SGLang serve: EAGLE-3's heads.

The tensors are EAGLE-3's with the layer as `layers.0`; the configuration of the layer stands in
`transformer_layer_config`, and the target is named under `verifier`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from foretell.drafters.heads.formats.base import Format, target_name, write_folder
from foretell.drafters.heads.formats.checkpoint import Checkpoint
from foretell.drafters.heads.formats.eagle3 import layer_of, load_eagle3, read_ids, tensor_names
from foretell.drafters.heads.networks.base import Head
from foretell.drafters.heads.networks.output import Output
from foretell.errors import BadConfig

LAYER = "layers.0."
MTP = "mtp"  # has another layout
VERSION = "0.3.0"  # of the library whose layout is written
PROPOSED = 5  # tokens that servers draft, where they are not told


class SpeculatorsFormat(Format):
    """EAGLE-3's as speculators has it."""

    name = "speculators"
    kind = "eagle3"
    writes = True

    def matches(self, checkpoint: Checkpoint) -> bool:
        told = checkpoint.config.get("speculators_model_type", MTP)
        return bool(told != MTP)

    def load(
        self, checkpoint: Checkpoint, target: Any, taps: str = ""
    ) -> tuple[Head, torch.Tensor | None]:
        config = checkpoint.config
        if config["speculators_model_type"] != self.kind or layer_of(checkpoint) is None:
            what = f"speculators_model_type={config['speculators_model_type']!r}"
            raise checkpoint.bad(f"{what}: this version loads {self.kind!r} of one layer alone")
        inner = config.get("transformer_layer_config")
        if not isinstance(inner, dict):
            raise checkpoint.bad("config.json lacks transformer_layer_config; fetch it again")
        options = {
            "stream_normed": bool(config.get("norm_before_residual", False)),
            # Here it says what nodes below read; SpecForge means another thing by it.
            "hands_on_normed": bool(config.get("norm_output", False)),
        }
        ids = read_ids(checkpoint, config)
        return load_eagle3(checkpoint, target, inner, options, ids, taps or "input")

    def write(self, head: Head, kept: torch.Tensor | None, target: Any, folder: Path) -> None:
        made: Any = head
        if head.kind != self.kind or made.norm is None:
            what = f"{head.kind} head" + (" without a last norm" if head.kind == self.kind else "")
            raise BadConfig(f"{self.name}: holds no {what}; write --to foretell")
        own = head.state_dict()
        tensors = {theirs: own[ours] for theirs, ours in tensor_names(head, LAYER).items()}
        if head.matrix is None:
            tensors["lm_head.weight"] = Output(target, kept).weight()
        vocab = head.config.target.vocab
        ids = torch.arange(vocab) if kept is None else kept.long()
        marks = torch.zeros(vocab, dtype=torch.bool)
        marks[ids] = True
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": marks}
        write_folder(folder, "model.safetensors", tensors, described(made, len(ids), target))


def described(head: Any, drafted: int, target: Any) -> dict[str, Any]:
    """The config.json of a head for `drafted` tokens."""
    shape, config = head.shape, target.config
    norms = head.option("tap_norms")
    # Settings of newer versions stand there where they are set alone, so that older ones read it.
    later = {
        "norm_before_fc": norms == "all",
        "fc_norm": norms == "each",
        "norm_output": head.hands_on_normed,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": PROPOSED, "accept_tolerance": 0.0}
            ],
            "verifier": {
                "name_or_path": target_name(target),
                "architectures": list(config.architectures or [type(target.hf).__name__]),
            },
        },
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": 1,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.width,
            "hidden_act": "silu",
            "rms_norm_eps": shape.eps,
            "rope_theta": shape.theta,
            "max_position_embeddings": int(target.context),
            "vocab_size": head.config.target.vocab,
            "attention_bias": False,
            "mlp_bias": False,
        },
        "draft_vocab_size": drafted,
        "eagle_aux_hidden_state_layer_ids": list(head.taps),
        "norm_before_residual": head.stream_normed,
        **{name: True for name, holds in later.items() if holds},
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
