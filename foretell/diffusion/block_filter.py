"""A small network that says which tokens of a block need no further step, and its file.

It reads the probabilities of the likeliest token at every position of a block, committed ones
included, and says of each position whether its token is the final one. Blocks shorter than its own
are padded with zeros. A file is safetensors, for one model and one length of blocks.

Source: Bao et al., Learning to Parallel: Accelerating Diffusion Large Language Models via Adaptive
Parallel Decoding, arXiv:2509.25188.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from foretell.errors import BadFile, first_message_line
from foretell.ops.files import replace_file
from foretell.ops.fingerprint import norm_mark

if TYPE_CHECKING:
    from foretell.core.model import Model

SCHEMA = "foretell block filter 1"
MAKE = "make one with `foretell train filter --model MODEL --prompts FILE --out FILE`"


class BlockFilter(nn.Module):
    """B probabilities -> B logits, by way of B units; 2,112 numbers for blocks of 32."""

    def __init__(self, block: int):
        super().__init__()
        self.block = block
        self.first = nn.Linear(block, block)
        self.second = nn.Linear(block, block)

    def forward(self, probabilities: torch.Tensor) -> torch.Tensor:
        """(..., n) of blocks of n <= B positions -> logits (..., n)."""
        missing_count = self.block - probabilities.shape[-1]
        padded = F.pad(probabilities.float(), (0, missing_count))
        logits: torch.Tensor = self.second(F.relu(self.first(padded)))
        return logits[..., : probabilities.shape[-1]]


def save_filter(block_filter: BlockFilter, file_path: Path, model: Model) -> None:
    """Writes it, whole or not at all. Raises BadFile."""
    metadata = {"schema": SCHEMA, "block": str(block_filter.block), "norm": norm_mark(model)}
    tensors = {name: tensor.contiguous() for name, tensor in block_filter.state_dict().items()}
    with replace_file(file_path) as partial_file:
        save_file(tensors, partial_file, metadata)


def load_filter(file_path: Path, model: Model) -> BlockFilter:
    """The filter in a file. Raises BadFile for a damaged one, and for another model's."""
    try:
        with safe_open(file_path, "pt") as open_file:
            metadata = open_file.metadata() or {}
            if metadata.get("schema") != SCHEMA:
                raise BadFile(f"{file_path}: is no filter of blocks; {MAKE}")
            names = open_file.keys()
            tensors = {name: open_file.get_tensor(name) for name in names}
        block = int(metadata["block"])
        # One of its layers has block * block numbers: a false header builds nothing large.
        if tensors["first.weight"].shape != (block, block):
            raise ValueError(f"it is none for blocks of {block}")
        block_filter = BlockFilter(block)
        block_filter.load_state_dict(tensors)
        if not all(bool(value.isfinite().all()) for value in tensors.values()):
            raise ValueError("a weight is not a finite number")
    except (OSError, SafetensorError, KeyError, RuntimeError, ValueError) as error:
        raise BadFile(
            f"{file_path}: cannot be read ({first_message_line(error)}); {MAKE}"
        ) from error
    if metadata.get("norm", "") != norm_mark(model):
        raise BadFile(f"{file_path}: was made for another model than {model.name}; {MAKE}")
    return block_filter.eval()
