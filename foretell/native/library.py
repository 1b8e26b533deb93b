"""The C library through ctypes: structures, the calls, and which kernels this processor runs."""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

import torch

from foretell.errors import BadConfig
from foretell.native.packing import FORMATS, Packed

VERSION = 12  # of the structures, as of FT_VERSION
KINDS = ("avx512_bf16", "avx512", "avx2", "neon", "portable")  # kernels, the quickest first
VARIABLE = "FORETELL_NATIVE"  # names the kernels, or `off`
ACTIVATIONS = ("silu", "gelu_tanh")  # in the order of the library's numbers


class Matrix(ctypes.Structure):
    """ft_matrix."""

    _fields_ = [
        *((name, c_int32) for name in ("format", "outputs", "inputs", "blocks")),
        *((name, c_void_p) for name in ("weights", "scales", "minima", "bias")),
    ]


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
        ("segments", c_int32),
        ("segment", POINTER(Segment)),
    ]


class Step(ctypes.Structure):
    """ft_step."""

    _fields_ = [
        ("jobs", POINTER(Job)),
        *((name, c_int32) for name in ("job_count", "nodes")),
        *((name, c_void_p) for name in ("states", "tokens", "cosines", "sines", "layers")),
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


class Reading(ctypes.Structure):
    """ft_reading."""

    _fields_ = [
        *((name, c_int32) for name in ("heads", "kv_heads", "nodes", "rows")),
        *((name, c_int32) for name in ("width", "value_width", "wide", "owners", "longest")),
        *((name, c_int32) for name in ("page", "first")),
        *((name, c_void_p) for name in ("keys", "values")),
        *((name, c_int64) for name in ("key_head", "key_row", "key_number")),
        *((name, c_int64) for name in ("value_head", "value_row")),
        *((name, c_void_p) for name in ("q", "lists", "read", "mask")),
        ("mask_head", c_int64),
        ("scale", c_float),
        ("out", c_void_p),
        ("out_row", c_int64),
        *((name, c_void_p) for name in ("weights", "log_sums")),
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


def library() -> Any:
    """The library with the quickest kernels that this processor runs.

    Raises LookupError, with the reason, where there is none.
    """
    lib, reason = found()
    if lib is None:
        raise LookupError(reason)
    return lib


@cache
def found() -> tuple[Any, str]:
    """The library, or None and why there is none; it is looked for once."""
    try:
        return _open(), ""
    except LookupError as error:
        return None, str(error)


def _open() -> Any:
    wanted = os.environ.get(VARIABLE, "")
    if switched_off():
        raise LookupError(f"{VARIABLE}=off")
    try:
        module = importlib.import_module("foretell.native._library")
    except ImportError as error:
        raise LookupError(
            "the C library is not built: install foretell again where a C compiler is found"
        ) from error
    lib = ctypes.CDLL(module.__file__)
    lib.ft_kind.restype = c_char_p
    lib.ft_choose.argtypes = [c_char_p]
    lib.ft_product.argtypes = [POINTER(Matrix), c_void_p, c_int32, c_void_p, c_int32]
    lib.ft_forward.argtypes = [POINTER(Model), POINTER(Step), c_int32]
    lib.ft_follow.argtypes = [POINTER(Model), POINTER(Step), POINTER(Following), c_int32]
    lib.ft_grow.argtypes = [POINTER(Model), POINTER(Step), POINTER(Growth), c_int32]
    lib.ft_go_between.argtypes = [POINTER(Model), POINTER(Step), POINTER(Between), c_int32]
    lib.ft_read.argtypes = [POINTER(Reading), c_int32]
    lib.ft_products.argtypes = [POINTER(Reading), c_int32]
    lib.ft_products.restype = None
    lib.ft_highest.argtypes = [c_void_p, c_int32, c_int32, c_int32, c_void_p, c_int32]
    lib.ft_best.argtypes = [c_void_p, c_int64, *[c_int32] * 3, *[c_void_p] * 3, c_int32]
    lib.ft_best.restype = None
    lib.ft_masked.argtypes = [c_void_p, c_void_p, c_int32, c_void_p]
    lib.ft_masked.restype = None
    lib.ft_draw.argtypes = [c_void_p, c_int32, c_double]
    lib.ft_nucleus.argtypes = [c_void_p, c_int32, c_double, c_void_p]
    lib.ft_peaks.argtypes = [c_void_p, c_int64, c_void_p, c_int32]
    lib.ft_peaks.restype = None
    lib.ft_ranges.argtypes = [c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int32]
    lib.ft_ranges.restype = None
    lib.ft_rows_of.argtypes = [POINTER(Matrix), c_void_p, c_int32, c_void_p]
    lib.ft_rows_of.restype = None
    lib.ft_read_rate.argtypes = [c_void_p, c_int64, c_int32]
    lib.ft_read_rate.restype = c_double
    if lib.ft_version() != VERSION:
        raise LookupError("the C library is of another version: install foretell again")
    if wanted and wanted not in KINDS:
        raise BadConfig.field(VARIABLE, wanted, f"off or one of {', '.join(KINDS)}")
    if not any(lib.ft_choose(kind.encode()) for kind in ([wanted] if wanted else KINDS)):
        raise LookupError(f"this processor cannot run its kernels {wanted}")
    return lib


# Threads of the step that runs; 0: as many as torch has.
_threads: ContextVar[int] = ContextVar("foretell_native_threads", default=0)


@contextmanager
def running(threads: int) -> Iterator[None]:
    """Inside, single operations take so many threads: torch has one then, see ops/threads.py."""
    token = _threads.set(threads)
    try:
        yield
    finally:
        _threads.reset(token)


def threads() -> int:
    """Of single operations."""
    return _threads.get() or torch.get_num_threads()


def switched_off() -> bool:
    """Whether the user wants no library."""
    return os.environ.get(VARIABLE) == "off"


def available() -> bool:
    """Whether the library can be had."""
    return found()[0] is not None


def kind() -> str:
    """Which kernels run, one of KINDS."""
    name: str = library().ft_kind().decode()
    return name


def address(tensor: torch.Tensor | None) -> int | None:
    """Where a contiguous tensor lies."""
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def matrix(packed: Packed, bias: torch.Tensor | None = None) -> Matrix:
    """The structure of a packed matrix, which must outlive it; `bias` float32."""
    return Matrix(
        FORMATS.index(packed.format),
        packed.outputs,
        packed.inputs,
        packed.blocks,
        address(packed.weights),
        address(packed.scales),
        address(packed.minima),
        address(bias),
    )


def product(of: Matrix, x: torch.Tensor, threads: int) -> torch.Tensor:
    """x (rows, inputs) float32 -> (rows, outputs) float32."""
    y = torch.empty(len(x), of.outputs)
    if len(x) and not library().ft_product(of, address(x), len(x), address(y), threads):
        raise MemoryError("no memory for a product")
    return y


def peaks(groups: torch.Tensor) -> torch.Tensor:
    """`packing.best_peaks`, up to rounding, of groups (N, G, 32) float32, uint8 (N, G)."""
    best = torch.empty(groups.shape[:-1], dtype=torch.uint8)
    groups = groups.contiguous()
    library().ft_peaks(address(groups), best.numel(), address(best), torch.get_num_threads())
    return best


def ranges(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`packing.best_ranges`, up to rounding, of groups (N, G, 32) float32."""
    groups = groups.contiguous()
    numbers = torch.empty(groups.shape, dtype=torch.uint8)
    scales, minima = torch.empty(2, *groups.shape[:-1])
    library().ft_ranges(
        address(groups),
        scales.numel(),
        address(numbers),
        address(scales),
        address(minima),
        torch.get_num_threads(),
    )
    return numbers, scales, minima


def rows_of(of: Matrix, outputs: torch.Tensor) -> torch.Tensor:
    """Rows of a matrix by number (n,) int64 -> (n, inputs) float32."""
    rows = torch.empty(len(outputs), of.inputs)
    library().ft_rows_of(of, address(outputs), len(outputs), address(rows))
    return rows


def read_rate(threads: int, size: int = 256 << 20) -> float:
    """Bytes a second that so many threads read from memory: the best of five reads of `size`."""
    memory = torch.zeros(size, dtype=torch.uint8)
    memory.fill_(1)
    rates = [library().ft_read_rate(address(memory), size, threads) for _ in range(5)]
    return max(rates)
