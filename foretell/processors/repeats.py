"""What a growing list ends with again and again."""

from __future__ import annotations

PRIME = (1 << 61) - 1
BASE = 0x9E3779B97F4A7C15 % PRIME


class Repeats:
    """A list of whole numbers whose last elements may be those before them once more.

    Stretches are compared by their hashes, so a look at the end of a text takes a time that grows
    with how often its last element has come, not with the length of what comes again.
    """

    def __init__(self) -> None:
        self.items: list[int] = []
        self.places: dict[int, list[int]] = {}  # of each element, where it stands
        self.hashes = [0]  # of the first n elements
        self.powers = [1]

    def append_item(self, item: int) -> None:
        self.places.setdefault(item, []).append(len(self.items))
        self.items.append(item)
        self.hashes.append((self.hashes[-1] * BASE + item + 1) % PRIME)
        if len(self.powers) < len(self.hashes):
            self.powers.append(self.powers[-1] * BASE % PRIME)

    def cut_items(self, length: int) -> None:
        """Keeps the first elements."""
        for item in reversed(self.items[length:]):
            self.places[item].pop()
        del self.items[length:], self.hashes[length + 1 :]

    def find_repeat(self) -> tuple[int, int]:
        """Returns (length of the shortest stretch that the list ends with at least twice in a row,
        how often it stands before the last one); (0, 0): there is none.
        """
        item_count = len(self.items)
        if not item_count:
            return 0, 0
        for earlier_position in reversed(self.places[self.items[-1]][:-1]):
            length = item_count - 1 - earlier_position
            if 2 * length > item_count:
                break
            repeat_count = self._count_repeats(length)
            if repeat_count:
                return length, repeat_count
        return 0, 0

    def _count_repeats(self, length: int) -> int:
        """Counts how often the last `length` elements stand right before themselves."""
        item_count = len(self.items)
        stretch_hash = self._stretch_hash(item_count - length, item_count)
        repeat_count = 0
        stretch_start = item_count - 2 * length
        while (
            stretch_start >= 0
            and self._stretch_hash(stretch_start, stretch_start + length) == stretch_hash
        ):
            repeat_count += 1
            stretch_start -= length
        return repeat_count

    def _stretch_hash(self, start: int, end: int) -> int:
        return (self.hashes[end] - self.hashes[start] * self.powers[end - start]) % PRIME
