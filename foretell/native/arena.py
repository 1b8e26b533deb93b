"""Memory that a model's matrices are packed into, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

LINE = 64  # bytes, at whose multiples weights begin
ROOMS = ("weights", "scales", "minima")  # fields of Packed


class Arena:
    """A room for each of ROOMS, so that matrices of one layout that are packed one after the other
    lie side by side in all three, and joining them moves nothing.

    `rooms`: memory uint8 (n,) each. What no longer fits in is for the caller to allocate.
    """

    def __init__(self, rooms: Mapping[str, torch.Tensor]):
        self.rooms = rooms
        self.used = dict.fromkeys(rooms, 0)

    @classmethod
    def of(cls, memory: torch.Tensor, sizes: Mapping[str, int]) -> Arena:
        """Divides memory, uint8 (n,), into rooms of so many bytes each."""
        parts = memory.split([sizes[room] for room in ROOMS])
        return cls(dict(zip(ROOMS, parts, strict=True)))

    def take(self, room: str, size: int) -> torch.Tensor | None:
        """So many bytes of a room, uint8 (size,); None: there are not as many left."""
        start = self.used[room]
        if start + size > len(self.rooms[room]):
            return None
        self.used[room] = start + rounded_size(size)
        return self.rooms[room][start : start + size]

    def holds(self, addresses: Iterable[int]) -> bool:
        """Whether all of these places in memory lie in it."""
        spans = [(room.data_ptr(), room.data_ptr() + len(room)) for room in self.rooms.values()]
        return all(any(first <= place < end for first, end in spans) for place in addresses)


def rounded_size(size: int) -> int:
    """The bytes that so many take up."""
    return -(-size // LINE) * LINE


def join_tensors(parts: list[torch.Tensor]) -> torch.Tensor:
    """Tensors (n, ...) one below the other: the same memory where they lie there that way."""
    first_part = parts[0]
    storage = first_part.untyped_storage().data_ptr()
    end = first_part.storage_offset()
    for part in parts:
        is_next = part.untyped_storage().data_ptr() == storage and part.storage_offset() == end
        if not is_next or not part.is_contiguous() or part.dtype is not first_part.dtype:
            return torch.cat(parts)
        end += part.numel()
    shape = (sum(len(part) for part in parts), *first_part.shape[1:])
    return first_part.as_strided(shape, first_part.stride())
