"""Rows that are stored in a form of their own: what policies are made of that encode older rows.

Blocks of rows leave the cache, a prompt's when it is read. Each is encoded once, from the rows as
they were computed, and decoded a layer at a time when it is read. After the last whole block, rows
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
Codes = Mapping[int, Code]  # of whole blocks, by the layer under which it lies, see Form.code_layer
Rows = tuple[torch.Tensor, torch.Tensor]  # keys and values of a layer (KV, n, D)


class Form:
    """How rows are stored. It knows nothing of a text, so requests share it."""

    def encode_rows(self, keys: Layers, values: Layers, stored_count: int) -> Codes:
        """Codes that stand for these rows, whole blocks. `stored_count`: the rows stored before
        them; 0: they are a prompt's. Tensors are no parts of others, so that they take what they
        hold.
        """
        raise NotImplementedError

    def decode_rows(self, code: Code, layer: int) -> Rows:
        """The rows of a layer, of those that `encode_rows` was given, in their own type.

        `code`: what lies under `code_layer(layer)`.
        """
        raise NotImplementedError

    def decode_all(self, codes: Sequence[Code], layer: int) -> Rows:
        """The rows of all of these, one after another."""
        row_parts = [self.decode_rows(code, layer) for code in codes]
        return torch.cat([k for k, _ in row_parts], 1), torch.cat([v for _, v in row_parts], 1)

    def code_layer(self, layer: int) -> int:
        """The layer under which this one's code lies: where layers share one, the same."""
        return layer


class LayerForm(Form):
    """A form in which each layer has a code of its own."""

    # Whether `decode_rows` takes codes of one shape together, stacked: tensors with a dimension
    # more.
    batched = False

    def encode_rows(self, keys: Layers, values: Layers, stored_count: int) -> Codes:
        layers = range(len(keys))
        return {
            layer: self.encode_layer(keys[layer], values[layer], layer, stored_count)
            for layer in layers
        }

    def decode_rows(self, code: Code, layer: int) -> Rows:
        return self.decode_layer(code)

    def decode_all(self, codes: Sequence[Code], layer: int) -> Rows:
        if not self.batched:
            return super().decode_all(codes, layer)
        row_parts = []
        for code_run in group_alike(codes):
            if len(code_run) == 1:
                row_parts.append(self.decode_rows(code_run[0], layer))
                continue
            stacked = {name: torch.stack([code[name] for code in code_run]) for name in code_run[0]}
            keys, values = self.decode_rows(stacked, layer)
            row_parts.append(
                (keys.transpose(0, 1).flatten(1, 2), values.transpose(0, 1).flatten(1, 2))
            )
        return torch.cat([k for k, _ in row_parts], 1), torch.cat([v for _, v in row_parts], 1)

    def encode_layer(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, stored_count: int
    ) -> Code:
        """`encode_rows` of a layer's rows (KV, n, D)."""
        raise NotImplementedError

    def decode_layer(self, code: Code) -> Rows:
        """`decode_rows` of a layer's code."""
        raise NotImplementedError


def group_alike(codes: Sequence[Code]) -> list[list[Code]]:
    """Groups codes that follow one another and have tensors of one shape."""
    code_runs: list[list[Code]] = []
    last_shape = None
    for code in codes:
        code_shape = {name: tensor.shape for name, tensor in code.items()}
        if code_shape != last_shape:
            code_runs.append([])
        code_runs[-1].append(code)
        last_shape = code_shape
    return code_runs


class AsTheyAre(LayerForm):
    """Rows as they were computed."""

    def encode_layer(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, stored_count: int
    ) -> Code:
        return {"keys": keys.clone(), "values": values.clone()}

    def decode_layer(self, code: Code) -> Rows:
        return code["keys"], code["values"]


class Shelf:
    """The place of the codes of one text and its forks: here in memory."""

    in_memory = True

    def open_shelf(self) -> Shelf:
        """An empty one for one more text."""
        return self

    def put_codes(self, codes: Codes) -> Codes:
        """Stores codes; returns them as they lie on the shelf from now on."""
        return codes

    def add_user(self) -> None:
        """Counts one more fork that uses the shelf."""

    def remove_user(self) -> None:
        """Counts one fork less: after the last, nothing is left of what lies on the shelf."""


def bytes_of(codes: Codes) -> int:
    """Bytes of all tensors of these codes."""
    tensors = [tensor for code in codes.values() for tensor in code.values()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass
class Stored(Holding):
    """Holds rows in a form, on a shelf. `held_codes`: their codes, by the time they left."""

    form: Form = field(default_factory=AsTheyAre)
    shelf: Shelf = field(default_factory=Shelf)
    text_shelf: Shelf | None = None  # this text's own
    held_codes: tuple[Codes, ...] = ()
    sizes: tuple[int, ...] = ()  # bytes of each of them
    rows: int = 0  # that they stand for

    def fork(self) -> Stored:
        twin = super().fork()
        assert isinstance(twin, Stored)
        if twin.text_shelf is not None:
            twin.text_shelf.add_user()
        return twin

    def clear_held(self) -> None:
        if self.text_shelf is not None:
            self.text_shelf.remove_user()
        self.text_shelf, self.held_codes, self.sizes, self.rows = None, (), (), 0

    def drop(self) -> None:
        self.clear_held()

    @property
    def holds_rows(self) -> bool:
        return bool(self.held_codes)

    @property
    def held_bytes(self) -> int:
        """Bytes of all codes, wherever they lie."""
        return sum(self.sizes)

    @property
    def bytes(self) -> int:
        return self.held_bytes if self.shelf.in_memory else 0

    def hold_rows(self, keys: Layers, values: Layers) -> None:
        codes = self.form.encode_rows(keys, values, self.rows)
        if self.text_shelf is None:
            self.text_shelf = self.shelf.open_shelf()
        self.held_codes = (*self.held_codes, self.text_shelf.put_codes(codes))
        self.sizes = (*self.sizes, bytes_of(codes))
        self.rows += next(rows.shape[1] for rows in keys if rows is not None)

    def decode_held(self, layer: int, device: torch.device | str = "cpu") -> Rows:
        """All rows of a layer that are held."""
        code_layer = self.form.code_layer(layer)
        device_codes = [
            {name: tensor.to(device) for name, tensor in layer_codes[code_layer].items()}
            for layer_codes in self.held_codes
        ]
        return self.form.decode_all(device_codes, layer)

    def attend_job(self, job: Any, attention: Attention) -> torch.Tensor:
        """Attends in one piece, so that rows as they are count bit by bit as if they had stayed."""
        return attention.among(
            *self.decode_held(attention.layer, attention.q.device), self.first_rows
        ).full_output()

    def attend_held(self, job: Any, attention: Attention) -> Sequence[Part]:
        return [attention.over(*self.decode_held(attention.layer, attention.q.device))]
