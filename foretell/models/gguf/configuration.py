"""A configuration of transformers from the header of a .gguf file and the names of its tensors."""

from __future__ import annotations

from dataclasses import fields as dataclass_fields
from typing import Any

from foretell.models.gguf import limits as gguf_limits
from foretell.models.gguf.architecture import Architecture, count_layers
from foretell.models.gguf.header import (
    STATED,
    Header,
    check_stated,
    end_tokens,
    is_neutral,
    rotation_parameters,
)

EMBEDDINGS = "token_embd.weight"
HEAD = "output.weight"
# Fields of a header that is silent: no window, no cap, no scale, one half of a layer after another.
SILENT: dict[str, Any] = {
    "sliding_window": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "use_parallel_residual": False,
}


def build_config(header: Header, architecture: Architecture) -> Any:
    """Raises LookupError for what it cannot say."""
    from transformers import CONFIG_MAPPING

    config_class: Any = CONFIG_MAPPING[architecture.model_type]
    known_fields = {config_field.name for config_field in dataclass_fields(config_class)}
    known_fields |= set(config_class.attribute_map)
    for key_name in architecture.required:
        header.require_value(key_name)
    _check_lists(header, architecture)
    _check_layers(header)
    stated_fields = {**architecture.fields} | {
        key_name: field_name
        for key_name, names in reversed(STATED.items())
        for field_name in names[::-1]
        if field_name in known_fields and key_name not in architecture.fields
    }
    values = {name: value for name, value in SILENT.items() if name in known_fields}
    values |= {
        field_name: header.get(key_name)
        for key_name, field_name in stated_fields.items()
        if header.get(key_name) is not None and not is_neutral(header, key_name)
    }
    head_count = header.require_value("attention.head_count")
    head_width = header.get(
        "attention.key_length", header.require_value("embedding_length") // head_count
    )
    values |= {
        "vocab_size": _count_tokens(header),
        "num_hidden_layers": count_layers(header, architecture),
        "tie_word_embeddings": HEAD not in header.tensors,
        "bos_token_id": header.values.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": header.values.get("tokenizer.ggml.padding_token_id"),
        "eos_token_id": end_tokens(header) or None,
    }
    if "num_key_value_heads" in known_fields:
        values.setdefault("num_key_value_heads", head_count)
    if "head_dim" in known_fields or header.get("attention.key_length") is not None:
        values["head_dim"] = head_width
    if "rope_parameters" in known_fields:
        values["rope_parameters"] = _rotation(header, architecture, head_width)
    values |= _bias_fields(header, architecture)
    if architecture.complete is not None:
        architecture.complete(header, values)
    config = config_class(**values)
    check_stated(header, config, stated_fields, architecture.keys)
    return config


def _rotation(header: Header, architecture: Architecture, head_width: int) -> dict[str, Any]:
    """The `rope_parameters` of heads that are turned whole, or in part where the family can."""
    if not architecture.partial_rotation:
        return rotation_parameters(header, head_width, architecture.keys)
    turned_width = header.get("rope.dimension_count", head_width)
    if not 0 < turned_width <= head_width or turned_width % 2:
        raise LookupError(
            f"its header has {header.architecture}.rope.dimension_count={turned_width}, and heads "
            f"are {head_width} wide"
        )
    part = turned_width / head_width
    if int(head_width * part) != turned_width:
        part = (turned_width + 0.5) / head_width  # a product that is rounded down
    parameters = rotation_parameters(header, turned_width, architecture.keys)
    return parameters | {"partial_rotary_factor": part}


def _bias_fields(header: Header, architecture: Architecture) -> dict[str, bool]:
    bias_names = {
        tensor_name.removesuffix(".bias").split(".", 2)[-1]
        for tensor_name in header.tensors
        if tensor_name.endswith(".bias")
    }
    return {
        field_name: not bias_names.isdisjoint(names)
        for field_name, names in architecture.biases.items()
    }


def _check_lists(header: Header, architecture: Architecture) -> None:
    """Raises LookupError for a value of each layer that nobody reads as one."""
    for key in header.values:
        key_name = key.removeprefix(f"{header.architecture}.")
        is_list = key_name != key and isinstance(header.get(key_name), list)
        if is_list and key_name not in architecture.keys:
            raise LookupError(f"its header has {key} of several values, one for each layer")


def _check_layers(header: Header) -> None:
    layer_names = {
        tensor_name.split(".")[1]
        for tensor_name in header.tensors
        if tensor_name.startswith("blk.")
    }
    stated_count = header.require_value("block_count")
    if stated_count != len(layer_names):
        raise LookupError(
            f"its block_count is {stated_count}, and it has {len(layer_names)} layers"
        )


def _count_tokens(header: Header) -> int:
    """How many rows its embeddings have, at least one for each token."""
    if EMBEDDINGS not in header.tensors:
        return int(header.require_value("vocab_size"))
    token_count = int(header.tensors[EMBEDDINGS].shape[1])
    word_count = gguf_limits.check_file(header.path).lengths.get("tokenizer.ggml.tokens", 0)
    if word_count > token_count:
        raise LookupError(
            f"{EMBEDDINGS} has rows for {token_count} tokens, and its tokenizer has {word_count}"
        )
    return token_count
