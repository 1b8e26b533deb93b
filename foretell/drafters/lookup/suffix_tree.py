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

from foretell.drafters.lookup.lookup import copy_tokens

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
        self._clear_texts()

    def _clear_texts(self) -> None:
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
        first_position = text.key << BITS
        for token in tokens:
            position = first_position + len(text.tokens)
            text.tokens.append(token)
            active_nodes = [self.root, *text.active]
            text.active = []
            # Short strings first: where a string becomes a node, its own endings are nodes already.
            for depth, node in enumerate(active_nodes, 1):
                self._append_token(text, node, depth, token, position)
                position -= 1
        self.sizes["tokens"] += len(tokens)
        while self.limit and self.nbytes > self.limit and self.texts:
            self.forget_oldest()

    def copy_with_text(self, text: Text) -> tuple[Suffixes, Text]:
        """A trie with the same counts that grows by itself, and its text; this one is the only
        text here.
        """
        trie_copy, text_copy = Suffixes(self.depth, self.limit, self.vocab), Text()
        text_copy.key, text_copy.first, text_copy.tokens = text.key, text.first, text.tokens[:]
        copied_nodes: dict[int, Node] = {}  # copies of those that the text's last tokens end in
        active_ids = {id(node) for node in text.active}

        def copy_node(node: Node) -> Node:
            node_copy = Node()
            node_copy.count, node_copy.ends, node_copy.last = node.count, node.ends, node.last
            node_copy.inner = {token: copy_node(child) for token, child in node.inner.items()}
            node_copy.leaves = {token: leaf[:] for token, leaf in node.leaves.items()}
            if id(node) in active_ids:
                copied_nodes[id(node)] = node_copy
            return node_copy

        trie_copy.root = copy_node(self.root)
        text_copy.active = [copied_nodes[id(node)] for node in text.active]
        trie_copy.keys, trie_copy.texts, trie_copy.sizes = (
            self.keys,
            {text_copy.key: text_copy},
            dict(self.sizes),
        )
        return trie_copy, text_copy

    def _append_token(self, text: Text, node: Node, depth: int, token: int, position: int) -> None:
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
            node.inner[token] = self._split_leaf(leaf, depth)

    def _split_leaf(self, leaf: list[int], depth: int) -> Node:
        """The node that takes a leaf's place at this depth."""
        node = Node()
        node.count = len(leaf)
        node.last = max(leaf)
        for position in leaf:
            text = self.texts[position >> BITS]
            token_index = (position & MASK) + depth
            if token_index < len(text.tokens):
                node.leaves.setdefault(text.tokens[token_index], []).append(position)
            else:
                node.ends += 1
                text.active.append(node)
        self.sizes["nodes"] += 1
        self.sizes["leaves"] += len(node.leaves) - 1
        return node

    def forget_oldest(self) -> None:
        """Takes out the oldest token, and its text if nothing is left of it."""
        text = next(iter(self.texts.values()))
        first_index = text.first
        text_length = len(text.tokens)
        if first_index < text_length:
            text.first += 1
            self.sizes["tokens"] -= 1
            if text_length - first_index == len(text.active):
                text.active.pop().ends -= 1
            node = self.root
            for token in text.tokens[first_index : first_index + self.depth]:
                child = node.inner.get(token)
                if child is None:
                    leaf = node.leaves[token]
                    leaf.remove(text.key << BITS | first_index)
                    if not leaf:
                        del node.leaves[token]
                        self.sizes["leaves"] -= 1
                    break
                child.count -= 1
                if not child.count:
                    del node.inner[token]
                    self.sizes["nodes"] -= 1
                node = child
        if text.first == text_length:
            del self.texts[text.key]
            self.sizes["texts"] -= 1

    def count(self, string: Sequence[int]) -> int:
        """How often these 1 to `depth` tokens stand in the texts."""
        subtree: Node | list[int] = self.root
        place_count = 0
        for length, token in enumerate(string):
            _, successors = self.successors_of((subtree, length))
            matching_places = [
                (count, subtree)
                for count, _, next_token, subtree in successors
                if next_token == token
            ]
            if not matching_places:
                return 0
            [(place_count, subtree)] = matching_places
        return place_count

    def common_run(
        self, place: Place, max_tokens: int, looping: Text | None = None, match: int = 0
    ) -> Sequence[int]:
        """At most so many tokens that follow alike wherever a rare string stands; none for a
        frequent one.

        `looping`: the text whose last `match` tokens the string begins with; what reaches its end
        goes on into itself.
        """
        subtree, length = place
        if isinstance(subtree, Node):
            return ()
        drafted = length - match
        continuations = []
        for position in subtree:
            text = self.texts[position >> BITS]
            token_index = (position & MASK) + length
            continuation = text.tokens[token_index : token_index + max_tokens]
            if text is looping and len(continuation) < max_tokens:
                looped = copy_tokens(text.tokens, token_index - drafted, drafted + max_tokens)
                continuation = array("i", looped[drafted:])
            continuations.append(continuation)
        # What the first and the last in order have in common all have.
        first_run, last_run = min(continuations), max(continuations)
        if first_run == last_run:
            return first_run
        shared_length = 0
        while (
            shared_length < min(len(first_run), len(last_run))
            and first_run[shared_length] == last_run[shared_length]
        ):
            shared_length += 1
        return first_run[:shared_length]

    def successors_of(
        self, place: Place, share: float = 0.0, looping: Text | None = None, match: int = 0
    ) -> tuple[int, list[Successor]]:
        """How often anything follows, and what does, best first.

        Only tokens that follow in `share` of these cases. The most frequent is best, of equals the
        one that stood last. `looping`, `match`: see alike.
        """
        subtree, length = place
        successors: list[Successor] = []
        if isinstance(subtree, Node):
            total = subtree.count - subtree.ends
            min_count = share * total
            for token, child in subtree.inner.items():
                if child.count >= min_count:
                    successors.append((child.count, child.last, token, child))
            leaves = subtree.leaves if min_count <= LEAF or length + 1 == self.depth else {}
        else:
            leaves = self._leaves_after(subtree, length, looping, match)
            total = sum(map(len, leaves.values()))
            min_count = share * total
        for token, leaf in leaves.items():
            if len(leaf) >= min_count:
                successors.append((len(leaf), max(leaf), token, leaf))
        # No two have the same count and position, so nodes are never compared.
        successors.sort(reverse=True)
        return total, successors

    def _leaves_after(
        self, positions: list[int], length: int, looping: Text | None, match: int
    ) -> dict[int, list[int]]:
        """Next token -> the positions of the string, of so many tokens, that it follows."""
        leaves: dict[int, list[int]] = {}
        for position in positions:
            text = self.texts[position >> BITS]
            token_index = (position & MASK) + length
            tokens = text.tokens
            if token_index >= len(tokens):
                if text is not looping:
                    continue
                text_start = token_index - length + match
                token_index = text_start + (token_index - text_start) % (len(tokens) - text_start)
            token = tokens[token_index]
            leaf = leaves.get(token)
            if leaf is None:
                leaves[token] = [position]
            else:
                leaf.append(position)
        return leaves

    def find_matches(self, text: Text, max_length: int) -> Iterator[tuple[int, int, Place]]:
        """(m, count, place) of the text's last m <= `max_length` <= depth tokens that stand
        elsewhere too, longest first.

        `count`: how often elsewhere. Of the lengths that stand in the same places only the longest
        is given. After a rare string the place is what follows it, of length 0.
        """
        max_length = min(max_length, len(text.tokens) - text.first)
        frequent = len(text.active)  # the lengths up to it are nodes
        last_count = 0
        if frequent < max_length:
            match_ends = self._match_ends(text, frequent + 1, max_length)
            for match_length in sorted({length for length, _ in match_ends}, reverse=True):
                positions = [end for length, end in match_ends if length >= match_length]
                last_count = len(positions)
                yield match_length, last_count, (positions, 0)
        for match_length in range(min(frequent, max_length), 0, -1):
            node = text.active[match_length - 1]
            if node.count - 1 > last_count:
                last_count = node.count - 1
                yield match_length, last_count, (node, match_length)

    def _match_ends(self, text: Text, min_length: int, max_length: int) -> list[tuple[int, int]]:
        """(length, position after it) of all that matches `min_length` or more of the text's last
        tokens, a rare string.
        """
        tokens = text.tokens
        ending_start = len(tokens) - min_length
        node = self.root
        token_index = ending_start
        while tokens[token_index] in node.inner:
            node = node.inner[tokens[token_index]]
            token_index += 1
        ends = []
        for position in node.leaves[tokens[token_index]]:
            other_text = self.texts[position >> BITS]
            match_start = position & MASK
            is_itself = other_text is text and match_start == ending_start
            if (
                is_itself
                or other_text.tokens[match_start : match_start + min_length]
                != tokens[ending_start:]
            ):
                continue
            max_extra = min(
                max_length - min_length, match_start - other_text.first, ending_start - text.first
            )
            extra_tokens = self._common_ending(
                other_text.tokens, match_start, tokens, ending_start, max_extra
            )
            ends.append((min_length + extra_tokens, position + min_length))
        return ends

    @staticmethod
    def _common_ending(
        first_text: array[int],
        first_end: int,
        second_text: array[int],
        second_end: int,
        max_length: int,
    ) -> int:
        """How many tokens, `max_length` at most, are the same before these ends."""
        if (
            first_text[first_end - max_length : first_end]
            == second_text[second_end - max_length : second_end]
        ):
            return max_length
        shared_length = 0
        while (
            first_text[first_end - shared_length - 1] == second_text[second_end - shared_length - 1]
        ):
            shared_length += 1
        return shared_length

    def tensors(self) -> dict[str, torch.Tensor]:
        """`tokens` (all, int32): the texts one after another, oldest first; `sizes` (texts, int64):
        their lengths.
        """
        all_tokens: list[int] = []
        sizes = []
        for text in self.texts.values():
            kept_tokens = text.tokens[text.first :]
            all_tokens.extend(kept_tokens)
            sizes.append(len(kept_tokens))
        return {
            "tokens": torch.tensor(all_tokens, dtype=torch.int32),
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
        self._clear_texts()
        text_start = 0
        for size in sizes:
            self.extend(Text(), tokens[text_start : text_start + size])
            text_start += size
