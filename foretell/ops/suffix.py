"""How often every string of up to `depth` tokens stands in some growing texts, and what follows it:
a suffix trie.

A suffix stands in the trie at its start's position. A leaf holds the positions of the few suffixes
that begin alike, and only where more than LEAF do is a level of nodes made; so the trie is as small
as a compressed one, and a new token costs one step for each of the text's last strings that are
that frequent, mostly one to four. Whatever is rarer is counted by looking at the texts. The oldest
positions can be forgotten one by one, and the counts stay those of what is left.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence

import torch

from foretell.ops.lookup import copied

LEAF = 8  # positions in a leaf above which it becomes a node
BITS = 32  # a position is its text's key, then the place in that text in this many bits
MASK = (1 << BITS) - 1
BYTES = {
    "tokens": 46,
    "leaves": 155,
    "nodes": 560,
    "texts": 400,
}  # what one takes in CPython, measured
Place = tuple[
    "Node | list[int]", int
]  # all places where a string stands: its node or positions, and its length


class Node:
    """A string that more than LEAF suffixes began with, `ends` of them at the end of a text.
    `last`: the newest.
    """

    __slots__ = ("count", "ends", "last", "inner", "leaves")

    def __init__(self) -> None:
        self.count, self.ends, self.last = 0, 0, -1
        self.inner: dict[int, Node] = {}
        self.leaves: dict[int, list[int]] = {}


class Text:
    """A text under way. `active[m - 1]`: the node of its last m tokens, as far down as there are
    nodes.
    """

    __slots__ = ("key", "tokens", "first", "active")

    def __init__(self) -> None:
        self.key, self.first = -1, 0  # tokens before `first` are forgotten
        self.tokens = array("i")
        self.active: list[Node] = []


class Suffixes:
    """Strings are counted up to `depth` tokens; `limit`: bytes above which the oldest tokens are
    forgotten, 0: never.

    `vocab`: token ids that may be restored are below it.
    """

    def __init__(self, depth: int, limit: int = 0, vocab: int = 2**31 - 1):
        self.depth, self.limit, self.vocab = depth, limit, vocab
        self._clear()

    def _clear(self) -> None:
        self.root, self.keys = Node(), 0  # the root's own counts are not kept
        self.texts: dict[int, Text] = {}  # oldest first
        self.sizes = dict.fromkeys(BYTES, 0)

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        return sum(BYTES[kind] * size for kind, size in self.sizes.items())

    def extend(self, text: Text, tokens: Sequence[int]) -> None:
        """Appends to the text, which is a new one or one of this trie (if it was forgotten, it
        starts again).
        """
        if self.texts.get(text.key) is not text:
            text.key, text.tokens, text.first, text.active = self.keys, array("i"), 0, []
            self.texts[text.key] = text
            self.keys += 1
            self.sizes["texts"] += 1
        body, base = text.tokens, text.key << BITS
        for token in tokens:
            position = base + len(body)
            body.append(token)
            before = [self.root, *text.active]
            text.active = active = []
            # Short strings first: where a string becomes a node, its own endings are nodes already.
            for depth, node in enumerate(before, 1):
                node.ends -= 1
                if (kid := node.inner.get(token)) is not None:
                    kid.count += 1
                    kid.ends += 1
                    if position > kid.last:
                        kid.last = position
                    active.append(kid)
                elif (leaf := node.leaves.get(token)) is None:
                    node.leaves[token] = [position]
                    self.sizes["leaves"] += 1
                else:
                    leaf.append(position)
                    if len(leaf) > LEAF and depth < self.depth:
                        del node.leaves[token]
                        node.inner[token] = self._node(leaf, depth)
                position -= 1
        self.sizes["tokens"] += len(tokens)
        while self.limit and self.nbytes > self.limit and self.texts:
            self.forget()

    def _node(self, leaf: list[int], depth: int) -> Node:
        """The node that takes a leaf's place at this depth."""
        node = Node()
        node.count, node.last = len(leaf), max(leaf)
        for position in leaf:
            text, at = self.texts[position >> BITS], (position & MASK) + depth
            if at < len(text.tokens):
                node.leaves.setdefault(text.tokens[at], []).append(position)
            else:
                node.ends += 1
                text.active.append(node)
        self.sizes["nodes"] += 1
        self.sizes["leaves"] += len(node.leaves) - 1
        return node

    def forget(self) -> None:
        """Takes out the oldest token, and its text if nothing is left of it."""
        text = next(iter(self.texts.values()))
        start, size = text.first, len(text.tokens)
        if start < size:
            text.first += 1
            self.sizes["tokens"] -= 1
            if size - start == len(text.active):
                text.active.pop().ends -= 1
            node = self.root
            for token in text.tokens[start : start + self.depth]:
                kid = node.inner.get(token)
                if kid is None:
                    leaf = node.leaves[token]
                    leaf.remove(text.key << BITS | start)
                    if not leaf:
                        del node.leaves[token]
                        self.sizes["leaves"] -= 1
                    break
                kid.count -= 1
                if not kid.count:
                    del node.inner[token]
                    self.sizes["nodes"] -= 1
                node = kid
        if text.first == size:
            del self.texts[text.key]
            self.sizes["texts"] -= 1

    def count(self, words: Sequence[int]) -> int:
        """How often these 1 to `depth` tokens stand in the texts."""
        place: Place = self.root, 0
        found = 0
        for word in words:
            steps = {token: (many, kid) for many, _, token, kid in self.after(place)[1]}
            if word not in steps:
                return 0
            found, kid = steps[word]
            place = kid, place[1] + 1
        return found

    def alike(
        self, place: Place, most: int, own: Text | None = None, match: int = 0
    ) -> Sequence[int]:
        """At most so many tokens that follow alike wherever a rare string stands; none for a
        frequent one.

        `own`: the text whose last `match` tokens the string begins with; what reaches its end goes
        on into itself.
        """
        thing, depth = place
        if isinstance(thing, Node):
            return ()
        parts = []
        for position in thing:
            text, at = self.texts[position >> BITS], (position & MASK) + depth
            part = text.tokens[at : at + most]
            if text is own and len(part) < most:
                part = array(
                    "i",
                    copied(text.tokens, at - depth + match, depth - match + most)[depth - match :],
                )
            parts.append(part)
        first, last = min(parts), max(parts)
        if first == last:
            return first
        return first[
            : next(
                (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first)
            )
        ]

    def after(
        self, place: Place, share: float = 0.0, own: Text | None = None, match: int = 0
    ) -> tuple[int, list[tuple[int, int, int, Node | list[int]]]]:
        """How often anything follows, and (count, newest position, token, what begins so) of what
        does, best first.

        Only tokens that follow in `share` of these cases. The most frequent is best, of equals the
        one that stood last. `own`, `match`: see alike.
        """
        thing, depth = place
        found: list[tuple[int, int, int, Node | list[int]]]
        leaves: dict[int, list[int]]
        if isinstance(thing, Node):
            total = thing.count - thing.ends
            least = share * total
            found = [
                (kid.count, kid.last, token, kid)
                for token, kid in thing.inner.items()
                if kid.count >= least
            ]
            leaves = thing.leaves if least <= LEAF or depth + 1 == self.depth else {}
        else:
            found, leaves, total = [], {}, 0
            texts = self.texts
            for position in thing:
                text, at = texts[position >> BITS], (position & MASK) + depth
                tokens = text.tokens
                if at >= len(tokens):
                    if text is not own:
                        continue
                    begin = at - depth + match
                    at = begin + (at - begin) % (len(tokens) - begin)
                total += 1
                if (leaf := leaves.get(token := tokens[at])) is None:
                    leaves[token] = [position]
                else:
                    leaf.append(position)
            least = share * total
        found += [
            (len(leaf), max(leaf), token, leaf)
            for token, leaf in leaves.items()
            if len(leaf) >= least
        ]
        found.sort(reverse=True)
        return total, found

    def matches(self, text: Text, longest: int) -> Iterator[tuple[int, int, Place]]:
        """(m, count, place) of the text's last m <= `longest` <= depth tokens that stand elsewhere
        too, longest first.

        `count`: how often elsewhere. Of the lengths that stand in the same places only the longest
        is given.
        """
        size = len(text.tokens)
        longest, known, before = min(longest, size - text.first), len(text.active), 0
        if known < longest:
            ends = self._ends(text, known + 1, longest)
            for m in sorted({length for length, _ in ends}, reverse=True):
                places = [end for length, end in ends if length >= m]
                before = len(places)
                yield m, before, (places, 0)
        for m in range(min(known, longest), 0, -1):
            node = text.active[m - 1]
            if node.count - 1 > before:
                before = node.count - 1
                yield m, before, (node, m)

    def _ends(self, text: Text, least: int, longest: int) -> list[tuple[int, int]]:
        """(length, position behind it) of all that matches `least` or more of the text's last
        tokens, a rare string.
        """
        tokens, size = text.tokens, len(text.tokens)
        node, start, found = self.root, size - least, []
        while tokens[start] in node.inner:
            node = node.inner[tokens[start]]
            start += 1
        newest = tokens[size - least :]
        for position in node.leaves[tokens[start]]:
            other, begin = self.texts[position >> BITS], position & MASK
            if (other is text and begin == size - least) or other.tokens[
                begin : begin + least
            ] != newest:
                continue
            room = min(longest - least, begin - other.first, size - least - text.first)
            if (
                room
                and other.tokens[begin - room : begin] == tokens[size - least - room : size - least]
            ):
                length = least + room
            else:
                length = least
                while (
                    length < least + room
                    and other.tokens[begin + least - length - 1] == tokens[size - length - 1]
                ):
                    length += 1
            found.append((length, position + least))
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        """`tokens` (all, int32): the texts one after another, oldest first; `sizes` (texts, int64):
        their lengths.
        """
        kept = [text.tokens[text.first :] for text in self.texts.values()]
        flat = array("i", b"".join(part.tobytes() for part in kept))
        tokens = (
            torch.frombuffer(flat, dtype=torch.int32).clone()
            if flat
            else torch.zeros(0, dtype=torch.int32)
        )
        return {
            "tokens": tokens,
            "sizes": torch.tensor([len(part) for part in kept], dtype=torch.int64),
        }

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Holds these texts instead, the newest of them that fit. Raises ValueError where the
        tensors are none.
        """
        if set(tensors) != {"tokens", "sizes"}:
            raise ValueError(f"tensors {sorted(tensors)}: a suffix store has 'sizes' and 'tokens'")
        for name, kind in (("tokens", torch.int32), ("sizes", torch.int64)):
            if tensors[name].dtype != kind or tensors[name].dim() != 1:
                raise ValueError(
                    f"{name}: {tensors[name].dtype} of {tensors[name].dim()} dimensions, not {kind} of one"
                )
        tokens, sizes = tensors["tokens"].tolist(), tensors["sizes"].tolist()
        if min(sizes, default=1) < 1 or sum(sizes) != len(tokens):
            raise ValueError(
                f"sizes: {len(sizes)} lengths of at least 1 must add up to the {len(tokens)} tokens"
            )
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab:
            raise ValueError(
                f"tokens: from {min(tokens)} to {max(tokens)}, not all of 0 to {self.vocab - 1}"
            )
        self._clear()
        start = 0
        for size in sizes:
            self.extend(Text(), tokens[start : start + size])
            start += size
