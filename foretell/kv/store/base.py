"""Rows that are stored in a form of their own: what policies are made of that encode older rows.

Blocks of rows leave the cache, a prompt's when it is read. Each is encoded once, from the rows as
they were computed, and decoded a layer at a time when it is read. Behind the last whole block, rows
stay in the cache as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from foretell.kv.store.holding import Holding, Layers, Part
from foretell.ops.attention import Attention

Code = Mapping[str, torch.Tensor]  # what stands for rows, under names of the form's own
Codes = Mapping[int, Code]  # of whole blocks, by the layer under which it lies, see Form.under
Rows = tuple[torch.Tensor, torch.Tensor]  # keys and values of a layer (KV, n, D)


class Form:
    """How rows are stored. It knows nothing of a text, so requests share it."""

    def encode(self, keys: Layers, values: Layers, place: int) -> Codes:
        """What stands for these rows, whole blocks. `place`: the rows stored before them; 0: they
        are a prompt's. Tensors are no parts of others, so that they take what they hold.
        """
        raise NotImplementedError

    def decode(self, code: Code, layer: int) -> Rows:
        """The rows of a layer, of those that `encode` was given, in their own type.

        `code`: what lies under `under(layer)`.
        """
        raise NotImplementedError

    def decode_all(self, codes: Sequence[Code], layer: int) -> Rows:
        """The rows of all of these, one behind another."""
        parts = [self.decode(code, layer) for code in codes]
        return torch.cat([k for k, _ in parts], 1), torch.cat([v for _, v in parts], 1)

    def under(self, layer: int) -> int:
        """The layer under which this one's code lies: where layers share one, the same."""
        return layer


class LayerForm(Form):
    """A form in which each layer has a code of its own."""

    # Whether `decode` takes codes of one shape together, stacked: tensors with a dimension more.
    batched = False

    def encode(self, keys: Layers, values: Layers, place: int) -> Codes:
        layers = range(len(keys))
        return {
            layer: self.encode_layer(keys[layer], values[layer], layer, place) for layer in layers
        }

    def decode(self, code: Code, layer: int) -> Rows:
        return self.decode_layer(code)

    def decode_all(self, codes: Sequence[Code], layer: int) -> Rows:
        if not self.batched:
            return super().decode_all(codes, layer)
        parts = []
        for alike in runs(codes):
            if len(alike) == 1:
                parts.append(self.decode(alike[0], layer))
                continue
            stacked = {name: torch.stack([code[name] for code in alike]) for name in alike[0]}
            keys, values = self.decode(stacked, layer)
            parts.append((keys.transpose(0, 1).flatten(1, 2), values.transpose(0, 1).flatten(1, 2)))
        return torch.cat([k for k, _ in parts], 1), torch.cat([v for _, v in parts], 1)

    def encode_layer(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, place: int
    ) -> Code:
        """`encode` of a layer's rows (KV, n, D)."""
        raise NotImplementedError

    def decode_layer(self, code: Code) -> Rows:
        """`decode` of a layer's code."""
        raise NotImplementedError


def runs(codes: Sequence[Code]) -> list[list[Code]]:
    """Those that follow one another and have tensors of one shape, together."""
    found: list[list[Code]] = []
    last = None
    for code in codes:
        shape = {name: tensor.shape for name, tensor in code.items()}
        if shape != last:
            found.append([])
        found[-1].append(code)
        last = shape
    return found


class AsTheyAre(LayerForm):
    """Rows as they were computed."""

    def encode_layer(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, place: int
    ) -> Code:
        return {"keys": keys.clone(), "values": values.clone()}

    def decode_layer(self, code: Code) -> Rows:
        return code["keys"], code["values"]


class Shelf:
    """Where the codes of one text and its forks lie: here in memory."""

    in_memory = True

    def opened(self) -> Shelf:
        """An empty one for one more text."""
        return self

    def put(self, codes: Codes) -> Codes:
        """The same codes, which lie on it from now on."""
        return codes

    def share(self) -> None:
        """One more fork uses it."""

    def leave(self) -> None:
        """One fewer does: behind the last, nothing is left of what lies on it."""


def bytes_of(codes: Codes) -> int:
    """Of all their tensors."""
    tensors = [tensor for code in codes.values() for tensor in code.values()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass
class Stored(Holding):
    """Holds rows in a form, on a shelf. `held`: of each time that blocks left, their codes."""

    form: Form = field(default_factory=AsTheyAre)
    shelf: Shelf = field(default_factory=Shelf)
    place: Shelf | None = None  # this text's own
    held: tuple[Codes, ...] = ()
    sizes: tuple[int, ...] = ()  # bytes of each of them
    rows: int = 0  # that they stand for

    def fork(self) -> Stored:
        twin = super().fork()
        assert isinstance(twin, Stored)
        if twin.place is not None:
            twin.place.share()
        return twin

    def clear(self) -> None:
        if self.place is not None:
            self.place.leave()
        self.place, self.held, self.sizes, self.rows = None, (), (), 0

    def drop(self) -> None:
        self.clear()

    @property
    def holds(self) -> bool:
        return bool(self.held)

    @property
    def held_bytes(self) -> int:
        """Of all codes, wherever they lie."""
        return sum(self.sizes)

    @property
    def bytes(self) -> int:
        return self.held_bytes if self.shelf.in_memory else 0

    def hold(self, keys: Layers, values: Layers) -> None:
        codes = self.form.encode(keys, values, self.rows)
        if self.place is None:
            self.place = self.shelf.opened()
        self.held = (*self.held, self.place.put(codes))
        self.sizes = (*self.sizes, bytes_of(codes))
        self.rows += next(rows.shape[1] for rows in keys if rows is not None)

    def decoded(self, layer: int, device: torch.device | str = "cpu") -> Rows:
        """All rows of a layer that are held."""
        under = self.form.under(layer)
        codes = [
            {name: tensor.to(device) for name, tensor in held[under].items()} for held in self.held
        ]
        return self.form.decode_all(codes, layer)

    def attend(self, job: Any, asked: Attention) -> torch.Tensor:
        """In one piece, so that rows as they are count bit by bit as if they had stayed."""
        return asked.among(*self.decoded(asked.layer, asked.q.device), self.first).whole()

    def parts(self, job: Any, asked: Attention) -> Sequence[Part]:
        return [asked.over(*self.decoded(asked.layer, asked.q.device))]
