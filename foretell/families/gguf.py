"""A model of the llama family read from a .gguf file as it lies there: its blocks of 32 numbers are
those of the C library, in another order.

Q8_0, Q4_0, Q4_1 and BF16 matrices keep their numbers to the last bit. Other formats are left to
llama.cpp.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from foretell.errors import first_line
from foretell.families.packed import PackedEmbedding, PackedLinear
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
BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}  # of 32 numbers with their scales
FORMATS = (*BLOCK_BYTES, "BF16")
TIED = "token_embd.weight"


def read(path: Path) -> PreTrainedModel:
    """The model, its linear layers packed. Raises LookupError, with the reason, where the C library
    does not compute what the file holds.
    """
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM

    if not library.available():
        raise LookupError("the C library is not there")
    try:
        reader = GGUFReader(path)
        field = reader.get_field("general.architecture")
        architecture = "" if field is None else str(field.contents())
        if architecture not in ARCHITECTURES:
            raise LookupError(f"it takes {', '.join(ARCHITECTURES)}, and not {architecture}")
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        for name, tensor in tensors.items():
            kind = tensor.tensor_type.name
            if len(tensor.shape) > 1 and kind not in FORMATS:
                raise LookupError(
                    f"{name} has the format {kind}, and it takes {', '.join(FORMATS)}"
                )
        config: Any = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        from accelerate import init_empty_weights

        with init_empty_weights(include_buffers=False):
            hf = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except Exception as error:  # the reader and transformers raise nearly anything
        if type(error) is LookupError:  # one of ours, and no KeyError of theirs
            raise
        raise LookupError(f"it cannot be read ({first_line(error)})") from error
    _fill(hf, tensors, config, architecture == "llama")
    return hf.eval()  # type: ignore[no-any-return]


def _fill(hf: Any, tensors: dict[str, Any], config: Any, interleaved: bool) -> None:
    """Puts the file's numbers into an empty model. Raises LookupError where they do not belong to
    it.
    """
    left = set(tensors)

    def take(name: str) -> Any:
        if name not in left:
            raise LookupError(f"it lacks {name}")
        left.discard(name)
        return tensors[name]

    try:
        for i, layer in enumerate(hf.model.layers):
            modules = dict(layer.named_modules())
            for short, place in MATRICES.items():
                heads = 0
                if interleaved and short in ("attn_q", "attn_k"):
                    heads = config.num_attention_heads
                    if short == "attn_k":
                        heads = config.num_key_value_heads
                bias = None
                if f"blk.{i}.{short}.bias" in left:
                    bias = _floats(take(f"blk.{i}.{short}.bias")).to(torch.bfloat16)
                packed = _matrix(take(f"blk.{i}.{short}.weight"), heads)
                _check(packed, modules[place])
                parent, _, child = place.rpartition(".")
                linear = PackedLinear(packed, bias, modules[place].in_features)
                setattr(modules[parent], child, linear)
            for short, place in NORMS.items():
                if place in modules:
                    _set_norm(modules[place], take(f"blk.{i}.{short}.weight"))
        _set_norm(hf.model.norm, take("output_norm.weight"))
        embedding = take(TIED)
        head = take("output.weight") if "output.weight" in left else embedding
        packed_head = PackedLinear(_matrix(head, 0), None, config.hidden_size)
        _check(packed_head.packed, hf.lm_head)
        hf.lm_head = packed_head
        table = packed_head
        if head is not embedding:
            table = PackedLinear(_matrix(embedding, 0), None, config.hidden_size)
        hf.set_input_embeddings(PackedEmbedding(table, torch.bfloat16))
    except AttributeError as error:
        raise LookupError(f"its model has other parts ({first_line(error)})") from error
    left.discard("rope_freqs.weight")  # what the configuration says as well
    if left:
        raise LookupError(f"it has {', '.join(sorted(left)[:3])}, which are unknown here")


def _check(packed: Packed, linear: nn.Linear) -> None:
    shape = (packed.outputs, packed.inputs)
    if shape != (linear.out_features, linear.in_features):
        raise LookupError(f"a matrix has the shape {shape}, and its configuration another")


def _set_norm(norm: nn.Module, tensor: Any) -> None:
    weight = _floats(tensor).to(torch.bfloat16)
    norm.weight = nn.Parameter(weight, requires_grad=False)


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
