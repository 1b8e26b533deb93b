"""What an architecture's name in a .gguf file means: which model of transformers it is, what its
header leaves unsaid, and which tensors of the file fill which parts of the model.

Each file in `architectures/` describes a group of them in `ARCHITECTURES`, by the names that
`general.architecture` has. One more entry is all that it takes to read one more.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foretell.models.gguf.header import Header

# Of a configuration and a number of rows: which of the file's rows (n,) stand in the model's order.
Order = Callable[[Any, int], np.ndarray]
# Adds to the fields of a configuration what a header means by several keys, or leaves unsaid.
Complete = Callable[[Header, dict[str, Any]], None]
REQUIRED = (
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
)
RMS = "attention.layer_norm_rms_epsilon"
LAYER_NORM = "attention.layer_norm_epsilon"
PATTERN = "attention.sliding_window_pattern"
# Keys of an architecture whose last layers may be there for drafts of several tokens alone.
PREDICTING = ("nextn_predict_layers", "block_count")


@dataclass(frozen=True)
class Source:
    """The tensors of a file that fill one part of a model, their rows after one another.

    `order`: which of these rows are the part's. `offset`: what the file's numbers have on top of
    the model's. `interleaved`: rows of the tensors take turns. `turned`: the model has inputs first
    where the file has outputs first. `compose`: how the part is made of the tensors, in float32,
    where none of this says it. `alternative`: where the file lacks the tensors.
    """

    names: tuple[str, ...]
    order: Order | None = None
    offset: float = 0.0
    interleaved: bool = False
    turned: bool = False
    compose: Callable[[Any, list[torch.Tensor]], torch.Tensor] | None = None
    alternative: Source | None = None


Sources = Mapping[str, str | Source]


@dataclass(frozen=True)
class Architecture:
    """An architecture of a .gguf file as a model of transformers.

    `layer`: of a path below a layer, the tensors that fill it, without `blk.N.` and, where their
    end is that of the path, without it. `top`: of a whole path beside the layers. `layers`: where
    the layers are.

    `fields`: of a key, its field where that is not the usual one. `keys`: those that `complete`
    reads besides. `required`: those without which it cannot be read. `biases`: of a field, the
    tensors that have biases if it is set. `zero_biases`: a bias that the file lacks is zero.
    `partial_rotation`: a part of each head may turn. `rest`: the number format of what is no
    matrix where matrices stay packed; states that go on from token to token want float32.
    `instead`: of a key and a value, None for any that says something, the description that holds
    where a header has it.
    """

    model_type: str
    layer: Sources
    top: Sources
    layers: str = "model.layers"
    fields: Mapping[str, str] = field(default_factory=dict)
    keys: frozenset[str] = frozenset()
    required: tuple[str, ...] = (*REQUIRED, RMS)
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    zero_biases: bool = False
    partial_rotation: bool = False
    rest: torch.dtype = torch.bfloat16
    complete: Complete | None = None
    instead: Mapping[tuple[str, int | None], Architecture] = field(default_factory=dict)

    @property
    def own_keys(self) -> frozenset[str]:
        """Those that it reads beside the usual ones."""
        return self.keys | frozenset(self.fields)


@cache
def known_architectures() -> dict[str, Architecture]:
    """All that are described here, by the names that files have for them."""
    found: dict[str, Architecture] = {}
    folder = Path(__file__).parent / "architectures"
    for module in pkgutil.iter_modules([str(folder)]):
        found.update(import_module(f"{__package__}.architectures.{module.name}").ARCHITECTURES)
    return found


def find_architecture(header: Header) -> Architecture:
    """Raises LookupError for one that nobody described."""
    found = known_architectures().get(header.architecture)
    if found is None:
        raise LookupError(
            f"its architecture is {header.architecture!r}, which is not described here; "
            "docs/gguf.md has those that are"
        )
    for (key, value), other in found.instead.items():
        stated_value = header.get(key)
        if stated_value and value in (None, stated_value):
            return other
    return found


def count_layers(header: Header, architecture: Architecture) -> int:
    """How many layers compute a token: those after them, which predict further ones, are not read.

    Raises LookupError.
    """
    layer_count = int(header.require_value("block_count"))
    if PREDICTING[0] in architecture.keys:
        layer_count -= int(header.get(PREDICTING[0], 0))
    if layer_count < 1:
        raise LookupError(f"its header says that it has {layer_count} layers")
    return layer_count


def halves_in_turn(head_field: str) -> Order:
    """Rows of heads whose halves alternate in the file, one half after the other in the model.

    `head_field`: of the configuration, how many heads they are.
    """

    def order_rows(config: Any, row_count: int) -> np.ndarray:
        heads = np.arange(row_count).reshape(getattr(config, head_field), -1, 2)
        return heads.swapaxes(1, 2).reshape(-1)

    return order_rows


def shifted(name: str) -> Source:
    """A norm whose weight has in the file the one that the model adds by itself."""
    return Source((name,), offset=1.0)


def window_types(header: Header, interval: int) -> list[str]:
    """Which kind of attention each layer has: one of `interval` sees everything, the others a
    window, unless the file says otherwise. Raises LookupError.
    """
    layer_count = header.require_value("block_count")
    pattern = header.get(PATTERN, interval)
    if not header.get("attention.sliding_window"):
        is_local = [False] * layer_count
    elif isinstance(pattern, bool):
        is_local = [pattern] * layer_count
    elif isinstance(pattern, list):
        is_local = list(map(bool, pattern))
    else:
        is_local = [pattern > 0 and (layer + 1) % pattern != 0 for layer in range(layer_count)]
    if len(is_local) != layer_count:
        raise LookupError(
            f"its header has {header.architecture}.{PATTERN} of {len(is_local)} values, and it has "
            f"{layer_count} layers"
        )
    return ["sliding_attention" if local else "full_attention" for local in is_local]
