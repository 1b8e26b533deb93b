"""The files of models that fill canvases: whose layers are those of known families, under which
names their weights stand, and which mask they read.

    LLaDA   names of its own; llama's layers        mask 126336, row j speaks of position j
    Dream   qwen2's names and layers                mask 151666, row j speaks of position j + 1
    SDAR    qwen3's names and layers                mask 151669, blocks of 4 from left to right
    A2D     qwen3's (or another known family's)     its configuration names the mask
    ours    any family of decoders, with `canvas` in config.json: what `foretell train dlm` writes

Transformers knows none of them; their own code is not needed, and not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.errors import BadModel

OURS = "canvas"  # of config.json: {"mask_id", "shift", "block"}


@dataclass(frozen=True)
class Kind:
    """How one kind of files is read. `family`: of transformers; `names`: patterns of its weights'
    names and those of the family.
    """

    family: str
    mask_id: int
    shift: int = 0
    block: int = 0
    names: Mapping[str, str] | None = None
    translated: Callable[[Mapping[str, Any]], dict[str, Any]] = dict


def _llada_settings(raw_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Llama's settings of LLaDA's. Raises BadModel for what llama's layers are not."""
    published: dict[str, Any] = {
        "block_type": "llama",
        "activation_type": "silu",
        "layer_norm_type": "rms",
        "rope": True,
        "alibi": False,
        "include_bias": False,
        "include_qkv_bias": False,
        "attention_layer_norm": False,
        "input_emb_norm": False,
        "scale_logits": False,
    }
    for setting, value in published.items():
        stated_value = raw_settings.get(setting, value)
        if (stated_value or False) != (value or False):
            raise BadModel(
                f"config.json: {setting}={stated_value!r} is not what LLaDA's published models "
                "have "
                f"({value!r}), and its layers are read as llama's"
            )
    head_count = int(raw_settings["n_heads"])
    return {
        "vocab_size": raw_settings.get("embedding_size") or raw_settings["vocab_size"],
        "hidden_size": raw_settings["d_model"],
        "intermediate_size": raw_settings["mlp_hidden_size"],
        "num_hidden_layers": raw_settings["n_layers"],
        "num_attention_heads": head_count,
        "num_key_value_heads": raw_settings.get("n_kv_heads") or head_count,
        "max_position_embeddings": raw_settings["max_sequence_length"],
        "rms_norm_eps": raw_settings.get("rms_norm_eps", 1e-5),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": raw_settings.get("rope_theta", 10000.0),
        },
        "tie_word_embeddings": raw_settings.get("weight_tying", False),
        "eos_token_id": raw_settings.get("eos_token_id"),
        "pad_token_id": raw_settings.get("pad_token_id"),
        "bos_token_id": None,
        "mask_token_id": raw_settings.get("mask_token_id"),
    }


LLADA = r"^model\.transformer\."
LLADA_BLOCK = LLADA + r"blocks\.(\d+)\."
OF_BLOCK = {
    "attn_norm": "input_layernorm",
    "ff_norm": "post_attention_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}
LLADA_NAMES = {
    LLADA + r"wte\.": "model.embed_tokens.",
    LLADA + r"ln_f\.": "model.norm.",
    LLADA + r"ff_out\.": "lm_head.",
    **{
        LLADA_BLOCK + llada_name + r"\.": r"model.layers.\1." + llama + "."
        for llada_name, llama in OF_BLOCK.items()
    },
}
KINDS: dict[str, Kind] = {  # by model_type, in small letters
    "llada": Kind("llama", 126336, names=LLADA_NAMES, translated=_llada_settings),
    "dream": Kind("qwen2", 151666, shift=1),
    "sdar": Kind("qwen3", 151669, block=4),
    "a2d-qwen3": Kind("qwen3", 151669),
    "a2d-qwen2": Kind("qwen2", 151665),
    "a2d-llama": Kind("llama", -1),
}


class Masked:
    """Loads one kind, as transformers' classes do theirs."""

    def __init__(self, raw_settings: Mapping[str, Any]):
        self.raw = raw_settings

    def from_pretrained(self, folder: str | Path, **arguments: Any) -> Any:
        """The model, or it and a report of its weights, as transformers' method returns it.

        What a denoiser has to know of it is in its configuration under OURS.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        own_settings = self.raw.get(OURS)
        kind = KINDS.get(str(self.raw.get("model_type", "")).lower())
        if own_settings is not None:
            kind = Kind(
                str(self.raw["model_type"]),
                own_settings["mask_id"],
                own_settings["shift"],
                own_settings["block"],
            )
        assert kind is not None, "class_of asks is_masked first"
        settings = kind.translated(self.raw)
        for setting in ("model_type", "auto_map", "architectures", OURS):
            settings.pop(setting, None)
        config = AutoConfig.for_model(kind.family, **settings)
        mask_id = settings.get("mask_token_id")
        mask_id = kind.mask_id if mask_id is None else mask_id
        if not 0 <= mask_id < config.vocab_size:
            raise BadModel(
                f"{folder}: its mask ({mask_id}) is no token of its vocabulary "
                f"({config.vocab_size}); name it in config.json: mask_token_id"
            )
        block = self.raw.get("block_size") or kind.block
        canvas_settings = {"mask_id": mask_id, "shift": kind.shift, "block": block}
        setattr(config, OURS, {**(own_settings or {}), **canvas_settings})
        arguments.pop("trust_remote_code", None)
        if kind.names:
            arguments["key_mapping"] = dict(kind.names)
        return AutoModelForCausalLM.from_pretrained(folder, config=config, **arguments)


def is_masked(raw_settings: Mapping[str, Any]) -> bool:
    """Whether these settings, of a config.json, are those of a model that fills canvases."""
    return OURS in raw_settings or str(raw_settings.get("model_type", "")).lower() in KINDS
