"""The numbers of a .gguf file put into an empty model: each tensor once, and each part of the model
from those that its architecture names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from foretell.models.decoder.packed import PackedEmbedding, PackedLinear
from foretell.models.decoder.packed_experts import PackedExperts, is_stacked
from foretell.models.gguf.architecture import Architecture, Source, count_layers
from foretell.models.gguf.header import ROTATION_TENSORS, Header

# A layer of (the file's matrix, its bias or None).
Make = Callable[[Any, "torch.Tensor | None"], "nn.Linear | PackedLinear"]
ENDS = (".weight", ".bias")


@dataclass
class Matrix:
    """A matrix of a file as it lies there, its rows whole blocks each. It has what is read of a
    tensor of the package `gguf`. `order`: the row that each output is, int64 (outputs,); None: they
    are in order.
    """

    name: str
    tensor_type: Any
    shape: tuple[int, int]  # inputs, outputs
    data: np.ndarray
    order: np.ndarray | None = None


def read_floats(tensor: Any) -> torch.Tensor:
    """A tensor of a file in float32, its sizes in torch's order. Raises LookupError."""
    from gguf import dequantize

    try:
        numbers = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise LookupError(
            f"{tensor.name} has the format {tensor.tensor_type.name}, which is not unpacked here"
        ) from error
    floats = numbers.astype(np.float32)
    order = getattr(tensor, "order", None)
    return torch.from_numpy(floats if order is None else floats[order])


class Filler:
    """Fills one model from one file. Raises LookupError where they do not belong to each other."""

    def __init__(self, header: Header, architecture: Architecture, dtype: torch.dtype):
        self.architecture, self.dtype = architecture, dtype
        unread = tuple(
            f"blk.{layer}."
            for layer in range(count_layers(header, architecture), header.get("block_count"))
        )
        self.tensors = {
            name: tensor
            for name, tensor in header.tensors.items()
            if name not in ROTATION_TENSORS and not name.startswith(unread)
        }
        self.unused = set(self.tensors)
        self.read: list[Any] = []  # tensors whose pages may leave the memory
        self.config: Any = None

    def fill_model(self, hf_model: Any, make_layer: Make) -> None:
        """Puts all tensors into a model without numbers, its matrices by `make_layer`."""
        self.config = hf_model.config
        modules = dict(hf_model.named_modules())
        embedding, head = hf_model.get_input_embeddings(), hf_model.get_output_embeddings()
        path = next(path for path, module in modules.items() if module is embedding)
        table = self._build_layer(path, embedding, make_layer)
        if isinstance(table, PackedLinear):
            scale = float(getattr(embedding, "scalar_embed_scale", 1.0))
            hf_model.set_input_embeddings(PackedEmbedding(table, self.dtype, scale))
        else:
            embedding.weight = table.weight
        for path, module in modules.items():
            if module is head and self.config.tie_word_embeddings:
                hf_model.set_output_embeddings(table)
            elif _is_matrix(module):
                layer = self._build_layer(path, module, make_layer)
                if type(module) is nn.Linear or isinstance(layer, PackedLinear):
                    parent_path, _, name = path.rpartition(".")
                    setattr(modules[parent_path], name, layer)
                else:
                    module.weight = nn.Parameter(layer.weight.t().contiguous(), False)
                    module.bias = layer.bias
            elif is_stacked(module) and isinstance(table, PackedLinear):
                parent_path, _, name = path.rpartition(".")
                setattr(modules[parent_path], name, self._build_experts(path, module, make_layer))
            elif module is not embedding:
                self._fill_module(path, module)
        if self.unused:
            names = ", ".join(sorted(self.unused)[:3])
            raise LookupError(f"it has {names}, which are unknown here")

    def _fill_module(self, path: str, module: nn.Module) -> None:
        """Fills the parts of a module that is no matrix, and none of its children's."""
        for name, part in list(module.named_parameters(recurse=False)):
            weight = self._read_part(f"{path}.{name}", tuple(part.shape)).to(self.dtype)
            setattr(module, name, nn.Parameter(weight, False))
        for name, stock in list(module.named_buffers(recurse=False)):
            if name not in module._non_persistent_buffers_set:
                buffer = self._read_part(f"{path}.{name}", tuple(stock.shape)).to(stock.dtype)
                setattr(module, name, buffer)

    def _build_layer(self, path: str, stock: Any, make_layer: Make) -> nn.Linear | PackedLinear:
        """A matrix with its bias; embeddings are one without."""
        has_inputs_first = not isinstance(stock, nn.Linear | nn.Embedding)
        outputs, inputs = stock.weight.shape[:: -1 if has_inputs_first else 1]
        matrix = self._read_rows(f"{path}.weight", (outputs, inputs))
        bias = None
        if getattr(stock, "bias", None) is not None:
            bias = self._read_bias(f"{path}.bias", outputs)
        layer = make_layer(matrix, bias)
        self._release_read()
        return layer

    def _build_experts(self, path: str, stock: Any, make_layer: Make) -> PackedExperts:
        """The matrices of a layer's experts as they lie in the file: of each kind those of all
        experts, one after the other.
        """
        gate_up, names, _ = self._find_source(f"{path}.gate_up_proj")
        _, down_names, _ = self._find_source(f"{path}.down_proj")
        count, down_shape = len(stock.down_proj), tuple(stock.down_proj.shape[1:])
        hidden, inner = down_shape[::-1] if gate_up.turned else down_shape
        has_biases = getattr(stock, "gate_up_proj_bias", None) is not None
        layers: list[Any] = []
        for name, shape in zip(
            (*names, *down_names), ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True
        ):
            tensor = self._take(name)
            sizes = tuple(int(size) for size in reversed(tensor.shape))
            if sizes != (count, *shape):
                raise _shape_error(name, sizes, (count, *shape))
            rows = np.asarray(tensor.data).reshape(count * shape[0], -1)
            matrix = Matrix(name, tensor.tensor_type, (shape[1], len(rows)), rows)
            bias = None
            if has_biases:
                bias = read_floats(self._take(name.replace(".weight", ".bias"))).flatten()
            layers.append(make_layer(matrix, bias))
            self._release_read()
        gate, up, down = layers
        return PackedExperts(gate, up, down, count, getattr(stock, "act_fn", None))

    def _read_rows(self, path: str, shape: tuple[int, int]) -> Matrix:
        """A matrix as it lies in the file, its rows in the model's order."""
        source, names, _ = self._find_source(path)
        tensors = [self._take(name) for name in names]
        if source.compose is not None or len({tensor.tensor_type for tensor in tensors}) > 1:
            return _matrix_of_floats(names[0], self._read_part(path, shape))
        row_count = sum(int(tensor.n_elements) // int(tensor.shape[0]) for tensor in tensors)
        rows = None if source.order is None else source.order(self.config, row_count)
        sizes = (row_count if rows is None else len(rows), int(tensors[0].shape[0]))
        if sizes != shape or any(len(tensor.shape) > 2 for tensor in tensors):
            stated_sizes = tuple(int(size) for size in reversed(tensors[0].shape))
            raise _shape_error(names[0], stated_sizes, shape)
        parts = [np.atleast_2d(tensor.data) for tensor in tensors]
        data = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return Matrix(names[0], tensors[0].tensor_type, shape[::-1], data, rows)

    def _read_bias(self, path: str, outputs: int) -> torch.Tensor:
        _, (name,), _ = self._find_source(path)
        if name not in self.tensors and self.architecture.zero_biases:
            return torch.zeros(outputs)
        return self._read_part(path, (outputs,))

    def _read_part(self, path: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The numbers of a part of the model in float32."""
        source, names, head_index = self._find_source(path)
        parts = [read_floats(self._take(name)) for name in names]
        if head_index is not None:
            parts = [part[head_index] if head_index < len(part) else part for part in parts]
        row_axis = parts[0].ndim - (1 if parts[0].ndim == 1 or names[0].endswith(".bias") else 2)
        if source.compose is not None:
            numbers = source.compose(self.config, parts)
        elif len({part.shape for part in parts}) > 1:
            raise LookupError(f"{' and '.join(names)} have different shapes")
        elif source.interleaved:
            numbers = torch.stack(parts, row_axis + 1).flatten(row_axis, row_axis + 1)
        else:
            numbers = torch.cat(parts, row_axis) if len(parts) > 1 else parts[0]
        if source.order is not None:
            rows = torch.from_numpy(source.order(self.config, numbers.shape[row_axis]))
            numbers = numbers.index_select(row_axis, rows)
        if source.turned and row_axis < numbers.ndim - 1:
            numbers = numbers.transpose(-1, -2).contiguous()
        if _without_ones(tuple(numbers.shape)) != _without_ones(shape):
            raise _shape_error(names[0], tuple(numbers.shape), shape)
        return numbers.reshape(shape) - source.offset

    def _find_source(self, path: str) -> tuple[Source, tuple[str, ...], int | None]:
        """What fills a part of the model, the whole names of its tensors, and which head's it is of
        those for which the file has one tensor.
        """
        layers, beginning = f"{self.architecture.layers}.", ""
        entries, below = self.architecture.top, path
        if path.startswith(layers):
            entries = self.architecture.layer
            layer_index, _, below = path.removeprefix(layers).partition(".")
            beginning = f"blk.{layer_index}."
        module_path, _, end = below.rpartition(".")
        parent_path, _, number = module_path.rpartition(".")
        head_index = int(number) if number.isdigit() else None
        module_path = module_path if head_index is None else f"{parent_path}.*"
        found = entries.get(below)
        if found is not None:
            end = "weight"
        else:
            found = entries.get(module_path)
        if found is None:
            raise LookupError(f"what fills {path} is unknown here")
        source = Source((found,)) if isinstance(found, str) else found
        while True:
            names = tuple(
                f"{beginning}{name}" if name.endswith(ENDS) else f"{beginning}{name}.{end}"
                for name in source.names
            )
            if source.alternative is None or names[0] in self.tensors:
                return source, names, head_index
            source = source.alternative

    def _take(self, name: str) -> Any:
        if name not in self.tensors:
            raise LookupError(f"it lacks {name}")
        self.unused.discard(name)
        self.read.append(self.tensors[name])
        return self.tensors[name]

    def _release_read(self) -> None:
        for tensor in self.read:
            tensor.release()
        self.read.clear()


def _matrix_of_floats(name: str, numbers: torch.Tensor) -> Matrix:
    from gguf import GGMLQuantizationType

    outputs, inputs = numbers.shape
    return Matrix(name, GGMLQuantizationType.F32, (inputs, outputs), numbers.numpy())


def _is_matrix(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return type(module) in (nn.Linear, Conv1D)


def _without_ones(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Files leave out sizes of 1."""
    return tuple(size for size in sizes if size != 1)


def _shape_error(name: str, sizes: tuple[int, ...], shape: tuple[int, ...]) -> LookupError:
    return LookupError(f"{name} has the shape {sizes}, and its header says {shape}")
