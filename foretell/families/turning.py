"""Keys that are moved to other positions, by the rotation of the family that made them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

# Keys (KV, n, D) as they were cached, and by how many positions they move, those of all heads
# alike (n,) or of each by itself (KV, n) -> the same there
Turn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def turn_of(decoder: Any) -> Turn:
    """How this decoder's keys are turned. Raises LookupError where they are not, or in a way that
    does not add up.

    Turned once from where they were cached: rounding grows with every turn.
    """
    loop = decoder.loop
    if loop is None:
        raise LookupError(decoder.loop_refused)
    layer = loop.layers[0]
    module = sys.modules[type(getattr(layer, "self_attn", layer)).__module__]
    rotate = getattr(module, "apply_rotary_pos_emb", None)
    if rotate is None:
        raise LookupError("its positions are no rotations of its keys")
    scaling = float(getattr(loop.rotary, "attention_scaling", 1.0))

    def turn(keys: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(keys.dtype, torch.float32)
        exact = keys.to(wide)
        cosines, sines = loop.rotary(exact, by.to(keys.device).reshape(-1, keys.shape[1]))
        angles = (cosines.to(wide) / scaling, sines.to(wide) / scaling)
        # A head lies where a text of a batch does, which have positions of their own.
        turned: torch.Tensor = rotate(exact[:, None], exact[:, None], *angles)[1][:, 0]
        return turned.to(keys.dtype)

    _check(turn, decoder)
    return turn


def _check(turn: Turn, decoder: Any) -> None:
    """That turns add up, and that a turn by nothing changes nothing."""
    heads, width, _ = next(shape for shape in decoder.layout if shape is not None)
    keys = torch.linspace(-1, 1, heads * 3 * width, dtype=torch.float64, device=decoder.device)
    keys = keys.view(heads, 3, width)
    steps = torch.tensor([2, 5, 7])
    try:
        there_and_back = turn(turn(keys, steps), -steps)
        same = turn(keys, torch.zeros(3, dtype=torch.long))
        alone = turn(keys, torch.stack([steps + head for head in range(heads)]))
        last = turn(keys, steps + heads - 1)
    except (TypeError, ValueError, RuntimeError) as error:
        raise LookupError("its keys are not rotated one by one") from error
    if not torch.allclose(there_and_back, keys, atol=1e-4) or not torch.allclose(same, keys):
        raise LookupError("its rotations do not add up")
    if not torch.allclose(alone[-1], last[-1], atol=1e-4):
        raise LookupError("its heads do not turn alone")
