"""Ways to make a tree: grown best first from estimated chances, or merged from two."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from foretell.tree import TokenTree


def grow(root: int, successors: Callable[[TokenTree, int], Sequence[tuple[int, float]]], size: int,
         depth: int = 64, source: str = "", floor: float = 0.0) -> TokenTree:  # fmt: skip
    """The best deterministic tree of `size` nodes, root included: best first by the product of acceptances.

    Nodes reached with a smaller chance than `floor` are left out.

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
        if -value < floor:
            break
        before = len(tree)
        node = tree.add(parent, options[parent][rank][0], value=-value, source=source)
        push(parent, rank + 1)
        if len(tree) > before:
            options[node] = successors(tree, node)
            push(node, 0)
    return tree


def merge(tree: TokenTree, other: TokenTree) -> TokenTree:
    """Hangs the nodes of `other` (same root) into `tree` by prefix, deterministic behind drawn ones; returns `tree`.

    A drawn node of `other` is allowed only where `tree` has no drawn children yet; a deterministic sibling of the same
    token then gives way to it, which changes no law. What both hold has both for its source.
    """
    place = {0: 0}
    taken = {node for node, tries in enumerate(tree.tries) if any(tree.laws[t] is not None for t in tries)}
    for node in range(1, len(other)):
        parent, law, token = place[other.parents[node]], other.laws[node], other.tokens[node]
        if law is not None and parent in taken:
            raise ValueError("both trees drew children of the same node: their laws cannot be combined")
        old = tree.child(parent, token)
        if old < 0:
            old = tree.add(parent, token, law, other.values[node], other.sources[node], other.matches[node])
        else:
            tree.laws[old] = law or tree.laws[old]
            tree.values[old] = max(tree.values[old], other.values[node])
            tree.matches[old] = max(tree.matches[old], other.matches[node])
            if other.sources[node] not in tree.sources[old].split("+"):
                tree.sources[old] += "+" + other.sources[node]
        place[node] = old
    for node, tries in enumerate(other.tries):
        drawn = [place[t] for t in tries if other.laws[t] is not None]
        if drawn:
            rest = [t for t in tree.tries[place[node]] if tree.laws[t] is None]
            tree.tries[place[node]] = drawn + rest
    return tree
