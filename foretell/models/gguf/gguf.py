"""A model read from a .gguf file: packed, its numbers in the order of the C library, or unpacked
for other backends.

Packed matrices keep their numbers to the last bit, of every type but those by codebooks (IQ1 to
IQ3).
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from foretell.errors import BadModel, first_message_line
from foretell.models.decoder.packed import PackedLinear
from foretell.models.gguf import limits as gguf_limits
from foretell.models.gguf.architecture import Architecture, find_architecture
from foretell.models.gguf.configuration import build_config
from foretell.models.gguf.filling import Filler, Make, read_floats
from foretell.models.gguf.header import Header, check_keys, read_header
from foretell.native import library
from foretell.native.arena import ROOMS, Arena
from foretell.native.gguf_blocks import TYPES, pack_blocks, packed_sizes
from foretell.ops.memory import large_pages

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def read_packed(file_path: Path) -> PreTrainedModel:
    """The model, its linear layers packed. Raises LookupError, with the reason, where the C library
    does not compute what the file holds.
    """
    if not library.is_available():
        raise LookupError("the C library is not there")
    header = _checked_header(file_path)
    return _build_model(
        header, find_architecture(header).rest, partial(_packed_linear, _make_arena(header))
    )


def build_empty(file_path: Path) -> PreTrainedModel:
    """The model of a file that `read_packed` has read before, without its numbers."""
    header = _checked_header(file_path)
    architecture = find_architecture(header)
    return _empty_model(header, architecture, architecture.rest)


def _make_arena(header: Header) -> Arena | None:
    """Memory in large pages for all matrices of a file; None: there are no such pages."""
    sizes = dict.fromkeys(ROOMS, 0)
    for tensor in header.tensors.values():
        if len(tensor.shape) > 1 and tensor.tensor_type.name in TYPES:
            inputs, *outputs = (int(size) for size in tensor.shape)
            for room, size in packed_sizes(
                tensor.tensor_type.name, math.prod(outputs), inputs
            ).items():
                sizes[room] += size
    memory = large_pages(sum(sizes.values()))
    return None if memory is None else Arena.of(memory, sizes)


def read_unpacked(file_path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model with plain matrices. Raises LookupError, with the reason, where the file holds what
    this does not read.
    """
    header = _checked_header(file_path)

    def plain_linear(tensor: Any, bias: torch.Tensor | None) -> nn.Linear:
        weight = read_floats(tensor).to(dtype)
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
        return linear

    return _build_model(header, dtype, plain_linear)


def _packed_linear(arena: Arena | None, tensor: Any, bias: torch.Tensor | None) -> PackedLinear:
    format_name = tensor.tensor_type.name
    if format_name not in TYPES:
        raise LookupError(
            f"{tensor.name} has the format {format_name}, and it takes {', '.join(TYPES)}"
        )
    inputs, outputs = (int(size) for size in tensor.shape)
    rows = np.asarray(tensor.data).view(np.uint8)
    order = None
    if tensor.order is not None:
        order = torch.from_numpy(np.ascontiguousarray(tensor.order, np.int64))
        outputs = len(rows)
    packed = pack_blocks(format_name, rows.reshape(outputs, -1), inputs, order, arena)
    narrow_bias = None if bias is None else bias.to(torch.bfloat16)
    layer = PackedLinear(packed, narrow_bias, inputs)
    layer.settled = arena is not None and arena.holds(packed.addresses)
    return layer


def _checked_header(file_path: Path) -> Header:
    """The header of a file, every key of which is known. Raises LookupError, and BadModel for one
    that cannot be.
    """
    gguf_limits.check_file(file_path)
    try:
        header = read_header(file_path)
        check_keys(header, find_architecture(header).own_keys)
    except BadModel:  # of another part
        raise
    except Exception as error:
        raise _read_error(error) from error
    return header


def _read_error(error: Exception) -> LookupError:
    """Why a file cannot be read: configurations of transformers raise nearly anything."""
    if type(error) is LookupError:  # one of ours, and no KeyError of theirs
        return error
    return LookupError(f"it cannot be read ({first_message_line(error)})")


def _build_model(header: Header, dtype: torch.dtype, make_layer: Make) -> PreTrainedModel:
    architecture = find_architecture(header)
    try:
        hf_model: Any = _empty_model(header, architecture, dtype)
        Filler(header, architecture, dtype).fill_model(hf_model, make_layer)
    except Exception as error:
        raise _read_error(error) from error
    return hf_model  # type: ignore[no-any-return]


def _empty_model(header: Header, architecture: Architecture, dtype: torch.dtype) -> Any:
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    config = build_config(header, architecture)
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
