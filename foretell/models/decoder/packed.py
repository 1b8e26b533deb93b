"""Linear layers and embeddings whose weights are packed: 8 or 4 bits in groups of 32 with a scale
each, or bfloat16.

Each row of activations is rounded by itself, to 8 bits with a scale for every 32 numbers where
weights are whole numbers, and the sums of a row have one order. So a token's result depends on no
other row of its forward, to the last bit. The C library computes the product where it is built;
elsewhere torch does, with the same whole numbers and more slowly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import nn

from foretell.native import library
from foretell.native.packing import (
    BLOCK,
    GROUP,
    TINY,
    Packed,
    by_group,
    numbers,
    quantize,
    unpack,
)
from foretell.ops.memory import large_pages, release, trim

SMALLEST = 2  # inputs of a layer that is packed
LINE = 64  # bytes, at whose multiples weights begin
HELD = 16 << 20  # bytes of replaced weights that stay in memory for a while
WHOLE_NUMBERS = ("int8", "int4")
NEAR = 0.05  # distance of two rows that rounding explains, as a part of their length
OFF = 3  # times as far from the exact rows as another way to compute: still rounding


# Layers that a recording names by number. The numbers are their addresses.
_recorded: WeakValueDictionary[int, PackedLinear] = WeakValueDictionary()
# Whether activations stay as they are, see `unrounded`.
_unrounded: ContextVar[bool] = ContextVar("foretell_unrounded", default=False)


@torch.library.custom_op("foretell::packed_linear", mutates_args=())
def packed_linear(x: torch.Tensor, sums: torch.Tensor | None, layer: int) -> torch.Tensor:
    """Stands in a recording for a product without its bias, x (..., in) -> (..., out): runtimes
    have their own, of the `recorded_layer`.

    `sums` (..., in / 32): of each group of activations, float32, where weights have minima.
    """
    return x.new_zeros(*x.shape[:-1], recorded_layer(layer).out_features)


def recorded_layer(layer: int) -> PackedLinear:
    """The layer that a recording names so."""
    return _recorded[layer]


@contextmanager
def unrounded() -> Iterator[None]:
    """Inside, products take activations as they are: slow, and what rounding is measured by."""
    token = _unrounded.set(True)
    try:
        yield
    finally:
        _unrounded.reset(token)


class PackedLinear(nn.Module):
    """x (..., in) -> (..., out)."""

    def __init__(self, packed: Packed, bias: torch.Tensor | None, in_features: int):
        super().__init__()
        self.packed = packed
        self.in_features = in_features
        self.out_features = packed.outputs
        self.bias = bias
        self.wide_bias = None if bias is None else bias.detach().float().contiguous()
        self._matrix: Any = None
        self.settled = False  # its weights lie in large pages, and stay where they are

    @classmethod
    def of(cls, linear: nn.Linear, format: str) -> PackedLinear:
        weight = linear.weight.detach()
        if library.available():
            packed = quantize(weight, format, library.peaks, library.ranges)
        else:
            packed = quantize(weight, format)
        return cls(packed, linear.bias, linear.in_features)

    @classmethod
    def join(cls, parts: list[PackedLinear]) -> PackedLinear | None:
        """One layer for several with the same input; the parts become views of it.

        None where their outputs are no multiples of 16.
        """
        sizes = [part.out_features for part in parts]
        if any(size % BLOCK for size in sizes):
            return None
        biases = [part.bias for part in parts if part.bias is not None]
        joined = cls(
            Packed.join([part.packed for part in parts]),
            torch.cat(biases) if biases else None,
            parts[0].in_features,
        )
        for part, packed in zip(parts, joined.packed.split(sizes), strict=True):
            part.packed = packed
            part._matrix = None
        return joined

    def take(self, outputs: torch.Tensor) -> PackedLinear:
        """A layer of these outputs (n,) alone, in their order."""
        bias = None if self.bias is None else self.bias[outputs]
        return PackedLinear(self.packed.take(outputs), bias, self.in_features)

    def plain(self) -> nn.Linear:
        """An ordinary layer of float32 with the same weights."""
        linear = nn.Linear(self.in_features, self.out_features, False, device="meta")
        weight = unpack(self.packed)[:, : self.in_features].float().contiguous()
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if self.wide_bias is not None:
            linear.bias = nn.Parameter(self.wide_bias, requires_grad=False)
        return linear.eval()

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes over: not the structure, which says where this one's weights lie."""
        return {**self.__dict__, "_matrix": None, "settled": False}

    @property
    def matrix(self) -> Any:
        """The C library's structure of it."""
        if self._matrix is None:
            self._matrix = library.matrix(self.packed, self.wide_bias)
        return self._matrix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.jit.is_tracing():
            return self._record(x)
        rows = x.reshape(-1, self.in_features).float()
        missing = self.packed.inputs - self.in_features
        rows = (F.pad(rows, (0, missing)) if missing else rows).contiguous()
        if library.available() and not _unrounded.get():
            y = library.product(self.matrix, rows, torch.get_num_threads())
        else:
            product = product_unrounded if _unrounded.get() else product_by_torch
            y = product(self.packed, rows)
            if self.wide_bias is not None:
                y += self.wide_bias
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def _record(self, x: torch.Tensor) -> torch.Tensor:
        _recorded[id(self)] = self
        missing = self.packed.inputs - self.in_features
        if missing:
            x = F.pad(x, (0, missing))
        sums = None
        if self.packed.minima is not None:
            sums = x.float().unflatten(-1, (-1, GROUP)).sum(-1)
        y: torch.Tensor = torch.ops.foretell.packed_linear(x, sums, id(self))
        return y if self.bias is None else y + self.bias


class PackedEmbedding(nn.Module):
    """Embeddings that are the head's rows: ids (...) -> (..., E), in the model's number format."""

    def __init__(self, head: PackedLinear, dtype: torch.dtype):
        super().__init__()
        self.head = [head]  # a list, so that it is no part of this module
        # Of the number format of rows; a buffer, so that it changes with the model's.
        self.like: torch.Tensor
        self.register_buffer("like", torch.empty(0, dtype=dtype), persistent=False)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """ids (n,) -> (n, E) float32. Raises IndexError for one that has no row."""
        head = self.head[0]
        if library.available():
            return library.rows_of(head.matrix, ids)[:, : head.in_features]
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < head.out_features:
            raise IndexError(f"an id is outside 0 to {head.out_features - 1}")
        rows = torch.empty(len(ids), head.packed.inputs)
        for row, i in zip(rows, ids.tolist(), strict=True):
            row[:] = unpack(_block_of(head.packed, i // BLOCK))[i % BLOCK]
        return rows[:, : head.in_features]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids.reshape(-1)).to(self.like.dtype).view(*ids.shape, -1)


def _block_of(packed: Packed, block: int) -> Packed:
    """The 16 outputs of one block."""
    size = len(packed.weights) // packed.blocks
    part = Packed(
        packed.format, BLOCK, packed.inputs, packed.weights[block * size : (block + 1) * size]
    )
    if packed.scales is not None:
        part.scales = packed.scales[block : block + 1]
    if packed.minima is not None:
        part.minima = packed.minima[block : block + 1]
    return part


def product_by_torch(packed: Packed, x: torch.Tensor) -> torch.Tensor:
    """x (rows, inputs) float32 -> (rows, outputs) float32, without the bias.

    Sums of a group are whole numbers below 2**24, so float32 holds them whatever their order.
    """
    if packed.format == "bfloat16":
        # One product a row: those of several rows may be summed in other orders.
        weight = unpack(packed).float()
        y = x.new_empty(len(x), packed.outputs)
        for row, out in zip(x.bfloat16().float(), y, strict=True):
            out[:] = weight @ row
        return y
    assert packed.scales is not None
    groups = x.view(len(x), packed.inputs // GROUP, GROUP)
    top = groups.abs().amax(-1, keepdim=True)
    scale = top / 127
    whole = (groups * torch.where(top > TINY, 127 / top, torch.zeros_like(top))).round()
    weights = numbers(packed).float()
    if packed.format == "int4" and packed.minima is None:
        weights -= 8
    weight_scale = by_group(packed, packed.scales).float()
    total = x.new_zeros(len(x), packed.outputs)
    for group in range(groups.shape[1]):
        dots = whole[:, group] @ weights[:, group].t()
        total = total + dots * (scale[:, group] * weight_scale[:, group])
        if packed.minima is not None:
            least = by_group(packed, packed.minima)[:, group].float()
            total = total + (scale[:, group] * whole[:, group].sum(-1, keepdim=True)) * least
    return total


def product_unrounded(packed: Packed, x: torch.Tensor) -> torch.Tensor:
    """As `product_by_torch`, of activations as they are."""
    return x @ unpack(packed).float().t()


def as_near(ours: torch.Tensor, twin: torch.Tensor, exact: Callable[[], torch.Tensor]) -> bool:
    """Whether rows that two ways to compute gave stand for the same.

    Both round activations, to neighbours here and there, and so may be far from each other though
    both are near to what they stand for. `exact`: the rows of activations that are not rounded,
    asked for where the two are not near each other.
    """
    if _distance(ours, twin) <= NEAR:
        return True
    rows = exact()
    return _distance(ours, rows) <= max(NEAR, OFF * _distance(twin, rows))


def _distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest of a row's distances, as a part of that row's length."""
    distance = (ours.float() - theirs.float()).norm(dim=-1)
    return float((distance / theirs.float().norm(dim=-1).clamp_min(1e-30)).max())


def settle(linears: Iterable[PackedLinear]) -> None:
    """Moves the weights of layers, in their order, beside each other and into large pages.

    Layers that share memory (`join`) share it there too. What is settled already stays.
    """
    users: dict[int, list[tuple[Packed, str]]] = {}  # of each storage, by its place in memory
    storages: dict[int, torch.UntypedStorage] = {}
    for linear in dict.fromkeys(linears):
        if linear.settled:
            continue
        linear.settled, linear._matrix = True, None
        for name in ("weights", "scales", "minima"):
            tensor = getattr(linear.packed, name)
            if tensor is not None:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage
                users.setdefault(storage.data_ptr(), []).append((linear.packed, name))
    sizes = [-(-storage.nbytes() // LINE) * LINE for storage in storages.values()]
    pages = large_pages(sum(sizes)) if sizes else None
    if pages is None:
        return
    left = 0  # bytes that were moved and may still be held
    for place, size in zip(list(storages), sizes, strict=True):
        old = storages.pop(place)
        taken, pages = pages[: old.nbytes()], pages[size:]
        taken.copy_(torch.empty(0, dtype=torch.uint8).set_(old))
        for packed, name in users[place]:
            tensor = getattr(packed, name)
            begin = tensor.storage_offset() * tensor.itemsize
            moved = taken[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            setattr(packed, name, moved)
        left += size
        if left > HELD:
            del old, tensor
            trim()
            left = 0
    trim()


def weight_sizes(module: nn.Module) -> dict[int, int]:
    """Bytes of each weight of a module by its place in memory, the packed ones included."""
    sizes = {p.data_ptr(): p.nbytes for p in module.parameters()}
    for part in module.modules():
        if isinstance(part, PackedLinear):
            sizes[part.packed.weights.data_ptr()] = part.packed.nbytes
    return sizes


def weight_bytes(module: nn.Module) -> int:
    """Bytes of all weights of a module, each counted once."""
    return sum(weight_sizes(module).values())


def held_bytes(module: nn.Module) -> int:
    """Bytes of all weights and buffers of a module, each counted once."""
    sizes = {buffer.data_ptr(): buffer.nbytes for buffer in module.buffers()}
    return sum((sizes | weight_sizes(module)).values())


def pack(hf: Any, format: str) -> int:
    """Replaces every linear layer of a model, and embeddings that are the head's weight.

    Returns how many layers. Of 4 bits the head keeps 8. The model's weights must be as they were
    read: pages of its files that hold them leave the memory.
    """
    head = hf.get_output_embeddings() if hasattr(hf, "get_output_embeddings") else None
    embedding = hf.get_input_embeddings() if head is not None else None
    tied = (
        type(head) is nn.Linear
        and type(embedding) is nn.Embedding
        and head.weight.data_ptr() == embedding.weight.data_ptr()
    )
    linears = [
        (parent, name, child)
        for parent in hf.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child.in_features >= SMALLEST
    ]
    count = len(linears)
    replaced: list[torch.Tensor] = []
    while linears:  # a layer that was packed is to be forgotten
        parent, name, linear = linears.pop()
        narrow = "int8" if linear is head and format == "int4" else format
        packed = PackedLinear.of(linear, narrow)
        setattr(parent, name, packed)
        if linear is head and tied:
            hf.set_input_embeddings(PackedEmbedding(packed, linear.weight.dtype))
        replaced.append(linear.weight.data)
        del linear
        if sum(weight.nbytes for weight in replaced) > HELD:
            release(replaced)
            replaced.clear()
            trim()
    release(replaced)
    replaced.clear()
    trim()
    return count


def widen(hf: Any) -> None:
    """Makes a model one of float32: packed layers of bfloat16 become plain ones, with their weights
    to the last bit. What has 8 or 4 bits stays packed.
    """
    hf.float()
    plain: dict[PackedLinear, nn.Linear] = {}
    for parent in list(hf.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PackedLinear) and child.packed.format == "bfloat16":
                plain[child] = child.plain()
                setattr(parent, name, plain[child])
    embedding = hf.get_input_embeddings()
    if isinstance(embedding, PackedEmbedding) and embedding.head[0] in plain:
        weight = plain[embedding.head[0]].weight
        hf.set_input_embeddings(nn.Embedding.from_pretrained(weight))


def weight_count(hf: nn.Module) -> int:
    """How many weights a model has, packed ones included."""
    packed = [module.packed for module in hf.modules() if isinstance(module, PackedLinear)]
    stock = sum(parameter.numel() for parameter in hf.parameters())
    return stock + sum(matrix.outputs * matrix.inputs for matrix in packed)
