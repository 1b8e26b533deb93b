"""Hidden states kept beside a cache's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

NO_STATES: Mapping[int, torch.Tensor] = {}


def joined(
    before: Mapping[int, torch.Tensor],
    hidden: Mapping[int, torch.Tensor],
    first: int,
    goes_on: bool,
) -> Mapping[int, torch.Tensor]:
    """By tap, the states of all nodes: `before`, and `hidden` of those from `first` on.

    `goes_on`: these are the same nodes, further up. Copies, since an executor may write over what
    it returned.
    """
    if first:
        known = before.keys() & hidden.keys()
        return {tap: torch.cat([before[tap][:first], hidden[tap]]) for tap in known}
    found = {tap: rows.clone() for tap, rows in hidden.items()}
    return {**before, **found} if goes_on else found


class TappedStates:
    """Hidden states of a cache's tokens: of the committed ones by position, of scratch rows beside.

    They outlive an eviction of rows, and feed models that read the target's states.
    """

    def __init__(self, taps: Sequence[int]):
        self.taps = tuple(taps)
        self.length = 0
        self.committed: dict[int, torch.Tensor] = {}  # (capacity, E)
        self.scratch: dict[int, torch.Tensor] = {}  # (scratch rows, E)
        self.none: dict[int, torch.Tensor] = {}  # (0, E), from the first forward on
        self.shared = False  # whether a fork reads `committed` too

    def write(self, first: int, hidden: Mapping[int, torch.Tensor]) -> None:
        """States of the scratch rows from `first` on; what stood there is forgotten."""
        for tap in self.taps:
            self.none[tap] = hidden[tap][:0]
            before = self.scratch.get(tap, hidden[tap][:0])[:first]
            self.scratch[tap] = torch.cat([before, hidden[tap]])

    def keep(self, nodes: Sequence[int]) -> None:
        """The states of these scratch rows, a path, become those of the next committed tokens."""
        end = self.length + len(nodes)
        rows = list(nodes)
        chosen: slice | list[int] = slice(len(rows)) if rows == [*range(len(rows))] else rows
        for tap, scratch in self.scratch.items() if nodes else ():
            held = self.committed.get(tap)
            if held is None or len(held) < end or self.shared:
                grown = scratch.new_empty(max(64, 1 << (end - 1).bit_length()), scratch.shape[1])
                if held is not None:
                    grown[: self.length] = held[: self.length]
                self.committed[tap] = held = grown
            held[self.length : end] = scratch[chosen]
        if nodes:
            self.shared = False
            self.length = end
        self.scratch = {}

    def adopt(self, states: Mapping[int, torch.Tensor]) -> None:
        """Takes the first tokens' states, of all its taps, from a segment."""
        self.committed = {tap: states[tap] for tap in self.taps}
        self.none = {tap: states[tap][:0] for tap in self.taps}
        self.length = len(next(iter(self.committed.values()), ()))
        self.shared = True

    @property
    def reach(self) -> int:
        """Tokens whose states are here, those of scratch rows included."""
        return self.length + len(next(iter(self.scratch.values()), ()))

    def read(self, taps: Sequence[int], start: int, end: int) -> torch.Tensor:
        """(end - start, E of all taps side by side) of the tokens at these positions, of the
        committed ones and of those whose scratch rows follow them.

        What stands before the first token is zeros.
        """
        assert end <= max(start, self.reach), "the states of these tokens are not there yet"
        found = []
        ahead = max(0, start - self.length)
        for tap in taps:
            none = self.none[tap]
            before = none.new_zeros(max(0, min(end, 0) - start), none.shape[1])
            held = self.committed.get(tap, none)[: self.length][max(0, start) : max(0, end)]
            rows = self.scratch.get(tap, none)[ahead : max(ahead, end - self.length)]
            found.append(torch.cat([before, held, rows]))
        return torch.cat(found, 1)

    def fork(self) -> TappedStates:
        twin = TappedStates(self.taps)
        twin.length = self.length
        twin.committed = dict(self.committed)
        twin.scratch = dict(self.scratch)
        twin.none = dict(self.none)
        self.shared = twin.shared = True
        return twin
