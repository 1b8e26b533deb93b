"""Stores rows of two layers as one: a direction that they share, and a length of each.

From the middle of the model on, each two neighbouring layers are a pair. A token's keys in both,
all heads together, become one direction between theirs and two lengths; so do its values. Tokens
whose directions lie far apart are kept as they are. With `bits`, directions and the rows of other
layers are rounded too. A prompt is stored when it is read; after it every `buffer` tokens are, and
until then they stay as they are.

Paper: Liu et al., MiniCache: KV Cache Compression in Depth Dimension for Large Language Models,
arXiv:2405.14366
Guarantee: lossy: a pair's rows point to one side; with drafts the text is the one without them
Cost: target 1, and restoring what is stored; a pair takes one layer's rows, 16 bytes a token, and
both layers' rows of tokens that are kept
Needs: cache rows of every layer, of all of the text, in one kind of position
Trains: nothing
Differs:
- the paper's rule for what is kept, as printed, keeps the most similar tokens, against its text;
here the most distant ones are kept (`rule=similar` for the other)
- tokens after the prompt are kept by the same rule within their block; the paper keeps some of the
prompt alone, and merges each new token at once
- its 4 bits are KIVI's; here keys are rounded by channel and values by token, in groups of up to
64, and tokens that are kept stay as they were
- a direction is stored for kept tokens too
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import torch

from foretell.core.settings import OneOf, Range
from foretell.errors import Unsupported
from foretell.kv.base import KV
from foretell.kv.store.base import Code, Codes, Form, Rows, Stored
from foretell.kv.store.holding import Layers
from foretell.kv.store.layer_pairs import RULES, distant_tokens, merge_layers, restore_layer
from foretell.kv.store.packing import Rounded, largest_divisor, round_to_grid

if TYPE_CHECKING:
    from foretell.core.model import Model

WHOLE = 16  # bits of numbers that are not rounded
BITS = (2, 4, 8, WHOLE)
GROUP = 64  # numbers on one grid, at most


@dataclass(frozen=True)
class Minicache(KV):
    """Shares, a layer and counts of bits and tokens."""

    role = "encoder"
    aligned = True

    # where a pair's direction lies between the shallow layer's and the deep one's
    t: Annotated[float, Range(0, 1)] = 0.6
    # share of the range of angles in which tokens are kept; 1: all
    gamma: Annotated[float, Range(0, 1)] = 0.05
    start: Annotated[int, Range(0)] = 0  # the first layer of a pair; 0: the middle one
    # of a number of what is stored: 2, 4, 8, or 16: they are as they were
    bits: Annotated[int, OneOf(BITS)] = 16
    per_head: bool = False  # whether each head has a direction of its own
    # which tokens are kept: distant or, as printed, similar
    rule: Annotated[str, OneOf(RULES)] = "distant"
    buffer: Annotated[int, Range(1)] = 64  # tokens that are stored together

    def build_policy(self, target: Model) -> Stored:
        self.check_target(target)
        loop = getattr(target, "loop", None)
        single_kind = loop is None or loop.kinds is None
        rope_uses = {
            bool(getattr(getattr(layer, "self_attn", layer), "use_rope", True))
            for layer in (loop.layers if loop is not None else ())
        }
        if len({*target.layout}) > 1 or not single_kind or len(rope_uses) > 1:
            missing_need = "rows of one shape and one kind of position in every layer"
            raise Unsupported.missing_capability(
                "kv=minicache", target.name, missing_need, "leave kv out"
            )
        shape: Any = target.layout[0]
        return Stored(0, 0, self.buffer, form=Pairs(self, len(target.layout), *shape))


@dataclass(frozen=True)
class Pairs(Form):
    """A pair's code lies under its shallow layer. Units are all heads of a layer, or each head."""

    settings: Minicache
    layers: int
    heads: int
    key_width: int
    value_width: int

    @property
    def first_paired(self) -> int:
        return self.settings.start or self.layers // 2

    def code_layer(self, layer: int) -> int:
        if layer < self.first_paired:
            return layer
        shallow_layer = layer - (layer - self.first_paired) % 2
        return shallow_layer if shallow_layer + 1 < self.layers else layer

    def is_paired(self, layer: int) -> bool:
        """Whether this is the shallow layer of a pair."""
        return (
            layer >= self.first_paired
            and (layer - self.first_paired) % 2 == 0
            and layer + 1 < self.layers
        )

    def encode_rows(self, keys: Layers, values: Layers, stored_count: int) -> Codes:
        codes = {}
        for layer in range(self.layers):
            if self.code_layer(layer) < layer:
                continue
            code: dict[str, torch.Tensor] = {}
            for name, rows in (("k", keys), ("v", values)):
                if self.is_paired(layer):
                    code |= self._merge_pair(name, rows[layer], rows[layer + 1])
                else:
                    code |= self._encode_units(name, rows[layer])
            codes[layer] = code
        return codes

    def _merge_pair(self, name: str, shallow: torch.Tensor, deep: torch.Tensor) -> Code:
        """The code of rows (KV, n, D) of two layers."""
        both_layers = torch.stack(
            [self._split_units(shallow), self._split_units(deep)]
        )  # (2, U, n, W)
        merged_pair = merge_layers(both_layers[0], both_layers[1], self.settings.t)
        kept_tokens = (
            distant_tokens(merged_pair.angles, self.settings.gamma, self.settings.rule)
            .flatten()
            .nonzero()[:, 0]
        )
        return {
            **self._encode_units(name, merged_pair.directions.to(shallow.dtype)),
            f"{name}.sizes": merged_pair.sizes,
            f"{name}.kept": kept_tokens.int(),
            f"{name}.rows": both_layers.flatten(1, 2)[:, kept_tokens],
        }

    def _split_units(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows (KV, n, D) as (U, n, W)."""
        return rows if self.settings.per_head else rows.transpose(0, 1).flatten(1)[None]

    def _encode_units(self, name: str, rows: torch.Tensor) -> Code:
        """Rows (U, n, W), rounded keys by channel and values by token."""
        if self.settings.bits == WHOLE:
            return {name: rows.clone(memory_format=torch.contiguous_format)}
        grouped_rows = rows.transpose(1, 2) if name == "k" else rows
        grid = round_to_grid(
            grouped_rows, self.settings.bits, self._group_size(name, rows.shape[2])
        )
        return {f"{name}.codes": grid.codes, f"{name}.low": grid.low, f"{name}.step": grid.step}

    def _group_size(self, name: str, width: int) -> int:
        return largest_divisor(self.settings.buffer if name == "k" else width, GROUP)

    def _decode_units(self, name: str, code: Code, width: int) -> torch.Tensor:
        """The rows (U, n, W), W being `width`, that `_encode_units` was given, up to rounding."""
        if name in code:
            return code[name]
        grid = Rounded(*(code[f"{name}.{part}"] for part in ("codes", "low", "step")))
        count = grid.low.shape[-1] * self._group_size(name, width)
        numbers = grid.restore_numbers(self.settings.bits, count).to(grid.low.dtype)
        return numbers.transpose(1, 2) if name == "k" else numbers

    def decode_rows(self, code: Code, layer: int) -> Rows:
        keys, values = (self._restore_rows(name, code, layer) for name in ("k", "v"))
        return keys, values

    def _restore_rows(self, name: str, code: Code, layer: int) -> torch.Tensor:
        """A layer's rows (KV, n, D)."""
        if f"{name}.sizes" not in code:
            return self._decode_units(
                name, code, self.key_width if name == "k" else self.value_width
            )
        pair_index = layer - self.code_layer(layer)
        kept_rows = code[f"{name}.rows"]
        directions = self._decode_units(name, code, kept_rows.shape[-1])
        restored_rows = restore_layer(directions, code[f"{name}.sizes"][pair_index]).to(
            kept_rows.dtype
        )
        units, count, width = restored_rows.shape
        kept_tokens = code[f"{name}.kept"].long()
        restored_rows = (
            restored_rows.reshape(-1, width)
            .index_copy(0, kept_tokens, kept_rows[pair_index])
            .view(units, count, width)
        )
        if self.settings.per_head:
            return restored_rows
        return restored_rows[0].view(count, self.heads, -1).transpose(0, 1)
