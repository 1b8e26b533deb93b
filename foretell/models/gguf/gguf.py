"""A model read from a .gguf file: packed as it lies there, where its blocks of 32 numbers are those
of the C library in another order, or unpacked for other executors.

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

from foretell.errors import first_line
from foretell.models.decoder.packed import PackedEmbedding, PackedLinear
from foretell.models.gguf import limits as gguf_limits
from foretell.models.gguf.header import (
    ROTATION_TENSORS,
    STATED,
    Header,
    check_keys,
    check_stated,
    ends,
    read_header,
    rotation,
)
from foretell.native import library
from foretell.native.packing import GROUP, Packed, pack, pack_bfloat16

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


def read(path: Path) -> PreTrainedModel:
    """The model, its linear layers packed. Raises LookupError, with the reason, where the C library
    does not compute what the file holds.
    """
    if not library.available():
        raise LookupError("the C library is not there")
    header = _header(path)
    if header.architecture not in ARCHITECTURES:
        raise LookupError(f"it takes {', '.join(ARCHITECTURES)}, and not {header.architecture}")
    for name, tensor in header.tensors.items():
        kind = tensor.tensor_type.name
        if len(tensor.shape) > 1 and kind not in FORMATS:
            raise LookupError(f"{name} has the format {kind}, and it takes {', '.join(FORMATS)}")
    return _built(header, torch.bfloat16, _packed)


def unpacked(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model with plain matrices. Raises LookupError, with the reason, where the file holds what
    neither this nor transformers reads.
    """
    header = _header(path)
    if header.architecture not in ARCHITECTURES:
        return _by_transformers(header, dtype)

    def plain(tensor: Any, bias: torch.Tensor | None, heads: int) -> nn.Linear:
        weight = _in_order(_floats(tensor), heads).to(dtype)
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
        return linear

    return _built(header, dtype, plain)


def _packed(tensor: Any, bias: torch.Tensor | None, heads: int) -> PackedLinear:
    packed = _matrix(tensor, heads)
    short = None if bias is None else bias.to(torch.bfloat16)
    return PackedLinear(packed, short, packed.inputs)


def _header(path: Path) -> Header:
    """Every key of it is known. Raises LookupError, and BadModel for one that cannot be."""
    gguf_limits.check(path)
    try:
        header = read_header(path)
        check_keys(header)
    except Exception as error:
        raise _reason(error) from error
    return header


def _reason(error: Exception) -> LookupError:
    """Why a file cannot be read: the reader and transformers raise nearly anything."""
    if type(error) is LookupError:  # one of ours, and no KeyError of theirs
        return error
    return LookupError(f"it cannot be read ({first_line(error)})")


def _built(header: Header, dtype: torch.dtype, make: Make) -> PreTrainedModel:
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    try:
        config = _config(header)
        with init_empty_weights(include_buffers=False):
            hf = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:
        raise _reason(error) from error
    _fill(hf, header, make, dtype)
    return hf.eval()  # type: ignore[no-any-return]


def _config(header: Header) -> Any:
    """The configuration that the file's header and the names of its tensors say."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[header.architecture]
    heads, hidden = header.need("attention.head_count"), header.need("embedding_length")
    width = header.get("attention.key_length", hidden // heads)
    for key in header.values:
        name = key.removeprefix(f"{header.architecture}.")
        if name != key and isinstance(header.get(name), list):
            raise LookupError(f"its header has {key} of several values, one for each layer")
    biased = {name.split(".", 2)[-1] for name in header.tensors if name.endswith(".bias")}
    fields = {
        field: True
        for field, names in BIASED.items()
        if hasattr(kind, field) and any(f"{name}.bias" in biased for name in names)
    }
    tokens = header.tensors[TIED].shape[1] if TIED in header.tensors else header.need("vocab_size")
    layers = {name.split(".")[1] for name in header.tensors if name.startswith("blk.")}
    if header.need("block_count") != len(layers):
        said = header.need("block_count")
        raise LookupError(f"its block_count is {said}, and it has {len(layers)} layers")
    words = gguf_limits.check(header.path).lengths.get("tokenizer.ggml.tokens", 0)
    if words > tokens:
        raise LookupError(f"{TIED} has rows for {tokens} tokens, and its tokenizer has {words}")
    config = kind(
        vocab_size=int(tokens),
        hidden_size=hidden,
        intermediate_size=header.need("feed_forward_length"),
        num_hidden_layers=len(layers),
        num_attention_heads=heads,
        num_key_value_heads=header.get("attention.head_count_kv", heads),
        head_dim=width,
        rms_norm_eps=header.need("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=header.need("context_length"),
        rope_parameters=rotation(header, width),
        tie_word_embeddings="output.weight" not in header.tensors,
        bos_token_id=header.values.get("tokenizer.ggml.bos_token_id"),
        pad_token_id=header.values.get("tokenizer.ggml.padding_token_id"),
        eos_token_id=ends(header) or None,
        **fields,
    )
    check_stated(header, config)
    return config


def _check_config(header: Header, config: Any) -> None:
    """Lets a configuration of transformers' reading say the file's rotation too, and checks that it
    says all the rest. Raises LookupError.
    """
    for name in SET:
        field = next((field for field in STATED[name] if hasattr(config, field)), None)
        value = header.get(name)
        if field is not None and value is not None:
            setattr(config, field, value)
    check_stated(header, config)
    width = getattr(config, "head_dim", None)
    width = width or config.hidden_size // config.num_attention_heads
    if hasattr(config, "query_pre_attn_scalar"):
        if header.get("block_count") in SCALED:
            raise LookupError("its scores have a scale that its header does not say")
        config.query_pre_attn_scalar = width
    rope = getattr(config, "rope_parameters", None)
    if rope is None:
        return
    whole = rope.get("full_attention", rope)
    turned = int(width * whole.get("partial_rotary_factor", 1.0))
    whole.update(rotation(header, turned))


def _by_transformers(header: Header, dtype: torch.dtype) -> PreTrainedModel:
    """A family that transformers reads, if it reads all that this file holds."""
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

    path = header.path
    try:
        config: Any = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        _check_config(header, config)
        hf, report = AutoModelForCausalLM.from_pretrained(
            path.parent,
            config=config,
            gguf_file=path.name,
            dtype=dtype,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
    except Exception as error:
        raise _reason(error) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise LookupError(f"it lacks {', '.join(missing[:3])}")
    in_file = sum(int(tensor.n_elements) for tensor in header.tensors.values())
    in_file -= sum(
        int(header.tensors[name].n_elements) for name in ROTATION_TENSORS if name in header.tensors
    )
    read_here = sum({p.data_ptr(): p.numel() for p in hf.parameters()}.values())
    if in_file != read_here:
        raise LookupError(f"it holds {in_file} numbers, of which transformers reads {read_here}")
    hf.config.eos_token_id = hf.generation_config.eos_token_id = ends(header) or None
    return hf.eval()  # type: ignore[no-any-return]


def _fill(hf: Any, header: Header, make: Make, dtype: torch.dtype) -> None:
    """Puts the file's numbers into an empty model. Raises LookupError where they do not belong to
    it.
    """
    left = {name: part for name, part in header.tensors.items() if name not in ROTATION_TENSORS}
    config = hf.config
    turned = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    if header.architecture != "llama":
        turned = {}

    def take(name: str, *shape: int) -> Any:
        if name not in left:
            raise LookupError(f"it lacks {name}")
        tensor = left.pop(name)
        found = tuple(int(size) for size in reversed(tensor.shape))
        if found != shape:
            raise LookupError(f"{name} has the shape {found}, and its header says {shape}")
        return tensor

    def linear(name: str, stock: Any, heads: int = 0) -> nn.Linear | PackedLinear:
        weight = take(f"{name}.weight", stock.out_features, stock.in_features)
        bias = None
        if stock.bias is not None:
            bias = torch.zeros(stock.out_features)
            if f"{name}.bias" in left:
                bias = _in_order(_floats(take(f"{name}.bias", stock.out_features)), heads)
        return make(weight, bias, heads)

    def fill_norm(name: str, norm: Any) -> None:
        weight = _floats(take(f"{name}.weight", *norm.weight.shape)).to(dtype)
        norm.weight = nn.Parameter(weight, requires_grad=False)

    for i, layer in enumerate(hf.model.layers):
        modules = dict(layer.named_modules())
        for short, place in MATRICES.items():
            parent, _, child = place.rpartition(".")
            made = linear(f"blk.{i}.{short}", modules[place], turned.get(short, 0))
            setattr(modules[parent], child, made)
        for short, place in NORMS.items():
            if place in modules:
                fill_norm(f"blk.{i}.{short}", modules[place])
    fill_norm("output_norm", hf.model.norm)
    table = make(take(TIED, config.vocab_size, config.hidden_size), None, 0)
    hf.lm_head = linear("output", hf.lm_head) if "output.weight" in left else table
    if isinstance(table, PackedLinear):
        hf.set_input_embeddings(PackedEmbedding(table, dtype))
    else:
        hf.get_input_embeddings().weight = table.weight
    if left:
        raise LookupError(f"it has {', '.join(sorted(left)[:3])}, which are unknown here")


def _floats(tensor: Any) -> torch.Tensor:
    from gguf import dequantize

    return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).astype(np.float32))


def _matrix(tensor: Any, heads: int) -> Packed:
    """A matrix as the library reads it.

    `heads`: how many heads its outputs are; then those of a head alternate between its halves, as
    the file's own rotation wants them. 0: they stand in order.
    """
    kind = tensor.tensor_type.name
    inputs, outputs = (int(size) for size in tensor.shape)
    if inputs % GROUP:
        raise LookupError(f"{tensor.name} has {inputs} inputs, no multiple of {GROUP}")
    rows = torch.from_numpy(np.array(tensor.data)).view(torch.uint8)
    if kind == "BF16":
        weight = _in_order(rows.view(torch.bfloat16).view(outputs, inputs), heads)
        return pack_bfloat16(weight)
    blocks = _in_order(rows.view(outputs, inputs // GROUP, BLOCK_BYTES[kind]), heads)
    scales = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
    if kind == "Q8_0":
        return pack("int8", blocks[..., 2:].contiguous().view(torch.int8), scales, None)
    minima = None
    if kind == "Q4_1":
        minima = blocks[..., 2:4].contiguous().view(torch.float16)[..., 0]
    pairs = blocks[..., -GROUP // 2 :]
    return pack("int4", torch.cat([pairs & 15, pairs >> 4], -1), scales, minima)


def _in_order(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows (N, ...) whose heads' halves alternate, one half after the other."""
    if not heads:
        return rows
    halves = rows.view(heads, -1, 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)
