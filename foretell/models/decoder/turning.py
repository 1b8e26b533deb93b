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
    """Finds how this decoder's keys are turned. Raises LookupError where they are not, or in a way
    that does not add up.

    Turned once from where they were cached: rounding grows with every turn.
    """
    loop, rotate_heads = _find_rotation(decoder)
    if not all(
        getattr(getattr(layer, "self_attn", layer), "use_rope", True) for layer in loop.layers
    ):
        raise LookupError("some of its layers know no positions")
    scaling = float(getattr(loop.rotary, "attention_scaling", 1.0))

    def turn(keys: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
        wide_dtype = torch.promote_types(keys.dtype, torch.float32)
        wide_keys = keys.to(wide_dtype)
        cosines, sines = loop.rotary(wide_keys, shifts.to(keys.device).reshape(-1, keys.shape[1]))
        angles = (cosines.to(wide_dtype) / scaling, sines.to(wide_dtype) / scaling)
        # A head lies where a text of a batch does, which have positions of their own.
        rotated: torch.Tensor = rotate_heads(wide_keys[:, None], wide_keys[:, None], *angles)[1][
            :, 0
        ]
        return rotated.to(keys.dtype)

    _check_turn(turn, decoder)
    return turn


def move_of(decoder: Any) -> Move:
    """Finds how this decoder's keys are moved from one position to another: turned back and on by
    its own tables, so that a moved key is the one that the decoder would have made there.

    Both turns together are one, R(to) R(at)^-1, computed in float64 and rounded once to at least
    float32. A scaling that the tables contain cancels, and layers without positions are left alone.
    Two tokens are run to check that. Raises LookupError where keys of some layer move otherwise.
    """
    loop, rotate_heads = _find_rotation(decoder)
    fixed_layers: set[int] = set()  # layers whose keys know no positions

    def move(
        layers: Sequence[torch.Tensor], from_positions: torch.Tensor, to_positions: torch.Tensor
    ) -> list[torch.Tensor]:
        wide_dtype = torch.promote_types(layers[0].dtype, torch.float32)
        dtype_example = layers[0].new_empty(0, dtype=wide_dtype)
        tables = [
            loop.rotary(dtype_example, positions.to(dtype_example.device)[None])
            for positions in (from_positions, to_positions)
        ]
        (c, s), (c_to, s_to) = [[part.double() for part in table] for table in tables]
        square_norm = c * c + s * s
        angles = [
            ((c_to * c + s_to * s) / square_norm).to(wide_dtype),
            ((s_to * c - c_to * s) / square_norm).to(wide_dtype),
        ]
        width = angles[0].shape[-1]  # of the part of a key that is turned
        moved_keys = []
        for layer, keys in enumerate(layers):
            if layer in fixed_layers:
                moved_keys.append(keys)
                continue
            rotary_part, other_part = keys[..., :width].to(wide_dtype)[None], keys[..., width:]
            rotated = rotate_heads(rotary_part[:, :0], rotary_part, *angles)[1][0].to(keys.dtype)
            moved_keys.append(torch.cat([rotated, other_part], -1))
        return moved_keys

    fixed_layers |= _find_fixed_layers(decoder, move)
    return move


def _find_rotation(decoder: Any) -> tuple[Any, Any]:
    """The decoder's loop, and its family's function that rotates queries and keys."""
    loop = decoder.loop
    if loop is None:
        raise LookupError(decoder.loop_refused)
    layer = loop.layers[0]
    family_module = sys.modules[type(getattr(layer, "self_attn", layer)).__module__]
    rotate_heads = getattr(family_module, "apply_rotary_pos_emb", None)
    if rotate_heads is None or loop.rotary is None:
        raise LookupError("its positions are no rotations of its keys")
    return loop, rotate_heads


@torch.inference_mode()
def _find_fixed_layers(decoder: Any, move: Move) -> set[int]:
    """The layers whose keys are the same at all positions. Raises LookupError where others' keys,
    moved, are not those that the decoder makes there.

    A token that stands alone sees itself only, so the states that keys are made of are the same at
    every position.
    """
    from_position, to_position = 2, min(37, decoder.context - 1)
    keys, values = [], []
    for position in (from_position, to_position):
        cache = decoder.cache()
        cache.offset = -position
        probe_token = decoder.probe_ids[1]
        job, _ = cache.prepare(Ask(TokenTree(probe_token)), [probe_token], 1)
        decoder.forward([job])
        keys.append([rows[:, :1].clone() for rows in cache.k])
        values.append([rows[:, :1].clone() for rows in cache.v])
        cache.drop()
    try:
        moved_keys = move(keys[0], torch.tensor([from_position]), torch.tensor([to_position]))
    except (TypeError, ValueError, RuntimeError) as error:
        raise LookupError("its keys are not rotated one by one") from error
    fixed_layers = set()
    for layer, expected_keys in enumerate(keys[1]):
        values_agree = _rows_agree(values[0][layer], values[1][layer])
        if values_agree and _rows_agree(keys[0][layer], expected_keys):
            fixed_layers.add(layer)
        elif not values_agree or not _rows_agree(moved_keys[layer], expected_keys):
            raise LookupError(f"layer {layer} has no keys that turn by position alone")
    if len(fixed_layers) == len(moved_keys):
        raise LookupError("its keys know no positions")
    return fixed_layers


def _rows_agree(our_rows: torch.Tensor, their_rows: torch.Tensor) -> bool:
    """Whether two computations of the same rows differ by rounding only."""
    tolerance = 1e-4 if our_rows.dtype.itemsize >= 4 else 0.03
    return bool((our_rows - their_rows).abs().max() <= tolerance * their_rows.abs().max())


def _check_turn(turn: Turn, decoder: Any) -> None:
    """Checks that turns add up, and that a turn by nothing changes nothing. Raises LookupError."""
    head_count, key_width, _ = next(shape for shape in decoder.layout if shape is not None)
    keys = torch.linspace(
        -1, 1, head_count * 3 * key_width, dtype=torch.float64, device=decoder.device
    )
    keys = keys.view(head_count, 3, key_width)
    steps = torch.tensor([2, 5, 7])
    try:
        there_and_back = turn(turn(keys, steps), -steps)
        unmoved = turn(keys, torch.zeros(3, dtype=torch.long))
        turned_by_head = turn(keys, torch.stack([steps + head for head in range(head_count)]))
        turned_as_last = turn(keys, steps + head_count - 1)
    except (TypeError, ValueError, RuntimeError) as error:
        raise LookupError("its keys are not rotated one by one") from error
    if not torch.allclose(there_and_back, keys, atol=1e-4) or not torch.allclose(unmoved, keys):
        raise LookupError("its rotations do not add up")
    if not torch.allclose(turned_by_head[-1], turned_as_last[-1], atol=1e-4):
        raise LookupError("its heads do not turn alone")
