"""Whole steps of the C library: the structures, and what they are filled with."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch

from foretell.native import library
from foretell.native.library import Matrix, placed

ACTIVATIONS = ("silu", "gelu_tanh")  # in the order of the library's numbers


class Layer(ctypes.Structure):
    """ft_layer."""

    _fields_ = [
        *((name, c_void_p) for name in ("before", "after", "query_norm", "key_norm")),
        ("token_norm", c_void_p),
        *((name, c_float) for name in ("before_eps", "after_eps", "head_eps", "token_eps")),
        ("window", c_int32),
        *((name, Matrix) for name in ("qkv", "out", "gate_up", "down")),
    ]


class Model(ctypes.Structure):
    """ft_model."""

    _fields_ = [
        *((name, c_int32) for name in ("layers", "hidden", "heads", "kv_heads", "width")),
        *((name, c_int32) for name in ("inner", "activation", "format")),
        *((name, c_float) for name in ("scale", "norm_eps", "logit_scale")),
        ("norm", c_void_p),
        ("layer", POINTER(Layer)),
        ("head", Matrix),
    ]


class Segment(ctypes.Structure):
    """ft_segment."""

    _fields_ = [
        *((name, c_void_p) for name in ("keys", "values")),
        *((name, c_int64) for name in ("layer_stride", "head_stride")),
        *((name, c_int32) for name in ("start", "rows")),
    ]


class Job(ctypes.Structure):
    """ft_job."""

    _fields_ = [
        *((name, c_int32) for name in ("nodes", "start", "base")),
        *((name, c_void_p) for name in ("positions", "seen", "row_positions", "keys", "values")),
        *((name, c_int64) for name in ("layer_stride", "head_stride")),
        *((name, c_int32) for name in ("room", "segments")),
        ("segment", POINTER(Segment)),
    ]


class Step(ctypes.Structure):
    """ft_step."""

    _fields_ = [
        ("jobs", POINTER(Job)),
        *((name, c_int32) for name in ("job_count", "nodes")),
        *((name, c_void_p) for name in ("states", "tokens", "cosines", "sines")),
        ("positions", c_int32),
        ("layers", c_void_p),
        ("layer_count", c_int32),
        ("rows", c_void_p),
        ("row_count", c_int32),
        *((name, c_void_p) for name in ("logits", "taps")),
        ("tap_count", c_int32),
        ("tapped", c_void_p),
    ]


class Between(ctypes.Structure):
    """ft_between."""

    _fields_ = [
        *((name, c_int32) for name in ("after", "before")),
        *((name, c_void_p) for name in ("hidden", "qkv", "attended")),
    ]


class Following(ctypes.Structure):
    """ft_following."""

    _fields_ = [
        ("embeddings", POINTER(Matrix)),
        ("scale", c_float),
        ("names", c_void_p),
        ("count", c_int32),
        *((name, c_void_p) for name in ("tokens", "chances")),
    ]


class Growth(ctypes.Structure):
    """ft_growth."""

    _fields_ = [
        ("embeddings", POINTER(Matrix)),
        ("scale", c_float),
        ("names", c_void_p),
        ("enter", Matrix),
        *((name, c_void_p) for name in ("token_norm", "state_norm")),
        ("eps", c_float),
        *((name, c_int32) for name in ("hands_on_normed", "depth", "breadth", "chosen")),
        ("least", c_float),
        *((name, c_void_p) for name in ("tokens", "parents", "counts", "chances")),
    ]


def stored(
    keys: torch.Tensor, values: torch.Tensor, layers: int, kv_heads: int, width: int
) -> dict[str, int]:
    """Fields of rows of keys and values (layers, KV, rows, D). Raises ValueError for others."""
    shape = (layers, kv_heads, keys.shape[2], width)
    fits = keys.shape == shape and values.shape == shape and keys.stride(2) == width
    fits = fits and keys.stride() == values.stride() and keys.stride(3) == 1
    if not fits or keys.dtype is not torch.bfloat16 or values.dtype is not torch.bfloat16:
        raise ValueError(f"rows {tuple(keys.shape)} of {keys.dtype}: the library reads {shape}")
    return {
        "keys": keys.data_ptr(),
        "values": values.data_ptr(),
        "layer_stride": keys.stride(0),
        "head_stride": keys.stride(1),
    }


def seen(seen: torch.Tensor | None, nodes: int, rows: int) -> int | None:
    """Where it lies which of so many rows each new node sees."""
    return None if seen is None else placed(seen, (nodes, rows), torch.bool)


def names(names: torch.Tensor | None, head: Matrix) -> int | None:
    """Where the tokens lie that the outputs of a head's matrix are."""
    return None if names is None else placed(names, (head.outputs,), torch.int64)


def opened() -> Any:
    """The library, with these calls described. Raises LookupError, with the reason, where there is
    none.
    """
    lib = library.library()
    lib.ft_forward.argtypes = [POINTER(Model), POINTER(Step), c_int32]
    for name, more in (("follow", Following), ("grow", Growth), ("go_between", Between)):
        call = getattr(lib, f"ft_{name}")
        call.argtypes = [POINTER(Model), POINTER(Step), POINTER(more), c_int32]
    return lib
