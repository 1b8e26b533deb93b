"""The tensors of a quantized folder put into an empty model: each once, and packed matrices as they
lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from foretell.models.decoder.packed import PackedEmbedding, PackedLinear
from foretell.models.decoder.packed_experts import PackedExperts, is_stacked
from foretell.models.quantized.format import FLOATS, Format
from foretell.models.quantized.matrix import Quantized
from foretell.models.quantized.tensors import Tensors
from foretell.native.packing import GROUP, pack_floats

# Ends of names that change nothing here: scales of activations and of rows of the cache, which are
# rounded by the numbers that they have, and tables that the model makes by itself.
IGNORED = (
    *(".input_scale", ".input_global_scale", ".input_zero_point", ".activation_scale"),
    *(".k_scale", ".v_scale", ".q_scale", ".output_scale", ".k_zero_point", ".v_zero_point"),
    *(".rotary_emb.inv_freq", ".input_scale_ub"),
)
RENAMED = {"block_sparse_moe": "mlp"}  # modules of files by their names in transformers
# Names of an expert's matrices in files: gate, up and down.
EXPERT_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
Matrix = Quantized | torch.Tensor
Pack = Callable[[Matrix], "PackedLinear | nn.Linear"]


class Filler:
    """Fills one model from one folder. Raises LookupError where they do not belong together."""

    def __init__(self, tensors: Tensors, reader: Format, make_layer: Pack):
        self.tensors, self.reader, self.make_layer = tensors, reader, make_layer
        self.packed_count = 0  # matrices that were of the format
        self.names = tensors.names()

    def fill_model(self, hf_model: Any) -> None:
        """Puts all tensors into a model without numbers."""
        modules = dict(hf_model.named_modules())
        embedding, head = hf_model.get_input_embeddings(), hf_model.get_output_embeddings()
        table: Any = None
        for path, module in modules.items():
            if module is embedding:
                table = self._fill_embedding(hf_model, path, embedding)
        for path, module in modules.items():
            parent_path, _, name = path.rpartition(".")
            if module is head and hf_model.config.tie_word_embeddings:
                hf_model.set_output_embeddings(table)
            elif type(module) is nn.Linear:
                setattr(modules[parent_path], name, self._build_layer(path, module))
            elif is_stacked(module):
                self._fill_experts(modules[parent_path], name, path, module)
            elif module is not embedding:
                self._fill_module(path, module)
            self.tensors.release()
        self._check_unused()

    def _fill_embedding(self, hf_model: Any, path: str, embedding: Any) -> Any:
        """The embeddings, and the layer that is the head where it has the same weights."""
        weight = self._read_floats(f"{path}.weight", tuple(embedding.weight.shape))
        layer = self.make_layer(weight)
        if isinstance(layer, PackedLinear):
            scale = float(getattr(embedding, "scalar_embed_scale", 1.0))
            hf_model.set_input_embeddings(PackedEmbedding(layer, torch.float32, scale))
        else:
            embedding.weight = layer.weight
        return layer

    def _build_layer(self, path: str, stock: nn.Linear) -> PackedLinear | nn.Linear:
        layer = self.make_layer(self._read_matrix(path, stock.out_features, stock.in_features))
        if stock.bias is not None:
            bias = self._read_floats(f"{path}.bias", (stock.out_features,)).float()
            set_bias(layer, bias)
        return layer

    def _read_matrix(self, path: str, outputs: int, inputs: int) -> Matrix:
        """A matrix, quantized or of floats."""
        path = self._find_path(path)
        if not self.reader.has(self.tensors, path):
            return self._read_floats(f"{path}.weight", (outputs, inputs))
        matrix = self.reader.read(self.tensors, path, outputs, inputs)
        self.packed_count += 1
        return matrix

    def _fill_experts(self, parent: Any, name: str, path: str, stock: Any) -> None:
        """Puts the matrices of a layer's experts in, from tensors of all or of each of them."""
        count, down_shape = len(stock.down_proj), tuple(stock.down_proj.shape[1:])
        act_fn = getattr(stock, "act_fn", None)
        # gpt-oss has inputs first, and gate and up by turns.
        hidden, inner = down_shape if act_fn is not None else down_shape[::-1]
        shapes = (inner, hidden), (inner, hidden), (hidden, inner)
        matrices: Any = self.reader.stacked(
            self.tensors, self._find_path(path), [(count, *shape) for shape in shapes]
        )
        if matrices is None:
            matrices = self._read_experts(path, count, shapes)
        else:
            self.packed_count += 1
        layers = [self.make_layer(matrix) for matrix in matrices]
        for layer, bias in zip(layers, self._read_biases(path, stock), strict=True):
            if bias is not None:
                set_bias(layer, bias)
        packed = [layer for layer in layers if isinstance(layer, PackedLinear)]
        if packed:
            gate, up, down = packed
            setattr(parent, name, PackedExperts(gate, up, down, count, act_fn))
        else:
            _fill_stacked(stock, layers, count, act_fn is None)

    def _read_experts(
        self, path: str, count: int, shapes: tuple[tuple[int, int], ...]
    ) -> list[Matrix]:
        """Gate, up and down of experts that lie apart, or in floats together, one below the
        other.
        """
        path = self._find_path(path)
        names = next(
            (
                names
                for names in EXPERT_NAMES
                if any(name.startswith(f"{path}.0.{names[0]}.") for name in self.names)
            ),
            None,
        )
        if names is None:
            raise LookupError(f"it lacks the experts {path}.0, in any way that is known here")
        return [
            join_rows([self._read_matrix(f"{path}.{i}.{name}", *shape) for i in range(count)])
            for name, shape in zip(names, shapes, strict=True)
        ]

    def _read_biases(self, path: str, stock: Any) -> list[torch.Tensor | None]:
        """The biases of gate, up and down of all experts, one below the other."""
        if getattr(stock, "gate_up_proj_bias", None) is None:
            return [None, None, None]
        gate_up, down = (
            self._read_floats(f"{path}.{name}", tuple(getattr(stock, name).shape)).float()
            for name in ("gate_up_proj_bias", "down_proj_bias")
        )
        return [gate_up[:, 0::2].flatten(), gate_up[:, 1::2].flatten(), down.flatten()]

    def _fill_module(self, path: str, module: nn.Module) -> None:
        """Fills the parts of a module that is no matrix, and none of its children's."""
        for name, part in list(module.named_parameters(recurse=False)):
            numbers = self._read_floats(f"{path}.{name}", tuple(part.shape))
            setattr(module, name, nn.Parameter(numbers.float(), False))
        for name, stock in list(module.named_buffers(recurse=False)):
            if name not in module._non_persistent_buffers_set:
                numbers = self._read_floats(f"{path}.{name}", tuple(stock.shape))
                setattr(module, name, numbers.to(stock.dtype, copy=True))

    def _read_floats(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.tensors.take_sized(self._find_path(name), shape, *FLOATS)

    def _find_path(self, path: str) -> str:
        """A path as the files name it."""
        if any(name.startswith(path) for name in self.names):
            return path
        for in_files, here in RENAMED.items():
            renamed = path.replace(f".{here}.", f".{in_files}.")
            if any(name.startswith(renamed) for name in self.names):
                return renamed
        return path

    def _check_unused(self) -> None:
        left = {name for name in self.tensors.unused if not name.endswith(IGNORED)}
        # Some tools write a bias of zeros for layers that have none.
        zeros = {n for n in left if n.endswith(".bias") and not bool(self.tensors.take(n).any())}
        if left := left - zeros:
            names = sorted(left)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise LookupError(f"it has {', '.join(names[:3])}{more}, which are unknown here")


def set_bias(layer: PackedLinear | nn.Linear, bias: torch.Tensor) -> None:
    """Gives a layer its bias, float32."""
    bias = bias.clone()
    if isinstance(layer, PackedLinear):
        layer.bias = layer.wide_bias = bias
    else:
        layer.bias = nn.Parameter(bias.to(layer.weight.dtype), requires_grad=False)


def join_rows(matrices: list[Matrix]) -> Matrix:
    """One matrix of several, one below the other. Raises LookupError where they are of other
    kinds.
    """
    first = matrices[0]
    if isinstance(first, torch.Tensor):
        if all(isinstance(matrix, torch.Tensor) for matrix in matrices):
            return torch.cat(matrices)  # type: ignore[arg-type]
        raise LookupError("some of its experts are quantized, and others are not")
    return first.join([matrix for matrix in matrices if isinstance(matrix, Quantized)])


def pack_matrix(matrix: Matrix) -> PackedLinear:
    """A layer with a packed matrix, without a bias."""
    if isinstance(matrix, Quantized):
        return PackedLinear(matrix.pack(), None, matrix.numbers.shape[1], matrix.order)
    missing_inputs = -matrix.shape[1] % GROUP
    padded = nn.functional.pad(matrix, (0, missing_inputs)) if missing_inputs else matrix
    return PackedLinear(pack_floats(padded), None, matrix.shape[1])


def plain_matrix(matrix: Matrix, dtype: torch.dtype) -> nn.Linear:
    """An ordinary layer with what the matrix stands for, without a bias."""
    weight = matrix.unpack() if isinstance(matrix, Quantized) else matrix
    linear = nn.Linear(weight.shape[1], weight.shape[0], False, device="meta")
    linear.weight = nn.Parameter(weight.to(dtype, copy=True), requires_grad=False)
    return linear


def _fill_stacked(stock: Any, layers: list[Any], count: int, inputs_first: bool) -> None:
    """Puts gate, up and down (X N, K) into the parameters of a module of transformers."""
    gate, up, down = (layer.weight.data.unflatten(0, (count, -1)) for layer in layers)
    gate_up = torch.stack((gate, up), 2).flatten(1, 2) if inputs_first else torch.cat((gate, up), 1)
    if inputs_first:
        gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    stock.gate_up_proj, stock.down_proj = (nn.Parameter(w, False) for w in (gate_up, down))
    if layers[0].bias is not None:
        biases = [layer.bias.data.view(count, -1) for layer in layers]
        stock.gate_up_proj_bias = nn.Parameter(torch.stack(biases[:2], 2).flatten(1), False)
        stock.down_proj_bias = nn.Parameter(biases[2], False)
