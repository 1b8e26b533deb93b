"""The memory: how fast it is read, how much a process takes, how much of it are weights."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from foretell.core.model import Model
from foretell.drafters.model.trimming import Trimmed
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.packed import PackedEmbedding, PackedLinear, weight_sizes

READ = 1 << 28  # bytes that measuring the memory's speed reads
WIDE = 1 << 25  # bytes from which on the measured matrix has wide rows
TRIES = 4
STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


@torch.inference_mode()
def measure_bandwidth(device: torch.device | str = "cpu", size: int = READ) -> float:
    """Bytes/s that this machine reads from memory: the best of sums, copies and matrix-vector
    products.

    `size` bytes are read each time; a processor's cache that holds them all makes the figure larger
    than the memory's.
    """
    data = torch.ones(size // 4, device=device)
    row_width = 4096 if size >= WIDE else 64
    matrix = data.view(torch.bfloat16).view(-1, row_width)
    vector = torch.ones(row_width, dtype=torch.bfloat16, device=device)
    half_buffer = torch.empty_like(data[: len(data) // 2])
    read_methods: list[Callable[[], Any]] = [
        lambda: data.sum(),
        lambda: half_buffer.copy_(data[: len(half_buffer)]),
        lambda: matrix @ vector,
    ]
    best_seconds = float("inf")
    for _ in range(TRIES):
        for read_method in read_methods:
            start_time = time.perf_counter()
            read_method()
            if torch.device(device).type == "cuda":
                torch.cuda.synchronize(device)
            best_seconds = min(best_seconds, time.perf_counter() - start_time)
    return size / best_seconds


def forget_peak() -> None:
    """Lets the system note the process's largest memory anew, where it can."""
    with contextlib.suppress(OSError):
        CLEAR.write_text("5")


def peak_memory() -> int | None:
    """Largest resident bytes of this process since `forget_peak`, or ever; None where the system
    does not tell.
    """
    with contextlib.suppress(OSError):
        for line in STATUS.read_text("utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return unit_bytes * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def weight_bytes(model: Model | None) -> int | None:
    """Bytes of weights that a forward reads, each tensor once; a table of embeddings counts only
    where it is also the head.

    An upper bound for a mixture of experts, and for a forward of some layers. None where the model
    does not show its weights.
    """
    if isinstance(model, Trimmed):
        model = model.base
    if not isinstance(model, Decoder):
        declared_bytes: int | None = getattr(model, "weight_bytes", None)
        return declared_bytes
    tensor_sizes = weight_sizes(model.hf)
    embedding_table: Any = model.hf.get_input_embeddings()
    output_head: Any = model.hf.get_output_embeddings()
    if not isinstance(embedding_table, PackedEmbedding):  # whose rows are the head's
        table_address = embedding_table.weight.data_ptr()
        if isinstance(output_head, PackedLinear) or table_address != output_head.weight.data_ptr():
            tensor_sizes.pop(table_address, None)
    return sum(tensor_sizes.values())


def held_bytes(model: Model | None) -> int:
    """Bytes of a model's weights, each tensor once; of a .gguf file, those that a forward reads."""
    if isinstance(model, Trimmed):
        model = model.base
    if not isinstance(model, Decoder):
        return weight_bytes(model) or 0
    return sum(weight_sizes(model.hf).values())
