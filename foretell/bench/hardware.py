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
    width = 4096 if size >= WIDE else 64
    matrix = data.view(torch.bfloat16).view(-1, width)
    vector = torch.ones(width, dtype=torch.bfloat16, device=device)
    half = torch.empty_like(data[: len(data) // 2])
    ways: list[Callable[[], Any]] = [
        lambda: data.sum(),
        lambda: half.copy_(data[: len(half)]),
        lambda: matrix @ vector,
    ]
    best = float("inf")
    for _ in range(TRIES):
        for way in ways:
            start = time.perf_counter()
            way()
            if torch.device(device).type == "cuda":
                torch.cuda.synchronize(device)
            best = min(best, time.perf_counter() - start)
    return size / best


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
    factor = 1 if sys.platform == "darwin" else 1024
    return factor * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def weight_bytes(model: Model | None) -> int | None:
    """Bytes of weights that a forward reads, each tensor once; a table of embeddings counts only
    where it is also the head.

    An upper bound for a mixture of experts, and for a forward of some layers. None where the model
    does not show its weights.
    """
    if isinstance(model, Trimmed):
        model = model.base
    if not isinstance(model, Decoder):
        known: int | None = getattr(model, "weight_bytes", None)
        return known
    sizes = weight_sizes(model.hf)
    table: Any = model.hf.get_input_embeddings()
    head: Any = model.hf.get_output_embeddings()
    if not isinstance(table, PackedEmbedding):  # whose rows are the head's
        place = table.weight.data_ptr()
        if isinstance(head, PackedLinear) or place != head.weight.data_ptr():
            sizes.pop(place, None)
    return sum(sizes.values())


def held_bytes(model: Model | None) -> int:
    """Bytes of all its weights, each tensor once; of a .gguf file, those that a forward reads."""
    if isinstance(model, Trimmed):
        model = model.base
    if not isinstance(model, Decoder):
        return weight_bytes(model) or 0
    return sum(weight_sizes(model.hf).values())
