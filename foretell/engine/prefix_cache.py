"""Automatic prefix caching: whose rows a text reads, and for whom it waits.

Where an engine keeps a PrefixTree, a text that has computed nothing yet begins with the rows that
are known of it. If a running text is about to compute a longer beginning of it, it waits for that:
of many requests with one prefix the first computes it. Rows of a text that has ended are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

from foretell.cache.prefix_tree import PrefixTree, common_length

if TYPE_CHECKING:
    from foretell.cache.cache import Cache
    from foretell.engine.live import Host, Live, OpenAsk

WORTH = 32  # tokens in common from which on waiting and reading pay


class Reuse:
    """The tree of an engine, and who waits for whom."""

    def __init__(self, engine: Host, tree: PrefixTree):
        self.engine = engine
        self.tree = tree
        self.decided: WeakSet[OpenAsk] = WeakSet()  # which begin with the rows they have
        # Who waits, for whom, and for how many tokens.
        self.following: WeakKeyDictionary[OpenAsk, tuple[Live, int]] = WeakKeyDictionary()

    def select_ready(self, waiting: Sequence[OpenAsk]) -> list[OpenAsk]:
        """Returns the open asks that need not wait for another text's rows."""
        return [open_ask for open_ask in waiting if self._is_ready(open_ask)]

    def _is_ready(self, open_ask: OpenAsk) -> bool:
        """Texts are compared once, not in every step in which they wait for their turn."""
        if not self._is_beginning(open_ask) or open_ask in self.decided:
            return True
        if open_ask in self.following:
            source, shared_length = self.following[open_ask]
            if self._is_computing(source) and source.caches["target", 0].length < shared_length:
                return False
        if not self._give_rows(open_ask):
            return False
        self.following.pop(open_ask, None)
        self.decided.add(open_ask)
        return True

    def _is_computing(self, live_request: Live) -> bool:
        """Whether a request is at work on its text."""
        return (
            live_request in self.engine.live
            and not live_request.paused
            and ("target", 0) in live_request.caches
        )

    def _is_beginning(self, open_ask: OpenAsk) -> bool:
        """Whether it is a text of the target that has computed nothing yet."""
        if open_ask.ask.model != "target" or open_ask.pending < WORTH:
            return False
        cache = open_ask.live.caches["target", open_ask.ask.branch]
        untouched = cache.length == 0 and not cache.tokens  # a first piece is not committed yet
        return untouched and self._shares_rows(open_ask.live, cache)

    @staticmethod
    def _shares_rows(live_request: Live, cache: Cache) -> bool:
        """Whether all that is kept of a text is rows and states that its tokens decide."""
        has_all_rows = bool(cache.layout) and None not in cache.layout and cache.recomputable
        has_all_rows = has_all_rows and cache.sharable
        is_ordinary = cache.policy is None and cache.positions is None
        has_prefix = (
            live_request.ctx.request.prefix is not None
        )  # rows that may be an edited text's
        return has_all_rows and is_ordinary and not cache.inputs and not has_prefix

    def _give_rows(self, open_ask: OpenAsk) -> bool:
        """Gives a new text the rows there are. False: it had better wait for more."""
        live_request = open_ask.live
        text = live_request.ctx.branches[open_ask.ask.branch].tokens
        tenant, beginning = live_request.ctx.request.tenant, text[:-1]
        own_cache = live_request.caches["target", open_ask.ask.branch]
        known_length = self.tree.count_known(tenant, beginning, taps_of(own_cache))
        source, shared_length = self._find_longest(open_ask, beginning, taps_of(own_cache))
        if source is not None and shared_length >= known_length + WORTH:
            cache = source.caches["target", 0]
            if cache.length < shared_length:
                self.following[open_ask] = source, shared_length
                return False
            self._keep_rows(source, cache, shared_length)
        segments = self.tree.match_prefix(tenant, beginning, taps_of(own_cache))
        self.tree.asked += len(beginning)
        if segments and segments[-1].end >= WORTH:
            if open_ask.model.reads_segments:
                for segment in segments:
                    own_cache.adopt_segment(segment)
            else:
                own_cache.copy_segments(segments)
            self.tree.reused += segments[-1].end
            open_ask.pending = own_cache.sync(text)
        return True

    def _find_longest(
        self, open_ask: OpenAsk, beginning: Sequence[int], taps: Sequence[int]
    ) -> tuple[Live | None, int]:
        """The running text that has the most in common with this one, and comes before it; it
        keeps the hidden states of these taps.
        """
        longest_request: Live | None = None
        longest = 0
        for other_request in self.engine.live:
            if other_request is open_ask.live or not self._is_computing(other_request):
                continue
            cache = other_request.caches["target", 0]
            same_tenant = other_request.ctx.request.tenant == open_ask.live.ctx.request.tenant
            enough = same_tenant and set(taps) <= {*taps_of(cache)}
            if not enough or not self._shares_rows(other_request, cache):
                continue
            if cache.length == 0 and other_request.index > open_ask.live.index:
                continue
            shared_length = common_length(other_request.ctx.branches[0].tokens[:-1], beginning)
            if shared_length > longest:
                longest_request, longest = other_request, shared_length
        return longest_request, longest

    def _keep_rows(self, live_request: Live, cache: Cache, end: int) -> None:
        """Puts the first rows of a text into the tree."""
        tokens = live_request.ctx.branches[0].tokens
        segments = [segment for segment in cache.segments if segment.start < end]
        if cache.length - cache.base < end:
            segments.append(cache.share_rows(tokens, end))
        self.tree.insert_text(live_request.ctx.request.tenant, segments)

    def keep_ended(self, live_request: Live) -> None:
        """Keeps the rows of a text that is done, or gives its rows up for now."""
        for open_ask in live_request.asks:
            self.decided.discard(open_ask)
        cache = live_request.caches.get(("target", 0))
        if (
            cache is None
            or live_request.reason == "error"
            or not self._shares_rows(live_request, cache)
        ):
            return
        tokens = live_request.ctx.branches[0].tokens
        cache.commit(tokens)
        known_length = self.tree.count_known(
            live_request.ctx.request.tenant, tokens[:-1], taps_of(cache)
        )
        if cache.length >= known_length + WORTH:
            self._keep_rows(live_request, cache, cache.length)


def taps_of(cache: Cache) -> Sequence[int]:
    """The taps whose hidden states a cache keeps."""
    return () if cache.states is None else cache.states.taps
