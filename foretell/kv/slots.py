"""Keys that stand at the positions of their rows, however many tokens were given up before them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from foretell.errors import Unsupported

if TYPE_CHECKING:
    from foretell.core.model import Model

# Keys (KV, n, D), and by how many positions they move, (n,) or (KV, n) -> the same there
Turn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def find_turn(name: str, target: Model) -> Turn:
    """How a target's keys are moved, for the policy `name`. Raises Unsupported."""
    turn_builder: Callable[[str], Turn] | None = getattr(target, "find_turn", None)
    if turn_builder is None:
        need = "rotary positions"
        raise Unsupported.missing_capability(f"kv={name}", target.name, need, "leave kv out")
    return turn_builder(f"kv={name}")


@dataclass(frozen=True)
class Slots:
    """The keys of a cache's rows as they were made, and at what positions.

    A key is turned once, from there to its row: rounding does not add up. Nothing is changed in
    place, so that copies of a cache may share it.
    """

    turn: Turn
    still: int = 0  # first rows, which never move
    keys: Mapping[int, torch.Tensor] = field(default_factory=dict)  # of each layer (KV, kept, D)
    places: Mapping[int, torch.Tensor] = field(default_factory=dict)  # (KV or 1, kept)

    def without_rows(self) -> Slots:
        """Slots of a cache without rows."""
        return Slots(self.turn, self.still)

    def keep_rows(self, cache: Any, surviving_rows: Sequence[torch.Tensor]) -> Slots:
        """Keeps of every layer these rows (KV, n) of its heads in order, or of all heads the same
        (1, n), and moves their keys to their rows. Rows that came since stand at their positions.
        """
        kept_keys, kept_positions = {}, {}
        for layer, rows in enumerate(surviving_rows):
            layer_keys = cache.k[layer][:, : cache.base]
            key_positions = torch.arange(cache.base, device=layer_keys.device).expand(len(rows), -1)
            if self.keys:
                held_count = self.keys[layer].shape[1]
                layer_keys = torch.cat([self.keys[layer], layer_keys[:, held_count:]], 1)
                key_positions = torch.cat([self.places[layer], key_positions[:, held_count:]], 1)
            gather_indices = rows.expand(len(layer_keys), -1)[..., None].expand(
                -1, -1, layer_keys.shape[-1]
            )
            kept_keys[layer], kept_positions[layer] = (
                layer_keys.gather(1, gather_indices),
                key_positions.gather(1, rows),
            )
        head_counts = [len(part) for part in cache.k]
        cache.keep_rows(
            [rows.expand(n, -1) for rows, n in zip(surviving_rows, head_counts, strict=True)]
        )
        cache.offset = cache.length - cache.base
        moved_rows = slice(self.still, cache.base)
        for layer, original_keys in kept_keys.items():
            moves = torch.arange(cache.base, device=original_keys.device) - kept_positions[layer]
            key_moves = moves[0] if len(moves) == 1 else moves
            cache.k[layer][:, moved_rows] = self.turn(
                original_keys[:, moved_rows], key_moves[..., moved_rows]
            )
        return replace(self, keys=kept_keys, places=kept_positions)
