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
    group_members: tuple[int, ...]

    @property
    def saved(self) -> int:
        """Prompt tokens that need not be computed."""
        return (len(self.group_members) - 1) * self.prefix


@dataclass
class Node:
    """A place in the tree of prompts where they part, or where some end."""

    depth: int  # tokens from the root
    ends: list[int] = field(default_factory=list)  # requests whose prompts end here
    children: list[Node] = field(default_factory=list)
    level: int = 0  # nodes above it
    opened: np.ndarray | None = None  # (level,) whether it is opened, by the deepest open one above


def group_prompts(
    prompts: Sequence[Sequence[int]], block: int = 1, min_tokens: int = 1
) -> list[Group]:
    """The groups that compute the fewest prompt tokens together; their members are all requests.

    `prompts`: token ids. A prompt's last token is never shared, since it is what the answer begins
    at. Prefixes are cut to a multiple of `block`, and those below `min_tokens` tokens are left
    alone.
    """
    root = build_prefix_tree(prompts)
    _choose_openings(root, block, min_tokens)
    groups = []
    for prefix, members in _opened_groups(root, block):
        if prefix:
            groups.append(Group(prefix, tuple(sorted(members))))
        else:
            groups += [Group(0, (member,)) for member in members]
    return sorted(groups, key=lambda prompt_group: prompt_group.group_members)


def build_prefix_tree(prompts: Sequence[Sequence[int]]) -> Node:
    """The compressed tree of all prompts without their last tokens."""
    prompt_keys = [_byte_key(prompt[:-1]) for prompt in prompts]
    sorted_indices = sorted(range(len(prompt_keys)), key=prompt_keys.__getitem__)
    root = Node(0)
    path = [root]  # to the prompt before
    previous_key = b""
    for prompt_index in sorted_indices:
        prompt_key = prompt_keys[prompt_index]
        shared_count = _shared_bytes(previous_key, prompt_key)
        while path[-1].depth > shared_count:
            child = path.pop()
            if path[-1].depth < shared_count:  # the prompts part in the middle of an edge
                middle = Node(shared_count, children=[child])
                path[-1].children[-1] = middle
                path.append(middle)
        length = len(prompt_key) // KEY.itemsize
        if length > path[-1].depth:
            leaf = Node(length)
            path[-1].children.append(leaf)
            path.append(leaf)
        path[-1].ends.append(prompt_index)
        previous_key = prompt_key
    return root


def shared_length(first_prompt: Sequence[int], second_prompt: Sequence[int]) -> int:
    """How many first tokens two prompts share."""
    return _shared_bytes(_byte_key(first_prompt), _byte_key(second_prompt))


def _byte_key(tokens: Sequence[int]) -> bytes:
    """Bytes that sort as the tokens do: all of one width, the most significant first."""
    return np.asarray(tokens, KEY).tobytes()


def _shared_bytes(a: bytes, b: bytes) -> int:
    n = min(len(a), len(b)) // KEY.itemsize
    differ = np.frombuffer(a, KEY, n) != np.frombuffer(b, KEY, n)
    return int(differ.argmax()) if differ.any() else n


def _choose_openings(root: Node, block: int, min_tokens: int) -> None:
    """Sets `opened` of every node below the root, children before their parents."""
    shared_above = [0]  # of the path to the current node, the tokens that each one would share
    child_savings = {
        id(root): np.zeros(1, np.int64)
    }  # of open paths: what the children so far save
    for node, parent, enters in _walk_tree(root):
        if enters:
            node.level = len(shared_above)
            shared_above.append(_block_depth(node, block))
            child_savings[id(node)] = np.zeros(node.level + 1, np.int64)
            continue
        shared_tokens = shared_above.pop()
        node_savings = child_savings.pop(id(node))
        unopened = node_savings[:-1] + len(node.ends) * np.array(shared_above, np.int64)
        opened = NEVER
        if shared_tokens >= max(min_tokens, 1):
            opened = int(node_savings[-1]) + (len(node.ends) - 1) * shared_tokens
        node.opened = unopened < opened
        child_savings[id(parent)] += np.maximum(unopened, opened)


def _walk_tree(root: Node) -> Iterator[tuple[Node, Node, bool]]:
    """(node, its parent, True) on the way down and (node, its parent, False) on the way up."""
    stack = [(child, root, True) for child in reversed(root.children)]
    while stack:
        node, parent, enters = stack.pop()
        yield node, parent, enters
        if enters:
            stack.append((node, parent, False))
            stack += [(child, node, True) for child in reversed(node.children)]


def _opened_groups(root: Node, block: int) -> Iterator[tuple[int, list[int]]]:
    """(tokens shared, requests that share them) of every opened node; of the root, which shares
    nothing, the requests that no other node serves.
    """
    groups_by_key: dict[int, tuple[int, list[int]]] = {0: (0, list(root.ends))}
    open_path: list[tuple[int, int]] = [
        (0, 0)
    ]  # on the path: level and key of the deepest open one
    for key, (node, _, enters) in enumerate(_walk_tree(root), 1):
        if not enters:
            open_path.pop()
            continue
        level, holder_key = open_path[-1]
        assert node.opened is not None
        if node.opened[level]:
            level, holder_key = node.level, key
            groups_by_key[key] = (_block_depth(node, block), [])
        groups_by_key[holder_key][1].extend(node.ends)
        open_path.append((level, holder_key))
    yield from groups_by_key.values()


def _block_depth(node: Node, block: int) -> int:
    return node.depth // block * block
