"""A model read from a .gguf file: packed as it lies there, where its blocks of 32 numbers are those
of the C library in another order, or unpacked for other backends.

Q8_0, Q4_0, Q4_1 and BF16 matrices keep their numbers to the last bit. Other formats are left to
llama.cpp, or are unpacked.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from foretell.errors import first_message_line
from foretell.models.decoder.packed import PackedEmbedding, PackedLinear
from foretell.models.gguf import limits as gguf_limits
from foretell.models.gguf.header import (
    ROTATION_TENSORS,
    STATED,
    Header,
    check_keys,
    check_stated,
    end_tokens,
    read_header,
    rotation_parameters,
)
from foretell.native import library
from foretell.native.packing import GROUP, Packed, pack_bfloat16, pack_numbers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ARCHITECTURES = ("llama", "qwen2", "qwen3")
MATRICES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NORMS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
# Fields of a configuration that give these matrices biases. One that the file lacks is zero.
BIASED: dict[str, tuple[str, ...]] = {
    "attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output"),
    "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down"),
}
# Keys that transformers' reading passes over, though its models compute what they say.
SET = (
    "context_length",
    "feed_forward_length",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "expert_weights_norm",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)
SCALED = (46, 62)  # layers of Gemma's models of 27 B, whose scores have a scale that no key says
BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}  # of 32 numbers with their scales
FORMATS = (*BLOCK_BYTES, "BF16")
TIED = "token_embd.weight"
# A layer of (the file's matrix, its bias or None, how many heads alternate).
Make = Callable[[Any, torch.Tensor | None, int], "nn.Linear | PackedLinear"]


def read_packed(file_path: Path) -> PreTrainedModel:
    """The model, its linear layers packed. Raises LookupError, with the reason, where the C library
    does not compute what the file holds.
    """
    if not library.is_available():
        raise LookupError("the C library is not there")
    header = _checked_header(file_path)
    if header.architecture not in ARCHITECTURES:
        raise LookupError(f"it takes {', '.join(ARCHITECTURES)}, and not {header.architecture}")
    for tensor_name, tensor in header.tensors.items():
        format_name = tensor.tensor_type.name
        if len(tensor.shape) > 1 and format_name not in FORMATS:
            raise LookupError(
                f"{tensor_name} has the format {format_name}, and it takes {', '.join(FORMATS)}"
            )
    return _build_model(header, torch.bfloat16, _packed_linear)


def read_unpacked(file_path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model with plain matrices. Raises LookupError, with the reason, where the file holds what
    neither this nor transformers reads.
    """
    header = _checked_header(file_path)
    if header.architecture not in ARCHITECTURES:
        return _by_transformers(header, dtype)

    def plain_linear(tensor: Any, bias: torch.Tensor | None, heads: int) -> nn.Linear:
        weight = _in_order(_read_floats(tensor), heads).to(dtype)
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
        return linear

    return _build_model(header, dtype, plain_linear)


def _packed_linear(tensor: Any, bias: torch.Tensor | None, head_count: int) -> PackedLinear:
    packed = _read_matrix(tensor, head_count)
    narrow_bias = None if bias is None else bias.to(torch.bfloat16)
    return PackedLinear(packed, narrow_bias, packed.inputs)


def _checked_header(file_path: Path) -> Header:
    """The header of a file, every key of which is known. Raises LookupError, and BadModel for one
    that cannot be.
    """
    gguf_limits.check_file(file_path)
    try:
        header = read_header(file_path)
        check_keys(header)
    except Exception as error:
        raise _read_error(error) from error
    return header


def _read_error(error: Exception) -> LookupError:
    """Why a file cannot be read: the reader and transformers raise nearly anything."""
    if type(error) is LookupError:  # one of ours, and no KeyError of theirs
        return error
    return LookupError(f"it cannot be read ({first_message_line(error)})")


def _build_model(header: Header, dtype: torch.dtype, make_layer: Make) -> PreTrainedModel:
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    try:
        config = _build_config(header)
        with init_empty_weights(include_buffers=False):
            hf_model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:
        raise _read_error(error) from error
    _fill_model(hf_model, header, make_layer, dtype)
    return hf_model.eval()  # type: ignore[no-any-return]


def _build_config(header: Header) -> Any:
    """The configuration that the file's header and the names of its tensors say."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[header.architecture]
    head_count, hidden_size = (
        header.require_value("attention.head_count"),
        header.require_value("embedding_length"),
    )
    head_width = header.get("attention.key_length", hidden_size // head_count)
    for key in header.values:
        entry_name = key.removeprefix(f"{header.architecture}.")
        if entry_name != key and isinstance(header.get(entry_name), list):
            raise LookupError(f"its header has {key} of several values, one for each layer")
    bias_names = {
        entry_name.split(".", 2)[-1]
        for entry_name in header.tensors
        if entry_name.endswith(".bias")
    }
    bias_fields = {
        field: True
        for field, names in BIASED.items()
        if hasattr(config_class, field)
        and any(f"{entry_name}.bias" in bias_names for entry_name in names)
    }
    token_count = (
        header.tensors[TIED].shape[1]
        if TIED in header.tensors
        else header.require_value("vocab_size")
    )
    layer_names = {
        entry_name.split(".")[1] for entry_name in header.tensors if entry_name.startswith("blk.")
    }
    if header.require_value("block_count") != len(layer_names):
        stated_count = header.require_value("block_count")
        raise LookupError(
            f"its block_count is {stated_count}, and it has {len(layer_names)} layers"
        )
    word_count = gguf_limits.check_file(header.path).lengths.get("tokenizer.ggml.tokens", 0)
    if word_count > token_count:
        raise LookupError(
            f"{TIED} has rows for {token_count} tokens, and its tokenizer has {word_count}"
        )
    config = config_class(
        vocab_size=int(token_count),
        hidden_size=hidden_size,
        intermediate_size=header.require_value("feed_forward_length"),
        num_hidden_layers=len(layer_names),
        num_attention_heads=head_count,
        num_key_value_heads=header.get("attention.head_count_kv", head_count),
        head_dim=head_width,
        rms_norm_eps=header.require_value("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=header.require_value("context_length"),
        rope_parameters=rotation_parameters(header, head_width),
        tie_word_embeddings="output.weight" not in header.tensors,
        bos_token_id=header.values.get("tokenizer.ggml.bos_token_id"),
        pad_token_id=header.values.get("tokenizer.ggml.padding_token_id"),
        eos_token_id=end_tokens(header) or None,
        **bias_fields,
    )
    check_stated(header, config)
    return config


def _check_config(header: Header, config: Any) -> None:
    """Lets a configuration of transformers' reading say the file's rotation too, and checks that it
    says all the rest. Raises LookupError.
    """
    for key_name in SET:
        field = next((field for field in STATED[key_name] if hasattr(config, field)), None)
        value = header.get(key_name)
        if field is not None and value is not None:
            setattr(config, field, value)
    check_stated(header, config)
    head_width = getattr(config, "head_dim", None)
    head_width = head_width or config.hidden_size // config.num_attention_heads
    if hasattr(config, "query_pre_attn_scalar"):
        if header.get("block_count") in SCALED:
            raise LookupError("its scores have a scale that its header does not say")
        config.query_pre_attn_scalar = head_width
    rope_parameters = getattr(config, "rope_parameters", None)
    if rope_parameters is None:
        return
    full_rotation = rope_parameters.get("full_attention", rope_parameters)
    turned_width = int(head_width * full_rotation.get("partial_rotary_factor", 1.0))
    full_rotation.update(rotation_parameters(header, turned_width))


def _by_transformers(header: Header, dtype: torch.dtype) -> PreTrainedModel:
    """A family that transformers reads, if it reads all that this file holds."""
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

    file_path = header.path
    try:
        config: Any = AutoConfig.from_pretrained(file_path.parent, gguf_file=file_path.name)
        _check_config(header, config)
        hf_model, report = AutoModelForCausalLM.from_pretrained(
            file_path.parent,
            config=config,
            gguf_file=file_path.name,
            dtype=dtype,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
    except Exception as error:
        raise _read_error(error) from error
    missing_keys = sorted(report["missing_keys"])
    if missing_keys:
        raise LookupError(f"it lacks {', '.join(missing_keys[:3])}")
    file_count = sum(int(tensor.n_elements) for tensor in header.tensors.values())
    file_count -= sum(
        int(header.tensors[tensor_name].n_elements)
        for tensor_name in ROTATION_TENSORS
        if tensor_name in header.tensors
    )
    read_count = sum(
        {parameter.data_ptr(): parameter.numel() for parameter in hf_model.parameters()}.values()
    )
    if file_count != read_count:
        raise LookupError(
            f"it holds {file_count} numbers, of which transformers reads {read_count}"
        )
    hf_model.config.eos_token_id = hf_model.generation_config.eos_token_id = (
        end_tokens(header) or None
    )
    return hf_model.eval()  # type: ignore[no-any-return]


def _fill_model(hf_model: Any, header: Header, make_layer: Make, dtype: torch.dtype) -> None:
    """Puts the file's numbers into an empty model. Raises LookupError where they do not belong to
    it.
    """
    remaining = {
        name: part for name, part in header.tensors.items() if name not in ROTATION_TENSORS
    }
    config = hf_model.config
    head_counts = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    if header.architecture != "llama":
        head_counts = {}

    def take_tensor(tensor_name: str, *shape: int) -> Any:
        if tensor_name not in remaining:
            raise LookupError(f"it lacks {tensor_name}")
        tensor = remaining.pop(tensor_name)
        tensor_shape = tuple(int(size) for size in reversed(tensor.shape))
        if tensor_shape != shape:
            raise LookupError(
                f"{tensor_name} has the shape {tensor_shape}, and its header says {shape}"
            )
        return tensor

    def build_linear(matrix_name: str, stock: Any, head_count: int = 0) -> nn.Linear | PackedLinear:
        weight = take_tensor(f"{matrix_name}.weight", stock.out_features, stock.in_features)
        bias = None
        if stock.bias is not None:
            bias = torch.zeros(stock.out_features)
            if f"{matrix_name}.bias" in remaining:
                bias = _in_order(
                    _read_floats(take_tensor(f"{matrix_name}.bias", stock.out_features)), head_count
                )
        return make_layer(weight, bias, head_count)

    def fill_norm(norm_name: str, norm: Any) -> None:
        weight = _read_floats(take_tensor(f"{norm_name}.weight", *norm.weight.shape)).to(dtype)
        norm.weight = nn.Parameter(weight, requires_grad=False)

    for layer_index, layer in enumerate(hf_model.model.layers):
        modules = dict(layer.named_modules())
        for matrix_name, module_name in MATRICES.items():
            parent_name, _, child_name = module_name.rpartition(".")
            filled_layer = build_linear(
                f"blk.{layer_index}.{matrix_name}",
                modules[module_name],
                head_counts.get(matrix_name, 0),
            )
            setattr(modules[parent_name], child_name, filled_layer)
        for matrix_name, module_name in NORMS.items():
            if module_name in modules:
                fill_norm(f"blk.{layer_index}.{matrix_name}", modules[module_name])
    fill_norm("output_norm", hf_model.model.norm)
    embedding = make_layer(take_tensor(TIED, config.vocab_size, config.hidden_size), None, 0)
    hf_model.lm_head = (
        build_linear("output", hf_model.lm_head) if "output.weight" in remaining else embedding
    )
    if isinstance(embedding, PackedLinear):
        hf_model.set_input_embeddings(PackedEmbedding(embedding, dtype))
    else:
        hf_model.get_input_embeddings().weight = embedding.weight
    if remaining:
        raise LookupError(f"it has {', '.join(sorted(remaining)[:3])}, which are unknown here")


def _read_floats(tensor: Any) -> torch.Tensor:
    from gguf import dequantize

    try:
        numbers = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise _read_error(error) from error
    return torch.from_numpy(numbers.astype(np.float32))


def _read_matrix(tensor: Any, head_count: int) -> Packed:
    """Reads a matrix in the C library's layout.

    `head_count`: how many heads its outputs are; then those of a head alternate between its halves,
    as the file's own rotation wants them. 0: they stand in order.
    """
    format_name = tensor.tensor_type.name
    inputs, outputs = (int(size) for size in tensor.shape)
    if inputs % GROUP:
        raise LookupError(f"{tensor.name} has {inputs} inputs, no multiple of {GROUP}")
    rows = torch.from_numpy(np.array(tensor.data)).view(torch.uint8)
    if format_name == "BF16":
        weight = _in_order(rows.view(torch.bfloat16).view(outputs, inputs), head_count)
        return pack_bfloat16(weight)
    blocks = _in_order(rows.view(outputs, inputs // GROUP, BLOCK_BYTES[format_name]), head_count)
    scales = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
    if format_name == "Q8_0":
        return pack_numbers("int8", blocks[..., 2:].contiguous().view(torch.int8), scales, None)
    minima = None
    if format_name == "Q4_1":
        minima = blocks[..., 2:4].contiguous().view(torch.float16)[..., 0]
    pairs = blocks[..., -GROUP // 2 :]
    return pack_numbers("int4", torch.cat([pairs & 15, pairs >> 4], -1), scales, minima)


def _in_order(rows: torch.Tensor, head_count: int) -> torch.Tensor:
    """Rows (N, ...) whose heads' halves alternate, one half after the other."""
    if not head_count:
        return rows
    halves = rows.view(head_count, -1, 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)
