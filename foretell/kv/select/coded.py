"""Keys and values in 8 bits, each row by its own range."""

from __future__ import annotations

from typing import NamedTuple

import torch

from foretell.kv.select.paging import extremes, widest

LEVELS = 255  # beside the least number


class Coded(NamedTuple):
    """Rows in 8 bits, each with the least of its numbers and the step between them (KV, n, 2)."""

    keys: torch.Tensor
    key_scales: torch.Tensor
    values: torch.Tensor
    value_scales: torch.Tensor

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> Coded:
        return cls(*coded(keys), *coded(values))

    def followed(self, others: Coded) -> Coded:
        """These rows and others behind them."""
        return Coded(*(torch.cat(parts, 1) for parts in zip(self, others, strict=True)))

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as they are read."""
        return decoded(self.keys, self.key_scales), decoded(self.values, self.value_scales)


def coded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest of LEVELS + 1 numbers from each row's least to its largest (KV, n, D), as whole
    numbers, and the scales.
    """
    low, high = rows.aminmax(dim=-1, keepdim=True)
    step = (high - low) / LEVELS
    codes = ((rows - low) / step.clamp(min=torch.finfo(rows.dtype).tiny)).round()
    return codes.clamp(0, LEVELS).to(torch.uint8), torch.cat([low, step], -1)


def decoded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The rows that `coded` made these of, up to half a step."""
    return scales[..., :1] + codes.to(scales) * scales[..., 1:]


def bounds_of(keys: torch.Tensor, part: int) -> torch.Tensor:
    """The `extremes` of whole parts of keys (KV, n, D), which hold for the rounded keys too."""
    return widest(extremes(keys, part), extremes(decoded(*coded(keys)), part))
