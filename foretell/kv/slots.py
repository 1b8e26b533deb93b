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


def turning(name: str, target: Model) -> Turn:
    """How a target's keys are moved, for the policy `name`. Raises Unsupported."""
    found: Callable[[str], Turn] | None = getattr(target, "turning", None)
    if found is None:
        need = "rotary positions"
        raise Unsupported.missing(f"kv={name}", target.name, need, "leave kv out")
    return found(f"kv={name}")


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

    def empty(self) -> Slots:
        """That of a cache without rows."""
        return Slots(self.turn, self.still)

    def keep(self, cache: Any, chosen: Sequence[torch.Tensor]) -> Slots:
        """Keeps of every layer these rows (KV, n) of its heads in order, or of all heads the same
        (1, n), and moves their keys to their rows. Rows that came since stand at their positions.
        """
        keys, places = {}, {}
        for layer, rows in enumerate(chosen):
            held = cache.k[layer][:, : cache.base]
            at = torch.arange(cache.base, device=held.device).expand(len(rows), -1)
            if self.keys:
                old = self.keys[layer].shape[1]
                held = torch.cat([self.keys[layer], held[:, old:]], 1)
                at = torch.cat([self.places[layer], at[:, old:]], 1)
            wide = rows.expand(len(held), -1)[..., None].expand(-1, -1, held.shape[-1])
            keys[layer], places[layer] = held.gather(1, wide), at.gather(1, rows)
        heads = [len(part) for part in cache.k]
        cache.keep_rows([rows.expand(n, -1) for rows, n in zip(chosen, heads, strict=True)])
        cache.offset = cache.length - cache.base
        moved = slice(self.still, cache.base)
        for layer, made in keys.items():
            moves = torch.arange(cache.base, device=made.device) - places[layer]
            by = moves[0] if len(moves) == 1 else moves
            cache.k[layer][:, moved] = self.turn(made[:, moved], by[..., moved])
        return replace(self, keys=keys, places=places)
