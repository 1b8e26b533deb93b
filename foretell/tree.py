"""Token trees and the laws their tokens were drawn from.

A tree is flat: node 0 is the last committed token, parents stand before their children. `tries[i]` lists the children
of node i in the order in which verification tries them; a child drawn twice stands there twice but is one node. Each
node carries the law its token was drawn from, given that the node exists: None for a token chosen by a rule, else a
`Law`. Two rules keep every tree exact: at a node drawn children are tried before deterministic
ones, and whether to draw a child never depends on which token it turned out to be.
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch


class Law:
    """The law q of a drawn token, dense (`ids` None, probs (V,)) or sparse (ids (K,), probs (K,)). Sums to 1."""

    __slots__ = ("ids", "probs")

    def __init__(self, probs: torch.Tensor, ids: torch.Tensor | None = None):
        self.probs, self.ids = probs, ids

    def prob(self, token: int) -> float:
        at: Any = slice(token, token + 1) if self.ids is None else self.ids == token
        return float(self.probs[at].sum())

    def dense(self, vocab: int) -> torch.Tensor:
        """(vocab,) of the same dtype; tokens the drafter does not have get 0."""
        if self.ids is None and len(self.probs) == vocab:
            return self.probs
        full = self.probs.new_zeros(max(vocab, len(self.probs)))
        full[slice(len(self.probs)) if self.ids is None else self.ids] = self.probs
        return full[:vocab]


class TokenTree:
    """A tree under construction or finished: a list entry for every node."""

    __slots__ = ("tokens", "parents", "depths", "laws", "values", "sources", "matches", "tries")

    def __init__(self, root: int):
        self.tokens, self.parents, self.depths = [root], [-1], [0]
        self.laws: list[Law | None] = [None]
        self.values = [1.0]  # the drafter's estimate that verification reaches the node
        self.sources = [""]
        self.matches = [0]  # tokens of the text that speak for a copied node; 0: not copied
        self.tries: list[list[int]] = [[]]

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, parent: int, token: int) -> int:
        """The child of `parent` that holds `token`, or -1."""
        for node in self.tries[parent]:
            if self.tokens[node] == token:
                return node
        return -1

    def add(self, parent: int, token: int, law: Law | None = None, value: float = 0.0, source: str = "",
            match: int = 0) -> int:  # fmt: skip
        """Adds a child and returns its node. A token already there stays one node, drawn again with one more try."""
        node = self.child(parent, token)
        if node >= 0:
            if law is not None:
                self.tries[parent].append(node)
            return node
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.laws.append(law)
        self.values.append(value)
        self.sources.append(source)
        self.matches.append(match)
        self.tries[parent].append(node)
        self.tries.append([])
        return node

    def chain(self, tokens: Iterable[int], source: str = "", at: int = 0, match: int = 0) -> TokenTree:
        """Hangs a deterministic chain below node `at`; returns the tree."""
        for token in tokens:
            at = self.add(at, token, None, self.values[at] * 0.75, source, match)
        return self

    def path(self, node: int) -> list[int]:
        """The nodes from the root's child down to `node`."""
        nodes = []
        while node > 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def words(self, node: int) -> list[int]:
        """The tokens on the way to `node`, root excluded."""
        return [self.tokens[i] for i in self.path(node)]

    @property
    def drawn(self) -> bool:
        return any(law is not None for law in self.laws)

    @property
    def is_chain(self) -> bool:
        return all(len(t) <= 1 for t in self.tries)

    def merge(self, other: TokenTree) -> TokenTree:
        """Hangs the nodes of `other` (same root) into this tree by prefix, deterministic behind drawn ones.

        A drawn node of `other` is allowed only where this tree has no drawn children yet; a deterministic sibling of
        the same token then gives way to it, which changes no law. What both trees hold has both for its source.
        """
        place = {0: 0}
        taken = {node for node, tries in enumerate(self.tries) if any(self.laws[t] is not None for t in tries)}
        for node in range(1, len(other)):
            parent, law, token = place[other.parents[node]], other.laws[node], other.tokens[node]
            if law is not None and parent in taken:
                raise ValueError("both trees drew children of the same node: their laws cannot be combined")
            old = self.child(parent, token)
            if old < 0:
                old = self.add(parent, token, law, other.values[node], other.sources[node], other.matches[node])
            else:
                self.laws[old] = law or self.laws[old]
                self.values[old] = max(self.values[old], other.values[node])
                self.matches[old] = max(self.matches[old], other.matches[node])
                if other.sources[node] not in self.sources[old].split("+"):
                    self.sources[old] += "+" + other.sources[node]
            place[node] = old
        for node, tries in enumerate(other.tries):
            drawn = [place[t] for t in tries if other.laws[t] is not None]
            if drawn:
                rest = [t for t in self.tries[place[node]] if self.laws[t] is None]
                self.tries[place[node]] = drawn + rest
        return self

    def prune(self, size: int) -> TokenTree:
        """The first `size` nodes. For deterministic trees only: a drawn tree is limited before it is drawn."""
        if len(self) <= size:
            return self
        assert not self.drawn, "a drawn tree must not be pruned afterwards"
        small = copy.copy(self)
        for name in ("tokens", "parents", "depths", "laws", "values", "sources"):
            setattr(small, name, getattr(self, name)[:size])
        small.tries = [[t for t in tries if t < size] for tries in self.tries[:size]]
        return small

    def check(self) -> None:
        """Asserts what every consumer relies on."""
        seen = {0}
        for node, tries in enumerate(self.tries):
            assert node == 0 or 0 <= self.parents[node] < node, f"node {node} stands before its parent"
            assert all(self.parents[t] == node for t in tries), f"a try of node {node} is not its child"
            laws = [self.laws[t] is None for t in tries]
            assert laws == sorted(laws), f"node {node}: a deterministic child is tried before a drawn one"
            tokens = [self.tokens[t] for t in dict.fromkeys(tries)]
            assert len(set(tokens)) == len(tokens), f"node {node} has the same child twice"
            seen.update(tries)
        assert seen == set(range(len(self))), "a node is nobody's child"


def grow(root: int, successors: Callable[[TokenTree, int], Sequence[tuple[int, float]]], size: int,
         depth: int = 64, source: str = "") -> TokenTree:  # fmt: skip
    """The best deterministic tree of `size` nodes, root included: best first by the product of acceptances.

    `successors(tree, node)` gives (token, chance that it is accepted if `node` is), best first. The N largest values
    are closed under parents, so any prefix of the nodes is the best tree of its own size.
    """
    tree = TokenTree(root)
    options = {0: successors(tree, 0)}
    heap: list[tuple[float, int, int, int]] = []  # -value, insertion order, parent, rank
    count = 0

    def push(parent: int, rank: int) -> None:
        nonlocal count
        if rank < len(options[parent]) and tree.depths[parent] < depth:
            count += 1
            heapq.heappush(heap, (-tree.values[parent] * options[parent][rank][1], count, parent, rank))

    push(0, 0)
    while heap and len(tree) < size:
        value, _, parent, rank = heapq.heappop(heap)
        before = len(tree)
        node = tree.add(parent, options[parent][rank][0], value=-value, source=source)
        push(parent, rank + 1)
        if len(tree) > before:
            options[node] = successors(tree, node)
            push(node, 0)
    return tree


@lru_cache(maxsize=512)
def ancestors(parents: tuple[int, ...]) -> torch.Tensor:
    """Bool (N, N): entry (i, j) says that j is i or an ancestor of i. Parent -1 is the committed text."""
    mask = torch.eye(len(parents), dtype=torch.bool).numpy()
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node, :node] = mask[parent, :node]
    return torch.from_numpy(mask)
