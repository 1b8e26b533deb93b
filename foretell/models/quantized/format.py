"""What every format of quantized folders has: its settings, and how its matrices are read."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from foretell.errors import BadModel
from foretell.models.quantized.matrix import Quantized
from foretell.models.quantized.tensors import Tensors

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
WIDEST_GROUP = 1 << 20
CURE = "name the model in 16 bits, which dtype='int8' or 'int4' packs, or a .gguf file"


class Settings:
    """What a folder says of its format: `quantization_config`, or a file of an older tool."""

    def __init__(self, fields: dict[str, Any], where: str):
        self.fields, self.where = fields, where

    def get(self, name: str, default: Any = None) -> Any:
        """A field, or the default where it is not there or null."""
        value = self.fields.get(name)
        return default if value is None else value

    def first(self, *names: str) -> str:
        """The first of some names of one field that is there."""
        return next((name for name in names if name in self.fields), names[0])

    def within(self, name: str) -> Settings:
        """The settings of an object in a field."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise self.refuse(name, "an object")
        return Settings(value, f"{self.where}.{name}")

    def choice(self, name: str, values: Sequence[Any], default: Any = None) -> Any:
        """A field that has one of some values. Raises BadModel for another one."""
        value = self.get(name, default)
        if type(value) is not type(values[0]) or value not in values:
            raise self.refuse(name, f"one of {', '.join(map(str, values))}")
        return value

    def group(self, name: str, default: Any = None) -> int:
        """How many inputs share a scale; -1: all."""
        value = self.get(name, default)
        is_count = isinstance(value, int) and not isinstance(value, bool)
        if not is_count or not (value == -1 or 0 < value <= WIDEST_GROUP):
            raise self.refuse(name, "a number of inputs, or -1 for all")
        return int(value)

    def pair(self, name: str) -> tuple[int, int]:
        """A field with outputs and inputs of a block."""
        value = self.get(name)
        is_pair = isinstance(value, list) and len(value) == 2
        if not is_pair or not all(type(n) is int and 0 < n <= WIDEST_GROUP for n in value):
            raise self.refuse(name, "two numbers, of outputs and of inputs")
        return value[0], value[1]

    def refuse(self, name: str, expected: str) -> BadModel:
        """The error of a field with a value that is not read."""
        shown = repr(self.fields.get(name))
        shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
        return BadModel(f"{self.where}.{name} is {shown}, and must be {expected}; {CURE}")


class Format:
    """Reads matrices of one format. Its file says in QUANT_METHODS for which `quant_method`.

    `marks`: parts that a layer has where its matrix is of this format; `parts`: all it may have,
    named LAYER.PART. `experts`: whether it has readers of experts that lie together.
    """

    marks: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()

    def __init__(self, settings: Settings):
        raise NotImplementedError

    def has(self, tensors: Tensors, path: str) -> bool:
        """Whether the layer at a path is of this format."""
        return any(f"{path}.{mark}" in tensors for mark in self.marks)

    def read(self, tensors: Tensors, path: str, outputs: int, inputs: int) -> Quantized:
        """Reads the matrix of a layer. Raises LookupError where it cannot be."""
        raise NotImplementedError

    def stacked(
        self, tensors: Tensors, path: str, shapes: Sequence[tuple[int, int, int]]
    ) -> list[Quantized] | None:
        """Reads gate, up and down, of all experts (X, N, K) each, where they lie together in parts
        of the module at a path; None: they do not.
        """
        return None


def floats_of(tensors: Tensors, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Reads floats of any width. Raises LookupError where they are of other sizes or not finite."""
    values = tensors.take_sized(name, shape, *FLOATS)
    if not bool(values.isfinite().all()):
        raise LookupError(f"{name} has numbers that are not finite")
    return values


def find_format(settings: Settings) -> Format:
    """The reader of a folder's format. Raises BadModel for one that no file reads."""
    files = format_files()
    module_name = files[settings.choice("quant_method", sorted(files))]
    module = importlib.import_module(f"foretell.models.quantized.{module_name}")
    reader = next(
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Format)
        and value.__module__ == module.__name__
    )
    return reader(settings)


@cache
def format_files() -> dict[str, str]:
    """The file that reads each `quant_method`, found by the constant QUANT_METHODS in it."""
    files: dict[str, str] = {}
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "QUANT_METHODS":
                files.update(dict.fromkeys(ast.literal_eval(node.value), path.stem))
    return files
