"""Whole steps of the C library: the structures, and what they are filled with."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch

from foretell.native import library
from foretell.native.library import Matrix, checked_address

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu", "relu2", "clamped_silu")
SCORINGS = ("softmax", "softmax_of_chosen", "logistic")  # in the order of the library's numbers
NO_ROTATION = -1
MATRICES = ("query", "key", "value", "out", "gate", "up", "down")  # of a layer, as they are named


class Norm(ctypes.Structure):
    """The structure ft_norm; empty: there is no norm."""

    _fields_ = [
        *((name, c_void_p) for name in ("weight", "bias")),
        ("eps", c_float),
        ("centered", c_int32),
    ]


class Experts(ctypes.Structure):
    """The structure ft_experts."""

    _fields_ = [
        *((name, c_int32) for name in ("count", "chosen", "scoring", "groups", "chosen_groups")),
        *((name, c_int32) for name in ("group_best", "renormalized", "activation")),
        ("scaling", c_float),
        ("choice_bias", c_void_p),
        *((name, Matrix) for name in ("router", "share")),
        *((name, c_void_p) for name in ("gate", "up", "down")),
    ]


class Layer(ctypes.Structure):
    """The structure ft_layer."""

    _fields_ = [
        *((name, Norm) for name in ("before_attention", "after_attention", "before_mlp")),
        *((name, Norm) for name in ("after_mlp", "query_norm", "key_norm", "token_norm")),
        *((name, c_int32) for name in ("whole_heads", "window", "rotation")),
        *((name, c_int32) for name in ("parallel", "activation")),
        *((name, c_float) for name in ("scale", "score_cap", "residual")),
        ("sinks", c_void_p),
        *((name, Matrix) for name in MATRICES),
        ("experts", POINTER(Experts)),
    ]


class Model(ctypes.Structure):
    """The structure ft_model."""

    _fields_ = [
        *((name, c_int32) for name in ("layers", "hidden", "heads", "kv_heads", "width")),
        *((name, c_float) for name in ("logit_scale", "logit_cap")),
        ("norm", Norm),
        ("layer", POINTER(Layer)),
        ("head", Matrix),
        ("position_rows", c_void_p),
        ("position_count", c_int32),
    ]


class Rotation(ctypes.Structure):
    """The structure ft_rotation."""

    _fields_ = [
        *((name, c_void_p) for name in ("cosines", "sines")),
        *((name, c_int32) for name in ("turned", "interleaved")),
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
        *((name, c_void_p) for name in ("states", "tokens")),
        ("rotations", POINTER(Rotation)),
        *((name, c_int32) for name in ("rotation_count", "positions")),
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
        *((name, Norm) for name in ("token_norm", "state_norm")),
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


class Rotations:
    """Tables of cosines and sines (positions, W / 2) as the library reads them, one a rotation.

    `most`: positions where there is no rotation, so that no table ends.
    """

    def __init__(self, interleaved: Sequence[bool], most: int = 1 << 30):
        self.interleaved = interleaved
        self.most = most
        self.positions = 0
        self.tables: list[tuple[torch.Tensor, torch.Tensor]] = []  # read where they lie
        self.structures = (Rotation * len(interleaved))()

    def replace(self, tables: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Takes tables of other positions, float32, in the order of the rotations."""
        self.positions = min((len(cosines) for cosines, _ in tables), default=self.most)
        self.tables = [(cos.contiguous(), sin.contiguous()) for cos, sin in tables]
        for structure, (cosines, sines), interleaved in zip(
            self.structures, self.tables, self.interleaved, strict=True
        ):
            shape = (self.positions, cosines.shape[1])
            structure.cosines = library.checked_address(cosines, shape, torch.float32)
            structure.sines = library.checked_address(sines, shape, torch.float32)
            structure.turned, structure.interleaved = 2 * cosines.shape[1], interleaved

    def fields(self) -> dict[str, Any]:
        """The fields of a Step that say which tables there are."""
        return {
            "rotations": self.structures,
            "rotation_count": len(self.structures),
            "positions": self.positions,
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
