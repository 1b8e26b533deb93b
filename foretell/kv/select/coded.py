"""Keys and values in 8 bits, each row by its own range."""

from __future__ import annotations

from typing import NamedTuple

import torch

from foretell.kv.select.paging import join_extremes, page_extremes

LEVELS = 255  # beside the least number


class Coded(NamedTuple):
    """Rows in 8 bits, each with the least of its numbers and the step between them (KV, n, 2)."""

    keys: torch.Tensor
    key_scales: torch.Tensor
    values: torch.Tensor
    value_scales: torch.Tensor

    @classmethod
    def from_rows(cls, keys: torch.Tensor, values: torch.Tensor) -> Coded:
        return cls(*encode_rows(keys), *encode_rows(values))

    def append_rows(self, later_rows: Coded) -> Coded:
        """Joins these rows and later ones after them."""
        return Coded(*(torch.cat(row_parts, 1) for row_parts in zip(self, later_rows, strict=True)))

    def read_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as they are read."""
        return decode_rows(self.keys, self.key_scales), decode_rows(self.values, self.value_scales)


def encode_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest of LEVELS + 1 numbers from each row's least to its largest (KV, n, D), as whole
    numbers, and the scales.
    """
    row_minimum, row_maximum = rows.aminmax(dim=-1, keepdim=True)
    step_size = (row_maximum - row_minimum) / LEVELS
    codes = ((rows - row_minimum) / step_size.clamp(min=torch.finfo(rows.dtype).tiny)).round()
    return codes.clamp(0, LEVELS).to(torch.uint8), torch.cat([row_minimum, step_size], -1)


def decode_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The rows that `encode_rows` made these of, up to half a step."""
    return scales[..., :1] + codes.to(scales) * scales[..., 1:]


def bounds_of(keys: torch.Tensor, part: int) -> torch.Tensor:
    """The `page_extremes` of whole parts of keys (KV, n, D), for the rounded keys too."""
    return join_extremes(
        page_extremes(keys, part), page_extremes(decode_rows(*encode_rows(keys)), part)
    )
