"""What a family's layers hand to attention, read off a forward in which nothing is attended to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface


@dataclass(frozen=True)
class AttentionCall:
    """Arguments that one layer hands to attention.

    `shape`: key-value heads, width of a key, width of a value. `reach`: how many positions its mask
    lets a node see, itself included, which is `AttentionProbe.span` where it sees all. 0: the mask
    is neither causal nor a window, or is not handed over. `biased`: whether it adds to the scores.
    """

    shape: tuple[int, int, int]
    window: int | None
    reach: int
    biased: bool


@dataclass
class AttentionProbe:
    """Findings of a model's first forward: one call of attention a layer, and maybe one to another
    sequence, of another length.

    `span`: length of the longest text.
    """

    span: int
    calls: dict[int, AttentionCall] = field(default_factory=dict)
    cross: dict[int, AttentionCall] = field(default_factory=dict)


PROBE: ContextVar[AttentionProbe] = ContextVar("foretell_probe")


def _record_attention(
    module: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: Any,
    sliding_window: int | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Notes what the layer hands to attention; attends to nothing."""
    is_reach = isinstance(attention_mask, torch.Tensor) and attention_mask.numel() == 1
    shape = (k.shape[1], k.shape[-1], v.shape[-1])
    layer_index: Any = module.layer_idx
    reach = int(attention_mask) if is_reach else 0
    call = AttentionCall(shape, sliding_window, reach, position_bias is not None)
    probe = PROBE.get()
    calls = probe.calls if k.shape[2] == q.shape[2] else probe.cross
    calls[layer_index] = call
    return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[-1]), None


def _mask_reach(
    *_: Any, mask_function: Callable[..., torch.Tensor], device: Any = None, **__: Any
) -> torch.Tensor:
    """The reach of a mask, (1, 1, 1, 1), in place of the mask.

    It is read off the last row of the longest text, and the middle row must have the same.
    """
    span = PROBE.get().span
    columns = torch.arange(span, device=device)
    last_row = mask_function(0, 0, torch.tensor(span - 1, device=device), columns)
    reach = int(last_row.sum())
    for row in (span - 1, span // 2):
        visible_rows = mask_function(0, 0, torch.tensor(row, device=device), columns)
        expected_rows = (columns <= row) & (columns > row - reach)
        if not torch.equal(visible_rows.expand(span), expected_rows):
            reach = 0
    return torch.full((1, 1, 1, 1), reach, device=device)


def layer_layouts(
    probe: AttentionProbe, layer_count: int, biased: bool = False
) -> tuple[tuple[tuple[int, int, int], ...], list[int | None]]:
    """Layouts of what each of `layer_count` layers stores, and its window. `biased`: a bias by
    position is known.

    Raises LookupError with what is missing where a layer does not leave all of attention to us.
    """
    calls = {layer: probe.calls[layer] for layer in range(layer_count)}
    check_calls(probe.span, calls, biased)
    return tuple(call.shape for call in calls.values()), [
        layer_call.window for layer_call in calls.values()
    ]


def check_calls(span: int, calls: Mapping[int, AttentionCall], biased: bool = False) -> None:
    """Raises LookupError with what is missing where a layer does not leave all of attention to us.

    `span`: of the probe.
    """
    for layer, call in calls.items():
        if call.biased and not biased:
            raise LookupError(f"scores without a bias by position, which layer {layer} adds")
        if not call.reach:
            raise LookupError(f"a causal mask or a sliding window, and layer {layer} has another")
        if call.reach != min(call.window or span, span):
            raise LookupError(
                f"to be told the window of {call.reach} positions, which layer {layer} keeps to "
                "itself"
            )


AttentionInterface.register("foretell-probe", _record_attention)
AttentionMaskInterface.register("foretell-probe", _mask_reach)


def rows_agree(our_rows: torch.Tensor, their_rows: torch.Tensor, is_wide: bool) -> bool:
    """Whether rows (N, V), or one (V,), differ by rounding only. `is_wide`: that of 32 bits or
    more.

    Of coarser ones most rows decide. A text's first tokens have states so large in some models that
    their rows, and no others, are off by more than any limit that would show another computation.
    """
    row_errors = (our_rows - their_rows).abs().amax(-1)
    difference, tolerance = (row_errors.max(), 1e-4) if is_wide else (row_errors.median(), 0.05)
    return bool(difference <= tolerance * their_rows.abs().max())
