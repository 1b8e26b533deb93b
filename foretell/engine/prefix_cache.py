"""Texts that begin as others did: whose rows they read, and whom they wait for.

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

    def ready(self, waiting: Sequence[OpenAsk]) -> list[OpenAsk]:
        """Those of the open asks that need not wait for another text's rows."""
        return [entry for entry in waiting if self._is_ready(entry)]

    def _is_ready(self, entry: OpenAsk) -> bool:
        """Texts are compared once, not in every step in which they wait for their turn."""
        if not self._begins(entry) or entry in self.decided:
            return True
        if entry in self.following:
            source, common = self.following[entry]
            if self._computes(source) and source.caches["target", 0].length < common:
                return False
        if not self._begin(entry):
            return False
        self.following.pop(entry, None)
        self.decided.add(entry)
        return True

    def _computes(self, live: Live) -> bool:
        """Whether a request is at work on its text."""
        return live in self.engine.live and not live.paused and ("target", 0) in live.caches

    def _begins(self, entry: OpenAsk) -> bool:
        """Whether it is a text of the target that has computed nothing yet."""
        if entry.ask.model != "target" or entry.pending < WORTH:
            return False
        cache = entry.live.caches["target", entry.ask.branch]
        untouched = cache.length == 0 and not cache.tokens  # a first piece is not committed yet
        return untouched and self._shares(entry.live, cache)

    @staticmethod
    def _shares(live: Live, cache: Cache) -> bool:
        """Whether all that is kept of a text is rows and states that its tokens decide."""
        whole = bool(cache.layout) and None not in cache.layout and cache.recomputable
        whole = whole and cache.sharable
        ordinary = cache.policy is None and cache.positions is None
        given = live.ctx.request.prefix is not None  # rows that may be an edited text's
        return whole and ordinary and not cache.inputs and not given

    def _begin(self, entry: OpenAsk) -> bool:
        """Gives a new text the rows there are. False: it had better wait for more."""
        live = entry.live
        text = live.ctx.branches[entry.ask.branch].tokens
        tenant, beginning = live.ctx.request.tenant, text[:-1]
        own = live.caches["target", entry.ask.branch]
        known = self.tree.known(tenant, beginning, taps_of(own))
        source, common = self._longest(entry, beginning, taps_of(own))
        if source is not None and common >= known + WORTH:
            cache = source.caches["target", 0]
            if cache.length < common:
                self.following[entry] = source, common
                return False
            self._keep(source, cache, common)
        segments = self.tree.match(tenant, beginning, taps_of(own))
        self.tree.asked += len(beginning)
        if segments and segments[-1].end >= WORTH:
            if entry.model.reads_segments:
                for segment in segments:
                    own.adopt(segment)
            else:
                own.take(segments)
            self.tree.reused += segments[-1].end
            entry.pending = own.sync(text)
        return True

    def _longest(
        self, entry: OpenAsk, beginning: Sequence[int], taps: Sequence[int]
    ) -> tuple[Live | None, int]:
        """The running text that has the most in common with this one, and comes before it; it
        keeps the hidden states of these taps.
        """
        best: Live | None = None
        longest = 0
        for other in self.engine.live:
            if other is entry.live or not self._computes(other):
                continue
            cache = other.caches["target", 0]
            same_tenant = other.ctx.request.tenant == entry.live.ctx.request.tenant
            enough = same_tenant and set(taps) <= {*taps_of(cache)}
            if not enough or not self._shares(other, cache):
                continue
            if cache.length == 0 and other.index > entry.live.index:
                continue
            common = common_length(other.ctx.branches[0].tokens[:-1], beginning)
            if common > longest:
                best, longest = other, common
        return best, longest

    def _keep(self, live: Live, cache: Cache, end: int) -> None:
        """Puts the first rows of a text into the tree."""
        tokens = live.ctx.branches[0].tokens
        segments = [segment for segment in cache.segments if segment.start < end]
        if cache.length - cache.base < end:
            segments.append(cache.share(tokens, end))
        self.tree.insert(live.ctx.request.tenant, segments)

    def ended(self, live: Live) -> None:
        """Keeps the rows of a text that is done, or gives its rows up for now."""
        for entry in live.asks:
            self.decided.discard(entry)
        cache = live.caches.get(("target", 0))
        if cache is None or live.reason == "error" or not self._shares(live, cache):
            return
        tokens = live.ctx.branches[0].tokens
        cache.commit(tokens)
        known = self.tree.known(live.ctx.request.tenant, tokens[:-1], taps_of(cache))
        if cache.length >= known + WORTH:
            self._keep(live, cache, cache.length)


def taps_of(cache: Cache) -> Sequence[int]:
    """The taps whose hidden states a cache keeps."""
    return () if cache.states is None else cache.states.taps
