"""Compressors for tests: with random weights, made of a target's own layers."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from foretell.kv.encoded.encoders import (
    KINDS,
    Compressor,
    CompressorShape,
    body_from,
    save_compressor,
)


def made(target: Any, kind: str, **more: Any) -> Compressor:
    """One with the target's layers, in its number format, and random matrices after them."""
    generator = torch.Generator().manual_seed(0)
    hidden = int(target.config.hidden_size)
    body, config = body_from(target, more.pop("layers", 1))
    shape = CompressorShape(kind, 2, hidden, hidden, window=4 * (kind == "lclm"), body=config)
    compressor = KINDS[kind](replace(shape, **more), body)
    with torch.no_grad():
        for name, weight in compressor.named_parameters():
            if not name.startswith("body."):
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    for weight in compressor.parameters():
        weight.data = weight.data.to(target.dtype)
    return compressor.eval().requires_grad_(False)


@cache
def folder(target: Any, kind: str, **more: Any) -> str:
    """A folder of such a one."""
    path = Path(tempfile.mkdtemp())
    save_compressor(made(target, kind, **more), path, target, {})
    return str(path)
