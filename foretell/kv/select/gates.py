"""Which key heads of a model need all of a text, and which the first and the last rows alone.

A table of gates is a safetensors file with one tensor, `gates` (L, KV): of each layer and key head
how much it needs, from 0 to 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from foretell.errors import Unsupported
from foretell.kv.select.marked import Kind

if TYPE_CHECKING:
    from foretell.core.model import Model

# Backends whose attention has a mask among the new nodes of a forward alone: each node sees all
# cached rows of its sequence. A streaming head's nodes do not: the window of each ends elsewhere.
ROWS_SEEN_BY_ALL = ("openvino", "onnxruntime")  # the latter leaves what it cannot do to the former


def _find_fault(gates: torch.Tensor) -> str:
    has_shape = gates.dim() == 2 and gates.is_floating_point() and gates.numel() > 0
    if has_shape and bool(((gates >= 0) & (gates <= 1)).all()):
        return ""
    return "gates are numbers from 0 to 1, one of each layer and key head"


GATES = Kind(
    "gates",
    "gates of its key heads",
    "make some with `foretell train gates --model MODEL --text TEXTS --out FILE`",
    "gates",
    _find_fault,
)


def save_gates(gates: torch.Tensor, path: Path, model: Model, steps: int) -> None:
    """Writes gates (L, KV), whole or not at all. Raises BadFile."""
    GATES.save_table(gates, path, model, steps=str(steps))


def select_streaming(gates: torch.Tensor, sparsity: float) -> torch.Tensor:
    """The `sparsity` of all heads that have the lowest gates, bool (L, KV).

    Of heads with equal gates those of earlier layers come first.
    """
    head_count = round(sparsity * gates.numel())
    head_order = gates.flatten().argsort(stable=True)
    streaming_mask = torch.zeros(gates.numel(), dtype=torch.bool)
    streaming_mask[head_order[:head_count]] = True
    return streaming_mask.view(gates.shape)


def streaming_of(model: Model, sparsity: float, gates_path: str, method: str) -> torch.Tensor:
    """The streaming heads of a model, bool (L, KV), by the gates in a file or a folder, or by those
    that ship. Without any none are needed.

    Raises BadFile where they are another model's, Unsupported where none ship, and where the
    model's backend cannot hide rows from single heads and nodes: torch would compute it all.
    """
    layout = [shape for shape in model.layout if shape is not None]
    table_sizes = (len(layout), layout[0][0])
    if not sparsity:
        return torch.zeros(table_sizes, dtype=torch.bool)
    backend = model.usual_backend
    if backend in ROWS_SEEN_BY_ALL:
        missing_need = (
            f"heads that see fewer rows, and {backend} shows each node all rows of a head"
        )
        cure = "load it with backend='torch', or dtype='bfloat16' or 'int8' for the C library"
        raise Unsupported.missing_capability(method, model.name, missing_need, cure)
    return select_streaming(GATES.find_table(model, gates_path, method, table_sizes), sparsity)
