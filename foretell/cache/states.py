"""Hidden states kept beside a cache's rows."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch

from foretell.cache.buffers import roomy

PIECES = 16  # pieces that wait to be put behind the others: one by one this would cost more
SHORT = 1 << 20  # bytes of a forward's states that may be held for the sake of a few of them
NO_STATES: Mapping[int, torch.Tensor] = {}
Piece = torch.Tensor | Mapping[int, torch.Tensor]  # (taps, rows, E), or by tap (rows, E)


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

    They outlive an eviction of rows, and feed models that read the target's states. Those of a
    text's first tokens may be shared with other texts, as the rows of these tokens are.
    """

    def __init__(self, taps: Sequence[int]):
        self.taps = tuple(taps)
        self.shared: tuple[Mapping[int, torch.Tensor], ...] = ()  # of segments, in order
        self.start = 0  # tokens whose states these are
        self.length = 0  # committed tokens in all
        self.own: torch.Tensor | None = None  # (taps, capacity, E) of the tokens from `start` on
        self.fresh: list[Piece] = []  # of the newest of these tokens
        self.scratch: Piece | None = None
        self.scratched = 0  # scratch rows
        self.none: dict[int, torch.Tensor] = {}  # (0, E), from the first forward on
        self.forked = False  # whether a fork reads `own` too

    def write(self, first: int, hidden: Mapping[int, torch.Tensor]) -> None:
        """States of the scratch rows from `first` on; what stood there is forgotten."""
        before, some = self.scratch if first else None, hidden[self.taps[0]]
        self.scratch, self.scratched = hidden, len(some)
        if before is not None or some.untyped_storage().nbytes() > SHORT:
            parts = [self._whole(hidden)]
            parts[:0] = [] if before is None else [self._whole(before)[:, :first]]
            self.scratch = torch.cat(parts, 1)
            self.scratched = self.scratch.shape[1]
        if not self.none:
            # Not a view, which would keep the first piece of a prompt in memory.
            self.none = dict.fromkeys(self.taps, some.new_empty(0, some.shape[1]))

    def _whole(self, piece: Piece) -> torch.Tensor:
        """(taps, rows, E)"""
        if isinstance(piece, torch.Tensor):
            return piece
        return torch.stack([piece[tap] for tap in self.taps])

    def keep(self, nodes: Sequence[int]) -> None:
        """The states of these scratch rows, a path, become those of the next committed tokens."""
        scratch, self.scratch = self.scratch, None
        if not nodes:
            return
        assert scratch is not None, "these rows were committed before"
        count = len(nodes)
        self.length += count
        # Nodes come in order: where none is left out, they are all there are.
        whole = count == self.scratched
        self.fresh.append(scratch if whole else self._whole(scratch)[:, list(nodes)])
        if count > PIECES or len(self.fresh) > PIECES:
            self.gather()

    def gather(self) -> None:
        """Puts the states of the newest committed tokens behind the others."""
        if not self.fresh:
            return
        fresh, self.fresh = torch.cat([*map(self._whole, self.fresh)], 1), []
        end = self.length - self.start
        held = end - fresh.shape[1]
        own = self.own
        if own is None or own.shape[1] < end or self.forked:
            grown = fresh.new_empty(len(self.taps), roomy(end), fresh.shape[2])
            if own is not None:
                grown[:, :held] = own[:, :held]
            self.own, self.forked = grown, False
            own = grown
        own[:, held:end] = fresh

    def adopt(self, states: Mapping[int, torch.Tensor]) -> None:
        """Takes those of the next tokens, of all its taps, from a segment; it has none of its own.

        They are read where they are.
        """
        assert self.length == self.start, "states of its own stand behind shared ones"
        self.shared = (*self.shared, states)
        self.none = {tap: states[tap][:0] for tap in self.taps}
        self.length += len(next(iter(states.values()), ()))
        self.start = self.length

    def lend(self) -> Mapping[int, torch.Tensor]:
        """Makes its own committed states shared ones, and returns them."""
        self.gather()
        held = self.length - self.start
        lent: dict[int, torch.Tensor] = {}
        if self.own is not None:
            held_states = self.own[:, :held].clone()
            lent = dict(zip(self.taps, held_states, strict=True))
        self.own, self.forked = None, False
        self.shared = (*self.shared, lent) if lent else self.shared
        self.start = self.length
        return lent

    def copied(self, start: int, end: int) -> dict[int, torch.Tensor]:
        """Copies (end - start, E) of each tap's states of the committed tokens at these places."""
        return {tap: self.read((tap,), start, end) for tap in self.taps if tap in self.none}

    @property
    def reach(self) -> int:
        """Tokens whose states are here, those of scratch rows included."""
        return self.length + (0 if self.scratch is None else self.scratched)

    @property
    def bytes(self) -> int:
        """Of the buffers of its own, shared states aside."""
        held = [part for part in (self.own, *self.fresh, self.scratch) if part is not None]
        return sum(part.nbytes for part in map(self._whole, held))

    def read(self, taps: Sequence[int], start: int, end: int) -> torch.Tensor:
        """(end - start, E of all taps side by side) of the tokens at these positions, of the
        committed ones and of those whose scratch rows follow them.

        What stands before the first token is zeros.
        """
        assert end <= max(start, self.reach), "the states of these tokens are not there yet"
        self.gather()
        return torch.cat([self._read(tap, start, end) for tap in taps], 1)

    def _read(self, tap: int, start: int, end: int) -> torch.Tensor:
        none = self.none[tap]
        parts = [none.new_zeros(max(0, min(end, 0) - start), none.shape[1])]
        tapped = self.taps.index(tap)
        own = none if self.own is None else self.own[tapped, : self.length - self.start]
        scratch = none if self.scratch is None else self._whole(self.scratch)[tapped]
        place = 0
        for part in (*(states[tap] for states in self.shared), own, scratch):
            parts.append(part[max(0, start - place) : max(0, end - place)])
            place += len(part)
        return torch.cat(parts)

    def fork(self) -> TappedStates:
        twin = copy.copy(self)
        twin.fresh = self.fresh[:]
        self.forked = twin.forked = True
        return twin
