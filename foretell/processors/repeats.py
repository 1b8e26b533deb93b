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

    def push(self, item: int) -> None:
        self.places.setdefault(item, []).append(len(self.items))
        self.items.append(item)
        self.hashes.append((self.hashes[-1] * BASE + item + 1) % PRIME)
        if len(self.powers) < len(self.hashes):
            self.powers.append(self.powers[-1] * BASE % PRIME)

    def cut(self, length: int) -> None:
        """Keeps the first elements."""
        for item in reversed(self.items[length:]):
            self.places[item].pop()
        del self.items[length:], self.hashes[length + 1 :]

    def found(self) -> tuple[int, int]:
        """(length of the shortest stretch that the list ends with at least twice in a row, how
        often it stands before the last one); (0, 0): there is none.
        """
        end = len(self.items)
        if not end:
            return 0, 0
        for place in reversed(self.places[self.items[-1]][:-1]):
            length = end - 1 - place
            if 2 * length > end:
                break
            times = self._times(length)
            if times:
                return length, times
        return 0, 0

    def _times(self, length: int) -> int:
        """How often the last `length` elements stand before themselves."""
        end = len(self.items)
        last = self._hash(end - length, end)
        times = 0
        start = end - 2 * length
        while start >= 0 and self._hash(start, start + length) == last:
            times += 1
            start -= length
        return times

    def _hash(self, start: int, end: int) -> int:
        return (self.hashes[end] - self.hashes[start] * self.powers[end - start]) % PRIME
