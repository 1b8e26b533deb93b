"""Which fields of a model's config.json change its numbers, as the faster layers (fused.py), and so
the C library, compute them.

A field of transformers' class is in one of these tables, or nobody here knows it. A field that the
class does not have changes nothing unless the family's code names it. Where one is left, the
model's own layers compute, as they honour everything. A test goes through the classes.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from types import ModuleType
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, masking_utils, modeling_rope_utils

# They change numbers, by way of the modules that are joined or of what is measured at loading.
HONOURED = frozenset(
    (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads head_dim hidden_act rms_norm_eps max_position_embeddings "
        "original_max_position_embeddings tie_word_embeddings attention_bias attention_out_bias "
        "mlp_bias use_bias qkv_bias bias rope_parameters sliding_window use_sliding_window "
        "max_window_layers layer_types embedding_multiplier logits_scaling "
        "logit_scale final_logit_softcapping key_projection layer_norm_eps layer_norm_epsilon "
        "norm_epsilon norm_eps use_qkv_bias"
    ).split()
)
# They change none: training, the ends of texts, and what is said of a model.
SILENT = frozenset(field.name for field in dataclasses.fields(PreTrainedConfig)) | frozenset(
    (
        "initializer_range use_cache pad_token_id bos_token_id eos_token_id pretraining_tp "
        "attention_dropout residual_dropout hidden_dropout embedding_dropout resid_pdrop "
        "embd_pdrop classifier_dropout no_rope_layer_interval name_or_path is_decoder "
        "ignore_keys_at_rope_validation base_model_tp_plan prefix"
    ).split()
)
# Kinds of rotations that are a table of cosines and sines by position, and their parameters.
ROTATIONS = frozenset("default linear dynamic yarn longrope llama3 proportional".split())
OF_ROTATIONS = frozenset(
    (
        "rope_type type rope_theta partial_rotary_factor factor original_max_position_embeddings "
        "attention_factor beta_fast beta_slow short_factor long_factor low_freq_factor "
        "high_freq_factor mscale mscale_all_dim truncate mrope_section mrope_interleaved"
    ).split()
)


def unread_field(
    config: Any, modules: Iterable[nn.Module] = (), read_fields: Collection[str] = ()
) -> str | None:
    """Why layers made of `modules` cannot be replaced by faster ones: the first field that these do
    not honour. None: they honour all. `read_fields`: those that the family's description reads.
    """
    declared_fields = {field.name for field in dataclasses.fields(config)}
    code_modules = _code_modules(modules)
    for field_name in vars(config):
        if field_name in read_fields or field_name in HONOURED:
            continue
        if field_name in SILENT or field_name.startswith("_"):
            continue
        if field_name in declared_fields or any(
            _names_field(code_module, field_name) for code_module in code_modules
        ):
            return f"its configuration has {field_name}, which they do not know"
    return _unread_rotation(getattr(config, "rope_parameters", None) or {})


def _unread_rotation(rope_parameters: Mapping[str, Any]) -> str | None:
    for field_name, value in rope_parameters.items():
        if isinstance(value, Mapping):  # a rotation for each kind of layer
            reason = _unread_rotation(value)
            if reason is not None:
                return reason
        elif field_name not in OF_ROTATIONS:
            return f"its rotation has {field_name}, which they do not know"
    rotation_type = rope_parameters.get("rope_type", "default")
    if rotation_type not in ROTATIONS and not isinstance(rotation_type, Mapping):
        return f"its rotation is of the type {rotation_type}, which they do not know"
    return None


def _code_modules(modules: Iterable[nn.Module]) -> set[ModuleType]:
    """Python modules that hold the code of these layers, and of what they share."""
    part_modules = {
        sys.modules[type(part).__module__] for module in modules for part in module.modules()
    }
    family_modules = {module for module in part_modules if not module.__name__.startswith("torch.")}
    return family_modules | {masking_utils, modeling_rope_utils}


@cache
def _source_text(module: ModuleType) -> str | None:
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):
        return None


def _names_field(module: ModuleType, field_name: str) -> bool:
    """Whether a module's code may read a field of this name."""
    source_text = _source_text(module)
    return (
        source_text is None or re.search(rf"\b{re.escape(field_name)}\b", source_text) is not None
    )
