"""Whole steps of the C library: the structures, and what they are filled with."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch

from foretell.native import library
from foretell.native.library import Matrix, checked_address

ACTIVATIONS = ("silu", "gelu_tanh")  # in the order of the library's numbers


class Layer(ctypes.Structure):
    """The structure ft_layer."""

    _fields_ = [
        *((name, c_void_p) for name in ("before", "after", "query_norm", "key_norm")),
        ("token_norm", c_void_p),
        *((name, c_float) for name in ("before_eps", "after_eps", "head_eps", "token_eps")),
        ("window", c_int32),
        *((name, Matrix) for name in ("qkv", "out", "gate_up", "down")),
    ]


class Model(ctypes.Structure):
    """The structure ft_model."""

    _fields_ = [
        *((name, c_int32) for name in ("layers", "hidden", "heads", "kv_heads", "width")),
        *((name, c_int32) for name in ("inner", "activation", "forms")),
        *((name, c_float) for name in ("scale", "norm_eps", "logit_scale")),
        ("norm", c_void_p),
        ("layer", POINTER(Layer)),
        ("head", Matrix),
    ]


class Segment(ctypes.Structure):
    """The structure ft_segment."""

    _fields_ = [
        *((name, c_void_p) for name in ("keys", "values")),
        *((name, c_int64) for name in ("layer_stride", "head_stride")),
        *((name, c_int32) for name in ("start", "rows")),
    ]


class Job(ctypes.Structure):
    """The structure ft_job."""

    _fields_ = [
        *((name, c_int32) for name in ("nodes", "start", "base")),
        *((name, c_void_p) for name in ("positions", "seen", "row_positions", "keys", "values")),
        *((name, c_int64) for name in ("layer_stride", "head_stride")),
        *((name, c_int32) for name in ("room", "segments")),
        ("segment", POINTER(Segment)),
    ]


class Step(ctypes.Structure):
    """The structure ft_step."""

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
    """The structure ft_between."""

    _fields_ = [
        *((name, c_int32) for name in ("after", "before")),
        *((name, c_void_p) for name in ("hidden", "qkv", "attended")),
    ]


class Following(ctypes.Structure):
    """The structure ft_following."""

    _fields_ = [
        ("embeddings", POINTER(Matrix)),
        ("scale", c_float),
        ("names", c_void_p),
        ("count", c_int32),
        *((name, c_void_p) for name in ("tokens", "chances")),
    ]


class Growth(ctypes.Structure):
    """The structure ft_growth."""

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


def row_fields(
    keys: torch.Tensor, values: torch.Tensor, layers: int, kv_heads: int, width: int
) -> dict[str, int]:
    """The fields of rows of keys and values (layers, KV, rows, D). Raises ValueError for others."""
    expected_shape = (layers, kv_heads, keys.shape[2], width)
    has_right_layout = (
        keys.shape == expected_shape and values.shape == expected_shape and keys.stride(2) == width
    )
    has_right_layout = has_right_layout and keys.stride() == values.stride() and keys.stride(3) == 1
    if (
        not has_right_layout
        or keys.dtype is not torch.bfloat16
        or values.dtype is not torch.bfloat16
    ):
        raise ValueError(
            f"rows {tuple(keys.shape)} of {keys.dtype}: the library reads {expected_shape}"
        )
    return {
        "keys": keys.data_ptr(),
        "values": values.data_ptr(),
        "layer_stride": keys.stride(0),
        "head_stride": keys.stride(1),
    }


def seen_address(seen: torch.Tensor | None, nodes: int, rows: int) -> int | None:
    """The address of the marks by which each new node sees some of so many rows."""
    return None if seen is None else checked_address(seen, (nodes, rows), torch.bool)


def names_address(names: torch.Tensor | None, head: Matrix) -> int | None:
    """The address of the tokens that the outputs of a head's matrix are."""
    return None if names is None else checked_address(names, (head.outputs,), torch.int64)


def open_library() -> Any:
    """Returns the library with these calls described. Raises LookupError, with the reason, where
    there is none.
    """
    c_library = library.load_kernels()
    c_library.ft_forward.argtypes = [POINTER(Model), POINTER(Step), c_int32]
    for name, extra_structure in (("follow", Following), ("grow", Growth), ("go_between", Between)):
        c_function = getattr(c_library, f"ft_{name}")
        c_function.argtypes = [POINTER(Model), POINTER(Step), POINTER(extra_structure), c_int32]
    return c_library
