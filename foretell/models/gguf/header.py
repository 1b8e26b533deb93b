"""The header of a .gguf file, read whole: each key changes numbers and is read, or changes none, or
is refused by name. What is unknown here could change numbers, and is refused.

`docs/gguf.md` has the lists for readers; a test goes through the constants of the package `gguf`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foretell.models.gguf.parts import open_parts

# Keys of an architecture, without its name, that a configuration states in these fields of its own,
# the first of them that it has.
STATED: dict[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size",),
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_weights_norm": ("norm_topk_prob",),
    "logit_scale": ("logit_scale",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "use_parallel_residual": ("use_parallel_residual",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_attention_heads"),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("v_head_dim", "head_dim"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.scale": ("attention_multiplier",),
    "attention.sliding_window": ("sliding_window",),
    "shortconv.l_cache": ("conv_L_cache",),
}
# Keys of the rotation, which `rotation_parameters` reads as one, and of a part of a head that it
# turns.
ROTATION = frozenset(
    f"rope.{name}"
    for name in (
        "dimension_count freq_base scale_linear scaling.type scaling.factor scaling.attn_factor "
        "scaling.original_context_length scaling.yarn_ext_factor scaling.yarn_attn_factor "
        "scaling.yarn_beta_fast scaling.yarn_beta_slow scaling.yarn_log_multiplier"
    ).split()
)
# Keys that change no number: how the file was made, and what is asked for states alone.
SILENT = frozenset({"tensor_data_layout", "pooling_type", "rope.scaling.finetuned"})
# Keys that change numbers in ways that nobody here reads, unless they have one of these values.
REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "embedding_length_out features_length expert_chunk_feed_forward_length "
            "moe_every_n_layers moe_latent_size experts_per_group decoder_start_token_id "
            "decoder_block_count rescale_every_n_layers time_mix_extra_dim time_decay_extra_dim "
            "token_shift_count interleave_moe_layer_step full_attention_interval "
            "activation_sparsity_scale altup.active_idx altup.num_inputs "
            "embedding_length_per_layer_input swiglu_clamp_exp swiglu_clamp_shexp "
            "{dense}_feat_in {dense}_feat_out attention.group_norm_epsilon "
            "attention.group_norm_groups attention.q_lora_rank attention.kv_lora_rank "
            "attention.decay_lora_rank attention.iclr_lora_rank attention.gate_lora_rank "
            "attention.value_residual_mix_lora_rank attention.relative_buckets_count "
            "attention.output_scale attention.temperature_length attention.temperature_scale "
            "attention.key_length_mla attention.value_length_mla attention.key_length_swa "
            "attention.value_length_swa attention.indexer.head_count attention.indexer.key_length "
            "attention.indexer.top_k rope.dimension_count_swa rope.freq_base_swa "
            "rope.scaling.alpha ssm.conv_kernel ssm.inner_size ssm.state_size ssm.time_step_rank "
            "ssm.group_count ssm.dt_b_c_rms kda.head_dim wkv.head_size posnet.embedding_length "
            "posnet.block_count convnext.embedding_length convnext.block_count "
            "classifier.output_labels expert_gating_func"
        ).split(),
        (),
    ),
    **dict.fromkeys(
        (
            "leading_dense_block_count expert_shared_count expert_group_count "
            "expert_group_used_count expert_group_scale nextn_predict_layers n_deepstack_layers "
            "router_logit_softcapping attention.max_alibi_bias attention.clamp_kqv "
            "attention.shared_kv_layers swin_norm"
        ).split(),
        (0, False),
    ),
    "expert_weights_scale": (0, 1),
    "attention.causal": (True,),
    "attention.sliding_window_pattern": (),
    "rope.dimension_sections": (),
}
# Of the keys in STATED, what says nothing where a configuration has no such field.
NOTHING: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("expert_count", "expert_used_count", "use_parallel_residual"), (0, False)),
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale"), (0, 1)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (0,)),
    **dict.fromkeys(("attention.sliding_window", "attention.scale"), (0,)),
}
# Keys of no architecture. These begin what is said of a file and of how it was made.
SILENT_BEGINNINGS = ("general.", "quantize.", "mradermacher.")
SPLIT = ("split.no", "split.count", "split.tensors.count")
REFUSED_BEGINNINGS = ("adapter.", "imatrix.", "clip.", "diffusion.", "xielu.")
# Keys of the tokenizer, without their beginning; those that are read, see token_fields.py.
TOKENS_READ = frozenset(
    (
        "ggml.model ggml.pre ggml.tokens ggml.token_type ggml.scores ggml.merges "
        "ggml.bos_token_id ggml.eos_token_id ggml.eot_token_id ggml.eom_token_id "
        "ggml.unknown_token_id ggml.padding_token_id ggml.add_bos_token ggml.add_eos_token "
        "ggml.add_space_prefix ggml.seperator_token_id ggml.mask_token_id ggml.cls_token_id "
        "chat_template"
    ).split()
)
TOKENS_SILENT = frozenset(
    (
        "ggml.token_type_count ggml.add_sep_token "  # of two texts, and here each is one
        "huggingface.json chat_templates ggml.fim_pre_token_id ggml.fim_suf_token_id "
        "ggml.fim_mid_token_id ggml.fim_pad_token_id ggml.fim_rep_token_id ggml.fim_sep_token_id "
        "ggml.prefix_token_id ggml.suffix_token_id ggml.middle_token_id"
    ).split()
)
TOKENS_REFUSED: dict[str, tuple[Any, ...]] = {
    "ggml.remove_extra_whitespaces": (False,),
    "ggml.precompiled_charsmap": (),
    "rwkv.world": (),
}
ENDS = ("eos", "eot", "eom")  # keys that name a token which ends a text
# Texts of control tokens that end a turn or a text: many files name one of several by key.
END_TEXTS = frozenset(
    (
        "<|endoftext|> <|end_of_text|> <|im_end|> <|end|> <|eot_id|> <|eom_id|> <end_of_turn> "
        "<|return|> <|call|> <EOT> [EOT] <end_of_utterance>"
    ).split()
)
CONTROL = 3  # the type of a token that is no text


@dataclass
class Header:
    """The part of a .gguf file before its numbers: values by key, tensors by name."""

    path: Path
    values: Mapping[str, Any]
    tensors: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """Value of a key of its architecture; a list of equal values counts as one."""
        value = self.values.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list) and value and all(part == value[0] for part in value):
            return value[0]
        return value

    def require_value(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise LookupError(f"its header lacks {self.architecture}.{key}")
        return value


def read_header(file_path: Path) -> Header:
    """The header of a file, or of the model whose first part it is, with the tensors of all parts.

    Raises LookupError and BadModel, see `open_parts`.
    """
    return Header(file_path, *open_parts(file_path))


def check_keys(header: Header, own_keys: frozenset[str] = frozenset()) -> None:
    """Raises LookupError with the first key that nobody here reads.

    `own_keys`: those that the architecture reads by itself, without its name.
    """
    file_type = header.values.get("general.type", "model")
    if file_type != "model":
        raise LookupError(f"its header has general.type={file_type!r}, and it takes a model")
    for key in header.values:
        if key.removeprefix(f"{header.architecture}.") not in own_keys:
            _check_key(header, key)


def _check_key(header: Header, key: str) -> None:
    prefix = f"{header.architecture}."
    if key.startswith(SILENT_BEGINNINGS):
        return
    if key in SPLIT:
        return
    if key.startswith("tokenizer."):
        key_name = key.removeprefix("tokenizer.")
        if key_name in TOKENS_READ | TOKENS_SILENT or key_name.startswith("chat_template."):
            return
        refused_values = TOKENS_REFUSED
    elif key.startswith(prefix):
        key_name = key.removeprefix(prefix)
        if key_name in SILENT or key_name in ROTATION or key_name in STATED:
            return
        refused_values = REFUSED
    else:
        raise LookupError(f"its header has {key}, which is unknown here")
    if key_name not in refused_values:
        raise LookupError(f"its header has {key}, which is unknown here")
    value = header.values[key]
    if value not in refused_values[key_name]:
        raise LookupError(
            f"its header has {key}={_shorten_value(value)}, which is not computed here"
        )


def is_neutral(header: Header, key_name: str) -> bool:
    """Whether the value of a key is one that says nothing."""
    return header.get(key_name) in NOTHING.get(key_name, ())


def check_stated(
    header: Header, config: Any, fields: Mapping[str, str], own_keys: frozenset[str] = frozenset()
) -> None:
    """Raises LookupError with the first key that a configuration does not state as the file.

    `fields`: of a key, its field where that is not the first of the usual ones. `own_keys`: those
    of which the architecture makes something else.
    """
    for key in header.values:
        key_name = key.removeprefix(f"{header.architecture}.")
        if key_name == key or key_name not in {**STATED, **fields} or key_name in own_keys:
            continue
        if is_neutral(header, key_name):
            continue
        value = header.get(key_name)
        names = (fields[key_name],) if key_name in fields else STATED[key_name]
        field_name = next((name for name in names if hasattr(config, name)), None)
        stated_value = None if field_name is None else getattr(config, field_name)
        if not _values_equal(value, stated_value):
            raise LookupError(
                f"its header has {key}={_shorten_value(value)}, and what computes it "
                f"{_shorten_value(stated_value)}"
            )


def _values_equal(value: Any, stated_value: Any) -> bool:
    """Whether two values are one, up to the rounding of a float32."""
    if isinstance(value, (int, float)) and isinstance(stated_value, (int, float)):
        return math.isclose(value, stated_value, rel_tol=1e-6)
    return bool(value == stated_value)


def _shorten_value(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def rotation_parameters(
    header: Header, head_width: int, own_keys: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """The `rope_parameters` of transformers for heads of `head_width` that are turned whole.

    `own_keys`: those that the architecture reads by itself.
    Raises LookupError for what they cannot say.
    """
    architecture = header.architecture
    turned_width = header.get("rope.dimension_count", head_width)
    if turned_width != head_width:
        raise LookupError(
            f"its header has {architecture}.rope.dimension_count={turned_width}, and heads are "
            f"{head_width} "
            "wide: parts of heads are not computed here"
        )
    by_length = "rope_factors_long.weight" in header.tensors
    usual_kind = "longrope" if by_length else "linear"
    scaling_kind, factor = header.get("rope.scaling.type", usual_kind), _scaling_factor(header)
    base_parameters = {
        "rope_type": "default",
        "rope_theta": float(header.get("rope.freq_base", 10000.0)),
    }
    if scaling_kind not in KINDS:
        raise LookupError(
            f"its header has {architecture}.rope.scaling.type="
            f"{_shorten_value(scaling_kind)}, "
            f"and it takes {', '.join(KINDS)}"
        )
    if by_length and scaling_kind != "longrope":
        raise LookupError(
            f"it has rope_factors_long.weight beside {architecture}.rope.scaling.type="
            f"{scaling_kind!r}"
        )
    for key_name, usual_values in YARN_USUAL.items():
        value = header.get(key_name, usual_values[0])
        if value not in usual_values and key_name not in own_keys:
            raise LookupError(
                f"its header has {architecture}.{key_name}={_shorten_value(value)}, which is not "
                "computed here"
            )
    return base_parameters | KINDS[scaling_kind](header, factor, head_width)


# Keys of yarn's that have one meaning only with these values.
YARN_USUAL: dict[str, tuple[float, ...]] = {
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}


def _scaling_factor(header: Header) -> float:
    factor = float(header.get("rope.scaling.factor", header.get("rope.scale_linear", 0.0)))
    return factor or 1.0


def _no_scaling(header: Header, factor: float, head_width: int) -> dict[str, Any]:
    return _linear_scaling(header, 1.0, head_width)


def _linear_scaling(header: Header, factor: float, head_width: int) -> dict[str, Any]:
    pair_factors = _pair_numbers(header, "rope_freqs.weight", head_width)
    attention_factor = _attention_factor(header)
    if pair_factors is None and attention_factor == 1:
        return {} if factor == 1 else {"rope_type": "linear", "factor": factor}
    pair_scales = np.ones(head_width // 2, np.float32) if pair_factors is None else pair_factors
    return _by_part(
        header, pair_scales * factor, pair_scales * factor, header.require_value("context_length")
    )


def _yarn_scaling(header: Header, factor: float, head_width: int) -> dict[str, Any]:
    if "rope_freqs.weight" in header.tensors:
        raise LookupError("it has rope_freqs.weight beside rope.scaling.type='yarn'")
    usual_factor = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": _original_length(header),
        "attention_factor": usual_factor * _attention_factor(header),
        "beta_fast": float(header.get("rope.scaling.yarn_beta_fast", 32.0)),
        "beta_slow": float(header.get("rope.scaling.yarn_beta_slow", 1.0)),
    }


def _longrope_scaling(header: Header, factor: float, head_width: int) -> dict[str, Any]:
    long_factors = _pair_numbers(header, "rope_factors_long.weight", head_width)
    short_factors = _pair_numbers(header, "rope_factors_short.weight", head_width)
    if long_factors is None or short_factors is None:
        raise LookupError("it has rope.scaling.type='longrope' and lacks rope_factors_*.weight")
    return _by_part(header, short_factors * factor, long_factors * factor, _original_length(header))


KINDS: dict[str, Callable[[Header, float, int], dict[str, Any]]] = {
    "none": _no_scaling,
    "linear": _linear_scaling,
    "yarn": _yarn_scaling,
    "longrope": _longrope_scaling,
}
ROTATION_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def _by_part(
    header: Header, short_factors: np.ndarray, long_factors: np.ndarray, original_length: int
) -> dict[str, Any]:
    """Each part of a head turns slower by a factor of its own."""
    return {
        "rope_type": "longrope",
        "short_factor": short_factors.tolist(),
        "long_factor": long_factors.tolist(),
        "original_max_position_embeddings": original_length,
        "factor": 1.0,
        "attention_factor": _attention_factor(header),
    }


def _attention_factor(header: Header) -> float:
    return float(header.get("rope.scaling.attn_factor", 1.0))


def _original_length(header: Header) -> int:
    stated_length = header.get("rope.scaling.original_context_length")
    return int(stated_length or header.require_value("context_length"))


def _pair_numbers(header: Header, tensor_name: str, head_width: int) -> np.ndarray | None:
    """A tensor of a number for each pair that is turned; None: the file has none."""
    from gguf import dequantize

    tensor = header.tensors.get(tensor_name)
    if tensor is None:
        return None
    numbers = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
    if numbers.shape != (head_width // 2,):
        raise LookupError(
            f"{tensor_name} has the shape {numbers.shape}, and heads are {head_width} wide"
        )
    return numbers


def end_tokens(header: Header) -> list[int]:
    """The ids that end a text: those that the file names, and control tokens of known texts."""
    values = header.values
    named_ids = [values.get(f"tokenizer.ggml.{end}_token_id") for end in ENDS]
    end_ids = dict.fromkeys(int(token) for token in named_ids if token is not None)
    token_texts = values.get("tokenizer.ggml.tokens", [])
    token_types = values.get("tokenizer.ggml.token_type", [])
    for token, (text, token_type) in enumerate(zip(token_texts, token_types, strict=False)):
        if token_type == CONTROL and text in END_TEXTS:
            end_ids.setdefault(token)
    return list(end_ids)
