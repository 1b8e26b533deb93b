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

from foretell.drafters.lookup.lookup import copied

LEAF = 8  # positions in a leaf above which it becomes a node
BITS = 32  # a position is its text's key, then the place in that text in this many bits
MASK = (1 << BITS) - 1
# bytes that one takes in CPython, measured
BYTES = {"tokens": 46, "leaves": 155, "nodes": 560, "texts": 400}


class Node:
    """A string that more than LEAF suffixes began with, `ends` of them at the end of a text.
    `last`: the newest.
    """

    __slots__ = ("count", "ends", "last", "inner", "leaves")

    def __init__(self) -> None:
        self.count = 0
        self.ends = 0
        self.last = -1
        self.inner: dict[int, Node] = {}  # next token -> node
        self.leaves: dict[int, list[int]] = {}  # next token -> positions


# All places where a string stands: (its node or its positions, its length). These two are plain
# tuples because drafting makes hundreds of them a step.
Place = tuple[Node | list[int], int]
# What follows a string: (how often, at which position last, the token, node or positions).
Successor = tuple[int, int, int, Node | list[int]]


class Text:
    """A text under way. `active[m - 1]`: the node of its last m tokens, as far down as there are
    nodes.
    """

    __slots__ = ("key", "tokens", "first", "active")

    def __init__(self) -> None:
        self.key = -1
        self.first = 0  # tokens before it are forgotten
        self.tokens = array("i")
        self.active: list[Node] = []


class Suffixes:
    """Strings are counted up to `depth` tokens; `limit`: bytes above which the oldest tokens are
    forgotten, 0: never.

    `vocab`: token ids that may be restored are below it.
    """

    def __init__(self, depth: int, limit: int = 0, vocab: int = 2**31 - 1):
        self.depth = depth
        self.limit = limit
        self.vocab = vocab
        self._clear()

    def _clear(self) -> None:
        self.root = Node()  # whose own counts are not kept
        self.keys = 0  # given out
        self.texts: dict[int, Text] = {}  # oldest first
        self.sizes = dict.fromkeys(BYTES, 0)

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        return sum(BYTES[name] * size for name, size in self.sizes.items())

    def extend(self, text: Text, tokens: Sequence[int]) -> None:
        """Appends to the text, which is a new one or one of this trie (if it was forgotten, it
        starts again).
        """
        if self.texts.get(text.key) is not text:
            text.key = self.keys
            text.tokens = array("i")
            text.first = 0
            text.active = []
            self.texts[text.key] = text
            self.keys += 1
            self.sizes["texts"] += 1
        base = text.key << BITS
        for token in tokens:
            position = base + len(text.tokens)
            text.tokens.append(token)
            before = [self.root, *text.active]
            text.active = []
            # Short strings first: where a string becomes a node, its own endings are nodes already.
            for depth, node in enumerate(before, 1):
                self._append(text, node, depth, token, position)
                position -= 1
        self.sizes["tokens"] += len(tokens)
        while self.limit and self.nbytes > self.limit and self.texts:
            self.forget()

    def copied(self, text: Text) -> tuple[Suffixes, Text]:
        """A trie with the same counts that grows by itself, and its text; this one is the only
        text here.
        """
        twin, own = Suffixes(self.depth, self.limit, self.vocab), Text()
        own.key, own.first, own.tokens = text.key, text.first, text.tokens[:]
        nodes: dict[int, Node] = {}  # copies of those that the text's last tokens end in
        ends = {id(node) for node in text.active}

        def copy(node: Node) -> Node:
            same = Node()
            same.count, same.ends, same.last = node.count, node.ends, node.last
            same.inner = {token: copy(child) for token, child in node.inner.items()}
            same.leaves = {token: leaf[:] for token, leaf in node.leaves.items()}
            if id(node) in ends:
                nodes[id(node)] = same
            return same

        twin.root = copy(self.root)
        own.active = [nodes[id(node)] for node in text.active]
        twin.keys, twin.texts, twin.sizes = self.keys, {own.key: own}, dict(self.sizes)
        return twin, own

    def _append(self, text: Text, node: Node, depth: int, token: int, position: int) -> None:
        """Takes in that `token` follows the string of `node` where that starts at `position`."""
        node.ends -= 1
        child = node.inner.get(token)
        if child is not None:
            child.count += 1
            child.ends += 1
            if position > child.last:
                child.last = position
            text.active.append(child)
            return
        leaf = node.leaves.get(token)
        if leaf is None:
            node.leaves[token] = [position]
            self.sizes["leaves"] += 1
            return
        leaf.append(position)
        if len(leaf) > LEAF and depth < self.depth:
            del node.leaves[token]
            node.inner[token] = self._node(leaf, depth)

    def _node(self, leaf: list[int], depth: int) -> Node:
        """The node that takes a leaf's place at this depth."""
        node = Node()
        node.count = len(leaf)
        node.last = max(leaf)
        for position in leaf:
            text = self.texts[position >> BITS]
            at = (position & MASK) + depth
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
        start = text.first
        size = len(text.tokens)
        if start < size:
            text.first += 1
            self.sizes["tokens"] -= 1
            if size - start == len(text.active):
                text.active.pop().ends -= 1
            node = self.root
            for token in text.tokens[start : start + self.depth]:
                child = node.inner.get(token)
                if child is None:
                    leaf = node.leaves[token]
                    leaf.remove(text.key << BITS | start)
                    if not leaf:
                        del node.leaves[token]
                        self.sizes["leaves"] -= 1
                    break
                child.count -= 1
                if not child.count:
                    del node.inner[token]
                    self.sizes["nodes"] -= 1
                node = child
        if text.first == size:
            del self.texts[text.key]
            self.sizes["texts"] -= 1

    def count(self, string: Sequence[int]) -> int:
        """How often these 1 to `depth` tokens stand in the texts."""
        where: Node | list[int] = self.root
        times = 0
        for length, token in enumerate(string):
            _, successors = self.after((where, length))
            same = [(count, where) for count, _, other, where in successors if other == token]
            if not same:
                return 0
            [(times, where)] = same
        return times

    def alike(
        self, place: Place, most: int, looping: Text | None = None, match: int = 0
    ) -> Sequence[int]:
        """At most so many tokens that follow alike wherever a rare string stands; none for a
        frequent one.

        `looping`: the text whose last `match` tokens the string begins with; what reaches its end
        goes on into itself.
        """
        where, length = place
        if isinstance(where, Node):
            return ()
        drafted = length - match
        continuations = []
        for position in where:
            text = self.texts[position >> BITS]
            at = (position & MASK) + length
            part = text.tokens[at : at + most]
            if text is looping and len(part) < most:
                looped = copied(text.tokens, at - drafted, drafted + most)
                part = array("i", looped[drafted:])
            continuations.append(part)
        # What the first and the last in order have in common all have.
        first, last = min(continuations), max(continuations)
        if first == last:
            return first
        same = 0
        while same < min(len(first), len(last)) and first[same] == last[same]:
            same += 1
        return first[:same]

    def after(
        self, place: Place, share: float = 0.0, looping: Text | None = None, match: int = 0
    ) -> tuple[int, list[Successor]]:
        """How often anything follows, and what does, best first.

        Only tokens that follow in `share` of these cases. The most frequent is best, of equals the
        one that stood last. `looping`, `match`: see alike.
        """
        where, length = place
        successors: list[Successor] = []
        if isinstance(where, Node):
            total = where.count - where.ends
            least = share * total
            for token, child in where.inner.items():
                if child.count >= least:
                    successors.append((child.count, child.last, token, child))
            leaves = where.leaves if least <= LEAF or length + 1 == self.depth else {}
        else:
            leaves = self._leaves(where, length, looping, match)
            total = sum(map(len, leaves.values()))
            least = share * total
        for token, leaf in leaves.items():
            if len(leaf) >= least:
                successors.append((len(leaf), max(leaf), token, leaf))
        # No two have the same count and position, so nodes are never compared.
        successors.sort(reverse=True)
        return total, successors

    def _leaves(
        self, positions: list[int], length: int, looping: Text | None, match: int
    ) -> dict[int, list[int]]:
        """Next token -> the positions of the string, of so many tokens, that it follows."""
        leaves: dict[int, list[int]] = {}
        for position in positions:
            text = self.texts[position >> BITS]
            at = (position & MASK) + length
            tokens = text.tokens
            if at >= len(tokens):
                if text is not looping:
                    continue
                begin = at - length + match
                at = begin + (at - begin) % (len(tokens) - begin)
            token = tokens[at]
            leaf = leaves.get(token)
            if leaf is None:
                leaves[token] = [position]
            else:
                leaf.append(position)
        return leaves

    def matches(self, text: Text, longest: int) -> Iterator[tuple[int, int, Place]]:
        """(m, count, place) of the text's last m <= `longest` <= depth tokens that stand elsewhere
        too, longest first.

        `count`: how often elsewhere. Of the lengths that stand in the same places only the longest
        is given. Behind a rare string the place is what follows it, of length 0.
        """
        longest = min(longest, len(text.tokens) - text.first)
        frequent = len(text.active)  # the lengths up to it are nodes
        last_count = 0
        if frequent < longest:
            ends = self._ends(text, frequent + 1, longest)
            for m in sorted({length for length, _ in ends}, reverse=True):
                positions = [end for length, end in ends if length >= m]
                last_count = len(positions)
                yield m, last_count, (positions, 0)
        for m in range(min(frequent, longest), 0, -1):
            node = text.active[m - 1]
            if node.count - 1 > last_count:
                last_count = node.count - 1
                yield m, last_count, (node, m)

    def _ends(self, text: Text, least: int, longest: int) -> list[tuple[int, int]]:
        """(length, position behind it) of all that matches `least` or more of the text's last
        tokens, a rare string.
        """
        tokens = text.tokens
        begin = len(tokens) - least
        node = self.root
        at = begin
        while tokens[at] in node.inner:
            node = node.inner[tokens[at]]
            at += 1
        ends = []
        for position in node.leaves[tokens[at]]:
            other = self.texts[position >> BITS]
            start = position & MASK
            itself = other is text and start == begin
            if itself or other.tokens[start : start + least] != tokens[begin:]:
                continue
            room = min(longest - least, start - other.first, begin - text.first)
            more = self._common_ending(other.tokens, start, tokens, begin, room)
            ends.append((least + more, position + least))
        return ends

    @staticmethod
    def _common_ending(
        one: array[int], one_end: int, two: array[int], two_end: int, most: int
    ) -> int:
        """How many tokens, `most` at most, are the same before these ends."""
        if one[one_end - most : one_end] == two[two_end - most : two_end]:
            return most
        same = 0
        while one[one_end - same - 1] == two[two_end - same - 1]:
            same += 1
        return same

    def tensors(self) -> dict[str, torch.Tensor]:
        """`tokens` (all, int32): the texts one after another, oldest first; `sizes` (texts, int64):
        their lengths.
        """
        flat: list[int] = []
        sizes = []
        for text in self.texts.values():
            kept = text.tokens[text.first :]
            flat.extend(kept)
            sizes.append(len(kept))
        return {
            "tokens": torch.tensor(flat, dtype=torch.int32),
            "sizes": torch.tensor(sizes, dtype=torch.int64),
        }

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Holds these texts instead, the newest of them that fit. Raises ValueError where the
        tensors are none.
        """
        if set(tensors) != {"tokens", "sizes"}:
            raise ValueError(f"tensors {sorted(tensors)}: a suffix store has 'sizes' and 'tokens'")
        for name, dtype in (("tokens", torch.int32), ("sizes", torch.int64)):
            tensor = tensors[name]
            if tensor.dtype != dtype or tensor.dim() != 1:
                shape = f"{tensor.dtype} of {tensor.dim()} dimensions"
                raise ValueError(f"{name}: {shape}, not {dtype} of one")
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
