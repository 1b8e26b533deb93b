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


def _llada(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Llama's settings of LLaDA's. Raises BadModel for what llama's layers are not."""
    usual: dict[str, Any] = {
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
    for name, value in usual.items():
        given = raw.get(name, value)
        if (given or False) != (value or False):
            raise BadModel(
                f"config.json: {name}={given!r} is not what LLaDA's published models have "
                f"({value!r}), and its layers are read as llama's"
            )
    heads = int(raw["n_heads"])
    return {
        "vocab_size": raw.get("embedding_size") or raw["vocab_size"],
        "hidden_size": raw["d_model"],
        "intermediate_size": raw["mlp_hidden_size"],
        "num_hidden_layers": raw["n_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": raw.get("n_kv_heads") or heads,
        "max_position_embeddings": raw["max_sequence_length"],
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-5),
        "rope_parameters": {"rope_type": "default", "rope_theta": raw.get("rope_theta", 10000.0)},
        "tie_word_embeddings": raw.get("weight_tying", False),
        "eos_token_id": raw.get("eos_token_id"),
        "pad_token_id": raw.get("pad_token_id"),
        "bos_token_id": None,
        "mask_token_id": raw.get("mask_token_id"),
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
        LLADA_BLOCK + own + r"\.": r"model.layers.\1." + llama + "."
        for own, llama in OF_BLOCK.items()
    },
}
KINDS: dict[str, Kind] = {  # by model_type, in small letters
    "llada": Kind("llama", 126336, names=LLADA_NAMES, translated=_llada),
    "dream": Kind("qwen2", 151666, shift=1),
    "sdar": Kind("qwen3", 151669, block=4),
    "a2d-qwen3": Kind("qwen3", 151669),
    "a2d-qwen2": Kind("qwen2", 151665),
    "a2d-llama": Kind("llama", -1),
}


class Masked:
    """Loads one kind, as transformers' classes do theirs."""

    def __init__(self, raw: Mapping[str, Any]):
        self.raw = raw

    def from_pretrained(self, place: str | Path, **arguments: Any) -> Any:
        """The model, or it and a report of its weights, as transformers' method returns it.

        What a denoiser has to know of it is in its configuration under OURS.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        own = self.raw.get(OURS)
        kind = KINDS.get(str(self.raw.get("model_type", "")).lower())
        if own is not None:
            kind = Kind(str(self.raw["model_type"]), own["mask_id"], own["shift"], own["block"])
        assert kind is not None, "class_of asks is_masked first"
        settings = kind.translated(self.raw)
        for name in ("model_type", "auto_map", "architectures", OURS):
            settings.pop(name, None)
        config = AutoConfig.for_model(kind.family, **settings)
        mask_id = settings.get("mask_token_id")
        mask_id = kind.mask_id if mask_id is None else mask_id
        if not 0 <= mask_id < config.vocab_size:
            raise BadModel(
                f"{place}: its mask ({mask_id}) is no token of its vocabulary "
                f"({config.vocab_size}); name it in config.json: mask_token_id"
            )
        block = self.raw.get("block_size") or kind.block
        about = {"mask_id": mask_id, "shift": kind.shift, "block": block}
        setattr(config, OURS, {**(own or {}), **about})
        arguments.pop("trust_remote_code", None)
        if kind.names:
            arguments["key_mapping"] = dict(kind.names)
        return AutoModelForCausalLM.from_pretrained(place, config=config, **arguments)


def is_masked(raw: Mapping[str, Any]) -> bool:
    """Whether these settings, of a config.json, are those of a model that fills canvases."""
    return OURS in raw or str(raw.get("model_type", "")).lower() in KINDS
