"""The C library through ctypes: single operations, and which kernels this processor runs."""

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
from foretell.native.packing import FORMATS, GROUP, Packed

VERSION = 13  # of the structures, as of FT_VERSION
KINDS = ("avx512_bf16", "avx512", "avx2", "neon", "portable")  # kernels, the quickest first
VARIABLE = "FORETELL_NATIVE"  # names the kernels, or `off`

# Calls that look at what they are given before they use it, see `_checked`.
CHECKED = (
    *("ft_product", "ft_forward", "ft_follow", "ft_grow", "ft_go_between"),
    *("ft_read", "ft_products", "ft_highest", "ft_best", "ft_rows_of"),
)
OUTSIDE, MISFIT = -2, -1  # what they return where they refuse it


class Matrix(ctypes.Structure):
    """ft_matrix."""

    _fields_ = [
        *((name, c_int32) for name in ("format", "outputs", "inputs", "blocks")),
        *((name, c_void_p) for name in ("weights", "scales", "minima", "bias")),
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
    lib.ft_read.argtypes = [POINTER(Reading), c_int32]
    lib.ft_products.argtypes = [POINTER(Reading), c_int32]
    lib.ft_highest.argtypes = [c_void_p, c_int32, c_int32, c_int32, c_void_p, c_int32]
    lib.ft_best.argtypes = [c_void_p, c_int64, *[c_int32] * 3, *[c_void_p] * 3, c_int32]
    lib.ft_masked.argtypes = [c_void_p, c_void_p, c_int32, c_void_p]
    lib.ft_masked.restype = None
    lib.ft_draw.argtypes = [c_void_p, c_int32, c_double]
    lib.ft_nucleus.argtypes = [c_void_p, c_int32, c_double, c_void_p]
    lib.ft_peaks.argtypes = [c_void_p, c_int64, c_void_p, c_int32]
    lib.ft_peaks.restype = None
    lib.ft_ranges.argtypes = [c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int32]
    lib.ft_ranges.restype = None
    lib.ft_rows_of.argtypes = [POINTER(Matrix), c_void_p, c_int32, c_void_p]
    lib.ft_read_rate.argtypes = [c_void_p, c_int64, c_int32]
    lib.ft_read_rate.restype = c_double
    for name in CHECKED:
        getattr(lib, name).errcheck = _checked
    if lib.ft_version() != VERSION:
        raise LookupError("the C library is of another version: install foretell again")
    if wanted and wanted not in KINDS:
        raise BadConfig.field(VARIABLE, wanted, f"off or one of {', '.join(KINDS)}")
    if not any(lib.ft_choose(kind.encode()) for kind in ([wanted] if wanted else KINDS)):
        raise LookupError(f"this processor cannot run its kernels {wanted}")
    return lib


def _checked(status: int, call: Any, arguments: Any) -> int:
    """What a call returned. Raises IndexError, ValueError or MemoryError where it is not done."""
    if status > 0:
        return status
    name = call.__name__
    if status == OUTSIDE:
        raise IndexError(f"{name}: a token, row, layer or position is beyond what there is")
    if status == MISFIT:
        raise ValueError(f"{name}: sizes do not belong to each other")
    raise MemoryError(f"{name}: no memory")


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
    """Where a contiguous tensor lies. Raises ValueError for another one."""
    if tensor is None:
        return None
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"a tensor {tuple(tensor.shape)} does not lie in one piece of memory")
    return tensor.data_ptr()


def placed(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Where a contiguous tensor lies. Raises ValueError where it is not of this shape and format,
    which the library cannot see.
    """
    if tensor.shape != shape or tensor.dtype is not dtype:
        found = f"{tuple(tensor.shape)} of {tensor.dtype}"
        raise ValueError(f"a tensor is {found}, and the library reads {shape} of {dtype}")
    where = address(tensor)
    assert where is not None
    return where


def matrix(packed: Packed, bias: torch.Tensor | None = None) -> Matrix:
    """The structure of a packed matrix, which must outlive it; `bias` float32. Raises ValueError
    where it holds other numbers than its sizes say.
    """
    packed.check()
    if bias is not None:
        placed(bias, (packed.outputs,), torch.float32)
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
    if len(x):
        given = placed(x, (len(x), of.inputs), torch.float32)
        library().ft_product(of, given, len(x), address(y), threads)
    return y


def peaks(groups: torch.Tensor) -> torch.Tensor:
    """`packing.best_peaks`, up to rounding, of groups (N, G, 32) float32, uint8 (N, G)."""
    best = torch.empty(groups.shape[:-1], dtype=torch.uint8)
    groups = groups.contiguous()
    given = placed(groups, (*best.shape, GROUP), torch.float32)
    library().ft_peaks(given, best.numel(), address(best), torch.get_num_threads())
    return best


def ranges(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`packing.best_ranges`, up to rounding, of groups (N, G, 32) float32."""
    groups = groups.contiguous()
    numbers = torch.empty(groups.shape, dtype=torch.uint8)
    scales, minima = torch.empty(2, *groups.shape[:-1])
    library().ft_ranges(
        placed(groups, (*scales.shape, GROUP), torch.float32),
        scales.numel(),
        address(numbers),
        address(scales),
        address(minima),
        torch.get_num_threads(),
    )
    return numbers, scales, minima


def rows_of(of: Matrix, outputs: torch.Tensor) -> torch.Tensor:
    """Rows of a matrix by number (n,) int64 -> (n, inputs) float32. Raises IndexError."""
    rows = torch.empty(len(outputs), of.inputs)
    numbers = placed(outputs, (len(outputs),), torch.int64)
    library().ft_rows_of(of, numbers, len(outputs), address(rows))
    return rows


def read_rate(threads: int, size: int = 256 << 20) -> float:
    """Bytes a second that so many threads read from memory: the best of five reads of `size`."""
    memory = torch.zeros(size, dtype=torch.uint8)
    memory.fill_(1)
    rates = [library().ft_read_rate(address(memory), size, threads) for _ in range(5)]
    return max(rates)
