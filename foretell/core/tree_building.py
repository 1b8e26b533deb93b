"""Ways to make a tree: all nodes at once, best first from estimated probabilities, or from two
trees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush

from foretell.core.tree import Law, TokenTree


def plant_tree(
    root: int,
    parents: Sequence[int],
    tokens: Sequence[int],
    values: Sequence[float],
    source: str,
    match: int = 0,
) -> TokenTree:
    """The deterministic tree of these nodes below `root`, parents before their children.

    The children of one node must hold different tokens.
    """
    tree = TokenTree(root)
    count = len(tokens)
    tree.tokens += tokens
    tree.parents += parents
    tree.values += values
    tree.laws += [None] * count
    tree.sources += [source] * count
    tree.matches += [match] * count
    tree.tries += [[] for _ in tokens]
    for node, parent in enumerate(parents, 1):
        tree.depths.append(tree.depths[parent] + 1)
        tree.tries[parent].append(node)
    return tree


def add_drawn(
    tree: TokenTree, parent: int, law: Law, tokens: Sequence[int], source: str
) -> list[int]:
    """Adds the tokens that were drawn from a dense distribution below `parent`; returns the node of
    each.

    A token drawn twice is one node with two tries.
    """
    nodes = []
    for token in tokens:
        value = tree.values[parent] * float(law.probs[token])
        nodes.append(tree.add(parent, token, law=law, value=value, source=source))
    return nodes


def grow_tree(
    root: int,
    successors: Callable[[TokenTree, int], Iterable[tuple[int, float]]],
    size: int,
    depth: int = 64,
    source: str = "",
    floor: float = 0.0,
) -> TokenTree:
    """The best deterministic tree of `size` nodes, root included, `depth` levels deep at most.

    `successors(tree, node)` gives (token, chance that it is accepted if `node` is), best first. It
    is asked once of every node, and what it gives is read only as far as needed. A node's value is
    the product of the probabilities on its path; nodes of a smaller value than `floor` are left
    out. The N largest values are closed under parents, so any prefix of the nodes is the best tree
    of its own size.
    """
    tree = TokenTree(root)
    # The inner loop of many drafters, hence local names.
    tokens, parents, depths = tree.tokens, tree.parents, tree.depths
    values, tries = tree.values, tree.tries
    # (-value, order, parent, token, further successors of the parent)
    heap: list[tuple[float, int, int, int, Iterator[tuple[int, float]]]] = []
    order = 0
    # Nodes whose next successor is not on the heap yet.
    waiting = [(0, iter(successors(tree, 0)))]
    while True:
        for node, further in waiting:
            if depths[node] < depth and (option := next(further, None)):
                order += 1
                token, chance = option
                heappush(heap, (-values[node] * chance, order, node, token, further))
        if not heap or len(tokens) >= size or -heap[0][0] < floor:
            break
        value, _, parent, token, further = heappop(heap)
        waiting = [(parent, further)]
        if tree.find_child(parent, token) < 0:
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
    """The pairs (token, probability), best first. Most are in order already."""
    pairs = zip(tokens, chances, strict=True)
    if chances == sorted(chances, reverse=True):
        return pairs
    return sorted(pairs, key=lambda pair: -pair[1])


def merge_trees(tree: TokenTree, other_tree: TokenTree) -> TokenTree:
    """Adds the nodes of `other_tree`, which has the same root, to `tree` by prefix; returns `tree`.

    Deterministic children come after drawn ones. A drawn node of `other_tree` is allowed only where
    `tree` has no drawn children yet, else ValueError; a deterministic sibling of the same token
    then gives way to it, which changes no distribution. What both trees hold names both as its
    source.
    """
    tree_nodes = [0]  # node of `other_tree` -> its node in `tree`
    other_drawn = other_tree.has_draws
    drawn_below: set[int] = set()  # nodes of `tree` that have drawn children of its own
    if other_drawn:
        for parent, law in zip(tree.parents, tree.laws, strict=True):
            if law is not None:
                drawn_below.add(parent)
    for node in range(1, len(other_tree)):
        parent = tree_nodes[other_tree.parents[node]]
        token, law, value = other_tree.tokens[node], other_tree.laws[node], other_tree.values[node]
        source, match = other_tree.sources[node], other_tree.matches[node]
        if law is not None and parent in drawn_below:
            raise ValueError(
                "both trees drew children of the same node: their laws cannot be combined"
            )
        tree_node = tree.find_child(parent, token)
        if tree_node < 0:
            tree_node = tree.add(parent, token, law=law, value=value, source=source, match=match)
        else:
            tree.laws[tree_node] = law or tree.laws[tree_node]
            tree.values[tree_node] = max(tree.values[tree_node], value)
            tree.matches[tree_node] = max(tree.matches[tree_node], match)
            known_source = tree.sources[tree_node]
            if source != known_source and source not in known_source.split("+"):
                tree.sources[tree_node] = f"{known_source}+{source}"
        tree_nodes.append(tree_node)
    if other_drawn:
        for node, tries in enumerate(other_tree.tries):
            drawn_children = [
                tree_nodes[child] for child in tries if other_tree.laws[child] is not None
            ]
            if drawn_children:
                siblings = tree.tries[tree_nodes[node]]
                fixed_children = [child for child in siblings if tree.laws[child] is None]
                tree.tries[tree_nodes[node]] = drawn_children + fixed_children
    return tree


def subtree_below(tree: TokenTree, node: int) -> tuple[TokenTree, list[int]]:
    """The tree whose root is `node`, and the place in `tree` of each of its nodes."""
    if node == 0:
        return tree, list(range(len(tree)))
    node_index = {node: 0}
    for child in range(node + 1, len(tree)):
        if tree.parents[child] in node_index:
            node_index[child] = len(node_index)
    subtree = TokenTree(tree.tokens[node])
    for name in ("tokens", "laws", "values", "sources", "matches"):
        values = getattr(tree, name)
        setattr(subtree, name, [values[inner_node] for inner_node in node_index])
    subtree.laws[0] = None
    subtree.parents = [
        -1,
        *(node_index[tree.parents[inner_node]] for inner_node in list(node_index)[1:]),
    ]
    subtree.depths = [tree.depths[inner_node] - tree.depths[node] for inner_node in node_index]
    subtree.tries = [
        [node_index[child] for child in tree.tries[inner_node]] for inner_node in node_index
    ]
    return subtree, list(node_index)
