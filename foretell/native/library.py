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
from foretell.native.packing import FORMATS, GROUP, SCALINGS, Packed

VERSION = 15  # of the structures, as of FT_VERSION
KINDS = ("avx512_bf16", "avx512", "avx2", "neon", "portable")  # kernels, the quickest first
VARIABLE = "FORETELL_NATIVE"  # names the kernels, or `off`

# Calls that look at what they are given before they use it, see `_check_status`.
CHECKED = (
    *("ft_product", "ft_forward", "ft_follow", "ft_grow", "ft_go_between"),
    *("ft_read", "ft_products", "ft_highest", "ft_best", "ft_rows_of", "ft_pack"),
)
OUTSIDE, MISFIT = -2, -1  # what they return where they refuse it


class Matrix(ctypes.Structure):
    """The structure ft_matrix."""

    _fields_ = [
        *((name, c_int32) for name in ("format", "outputs", "inputs", "blocks")),
        *((name, c_int32) for name in ("bits", "group", "offset", "scaling", "least_scaling")),
        *((name, c_void_p) for name in ("weights", "scales", "minima", "table", "fine")),
        ("bias", c_void_p),
    ]


class Raw(ctypes.Structure):
    """The structure ft_raw."""

    _fields_ = [
        *((name, c_int32) for name in ("type", "inputs", "row_count")),
        ("rows", c_void_p),
        ("row_bytes", c_int64),
        ("order", c_void_p),
    ]


class Reading(ctypes.Structure):
    """The structure ft_reading."""

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


def load_kernels() -> Any:
    """Returns the library with the quickest kernels that this processor runs.

    Raises LookupError, with the reason, where there is none.
    """
    c_library, reason = find_library()
    if c_library is None:
        raise LookupError(reason)
    return c_library


@cache
def find_library() -> tuple[Any, str]:
    """Returns the library, or None and why there is none; it is looked for once."""
    try:
        return _open_library(), ""
    except LookupError as error:
        return None, str(error)


def _open_library() -> Any:
    kernel_name = os.environ.get(VARIABLE, "")
    if switched_off():
        raise LookupError(f"{VARIABLE}=off")
    try:
        module = importlib.import_module("foretell.native._library")
    except ImportError as error:
        raise LookupError(
            "the C library is not built here: install foretell again where a C compiler is found; "
            "in a clone with `pip install -e .`"
        ) from error
    c_library = ctypes.CDLL(module.__file__)
    c_library.ft_kind.restype = c_char_p
    c_library.ft_choose.argtypes = [c_char_p]
    c_library.ft_product.argtypes = [POINTER(Matrix), c_void_p, c_int32, c_void_p, c_int32]
    c_library.ft_read.argtypes = [POINTER(Reading), c_int32]
    c_library.ft_products.argtypes = [POINTER(Reading), c_int32]
    c_library.ft_highest.argtypes = [c_void_p, c_int32, c_int32, c_int32, c_void_p, c_int32]
    c_library.ft_best.argtypes = [c_void_p, c_int64, *[c_int32] * 3, *[c_void_p] * 3, c_int32]
    c_library.ft_masked.argtypes = [c_void_p, c_void_p, c_int32, c_void_p]
    c_library.ft_masked.restype = None
    c_library.ft_draw.argtypes = [c_void_p, c_int32, c_double]
    c_library.ft_nucleus.argtypes = [c_void_p, c_int32, c_double, c_void_p]
    c_library.ft_peaks.argtypes = [c_void_p, c_int64, c_void_p, c_int32]
    c_library.ft_peaks.restype = None
    c_library.ft_ranges.argtypes = [c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int32]
    c_library.ft_ranges.restype = None
    c_library.ft_rows_of.argtypes = [POINTER(Matrix), c_void_p, c_int32, c_void_p]
    c_library.ft_pack.argtypes = [POINTER(Raw), POINTER(Matrix), c_int32]
    for name in CHECKED:
        getattr(c_library, name).errcheck = _check_status
    if c_library.ft_version() != VERSION:
        raise LookupError("the C library is of another version: install foretell again")
    if kernel_name and kernel_name not in KINDS:
        raise BadConfig.field(VARIABLE, kernel_name, f"off or one of {', '.join(KINDS)}")
    if not any(
        c_library.ft_choose(kind.encode()) for kind in ([kernel_name] if kernel_name else KINDS)
    ):
        raise LookupError(f"this processor cannot run its kernels {kernel_name}")
    return c_library


def _check_status(status: int, c_function: Any, arguments: Any) -> int:
    """Returns a call's status. Raises IndexError, ValueError or MemoryError where it is not
    done.
    """
    if status > 0:
        return status
    function_name = c_function.__name__
    if status == OUTSIDE:
        raise IndexError(
            f"{function_name}: a token, row, layer or position is beyond what there is"
        )
    if status == MISFIT:
        raise ValueError(f"{function_name}: sizes do not belong to each other")
    raise MemoryError(f"{function_name}: no memory")


# Threads of the step that runs; 0: as many as torch has.
_threads: ContextVar[int] = ContextVar("foretell_native_threads", default=0)


@contextmanager
def limit_threads(threads: int) -> Iterator[None]:
    """Lets single operations take so many threads, inside: torch has one then, see
    ops/threads.py.
    """
    context_token = _threads.set(threads)
    try:
        yield
    finally:
        _threads.reset(context_token)


def thread_count() -> int:
    """The number of threads of single operations."""
    return _threads.get() or torch.get_num_threads()


def switched_off() -> bool:
    """Whether the user wants no library."""
    return os.environ.get(VARIABLE) == "off"


def is_available() -> bool:
    """Whether the library can be had."""
    return find_library()[0] is not None


def kernel_kind() -> str:
    """The kind of kernels that run, one of KINDS."""
    kind_name: str = load_kernels().ft_kind().decode()
    return kind_name


def tensor_address(tensor: torch.Tensor | None) -> int | None:
    """The address of a contiguous tensor. Raises ValueError for another one."""
    if tensor is None:
        return None
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"a tensor {tuple(tensor.shape)} does not lie in one piece of memory")
    return tensor.data_ptr()


def checked_address(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """The address of a contiguous tensor. Raises ValueError where it is not of this shape and
    format, which the library cannot see.
    """
    if tensor.shape != shape or tensor.dtype is not dtype:
        tensor_description = f"{tuple(tensor.shape)} of {tensor.dtype}"
        raise ValueError(
            f"a tensor is {tensor_description}, and the library reads {shape} of {dtype}"
        )
    address = tensor_address(tensor)
    assert address is not None
    return address


def describe_matrix(packed: Packed, bias: torch.Tensor | None = None) -> Matrix:
    """Returns the structure of a packed matrix, which must outlive it; `bias` float32. Raises
    ValueError where it holds other numbers than its sizes say.
    """
    packed.check()
    if bias is not None:
        checked_address(bias, (packed.outputs,), torch.float32)
    return Matrix(
        FORMATS.index(packed.format),
        packed.outputs,
        packed.inputs,
        packed.blocks,
        packed.bits,
        packed.group,
        packed.offset,
        SCALINGS.index(packed.scaling),
        SCALINGS.index(packed.least_scaling),
        tensor_address(packed.weights),
        tensor_address(packed.scales),
        tensor_address(packed.minima),
        tensor_address(packed.table),
        tensor_address(packed.fine),
        tensor_address(bias),
    )


def activation_form(packed: Packed) -> int:
    """The form in which a matrix reads activations, as ft_forms says it."""
    return {"whole": 1, "bfloat16": 2}.get(packed.format, 4)


def multiply_rows(matrix: Matrix, x: torch.Tensor, threads: int) -> torch.Tensor:
    """Multiplies x (rows, inputs) float32 -> (rows, outputs) float32."""
    y = torch.empty(len(x), matrix.outputs)
    if len(x):
        input_address = checked_address(x, (len(x), matrix.inputs), torch.float32)
        load_kernels().ft_product(matrix, input_address, len(x), tensor_address(y), threads)
    return y


def find_peaks(groups: torch.Tensor) -> torch.Tensor:
    """Computes `best_peaks` of rounding.py, nearly, of groups (N, G, 32) float32; uint8 (N, G)."""
    peak_bytes = torch.empty(groups.shape[:-1], dtype=torch.uint8)
    groups = groups.contiguous()
    group_address = checked_address(groups, (*peak_bytes.shape, GROUP), torch.float32)
    load_kernels().ft_peaks(
        group_address, peak_bytes.numel(), tensor_address(peak_bytes), thread_count()
    )
    return peak_bytes


def find_ranges(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes `best_ranges` of rounding.py, nearly, of groups (N, G, 32) float32."""
    groups = groups.contiguous()
    group_numbers = torch.empty(groups.shape, dtype=torch.uint8)
    scales, minima = torch.empty(2, *groups.shape[:-1])
    load_kernels().ft_ranges(
        checked_address(groups, (*scales.shape, GROUP), torch.float32),
        scales.numel(),
        tensor_address(group_numbers),
        tensor_address(scales),
        tensor_address(minima),
        thread_count(),
    )
    return group_numbers, scales, minima


def read_matrix_rows(matrix: Matrix, outputs: torch.Tensor) -> torch.Tensor:
    """Reads rows of a matrix by number (n,) int64 -> (n, inputs) float32. Raises IndexError."""
    rows = torch.empty(len(outputs), matrix.inputs)
    row_numbers = checked_address(outputs, (len(outputs),), torch.int64)
    load_kernels().ft_rows_of(matrix, row_numbers, len(outputs), tensor_address(rows))
    return rows
