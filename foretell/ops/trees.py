"""Ways to make a tree: planted at once, grown best first from estimated chances, or merged from
two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush

from foretell.core.tree import TokenTree


def plant(
    root: int,
    parents: Sequence[int],
    tokens: Sequence[int],
    values: Sequence[float],
    source: str,
    match: int = 0,
) -> TokenTree:
    """The deterministic tree of these nodes, parents first; the children of one node hold different
    tokens.
    """
    tree, count = TokenTree(root), len(tokens)
    depths, tries = tree.depths, tree.tries
    tree.tokens += tokens
    tree.parents += parents
    tree.values += values
    tree.laws += [None] * count
    tree.sources += [source] * count
    tree.matches += [match] * count
    tries += [[] for _ in tokens]
    for node, parent in enumerate(parents, 1):
        depths.append(depths[parent] + 1)
        tries[parent].append(node)
    return tree


def grow(
    root: int,
    successors: Callable[[TokenTree, int], Iterable[tuple[int, float]]],
    size: int,
    depth: int = 64,
    source: str = "",
    floor: float = 0.0,
) -> TokenTree:
    """The best deterministic tree of `size` nodes, root included: best first by the product of
    acceptances.

    Nodes reached with a smaller chance than `floor` are left out.

    `successors(tree, node)` gives (token, chance that it is accepted if `node` is), best first. It
    is asked once of every node, and what it gives is read as far as needed. The N largest values
    are closed under parents, so any prefix of the nodes is the best tree of its own size.
    """
    tree = TokenTree(root)
    tokens, parents, depths, values, tries = (
        tree.tokens,
        tree.parents,
        tree.depths,
        tree.values,
        tree.tries,
    )
    heap: list[
        tuple[float, int, int, int, Iterator[tuple[int, float]]]
    ] = []  # -value, order, parent, token, the rest
    count, waiting = (
        0,
        [(0, iter(successors(tree, 0)))],
    )  # nodes whose next successor is not on the heap yet
    while True:
        for node, rest in waiting:
            if depths[node] < depth and (option := next(rest, None)):
                count += 1
                heappush(heap, (-values[node] * option[1], count, node, option[0], rest))
        if not heap or len(tokens) >= size or -heap[0][0] < floor:
            break
        value, _, parent, token, rest = heappop(heap)
        waiting = [(parent, rest)]
        if tree.child(parent, token) < 0:
            node = len(tokens)
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
            values.append(-value)
            tries[parent].append(node)
            tries.append([])
            waiting.append((node, iter(successors(tree, node))))
    tree.laws += [None] * (len(tokens) - 1)
    tree.sources += [source] * (len(tokens) - 1)
    tree.matches += [0] * (len(tokens) - 1)
    return tree


def best_first(tokens: Sequence[int], chances: list[float]) -> Iterable[tuple[int, float]]:
    """The pairs, most of which are in order already."""
    pairs = zip(tokens, chances, strict=True)
    return (
        pairs
        if chances == sorted(chances, reverse=True)
        else sorted(pairs, key=lambda pair: -pair[1])
    )


def merge(tree: TokenTree, other: TokenTree) -> TokenTree:
    """Hangs the nodes of `other` (same root) into `tree` by prefix, deterministic behind drawn
    ones; returns `tree`.

    A drawn node of `other` is allowed only where `tree` has no drawn children yet; a deterministic
    sibling of the same token then gives way to it, which changes no law. What both hold has both
    for its source.
    """
    place, drawn = [0], other.drawn
    taken = (
        {tree.parents[node] for node, law in enumerate(tree.laws) if law is not None}
        if drawn
        else set[int]()
    )
    for node in range(1, len(other)):
        parent, token, value = place[other.parents[node]], other.tokens[node], other.values[node]
        law, source, match = other.laws[node], other.sources[node], other.matches[node]
        if law is not None and parent in taken:
            raise ValueError(
                "both trees drew children of the same node: their laws cannot be combined"
            )
        old = tree.child(parent, token)
        if old < 0:
            old = tree.add(parent, token, law, value, source, match)
        else:
            tree.laws[old] = law or tree.laws[old]
            tree.values[old] = max(tree.values[old], value)
            tree.matches[old] = max(tree.matches[old], match)
            if source != tree.sources[old] and source not in tree.sources[old].split("+"):
                tree.sources[old] += "+" + source
        place.append(old)
    for node, tries in enumerate(other.tries if drawn else ()):
        mine = [place[t] for t in tries if other.laws[t] is not None]
        if mine:
            rest = [t for t in tree.tries[place[node]] if tree.laws[t] is None]
            tree.tries[place[node]] = mine + rest
    return tree
