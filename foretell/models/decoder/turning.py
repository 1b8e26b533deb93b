"""Keys that are moved to other positions, by the rotation of the family that made them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from foretell.core.tree import TokenTree
from foretell.core.types import Ask

# Keys (KV, n, D) as they were cached, and by how many positions they move, those of all heads
# alike (n,) or of each by itself (KV, n) -> the same there
Turn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# Keys (KV, n, D) of every layer as they were cached, their positions (n,), and others (n,) -> the
# same keys there
Move = Callable[[Sequence[torch.Tensor], torch.Tensor, torch.Tensor], list[torch.Tensor]]


def turn_of(decoder: Any) -> Turn:
    """How this decoder's keys are turned. Raises LookupError where they are not, or in a way that
    does not add up.

    Turned once from where they were cached: rounding grows with every turn.
    """
    loop, rotate = _rotation(decoder)
    if not all(getattr(getattr(one, "self_attn", one), "use_rope", True) for one in loop.layers):
        raise LookupError("some of its layers know no positions")
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


def move_of(decoder: Any) -> Move:
    """How this decoder's keys are moved from one position to another: turned back and on by its own
    tables, so that a moved key is the one that the decoder would have made there.

    Both turns together are one, R(to) R(at)^-1, computed in float64 and rounded once to at least
    float32. A scaling that the tables contain cancels, and layers without positions are left alone.
    Two tokens are run to check that. Raises LookupError where keys of some layer move otherwise.
    """
    loop, rotate = _rotation(decoder)
    unturned: set[int] = set()  # layers whose keys know no positions

    def move(
        layers: Sequence[torch.Tensor], at: torch.Tensor, to: torch.Tensor
    ) -> list[torch.Tensor]:
        wide = torch.promote_types(layers[0].dtype, torch.float32)
        like = layers[0].new_empty(0, dtype=wide)
        tables = [loop.rotary(like, p.to(like.device)[None]) for p in (at, to)]
        (c, s), (c_to, s_to) = [[part.double() for part in table] for table in tables]
        size = c * c + s * s
        angles = [((c_to * c + s_to * s) / size).to(wide), ((s_to * c - c_to * s) / size).to(wide)]
        width = angles[0].shape[-1]  # of the part of a key that is turned
        moved = []
        for layer, keys in enumerate(layers):
            if layer in unturned:
                moved.append(keys)
                continue
            turning, rest = keys[..., :width].to(wide)[None], keys[..., width:]
            turned = rotate(turning[:, :0], turning, *angles)[1][0].to(keys.dtype)
            moved.append(torch.cat([turned, rest], -1))
        return moved

    unturned |= _unturned(decoder, move)
    return move


def _rotation(decoder: Any) -> tuple[Any, Any]:
    """The decoder's loop, and its family's function that rotates queries and keys."""
    loop = decoder.loop
    if loop is None:
        raise LookupError(decoder.loop_refused)
    layer = loop.layers[0]
    module = sys.modules[type(getattr(layer, "self_attn", layer)).__module__]
    rotate = getattr(module, "apply_rotary_pos_emb", None)
    if rotate is None:
        raise LookupError("its positions are no rotations of its keys")
    return loop, rotate


@torch.inference_mode()
def _unturned(decoder: Any, move: Move) -> set[int]:
    """The layers whose keys are the same at all positions. Raises LookupError where others' keys,
    moved, are not those that the decoder makes there.

    A token that stands alone sees itself only, so the states that keys are made of are the same at
    every position.
    """
    at, to = 2, min(37, decoder.context - 1)
    keys, values = [], []
    for position in (at, to):
        cache = decoder.cache()
        cache.offset = -position
        token = decoder.probe_ids[1]
        job, _ = cache.prepare(Ask(TokenTree(token)), [token], 1)
        decoder.forward([job])
        keys.append([rows[:, :1].clone() for rows in cache.k])
        values.append([rows[:, :1].clone() for rows in cache.v])
        cache.drop()
    try:
        moved = move(keys[0], torch.tensor([at]), torch.tensor([to]))
    except (TypeError, ValueError, RuntimeError) as error:
        raise LookupError("its keys are not rotated one by one") from error
    found = set()
    for layer, there in enumerate(keys[1]):
        alike = _same(values[0][layer], values[1][layer])
        if alike and _same(keys[0][layer], there):
            found.add(layer)
        elif not alike or not _same(moved[layer], there):
            raise LookupError(f"layer {layer} has no keys that turn by position alone")
    if len(found) == len(moved):
        raise LookupError("its keys know no positions")
    return found


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two computations of the same rows differ by rounding only."""
    tolerance = 1e-4 if one.dtype.itemsize >= 4 else 0.03
    return bool((one - other).abs().max() <= tolerance * other.abs().max())


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
