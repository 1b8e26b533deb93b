"""Linear layers and embeddings whose weights are packed: whole numbers of 2 to 8 bits in groups
with a scale each, or floats.

Each row of activations is rounded by itself, to 8 bits with a scale for every 32 numbers where
weights are whole numbers, and the sums of a row have one order. So a token's result depends on no
other row of its forward, to the last bit. The C library computes the product where it is built;
elsewhere torch does, with the same whole numbers and more slowly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import nn

from foretell.models.families.matrices import as_linear, is_matrix
from foretell.native import library
from foretell.native.arena import rounded_size
from foretell.native.packing import (
    BLOCK,
    GROUP,
    Packed,
    centre_of,
    group_minima,
    group_scales,
    unpack_matrix,
    whole_values,
)
from foretell.native.rounding import TINY, quantize_matrix
from foretell.ops.memory import large_pages, release_pages, trim_memory

SMALLEST = 2  # inputs of a layer that is packed
KEPT = frozenset({"dt_proj"})  # Mamba's steps: few inputs, and its own code reads the weights
CAREFUL = frozenset({"x_proj"})  # of 8 bits beside 4: few outputs, which make a state
HELD = 16 << 20  # bytes of replaced weights that stay in memory for a while
WHOLE_NUMBERS = ("int8", "int4")
NEAR = 0.05  # distance of two rows that rounding explains, as a part of their length
OFF = 3  # times as far from the exact rows as another way to compute: still rounding


# Layers that a recording names by number. The numbers are their addresses.
_recorded: WeakValueDictionary[int, PackedLinear] = WeakValueDictionary()
# Whether activations stay as they are, see `without_rounding`.
_unrounded: ContextVar[bool] = ContextVar("foretell_unrounded", default=False)
_skipped: ContextVar[bool] = ContextVar("foretell_skipped", default=False)


@torch.library.custom_op("foretell::packed_linear", mutates_args=())
def packed_linear(x: torch.Tensor, sums: torch.Tensor | None, layer: int) -> torch.Tensor:
    """Stands in a recording for a product without its bias, x (..., in) -> (..., out): runtimes
    have their own, of the `recorded_layer`.

    `sums` (..., in / group): of each group of activations, float32, where weights have minima.
    """
    return x.new_zeros(*x.shape[:-1], recorded_layer(layer).out_features)


def recorded_layer(layer: int) -> PackedLinear:
    """The layer that a recording names by this number."""
    return _recorded[layer]


@contextmanager
def _switched_on(flag: ContextVar[bool]) -> Iterator[None]:
    context_token = flag.set(True)
    try:
        yield
    finally:
        flag.reset(context_token)


def without_rounding() -> AbstractContextManager[None]:
    """Inside, products take activations as they are: slow, and what rounding is measured by."""
    return _switched_on(_unrounded)


def without_products() -> AbstractContextManager[None]:
    """Inside, every product is zero: only calls matter."""
    return _switched_on(_skipped)


class PackedLinear(nn.Module):
    """A linear layer with packed weights, x (..., in) -> (..., out)."""

    def __init__(
        self,
        packed: Packed,
        bias: torch.Tensor | None,
        in_features: int,
        order: torch.Tensor | None = None,
    ):
        """`order` int64 (in,): the input that each column of the matrix reads; None: its own."""
        super().__init__()
        self.order = order
        self.packed = packed
        self.in_features = in_features
        self.out_features = packed.outputs
        self.bias = bias
        self.wide_bias = None if bias is None else bias.detach().float().contiguous()
        self._matrix: Any = None
        self.settled = False  # its weights lie in large pages, and stay where they are

    @classmethod
    def of(
        cls, linear: nn.Linear, dtype: str, input_factors: torch.Tensor | None = None
    ) -> PackedLinear:
        """Packs a layer, its weights times `input_factors` (in,)."""
        weight = linear.weight.detach().contiguous()
        if input_factors is not None:
            weight = weight * input_factors.to(weight.dtype)
        if library.is_available():
            packed = quantize_matrix(weight, dtype, library.find_peaks, library.find_ranges)
        else:
            packed = quantize_matrix(weight, dtype)
        return cls(packed, linear.bias, linear.in_features)

    @classmethod
    def join(cls, layers: list[PackedLinear]) -> PackedLinear | None:
        """Makes one layer of several with the same input; the parts become views of it.

        None where their outputs are no multiples of 16, their layouts differ, or they read inputs
        in an order of their own.
        """
        output_counts = [layer.out_features for layer in layers]
        if any(size % BLOCK for size in output_counts):
            return None
        if len({layer.packed.layout for layer in layers}) > 1:
            return None
        if any(layer.order is not None for layer in layers):
            return None
        biases = [layer.bias for layer in layers if layer.bias is not None]
        joint = cls(
            Packed.join([layer.packed for layer in layers]),
            torch.cat(biases) if biases else None,
            layers[0].in_features,
        )
        stays = joint.packed.addresses == layers[0].packed.addresses
        joint.settled = stays and all(layer.settled for layer in layers)
        for layer, packed in zip(layers, joint.packed.split(output_counts), strict=True):
            layer.packed = packed
            layer.settled, layer._matrix = joint.settled, None
        return joint

    def split(self, sizes: list[int]) -> list[PackedLinear]:
        """Makes layers of so many outputs each, in their order, which share this one's memory;
        where they are no multiples of 16, they have memory of their own.
        """
        biases = [None] * len(sizes) if self.bias is None else self.bias.split(sizes)
        if any(size % BLOCK for size in sizes):
            ranges = torch.arange(self.out_features).split(sizes)
            return [self.take(outputs) for outputs in ranges]
        return [
            PackedLinear(packed, bias, self.in_features, self.order)
            for packed, bias in zip(self.packed.split(sizes), biases, strict=True)
        ]

    def take(self, outputs: torch.Tensor) -> PackedLinear:
        """Makes a layer of these outputs (n,) alone, in their order."""
        bias = None if self.bias is None else self.bias[outputs]
        return PackedLinear(self.packed.take(outputs), bias, self.in_features, self.order)

    def plain(self) -> nn.Linear:
        """Makes an ordinary layer of float32 with the same weights."""
        linear = nn.Linear(self.in_features, self.out_features, False, device="meta")
        weight = unpack_matrix(self.packed)[:, : self.in_features].float().contiguous()
        if self.order is not None:
            weight = weight[:, self.order.argsort()].contiguous()
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if self.wide_bias is not None:
            linear.bias = nn.Parameter(self.wide_bias, requires_grad=False)
        return linear.eval()

    def __getstate__(self) -> dict[str, Any]:
        """The state that a copy takes over: not the structure, which says where this one's weights
        lie.
        """
        return {**self.__dict__, "_matrix": None, "settled": False}

    @property
    def matrix(self) -> Any:
        """The C library's structure of it."""
        if self._matrix is None:
            self._matrix = library.describe_matrix(self.packed, self.wide_bias)
        return self._matrix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.order is not None:
            x = x.index_select(-1, self.order)
        if torch.jit.is_tracing():
            return self._record_product(x)
        if _skipped.get():
            return x.new_zeros(*x.shape[:-1], self.out_features)
        input_rows = x.reshape(-1, self.in_features).float()
        missing_inputs = self.packed.inputs - self.in_features
        input_rows = F.pad(input_rows, (0, missing_inputs)).contiguous()
        if library.is_available():
            y = library.multiply_rows(self.matrix, input_rows, library.thread_count())
            for _ in range(2 * _unrounded.get()):  # what was left out, in as many bits again
                input_rows = left_by_rounding(self.packed, input_rows)
                y += library.multiply_rows(self.matrix, input_rows, library.thread_count())
                y -= 0 if self.wide_bias is None else self.wide_bias
        else:
            product = product_unrounded if _unrounded.get() else product_by_torch
            y = product(self.packed, input_rows)
            if self.wide_bias is not None:
                y += self.wide_bias
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def _record_product(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed.format == "float8" or self.packed.fine is not None:
            raise LookupError("its matrices are floats of 8 bits, or of 4 by a table of floats")
        _recorded[id(self)] = self
        missing_inputs = self.packed.inputs - self.in_features
        if missing_inputs:
            x = F.pad(x, (0, missing_inputs))
        group_sums = None
        has_sums = self.packed.is_whole and centre_of(self.packed)[1] != 0
        if has_sums or self.packed.minima is not None:
            group_sums = x.float().unflatten(-1, (-1, self.packed.group)).sum(-1)
        y: torch.Tensor = torch.ops.foretell.packed_linear(x, group_sums, id(self))
        return y if self.bias is None else y + self.bias


class PackedEmbedding(nn.Module):
    """Embeddings that are the head's rows times `scale`: ids (...) -> (..., E), in the model's
    number format.
    """

    def __init__(self, head: PackedLinear, dtype: torch.dtype, scale: float = 1.0):
        super().__init__()
        self.scale = scale
        self.head = [head]  # a list, so that it is no part of this module
        # Of the number format of rows; a buffer, so that it changes with the model's.
        self.like: torch.Tensor
        self.register_buffer("like", torch.empty(0, dtype=dtype), persistent=False)

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """ids (n,) -> (n, E) float32. Raises IndexError for one that has no row."""
        rows = self._head_rows(token_ids)
        return rows if self.scale == 1 else rows * self.scale

    def _head_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        head = self.head[0]
        if library.is_available():
            return library.read_matrix_rows(head.matrix, token_ids)[:, : head.in_features]
        if (
            len(token_ids)
            and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < head.out_features
        ):
            raise IndexError(f"an id is outside 0 to {head.out_features - 1}")
        rows = torch.empty(len(token_ids), head.packed.inputs)
        for embedding_row, token_id in zip(rows, token_ids.tolist(), strict=True):
            block_part = head.packed.part(token_id // BLOCK, BLOCK)
            embedding_row[:] = unpack_matrix(block_part)[token_id % BLOCK]
        return rows[:, : head.in_features]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids.reshape(-1)).to(self.like.dtype).view(*ids.shape, -1)


def product_by_torch(packed: Packed, x: torch.Tensor) -> torch.Tensor:
    """x (rows, inputs) float32 -> (rows, outputs) float32, without the bias.

    Sums of a group are whole numbers below 2**24, so float32 holds them whatever their order.
    """
    if not packed.is_whole:
        # One product a row: those of several rows may be summed in other orders.
        weight = unpack_matrix(packed).float()
        y = x.new_empty(len(x), packed.outputs)
        rounded_rows = x.bfloat16().float() if packed.format == "bfloat16" else x
        for input_row, output_row in zip(rounded_rows, y, strict=True):
            output_row[:] = weight @ input_row
        return y
    groups = x.view(len(x), packed.inputs // GROUP, GROUP)
    group_peaks = groups.abs().amax(-1, keepdim=True)
    part_size = min(GROUP, packed.group)  # inputs that share the scales of both sides
    parts_per_group = GROUP // part_size
    scales = (group_peaks / 127).repeat_interleave(parts_per_group, 1)
    whole_numbers = (
        groups * torch.where(group_peaks > TINY, 127 / group_peaks, torch.zeros_like(group_peaks))
    ).round()
    parts = whole_numbers.view(len(x), packed.inputs // part_size, part_size)
    weights = whole_values(packed).float().unflatten(1, (-1, part_size))
    weight_scale, weight_minima = group_scales(packed), group_minima(packed)
    totals = x.new_zeros(len(x), packed.outputs)
    for part_index in range(parts.shape[1]):
        scaled_group = part_index * part_size // packed.group
        part_numbers, part_scales = parts[:, part_index], scales[:, part_index]
        dots = part_numbers @ weights[:, part_index].t()
        totals = totals + dots * (part_scales * weight_scale[:, scaled_group])
        if weight_minima is not None:
            part_sums = part_scales * part_numbers.sum(-1, keepdim=True)
            totals = totals + part_sums * weight_minima[:, scaled_group]
    return totals


def product_unrounded(packed: Packed, x: torch.Tensor) -> torch.Tensor:
    """Computes `product_by_torch` of activations as they are."""
    return x @ unpack_matrix(packed).float().t()


def left_by_rounding(packed: Packed, x: torch.Tensor) -> torch.Tensor:
    """The part of activations x (rows, inputs) float32 that a product leaves out."""
    if not packed.is_whole:
        return x - x.bfloat16().float() if packed.format == "bfloat16" else torch.zeros_like(x)
    groups = x.view(len(x), packed.inputs // GROUP, GROUP)
    group_peaks = groups.abs().amax(-1, keepdim=True)
    inverses = torch.where(group_peaks > TINY, 127 / group_peaks, torch.zeros_like(group_peaks))
    return (groups - (groups * inverses).round() * (group_peaks / 127)).view_as(x)


def is_as_near(
    our_rows: torch.Tensor, twin_rows: torch.Tensor, compute_exact: Callable[[], torch.Tensor]
) -> bool:
    """Whether rows that two ways to compute gave stand for the same.

    Both round activations, to neighbours here and there, and so may be far from each other though
    both are near to what they stand for. `compute_exact`: the rows of activations that are not
    rounded, asked for where the two are not near each other.
    """
    if _row_distance(our_rows, twin_rows) <= NEAR:
        return True
    exact_rows = compute_exact()
    return _row_distance(our_rows, exact_rows) <= max(
        NEAR, OFF * _row_distance(twin_rows, exact_rows)
    )


def _row_distance(our_rows: torch.Tensor, their_rows: torch.Tensor) -> float:
    """The largest of a row's distances, as a part of that row's length."""
    distance = (our_rows.float() - their_rows.float()).norm(dim=-1)
    return float((distance / their_rows.float().norm(dim=-1).clamp_min(1e-30)).max())


def settle_weights(linears: Iterable[PackedLinear]) -> None:
    """Moves the weights of layers, in their order, beside each other and into large pages.

    Layers that share memory (`join`) share it there too. What is settled already stays.
    """
    storage_users: dict[int, list[tuple[Packed, str]]] = {}  # by the storage's place in memory
    storages: dict[int, torch.UntypedStorage] = {}
    for linear in dict.fromkeys(linears):
        if linear.settled:
            continue
        linear.settled, linear._matrix = True, None
        for field_name in ("weights", "scales", "minima"):
            tensor = getattr(linear.packed, field_name)
            if tensor is not None:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage
                storage_users.setdefault(storage.data_ptr(), []).append((linear.packed, field_name))
    storage_sizes = [rounded_size(storage.nbytes()) for storage in storages.values()]
    pages = large_pages(sum(storage_sizes)) if storage_sizes else None
    if pages is None:
        return
    unreleased_bytes = 0  # bytes that were moved and may still be held
    for address, storage_size in zip(list(storages), storage_sizes, strict=True):
        old_storage = storages.pop(address)
        new_bytes, pages = pages[: old_storage.nbytes()], pages[storage_size:]
        new_bytes.copy_(torch.empty(0, dtype=torch.uint8).set_(old_storage))
        for packed, field_name in storage_users[address]:
            tensor = getattr(packed, field_name)
            first_byte = tensor.storage_offset() * tensor.itemsize
            moved_bytes = new_bytes[first_byte : first_byte + tensor.nbytes]
            setattr(packed, field_name, moved_bytes.view(tensor.dtype).view(tensor.shape))
        unreleased_bytes += storage_size
        if unreleased_bytes > HELD:
            del old_storage, tensor
            trim_memory()
            unreleased_bytes = 0
    trim_memory()


def weight_sizes(module: nn.Module) -> dict[int, int]:
    """Bytes of each weight of a module by its place in memory, the packed ones included."""
    sizes = {parameter.data_ptr(): parameter.nbytes for parameter in module.parameters()}
    for submodule in module.modules():
        # Embeddings are no part of a module where the head is of their rows.
        linear = submodule.head[0] if isinstance(submodule, PackedEmbedding) else submodule
        if isinstance(linear, PackedLinear):
            sizes[linear.packed.weights.data_ptr()] = linear.packed.nbytes
    return sizes


def weight_bytes(module: nn.Module) -> int:
    """Bytes of all weights of a module, each counted once."""
    return sum(weight_sizes(module).values())


def held_bytes(module: nn.Module) -> int:
    """Bytes of all weights and buffers of a module, each counted once."""
    sizes = {buffer.data_ptr(): buffer.nbytes for buffer in module.buffers()}
    return sum((sizes | weight_sizes(module)).values())


def pack_layers(
    hf_model: Any, format: str, input_factors: dict[Any, torch.Tensor] | None = None
) -> int:
    """Replaces every linear layer of a model, and embeddings that are the head's weight.

    Returns how many layers. Of 4 bits the head and CAREFUL ones keep 8. The model's weights must be
    as they were read: pages of its files that hold them leave the memory. `input_factors`: by what
    weights of some layers are multiplied, which leave the table.
    """
    input_factors = input_factors or {}
    head = hf_model.get_output_embeddings() if hasattr(hf_model, "get_output_embeddings") else None
    embedding = hf_model.get_input_embeddings() if head is not None else None
    is_tied = (
        type(head) is nn.Linear
        and type(embedding) is nn.Embedding
        and head.weight.data_ptr() == embedding.weight.data_ptr()
    )
    linears: list[tuple[nn.Module, str, Any]] = [
        (parent, child_name, child)
        for parent in hf_model.modules()
        for child_name, child in parent.named_children()
        if is_matrix(child) and as_linear(child).in_features >= SMALLEST and child_name not in KEPT
    ]
    layer_count = len(linears)
    replaced_weights: list[torch.Tensor] = []
    while linears:  # a layer that was packed is to be forgotten
        parent, child_name, linear = linears.pop()
        is_finer = format == "int4" and (linear is head or child_name in CAREFUL)
        layer_format, weight = "int8" if is_finer else format, linear.weight.data
        factors = input_factors.pop(linear, None)
        packed_layer = PackedLinear.of(as_linear(linear), layer_format, factors)
        setattr(parent, child_name, packed_layer)
        if linear is head and is_tied:
            hf_model.set_input_embeddings(PackedEmbedding(packed_layer, weight.dtype))
        replaced_weights.append(weight)
        del linear, weight
        if sum(weight.nbytes for weight in replaced_weights) > HELD:
            release_pages(replaced_weights)
            replaced_weights.clear()
            trim_memory()
    release_pages(replaced_weights)
    replaced_weights.clear()
    trim_memory()
    return layer_count


def widen_layers(hf_model: Any) -> None:
    """Makes a model one of float32: packed layers of floats become plain ones, with their weights
    to the last bit. What has whole numbers stays packed.
    """
    hf_model.float()
    plain_layers: dict[PackedLinear, nn.Linear] = {}
    for parent in list(hf_model.modules()):
        for child_name, child in list(parent.named_children()):
            if isinstance(child, PackedLinear) and not child.packed.is_whole:
                plain_layers[child] = child.plain()
                setattr(parent, child_name, plain_layers[child])
    embedding = hf_model.get_input_embeddings()
    if isinstance(embedding, PackedEmbedding) and embedding.head[0] in plain_layers:
        weight = plain_layers[embedding.head[0]].weight
        hf_model.set_input_embeddings(nn.Embedding.from_pretrained(weight))


def narrowest_format(hf_model: nn.Module, dtype: torch.dtype) -> str | None:
    """The narrowest numbers, by name, of packed layers whose products round activations to
    fewer bits than the rest has, which is of `dtype`; None: there is no such layer.
    """
    matrices = [part.packed for part in hf_model.modules() if isinstance(part, PackedLinear)]
    whole_bits = [packed.bits for packed in matrices if packed.is_whole]
    if whole_bits:
        return f"int{min(whole_bits)}"
    is_wide = dtype in (torch.float32, torch.float64)
    has_narrow = any(packed.format == "bfloat16" for packed in matrices)
    return "bfloat16" if is_wide and has_narrow else None


def widen_rest(hf_model: Any) -> None:
    """Makes all of a packed model float32 that is no matrix; embeddings keep their numbers of
    bfloat16 and their bytes, and their rows become float32.
    """
    embedding = hf_model.get_input_embeddings()
    if type(embedding) is nn.Embedding and embedding.weight.dtype == torch.bfloat16:
        table = nn.Linear(embedding.embedding_dim, embedding.num_embeddings, False, "meta")
        table.weight = embedding.weight
        packed_table = PackedEmbedding(PackedLinear.of(table, "bfloat16"), torch.float32)
        hf_model.set_input_embeddings(packed_table)
        release_pages([embedding.weight.data])
    hf_model.float()
    trim_memory()


def weight_count(hf_model: nn.Module) -> int:
    """How many weights a model has, packed ones included."""
    packed_weights = [
        module.packed for module in hf_model.modules() if isinstance(module, PackedLinear)
    ]
    stock_count = sum(parameter.numel() for parameter in hf_model.parameters())
    return stock_count + sum(matrix.outputs * matrix.inputs for matrix in packed_weights)
