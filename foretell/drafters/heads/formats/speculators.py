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
from foretell.drafters.heads.formats.eagle3 import eagle3_names, layer_prefix, load_eagle3, read_ids
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

    def matches_folder(self, checkpoint: Checkpoint) -> bool:
        declared = checkpoint.config.get("speculators_model_type", MTP)
        return bool(declared != MTP)

    def load_head(
        self, checkpoint: Checkpoint, target: Any, taps: str = ""
    ) -> tuple[Head, torch.Tensor | None]:
        config = checkpoint.config
        if config["speculators_model_type"] != self.kind or layer_prefix(checkpoint) is None:
            complaint = f"speculators_model_type={config['speculators_model_type']!r}"
            raise checkpoint.bad_model(
                f"{complaint}: this version loads {self.kind!r} of one layer alone"
            )
        inner_config = config.get("transformer_layer_config")
        if not isinstance(inner_config, dict):
            raise checkpoint.bad_model("config.json lacks transformer_layer_config; fetch it again")
        options = {
            "stream_normed": bool(config.get("norm_before_residual", False)),
            # Here it says what nodes below read; SpecForge means another thing by it.
            "hands_on_normed": bool(config.get("norm_output", False)),
        }
        ids = read_ids(checkpoint, config)
        return load_eagle3(checkpoint, target, inner_config, options, ids, taps or "input")

    def write_head(
        self, head: Head, kept_tokens: torch.Tensor | None, target: Any, folder: Path
    ) -> None:
        eagle_head: Any = head
        if head.kind != self.kind or eagle_head.norm is None:
            complaint = f"{head.kind} head" + (
                " without a last norm" if head.kind == self.kind else ""
            )
            raise BadConfig(f"{self.name}: holds no {complaint}; write --to foretell")
        head_state = head.state_dict()
        tensors = {theirs: head_state[ours] for theirs, ours in eagle3_names(head, LAYER).items()}
        if head.matrix is None:
            tensors["lm_head.weight"] = Output(target, kept_tokens).train_weight()
        vocab = head.config.target.vocab
        drafted_ids = torch.arange(vocab) if kept_tokens is None else kept_tokens.long()
        is_drafted = torch.zeros(vocab, dtype=torch.bool)
        is_drafted[drafted_ids] = True
        tensors |= {"d2t": drafted_ids - torch.arange(len(drafted_ids)), "t2d": is_drafted}
        write_folder(
            folder,
            "model.safetensors",
            tensors,
            describe_head(eagle_head, len(drafted_ids), target),
        )


def describe_head(head: Any, drafted_count: int, target: Any) -> dict[str, Any]:
    """The config.json of a head for `drafted_count` tokens."""
    shape, config = head.shape, target.config
    norms = head.option("tap_norms")
    # Settings of newer versions stand there where they are set alone, so that older ones read it.
    newer_settings = {
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
        "draft_vocab_size": drafted_count,
        "eagle_aux_hidden_state_layer_ids": list(head.taps),
        "norm_before_residual": head.stream_normed,
        **{name: True for name, is_set in newer_settings.items() if is_set},
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
