"""Token trees and the distributions their tokens were drawn from.

A tree is flat: node 0 is the last committed token, parents stand before their children. `tries[i]`
lists the children of node i in the order in which verification tries them; a child drawn twice
stands there twice but is one node. Each node carries the distribution its token was drawn from,
given that the node exists: None for a token chosen by a rule, else a `Law`. Two rules keep every
tree exact: at a node drawn children are tried before deterministic ones, and whether to draw a
child never depends on which token it turned out to be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

NEXT = 0.75  # probability that a node is accepted if its parent is, where a drafter has no estimate


class Law:
    """The distribution q of a drawn token. Sums to 1.

    Dense (`ids` None, probs (V,)) or sparse (ids (K,), probs (K,)).
    """

    __slots__ = ("ids", "probs")

    def __init__(self, probs: torch.Tensor, ids: torch.Tensor | None = None):
        self.probs = probs
        self.ids = ids

    def token_prob(self, token: int) -> float:
        if self.ids is not None:
            return float(self.probs[self.ids == token].sum())
        return float(self.probs[token]) if token < len(self.probs) else 0.0

    def dense(self, vocab: int) -> torch.Tensor:
        """(vocab,) of the same dtype; tokens the drafter does not have get 0."""
        if self.ids is None and len(self.probs) == vocab:
            return self.probs
        full_probs = self.probs.new_zeros(max(vocab, len(self.probs)))
        if self.ids is None:
            full_probs[: len(self.probs)] = self.probs
        else:
            full_probs[self.ids] = self.probs
        return full_probs[:vocab]


PER_NODE = ("tokens", "depths", "laws", "values", "sources", "matches")  # what a cut selects


class TokenTree:
    """A tree under construction or finished: a list entry for every node."""

    __slots__ = (*PER_NODE, "parents", "tries", "beside")

    def __init__(self, root: int):
        self.tokens = [root]
        self.parents = [-1]
        self.depths = [0]
        self.laws: list[Law | None] = [None]
        self.values = [1.0]  # the drafter's estimate that verification reaches the node
        self.sources = [""]
        self.matches = [0]  # tokens of the text that speak for a copied node; 0: not copied
        self.tries: list[list[int]] = [[]]
        self.beside = 0  # rows without a token that the drafter has computed beside the nodes

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        """`TokenTree(5: 17 (3 8) 4)`: the root's token, then its children, each with its own."""

        def below(node: int) -> str:
            children = list(dict.fromkeys(self.tries[node]))
            inner = " ".join(below(child) for child in children)
            return f"{self.tokens[node]} ({inner})" if inner else str(self.tokens[node])

        drafts = " ".join(below(child) for child in dict.fromkeys(self.tries[0]))
        return f"TokenTree({self.tokens[0]}: {drafts or 'no drafts'})"

    def find_child(self, parent: int, token: int) -> int:
        """The child of `parent` that holds `token`, or -1."""
        tokens = self.tokens
        for node in self.tries[parent]:
            if tokens[node] == token:
                return node
        return -1

    def add(
        self,
        parent: int,
        token: int,
        law: Law | None = None,
        value: float | None = None,
        source: str = "",
        match: int = 0,
    ) -> int:
        """Adds a child and returns its node.

        A token already there stays one node; drawn again it is tried once more. `value`: the
        drafter's estimate of the probability that verification reaches the node, by which the
        policy decides what is worth drafting; None: NEXT times its parent's.
        """
        node = self.find_child(parent, token)
        if node >= 0:
            if law is not None:
                self.tries[parent].append(node)
            return node
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.laws.append(law)
        self.values.append(NEXT * self.values[parent] if value is None else value)
        self.sources.append(source)
        self.matches.append(match)
        self.tries[parent].append(node)
        self.tries.append([])
        return node

    def chain(
        self, tokens: Iterable[int], source: str = "", at: int = 0, match: int = 0
    ) -> TokenTree:
        """Hangs a deterministic chain below node `at`; returns the tree."""
        for token in tokens:
            at = self.add(at, token, source=source, match=match)
        return self

    def path(self, node: int) -> list[int]:
        """The nodes from the root's child down to `node`."""
        nodes = []
        while node > 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def tokens_to(self, node: int) -> list[int]:
        """The tokens on the way to `node`, root excluded."""
        return [self.tokens[i] for i in self.path(node)]

    @property
    def has_draws(self) -> bool:
        """Whether any token was drawn from a distribution."""
        return self.laws.count(None) < len(self.laws)

    @property
    def is_chain(self) -> bool:
        return max(map(len, self.tries)) <= 1

    def keep(self, nodes: Sequence[int]) -> TokenTree:
        """The root and these nodes, in order and with their parents.

        A drawn tree must not be cut afterwards: it is limited before it is drawn.
        """
        kept_nodes = [0, *nodes]
        if len(kept_nodes) == len(self):
            return self
        assert not self.has_draws, "a drawn tree must not be cut afterwards"
        new_index = {old_node: new_node for new_node, old_node in enumerate(kept_nodes)}
        pruned_tree = TokenTree(self.tokens[0])
        for name in PER_NODE:
            values = getattr(self, name)
            setattr(pruned_tree, name, [values[i] for i in kept_nodes])
        pruned_tree.parents = [-1, *(new_index[self.parents[i]] for i in nodes)]
        pruned_tree.tries = [
            [new_index[t] for t in self.tries[i] if t in new_index] for i in kept_nodes
        ]
        return pruned_tree

    def reroot_at(self, token: int) -> TokenTree:
        """Returns the tree below another last committed token: for a branch with another text."""
        if token == self.tokens[0]:
            return self
        rerooted_tree = TokenTree(token)
        for name in self.__slots__:
            setattr(rerooted_tree, name, getattr(self, name))
        rerooted_tree.tokens = [token, *self.tokens[1:]]
        return rerooted_tree

    def check(self) -> None:
        """Asserts what every consumer relies on."""
        seen_nodes = {0}
        for node, tries in enumerate(self.tries):
            is_ordered = node == 0 or 0 <= self.parents[node] < node
            assert is_ordered, f"node {node} stands before its parent"
            assert all(self.parents[t] == node for t in tries), f"a try of {node} is not its child"
            laws = [self.laws[t] is None for t in tries]
            assert laws == sorted(laws), (
                f"node {node}: a drawn child is tried after one that is not"
            )
            tokens = [self.tokens[t] for t in dict.fromkeys(tries)]
            assert len(set(tokens)) == len(tokens), f"node {node} has the same child twice"
            seen_nodes.update(tries)
        assert seen_nodes == set(range(len(self))), "a node is nobody's child"
