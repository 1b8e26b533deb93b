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

from foretell.cache.policy import Segment, copy_rows

MOST_PARTS = 32  # segments that one text may begin with
SHORT = 256  # tokens below which a leaf is joined with what follows it


@dataclass(eq=False)
class Node:
    """A segment and what texts have gone on with after it, by their next token."""

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

    def match_prefix(
        self, tenant: str, tokens: Sequence[int], taps: Sequence[int] = ()
    ) -> list[Segment]:
        """The segments of the longest known beginning of a text, in order, as far as they have the
        hidden states of these taps.
        """
        matched_segments: list[Segment] = []
        clock_time = next(self.clock)
        children = self.roots.get(tenant, {})
        position = 0
        while position < len(tokens) and len(matched_segments) < MOST_PARTS:
            node = children.get(tokens[position])
            if node is None or not node.segment.has_states(taps):
                break
            common_count = common_length(node.segment.tokens, tokens[position:])
            if common_count < len(node.segment.tokens):
                node = self._cut_node(node, common_count)
            node.used = clock_time
            matched_segments.append(node.segment)
            position += common_count
            children = node.children
        return matched_segments

    def count_known(self, tenant: str, tokens: Sequence[int], taps: Sequence[int] = ()) -> int:
        """How many of a text's first tokens are known with these states; changes nothing."""
        children = self.roots.get(tenant, {})
        position = 0
        while position < len(tokens):
            node = children.get(tokens[position])
            if node is None or not node.segment.has_states(taps):
                break
            common_count = common_length(node.segment.tokens, tokens[position:])
            position += common_count
            if common_count < len(node.segment.tokens):
                break
            children = node.children
        return position

    def iterate_nodes(self) -> Iterator[Node]:
        """All of them, parents before their children."""
        waiting_nodes = [node for root in self.roots.values() for node in root.values()]
        while waiting_nodes:
            node = waiting_nodes.pop()
            yield node
            waiting_nodes += node.children.values()

    # --- writing

    def insert_text(self, tenant: str, segments: Sequence[Segment]) -> None:
        """Takes in the segments of one text, in order from its first token.

        Of what is known already only states are taken that were missing.
        """
        tokens = [token for segment in segments for token in segment.tokens]
        known_segments = self.match_prefix(tenant, tokens)
        for known_segment in known_segments:
            self._add_states(known_segment, segments)
        if (
            len(known_segments) == MOST_PARTS
        ):  # more of it may be known, and no text would reach more
            return
        known_length = known_segments[-1].end if known_segments else 0
        parent = self._node_at(tenant, known_segments)
        for segment in segments:
            if segment.end <= known_length:
                continue
            new_segment = cut_segment(segment, max(known_length, segment.start), segment.end)
            parent = self._append_node(tenant, parent, new_segment)
        self._evict_leaves()

    def _add_states(self, known_segment: Segment, segments: Sequence[Segment]) -> None:
        """Gives a known segment the states that these, of the same text, have and it lacks."""
        parts = [
            segment
            for segment in segments
            if segment.start < known_segment.end and segment.end > known_segment.start
        ]
        taps = set.intersection(*(set(part.states) for part in parts)) - known_segment.states.keys()
        if not taps or parts[0].start > known_segment.start or parts[-1].end < known_segment.end:
            return
        rows = [
            slice(max(0, known_segment.start - part.start), known_segment.end - part.start)
            for part in parts
        ]
        earlier_bytes = known_segment.bytes
        added_states = {
            tap: torch.cat(
                [part.states[tap][part_rows] for part, part_rows in zip(parts, rows, strict=True)]
            )
            for tap in taps
        }
        known_segment.states = {**known_segment.states, **added_states}
        self.bytes += known_segment.bytes - earlier_bytes

    def _node_at(self, tenant: str, segments: Sequence[Segment]) -> Node | None:
        node = None
        children = self.roots.get(tenant, {})
        for segment in segments:
            node = children[segment.tokens[0]]
            children = node.children
        return node

    def _append_node(self, tenant: str, parent: Node | None, segment: Segment) -> Node:
        is_short = parent is not None and len(parent.segment.tokens) < SHORT
        same_states = parent is not None and parent.segment.states.keys() == segment.states.keys()
        if parent is not None and not parent.children and is_short and same_states:
            self.bytes += segment.bytes
            parent.segment = join_segments(parent.segment, segment)
            parent.digest = None
            return parent
        children = self.roots.setdefault(tenant, {}) if parent is None else parent.children
        node = Node(segment, parent, used=next(self.clock))
        children[segment.tokens[0]] = node
        self.bytes += segment.bytes
        return node

    def _cut_node(self, node: Node, length: int) -> Node:
        """Divides a node after `length` tokens; returns the first part."""
        old_segment = node.segment
        first_node = Node(
            cut_segment(old_segment, old_segment.start, old_segment.start + length),
            node.parent,
            used=node.used,
        )
        sibling_nodes = self._siblings(node)
        sibling_nodes[old_segment.tokens[0]] = first_node
        node.segment = cut_segment(old_segment, old_segment.start + length, old_segment.end)
        node.parent = first_node
        node.digest = None
        first_node.children = {node.segment.tokens[0]: node}
        return first_node

    def _siblings(self, node: Node) -> dict[int, Node]:
        """The children among which a node stands."""
        if node.parent is not None:
            return node.parent.children
        first_token = node.segment.tokens[0]
        return next(root for root in self.roots.values() if root.get(first_token) is node)

    def _evict_leaves(self) -> None:
        """Gives up the leaves that were used longest ago; those that are being read come last."""
        while self.bytes > self.limit:
            leaves = [node for node in self.iterate_nodes() if not node.children]
            oldest = min(leaves, key=lambda leaf: (leaf.segment.readers > 0, leaf.used))
            self.bytes -= oldest.segment.bytes
            del self._siblings(oldest)[oldest.segment.tokens[0]]

    # --- checks

    def find_troubles(self) -> list[str]:
        """Lists what is wrong with the tree. Rows are compared with what they were at the last
        check.
        """
        troubles = []
        total_bytes = 0
        for node in self.iterate_nodes():
            segment = node.segment
            total_bytes += segment.bytes
            start = 0 if node.parent is None else node.parent.segment.end
            if segment.start != start:
                troubles.append(f"a shared segment begins at {segment.start} and not at {start}")
            digest = digest_of(segment)
            if node.digest is not None and node.digest != digest:
                troubles.append(
                    f"rows {segment.start} to {segment.end - 1} of a prefix have changed"
                )
            node.digest = digest
        if total_bytes != self.bytes:
            troubles.append(
                f"shared segments hold {total_bytes} bytes and not {self.bytes} as counted"
            )
        return troubles


def common_length(first_text: Sequence[int], second_text: Sequence[int]) -> int:
    """How many of their first tokens two texts have in common."""
    equal_length, max_length = 0, min(len(first_text), len(second_text))
    while equal_length < max_length:
        middle_length = (equal_length + max_length + 1) // 2
        if tuple(first_text[equal_length:middle_length]) == tuple(
            second_text[equal_length:middle_length]
        ):
            equal_length = middle_length
        else:
            max_length = middle_length - 1
    return equal_length


def cut_segment(segment: Segment, start: int, end: int) -> Segment:
    """The part of a segment between two positions, with rows of its own unless it is the whole."""
    if (start, end) == (segment.start, segment.end):
        return segment
    row_range = slice(start - segment.start, end - segment.start)
    k, v = (copy_rows(layers, row_range) for layers in (segment.k, segment.v))
    states = {tap: tap_states[row_range].clone() for tap, tap_states in segment.states.items()}
    return Segment(segment.tokens[row_range], start, k, v, states)


def join_segments(first_segment: Segment, second_segment: Segment) -> Segment:
    """Two segments that follow each other and have states of the same taps, as one."""
    k, v = (
        [
            None if first_layer is None else torch.cat([first_layer, second_layer], 1)
            for first_layer, second_layer in zip(*layers, strict=True)
        ]
        for layers in ((first_segment.k, second_segment.k), (first_segment.v, second_segment.v))
    )
    states = {
        tap: torch.cat([tap_states, second_segment.states[tap]])
        for tap, tap_states in first_segment.states.items()
    }
    return Segment(
        first_segment.tokens + second_segment.tokens,
        first_segment.start,
        copy_rows(k),
        copy_rows(v),
        states,
    )


def digest_of(segment: Segment) -> int:
    """A check sum of a segment's rows."""
    digest = 0
    for layer in (*segment.k, *segment.v):
        if layer is not None:
            layer_bytes = layer.detach().cpu().contiguous().view(torch.uint8)
            digest = crc32(layer_bytes.numpy().data, digest)
    return digest
