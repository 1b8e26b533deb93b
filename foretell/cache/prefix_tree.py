"""Rows of earlier texts that later ones begin with: a radix tree of shared segments.

    root ── "You are a helpful assistant…" ─┬─ "What is…"          each node: a Segment, its rows
                                            └─ "Translate:…" ─┬─ …  copied once, read by any number
                                                              └─ …  of caches, written by none

A text follows the tree as far as its tokens go, also to the middle of a node, which is then cut in
two. Hidden states stand beside rows where the text that computed them kept some; a text that needs
them follows the tree as far as it has them. Nodes are given up by age, the leaves first, as soon as
all of them together hold more bytes than allowed; what a cache reads stays with that cache. Every
tenant has a tree of its own, unless they are told to share one: how quickly a prompt is answered
would tell what others asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from zlib import crc32

import torch

from foretell.cache.policy import Segment, copied

MOST_PARTS = 32  # segments that one text may begin with
SHORT = 256  # tokens below which a leaf is joined with what follows it


@dataclass(eq=False)
class Node:
    """A segment and what texts have gone on with behind it, by their next token."""

    segment: Segment
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    used: int = 0  # the tree's clock when a text last followed it
    digest: int | None = None  # of its rows, taken when nothing else was to do


class PrefixTree:
    """Segments of the first tokens of texts; `limit`: bytes that all of them may hold."""

    def __init__(self, limit: int):
        self.limit = limit
        self.roots: dict[str, dict[int, Node]] = {}  # of each tenant, by first token
        self.bytes = 0
        self.clock = itertools.count(1)
        self.asked = 0  # tokens of texts that were looked up
        self.reused = 0  # of those, how many were found

    # --- reading

    def match(self, tenant: str, tokens: Sequence[int], taps: Sequence[int] = ()) -> list[Segment]:
        """The segments of the longest known beginning of a text, in order, as far as they have the
        hidden states of these taps.
        """
        found: list[Segment] = []
        now = next(self.clock)
        children = self.roots.get(tenant, {})
        place = 0
        while place < len(tokens) and len(found) < MOST_PARTS:
            node = children.get(tokens[place])
            if node is None or not node.segment.has_states(taps):
                break
            common = common_length(node.segment.tokens, tokens[place:])
            if common < len(node.segment.tokens):
                node = self._cut(node, common)
            node.used = now
            found.append(node.segment)
            place += common
            children = node.children
        return found

    def known(self, tenant: str, tokens: Sequence[int], taps: Sequence[int] = ()) -> int:
        """How many of a text's first tokens are known with these states; changes nothing."""
        children = self.roots.get(tenant, {})
        place = 0
        while place < len(tokens):
            node = children.get(tokens[place])
            if node is None or not node.segment.has_states(taps):
                break
            common = common_length(node.segment.tokens, tokens[place:])
            place += common
            if common < len(node.segment.tokens):
                break
            children = node.children
        return place

    def nodes(self) -> Iterator[Node]:
        """All of them, parents before their children."""
        waiting = [node for root in self.roots.values() for node in root.values()]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()

    # --- writing

    def insert(self, tenant: str, segments: Sequence[Segment]) -> None:
        """Takes in the segments of one text, in order from its first token.

        Of what is known already only states are taken that were missing.
        """
        tokens = [token for segment in segments for token in segment.tokens]
        known = self.match(tenant, tokens)
        for old in known:
            self._add_states(old, segments)
        if len(known) == MOST_PARTS:  # more of it may be known, and no text would reach more
            return
        length = known[-1].end if known else 0
        parent = self._node_at(tenant, known)
        for segment in segments:
            if segment.end <= length:
                continue
            fresh = cut(segment, max(length, segment.start), segment.end)
            parent = self._append(tenant, parent, fresh)
        self._evict()

    def _add_states(self, known: Segment, segments: Sequence[Segment]) -> None:
        """Gives a known segment the states that these, of the same text, have and it lacks."""
        parts = [one for one in segments if one.start < known.end and one.end > known.start]
        taps = set.intersection(*(set(part.states) for part in parts)) - known.states.keys()
        if not taps or parts[0].start > known.start or parts[-1].end < known.end:
            return
        rows = [slice(max(0, known.start - part.start), known.end - part.start) for part in parts]
        before = known.bytes
        added = {
            tap: torch.cat([part.states[tap][own] for part, own in zip(parts, rows, strict=True)])
            for tap in taps
        }
        known.states = {**known.states, **added}
        self.bytes += known.bytes - before

    def _node_at(self, tenant: str, segments: Sequence[Segment]) -> Node | None:
        node = None
        children = self.roots.get(tenant, {})
        for segment in segments:
            node = children[segment.tokens[0]]
            children = node.children
        return node

    def _append(self, tenant: str, parent: Node | None, segment: Segment) -> Node:
        short = parent is not None and len(parent.segment.tokens) < SHORT
        alike = parent is not None and parent.segment.states.keys() == segment.states.keys()
        if parent is not None and not parent.children and short and alike:
            self.bytes += segment.bytes
            parent.segment = join(parent.segment, segment)
            parent.digest = None
            return parent
        children = self.roots.setdefault(tenant, {}) if parent is None else parent.children
        node = Node(segment, parent, used=next(self.clock))
        children[segment.tokens[0]] = node
        self.bytes += segment.bytes
        return node

    def _cut(self, node: Node, length: int) -> Node:
        """Divides a node behind `length` tokens; returns the first part."""
        whole = node.segment
        first = Node(cut(whole, whole.start, whole.start + length), node.parent, used=node.used)
        siblings = self._siblings(node)
        siblings[whole.tokens[0]] = first
        node.segment = cut(whole, whole.start + length, whole.end)
        node.parent = first
        node.digest = None
        first.children = {node.segment.tokens[0]: node}
        return first

    def _siblings(self, node: Node) -> dict[int, Node]:
        """The children among which a node stands."""
        if node.parent is not None:
            return node.parent.children
        first = node.segment.tokens[0]
        return next(root for root in self.roots.values() if root.get(first) is node)

    def _evict(self) -> None:
        """Gives up the leaves that were used longest ago; those that are being read come last."""
        while self.bytes > self.limit:
            leaves = [node for node in self.nodes() if not node.children]
            oldest = min(leaves, key=lambda leaf: (leaf.segment.readers > 0, leaf.used))
            self.bytes -= oldest.segment.bytes
            del self._siblings(oldest)[oldest.segment.tokens[0]]

    # --- checks

    def troubles(self) -> list[str]:
        """What is wrong with the tree. Rows are compared with what they were at the last check."""
        found = []
        total = 0
        for node in self.nodes():
            segment = node.segment
            total += segment.bytes
            start = 0 if node.parent is None else node.parent.segment.end
            if segment.start != start:
                found.append(f"a shared segment begins at {segment.start} and not at {start}")
            digest = digest_of(segment)
            if node.digest is not None and node.digest != digest:
                found.append(f"rows {segment.start} to {segment.end - 1} of a prefix have changed")
            node.digest = digest
        if total != self.bytes:
            found.append(f"shared segments hold {total} bytes and not {self.bytes} as counted")
        return found


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many of their first tokens two texts have in common."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if tuple(first[low:middle]) == tuple(second[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low


def cut(segment: Segment, start: int, end: int) -> Segment:
    """The part of a segment between two positions, with rows of its own unless it is the whole."""
    if (start, end) == (segment.start, segment.end):
        return segment
    rows = slice(start - segment.start, end - segment.start)
    k, v = (copied(layers, rows) for layers in (segment.k, segment.v))
    states = {tap: held[rows].clone() for tap, held in segment.states.items()}
    return Segment(segment.tokens[rows], start, k, v, states)


def join(first: Segment, second: Segment) -> Segment:
    """Two segments that follow each other and have states of the same taps, as one."""
    k, v = (
        [
            None if one is None else torch.cat([one, other], 1)
            for one, other in zip(*layers, strict=True)
        ]
        for layers in ((first.k, second.k), (first.v, second.v))
    )
    states = {tap: torch.cat([held, second.states[tap]]) for tap, held in first.states.items()}
    return Segment(first.tokens + second.tokens, first.start, copied(k), copied(v), states)


def digest_of(segment: Segment) -> int:
    """A check sum of a segment's rows."""
    digest = 0
    for layer in (*segment.k, *segment.v):
        if layer is not None:
            rows = layer.detach().cpu().contiguous().view(torch.uint8)
            digest = crc32(rows.numpy().data, digest)
    return digest
