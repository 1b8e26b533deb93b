"""Hidden states kept beside a cache's rows."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch

from foretell.cache.buffers import roomy_length

PIECES = 16  # pieces that wait to be put after the others: one by one this would cost more
SHORT = 1 << 20  # bytes of a forward's states that may be held for the sake of a few of them
NO_STATES: Mapping[int, torch.Tensor] = {}
Piece = torch.Tensor | Mapping[int, torch.Tensor]  # (taps, rows, E), or by tap (rows, E)


def join_states(
    earlier_states: Mapping[int, torch.Tensor],
    hidden: Mapping[int, torch.Tensor],
    first_node: int,
    goes_on: bool,
) -> Mapping[int, torch.Tensor]:
    """States of all nodes by tap: `earlier_states`, and `hidden` of those from `first_node` on.

    `goes_on`: these are the same nodes, further up. Copies, since a backend may write over what
    it returned.
    """
    if first_node:
        known_taps = earlier_states.keys() & hidden.keys()
        return {
            tap: torch.cat([earlier_states[tap][:first_node], hidden[tap]]) for tap in known_taps
        }
    copied_states = {tap: rows.clone() for tap, rows in hidden.items()}
    return {**earlier_states, **copied_states} if goes_on else copied_states


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
        self.own_states: torch.Tensor | None = (
            None  # (taps, capacity, E) of the tokens from `start` on
        )
        self.fresh: list[Piece] = []  # of the newest of these tokens
        self.scratch: Piece | None = None
        self.scratched = 0  # scratch rows
        self.none: dict[int, torch.Tensor] = {}  # (0, E), from the first forward on
        self.forked = False  # whether a fork reads `own` too

    def write_states(self, first_node: int, hidden: Mapping[int, torch.Tensor]) -> None:
        """States of the scratch rows from `first_node` on; what stood there is forgotten."""
        earlier_states, sample_states = self.scratch if first_node else None, hidden[self.taps[0]]
        self.scratch, self.scratched = hidden, len(sample_states)
        if earlier_states is not None or sample_states.untyped_storage().nbytes() > SHORT:
            state_parts = [self._stack_taps(hidden)]
            state_parts[:0] = (
                [] if earlier_states is None else [self._stack_taps(earlier_states)[:, :first_node]]
            )
            self.scratch = torch.cat(state_parts, 1)
            self.scratched = self.scratch.shape[1]
        if not self.none:
            # Not a view, which would keep the first piece of a prompt in memory.
            self.none = dict.fromkeys(self.taps, sample_states.new_empty(0, sample_states.shape[1]))

    def _stack_taps(self, piece: Piece) -> torch.Tensor:
        """(taps, rows, E)"""
        if isinstance(piece, torch.Tensor):
            return piece
        return torch.stack([piece[tap] for tap in self.taps])

    def keep_nodes(self, nodes: Sequence[int]) -> None:
        """The states of these scratch rows, a path, become those of the next committed tokens."""
        scratch, self.scratch = self.scratch, None
        if not nodes:
            return
        assert scratch is not None, "these rows were committed before"
        count = len(nodes)
        self.length += count
        # Nodes come in order: where none is left out, they are all there are.
        keeps_all = count == self.scratched
        self.fresh.append(scratch if keeps_all else self._stack_taps(scratch)[:, list(nodes)])
        if count > PIECES or len(self.fresh) > PIECES:
            self.join_pieces()

    def join_pieces(self) -> None:
        """Puts the states of the newest committed tokens after the others."""
        if not self.fresh:
            return
        fresh_states, self.fresh = torch.cat([*map(self._stack_taps, self.fresh)], 1), []
        state_count = self.length - self.start
        held_count = state_count - fresh_states.shape[1]
        own_states = self.own_states
        if own_states is None or own_states.shape[1] < state_count or self.forked:
            grown_states = fresh_states.new_empty(
                len(self.taps), roomy_length(state_count), fresh_states.shape[2]
            )
            if own_states is not None:
                grown_states[:, :held_count] = own_states[:, :held_count]
            self.own_states, self.forked = grown_states, False
            own_states = grown_states
        own_states[:, held_count:state_count] = fresh_states

    def adopt_states(self, states: Mapping[int, torch.Tensor]) -> None:
        """Takes a segment's states of the next tokens, of all taps, to read them where they are;
        there are none of its own yet.
        """
        assert self.length == self.start, "states of its own follow shared ones"
        self.shared = (*self.shared, states)
        self.none = {tap: states[tap][:0] for tap in self.taps}
        self.length += len(next(iter(states.values()), ()))
        self.start = self.length

    def lend_states(self) -> Mapping[int, torch.Tensor]:
        """Makes its own committed states shared ones, and returns them."""
        self.join_pieces()
        held_count = self.length - self.start
        lent_states: dict[int, torch.Tensor] = {}
        if self.own_states is not None:
            held_states = self.own_states[:, :held_count].clone()
            lent_states = dict(zip(self.taps, held_states, strict=True))
        self.own_states, self.forked = None, False
        self.shared = (*self.shared, lent_states) if lent_states else self.shared
        self.start = self.length
        return lent_states

    def copy_states(self, start: int, end: int) -> dict[int, torch.Tensor]:
        """Copies (end - start, E) of each tap's states of the committed tokens at these places."""
        return {tap: self.read_states((tap,), start, end) for tap in self.taps if tap in self.none}

    @property
    def reach(self) -> int:
        """Tokens whose states are here, those of scratch rows included."""
        return self.length + (0 if self.scratch is None else self.scratched)

    @property
    def bytes(self) -> int:
        """Bytes of the cache's own buffers, shared states aside."""
        own_parts = [
            state_part
            for state_part in (self.own_states, *self.fresh, self.scratch)
            if state_part is not None
        ]
        return sum(state_part.nbytes for state_part in map(self._stack_taps, own_parts))

    def read_states(self, taps: Sequence[int], start: int, end: int) -> torch.Tensor:
        """(end - start, E of all taps side by side) of the tokens at these positions, of the
        committed ones and of those whose scratch rows follow them.

        What stands before the first token is zeros.
        """
        assert end <= max(start, self.reach), "the states of these tokens are not there yet"
        self.join_pieces()
        return torch.cat([self._read_tap(tap, start, end) for tap in taps], 1)

    def _read_tap(self, tap: int, start: int, end: int) -> torch.Tensor:
        no_states = self.none[tap]
        state_parts = [no_states.new_zeros(max(0, min(end, 0) - start), no_states.shape[1])]
        tap_index = self.taps.index(tap)
        own_states = (
            no_states
            if self.own_states is None
            else self.own_states[tap_index, : self.length - self.start]
        )
        scratch_states = (
            no_states if self.scratch is None else self._stack_taps(self.scratch)[tap_index]
        )
        part_start = 0
        for state_part in (*(states[tap] for states in self.shared), own_states, scratch_states):
            state_parts.append(state_part[max(0, start - part_start) : max(0, end - part_start)])
            part_start += len(state_part)
        return torch.cat(state_parts)

    def fork(self) -> TappedStates:
        twin = copy.copy(self)
        twin.fresh = self.fresh[:]
        self.forked = twin.forked = True
        return twin
