"""Rows that several caches read: how a cache gives its own away, and begins with those of others.

A cache either reads the segments where they are or, for a backend that cannot, copies them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from foretell.cache.buffers import Rows, row_bytes
from foretell.cache.policy import NEVER, CachePolicy, Segment, copy_rows

if TYPE_CHECKING:
    from foretell.cache.states import TappedStates

LENT = 256  # own rows from which on a text's forks read them together
MOST_LENT = 8  # segments that a text may begin with for that
LEAST_ROWS = 64  # of the buffers of what follows them


class SharedRows(Rows):
    """The part of a cache that concerns segments. `cache.cache.Cache` is the whole."""

    length: int
    base: int
    tokens: list[int]
    positions: list[int] | None
    policy: CachePolicy | None
    states: TappedStates | None
    commit: Callable[[Sequence[int]], None]
    reserve: Callable[[int], None]
    segments: tuple[Segment, ...] = ()  # rows of the first tokens, shared with others
    sharable = True  # whether rows are all that its model remembers of a text

    def share_rows(self, tokens: Sequence[int], end_position: int = NEVER) -> Segment:
        """A copy of its own committed rows of the branch `tokens`, which outlives this cache.

        Only rows of positions before `end_position` are copied.
        """
        assert self.layout, "what this model keeps of a text is no rows"
        assert self.positions is None, "only whole rows are shared"
        self.commit(tokens)
        start = self.length - self.base
        end_position = min(end_position, self.length)
        states = {} if self.states is None else self.states.copy_states(start, end_position)
        k, v = (copy_rows(layers, slice(0, end_position - start)) for layers in (self.k, self.v))
        return Segment(tuple(tokens[start:end_position]), start, k, v, states)

    def adopt_segment(self, segment: Segment) -> bool:
        """Begins an empty cache with shared rows.

        False: it has to compute them, as they lack states that it keeps, or it has a policy.
        """
        is_empty = self.base == 0 and not self.tokens
        assert is_empty and self.length == segment.start, "only an empty cache adopts rows"
        if self.policy is not None:
            return False
        if self.states is not None:
            if not segment.has_states(self.states.taps):
                return False
            self.states.adopt_states(segment.states)
        self.segments = (*self.segments, segment)
        segment.readers += 1
        self.length = segment.end
        return True

    def lend_rows(self, tokens: Sequence[int]) -> None:
        """Before forks of the branch `tokens`: its own committed rows become a segment that all of
        them read, where they are many. Else each fork would copy them as soon as it writes.
        """
        is_ordinary = self.policy is None and self.positions is None and self.sharable
        has_rows = bool(self.layout) and None not in self.layout and not self.tokens
        is_worthwhile = self.base >= LENT and len(self.segments) < MOST_LENT
        if not (is_ordinary and has_rows and is_worthwhile):
            return
        start = self.length - self.base
        k, v = (copy_rows(layers, slice(0, self.base)) for layers in (self.k, self.v))
        states = {} if self.states is None else self.states.lend_states()
        segment = Segment(tuple(tokens[start : self.length]), start, k, v, states)
        segment.readers += 1
        self.segments = (*self.segments, segment)
        self.base = 0
        super().drop()  # forks that were made before go on with the old buffers
        self.sharers = [1]
        self.begin_buffers(LEAST_ROWS)

    def copy_segments(self, segments: Sequence[Segment]) -> None:
        """Begins an empty cache with copies of shared rows, for who reads no segments.

        States, where it keeps any, are read where they are: the segments must have them.
        """
        is_empty = self.length == self.base == 0 and not self.tokens and self.policy is None
        assert is_empty, "only an empty cache takes rows"
        self.reserve(segments[-1].end)
        for segment in segments:
            row_range = slice(segment.start, segment.end)
            for layer_buffer, shared_rows in zip(
                (*self.k, *self.v), (*segment.k, *segment.v), strict=True
            ):
                layer_buffer[:, row_range] = shared_rows
            if self.states is not None:
                self.states.adopt_states(segment.states)
        self.length = self.base = segments[-1].end

    def unshare_rows(self) -> None:
        """Copies the rows of its segments in front of its own: from now on it shares none."""
        assert not self.tokens, "rows are copied between forwards"
        if not self.segments:
            return
        prefix_length, own_count = self.segments[-1].end, self.base
        self.reserve(prefix_length + own_count)
        for buffer in (*self.keys, *self.values):
            buffer[:, :, prefix_length : prefix_length + own_count] = buffer[
                :, :, :own_count
            ].clone()
        for segment in self.segments:
            row_range = slice(segment.start, segment.end)
            for layer_buffer, shared_rows in zip(
                (*self.k, *self.v), (*segment.k, *segment.v), strict=True
            ):
                if layer_buffer is not None:
                    layer_buffer[:, row_range] = shared_rows
        self.base += prefix_length
        self.leave_segments()

    @property
    def bytes(self) -> int:
        """Bytes of the rows and states that the cache holds itself, those of the last forward and
        its policy's included.
        """
        extra_bytes = 0 if self.policy is None else self.policy.bytes
        extra_bytes += 0 if self.states is None else self.states.bytes
        return (self.base + len(self.tokens)) * row_bytes(self.layout, self.dtype) + extra_bytes

    @property
    def allocated(self) -> int:
        """Bytes that are taken for it: as `bytes`, with all of its buffers."""
        row_memory = (self.base + len(self.tokens)) * row_bytes(self.layout, self.dtype)
        return self.bytes - row_memory + self.buffer_bytes

    def read_by_one_more(self) -> None:
        """A copy of this cache reads what it reads."""
        self.sharers[0] += 1
        for segment in self.segments:
            segment.readers += 1

    def leave_segments(self) -> None:
        for segment in self.segments:
            segment.readers -= 1
        self.segments = ()

    def drop(self) -> None:
        self.leave_segments()
        if self.policy is not None:
            self.policy.drop()
        super().drop()
