"""Which requests of a batch should share the computation of which first tokens.

Every request belongs to one group at most, and a group has one prefix. The choice is the best one
there is: it is a facility-location problem on the tree of all prompts, where opening a node costs
the tokens from the root to it, once, and saves as many for each request that uses it. A request
uses the deepest open node above it. With D(v) tokens from the root to node v, e(v) requests that
end there, and `a` tokens down to the deepest open node above v,

    best(v, a) = max(  e(v) D(v) - D(v) + sum of best(c, D(v)) over the children c    v is opened
                       e(v) a           + sum of best(c, a)    over the children c )  it is not

The published rule merges greedily and reaches less; the tests compare them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

KEY = np.dtype(">u4")  # of a token in a key
NEVER = -(1 << 60)  # tokens saved by opening a node that may not be opened


@dataclass(frozen=True)
class Group:
    """Requests, by their places in the batch, whose prompts begin with the same tokens."""

    prefix: int  # how many tokens they share; 0: a request by itself
    members: tuple[int, ...]

    @property
    def saved(self) -> int:
        """Prompt tokens that need not be computed."""
        return (len(self.members) - 1) * self.prefix


@dataclass
class Node:
    """A place in the tree of prompts where they part, or where some end."""

    depth: int  # tokens from the root
    ends: list[int] = field(default_factory=list)  # requests whose prompts end here
    children: list[Node] = field(default_factory=list)
    level: int = 0  # nodes above it
    opened: np.ndarray | None = None  # (level,) whether it is opened, by the deepest open one above


def group(prompts: Sequence[Sequence[int]], block: int = 1, least: int = 1) -> list[Group]:
    """The groups that compute the fewest prompt tokens together; their members are all requests.

    `prompts`: token ids. A prompt's last token is never shared, since it is what the answer begins
    at. Prefixes are cut to a multiple of `block`, and those below `least` tokens are left alone.
    """
    root = tree(prompts)
    _choose(root, block, least)
    groups = []
    for prefix, members in _opened(root, block):
        if prefix:
            groups.append(Group(prefix, tuple(sorted(members))))
        else:
            groups += [Group(0, (member,)) for member in members]
    return sorted(groups, key=lambda one: one.members)


def tree(prompts: Sequence[Sequence[int]]) -> Node:
    """The compressed tree of all prompts without their last tokens."""
    keys = [_key(prompt[:-1]) for prompt in prompts]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    root = Node(0)
    path = [root]  # to the prompt before
    before = b""
    for place in order:
        key = keys[place]
        shared = _shared_bytes(before, key)
        while path[-1].depth > shared:
            child = path.pop()
            if path[-1].depth < shared:  # the prompts part in the middle of an edge
                middle = Node(shared, children=[child])
                path[-1].children[-1] = middle
                path.append(middle)
        length = len(key) // KEY.itemsize
        if length > path[-1].depth:
            leaf = Node(length)
            path[-1].children.append(leaf)
            path.append(leaf)
        path[-1].ends.append(place)
        before = key
    return root


def shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many first tokens two prompts share."""
    return _shared_bytes(_key(first), _key(second))


def _key(tokens: Sequence[int]) -> bytes:
    """Of one width and the most significant first: bytes in the order of the tokens themselves."""
    return np.asarray(tokens, KEY).tobytes()


def _shared_bytes(a: bytes, b: bytes) -> int:
    n = min(len(a), len(b)) // KEY.itemsize
    differ = np.frombuffer(a, KEY, n) != np.frombuffer(b, KEY, n)
    return int(differ.argmax()) if differ.any() else n


def _choose(root: Node, block: int, least: int) -> None:
    """Sets `opened` of every node below the root, children before their parents."""
    above = [0]  # of the path to the current node, the tokens that each one would share
    sums = {id(root): np.zeros(1, np.int64)}  # of open paths: what the children so far save
    for node, parent, enters in _walk(root):
        if enters:
            node.level = len(above)
            above.append(_cut(node, block))
            sums[id(node)] = np.zeros(node.level + 1, np.int64)
            continue
        worth = above.pop()
        below = sums.pop(id(node))
        unopened = below[:-1] + len(node.ends) * np.array(above, np.int64)
        opened = NEVER
        if worth >= max(least, 1):
            opened = int(below[-1]) + (len(node.ends) - 1) * worth
        node.opened = unopened < opened
        sums[id(parent)] += np.maximum(unopened, opened)


def _walk(root: Node) -> Iterator[tuple[Node, Node, bool]]:
    """(node, its parent, True) on the way down and (node, its parent, False) on the way up."""
    stack = [(child, root, True) for child in reversed(root.children)]
    while stack:
        node, parent, enters = stack.pop()
        yield node, parent, enters
        if enters:
            stack.append((node, parent, False))
            stack += [(child, node, True) for child in reversed(node.children)]


def _opened(root: Node, block: int) -> Iterator[tuple[int, list[int]]]:
    """(tokens shared, requests that share them) of every opened node; of the root, which shares
    nothing, the requests that no other node serves.
    """
    served: dict[int, tuple[int, list[int]]] = {0: (0, list(root.ends))}
    deepest: list[tuple[int, int]] = [(0, 0)]  # on the path: level and key of the deepest open one
    for key, (node, _, enters) in enumerate(_walk(root), 1):
        if not enters:
            deepest.pop()
            continue
        level, holder = deepest[-1]
        assert node.opened is not None
        if node.opened[level]:
            level, holder = node.level, key
            served[key] = (_cut(node, block), [])
        served[holder][1].extend(node.ends)
        deepest.append((level, holder))
    yield from served.values()


def _cut(node: Node, block: int) -> int:
    return node.depth // block * block
