"""Trees of a head that reads the target's states: the best children of the best nodes, level by
level.

The head computes a level in one forward, or grows the whole tree in one call where it can. Tokens
are chosen, not drawn, by the head's own chances, whatever the sampling.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.drafters.heads.networks.tree_shape import TreeShape

if TYPE_CHECKING:
    from foretell.core.context import Context

STATE = 0  # the tap under which a head gives what nodes below are to be given as features
Path = tuple[int, ...]


@dataclass
class Candidate:
    """A token that may be drafted. `parent`: -1 is the text; `asked`: its node in the tree that
    the head is asked about, 0 where it is not in it.
    """

    token: int
    parent: int
    chance: float  # given its parent
    total: float  # of its path
    level: int
    asked: int = 0


class HeadReader:
    """A head as a drafter of one request sees it."""

    def __init__(self, ctx: Context, name: str = "head"):
        self.name = name
        self.model: Any = ctx.models[name]
        # The tokens that the numbers of its rows stand for.
        self.tokens: Sequence[int] = getattr(self.model, "tokens", range(self.model.vocab))
        self.deepest: int = getattr(self.model, "deepest", 64)  # that it can draft

    def depth(self, ctx: Context, depth: int) -> int:
        """How deep a tree may be that it has room for."""
        return min(depth, self.deepest, ctx.depth, self.model.context - len(ctx.tokens))


def grow(
    ctx: Context, reader: HeadReader, budget: int, shape: TreeShape, source: str
) -> Generator[Ask, Any, TokenTree]:
    """The best of all candidates, `budget` nodes with the root at most.

    A chance never grows on the way down, so the best ones have their parents among them.
    """
    depth = reader.depth(ctx, shape.depth)
    if depth < 1 or budget < 2:
        return TokenTree(ctx.tokens[-1])
    found: list[Candidate] = []
    if "grows" in reader.model.caps and not shape.share:
        root = TokenTree(ctx.tokens[-1])
        reply = yield Ask(root, reader.name, ctx.branch, rows=[0], follow=depth)
        found = candidates_of(reply.followed)
    if not found:
        found = yield from by_levels(ctx, reader, depth, shape)
    return best_tree(ctx, found, min(shape.total, budget - 1), source)


def candidates_of(followed: Sequence[tuple[int, float, int]]) -> list[Candidate]:
    """Those that a head grew by itself."""
    found: list[Candidate] = []
    for token, chance, parent in followed:
        total, level = (found[parent].total, found[parent].level + 1) if parent >= 0 else (1.0, 0)
        found.append(Candidate(token, parent, chance, total * chance, level))
    return found


def by_levels(
    ctx: Context, reader: HeadReader, depth: int, shape: TreeShape
) -> Generator[Ask, Any, list[Candidate]]:
    """All candidates of at most `depth` levels, by one ask a level."""
    levels = Levels(ctx, reader)
    found: list[Candidate] = []
    frontier = [-1]
    for _ in range(depth):
        rows = yield from levels.ask(found, frontier)
        first = len(found)
        for parent, row in zip(frontier, rows, strict=True):
            add_children(found, parent, row, shape.breadth, reader, shape.share)
        below = sorted(range(first, len(found)), key=lambda number: -found[number].total)
        frontier = below[: shape.breadth]
        if not frontier or found[frontier[0]].total < shape.least:  # none: rows without a law
            break
    return found


def by_ranks(
    ctx: Context, reader: HeadReader, places: Sequence[Path]
) -> Generator[Ask, Any, list[Candidate]]:
    """The candidates at these places, parents first; each is the ranks on the way to it."""
    levels = Levels(ctx, reader)
    found: list[Candidate] = []
    numbers: dict[Path, int] = {(): -1}
    for level in range(reader.depth(ctx, max(map(len, places)))):
        here = [place for place in places if len(place) == level + 1]
        parents = [path for path in dict.fromkeys(place[:-1] for place in here) if path in numbers]
        rows = yield from levels.ask(found, [numbers[path] for path in parents])
        for path, row in zip(parents, rows, strict=True):
            ranks = [place[-1] for place in here if place[:-1] == path]
            first = len(found)
            count = add_children(found, numbers[path], row, max(ranks) + 1, reader)
            numbers |= {(*path, rank): first + rank for rank in range(count)}
    wanted = {numbers[place] for place in places if place in numbers}
    assert len(wanted) == len(found), "ranks of children begin with 0 and leave none out"
    return found


def add_children(
    found: list[Candidate],
    parent: int,
    row: torch.Tensor,
    count: int,
    reader: HeadReader,
    share: float = 0.0,
) -> int:
    """Adds the `count` best tokens of a row (Vd,) behind a candidate, -1 the root, best first;
    returns how many there are. Those less likely than `share` of the best are left out.
    """
    chances, places = row.softmax(-1).topk(min(count, len(row)))
    chances = chances[chances >= share * chances[0]]
    places = places[: len(chances)]
    total, level = (found[parent].total, found[parent].level + 1) if parent >= 0 else (1.0, 0)
    for chance, place in zip(chances.tolist(), places.tolist(), strict=True):
        token = reader.tokens[place]
        found.append(Candidate(token, parent, chance, total * chance, level))
    return len(chances)


class Levels:
    """The tree of nodes that a head is asked about, with the states that it left."""

    def __init__(self, ctx: Context, reader: HeadReader):
        self.ctx, self.reader = ctx, reader
        self.tree = TokenTree(ctx.tokens[-1])
        self.left: list[torch.Tensor] = []  # by each node of the tree
        self.features: list[torch.Tensor] = []  # that each node below the root reads

    def ask(
        self, found: Sequence[Candidate], frontier: Sequence[int]
    ) -> Generator[Ask, Any, list[torch.Tensor]]:
        """The rows behind these candidates, -1 the root. Those above them that were not asked about
        yet are asked about too.
        """
        rows = [self._node(found, number) for number in frontier]
        given = torch.stack(self.features) if self.features else None
        reply = yield Ask(
            self.tree,
            self.reader.name,
            self.ctx.branch,
            rows=rows,
            taps=(STATE,),
            features=given,
        )
        states = dict(zip(reply.new, reply.hidden[STATE], strict=True))
        self.left += [states[node] for node in range(len(self.left), len(self.tree))]
        return list(reply.logits)

    def _node(self, found: Sequence[Candidate], number: int) -> int:
        """A candidate's node. One that is new with its parent is given what its parent was."""
        if number < 0:
            return 0
        one = found[number]
        if not one.asked:
            parent = self._node(found, one.parent)
            one.asked = self.tree.add(parent, one.token)
            known = parent < len(self.left)
            self.features.append(self.left[parent] if known else self.features[parent - 1])
        return one.asked


def best_tree(ctx: Context, found: Sequence[Candidate], count: int, source: str) -> TokenTree:
    """The `count` candidates of the highest totals, behind none that ends the text."""
    order = sorted(range(len(found)), key=lambda number: -found[number].total)
    return tree_of(ctx, found, order[:count], source)


def tree_of(
    ctx: Context, found: Sequence[Candidate], chosen: Iterable[int], source: str
) -> TokenTree:
    """These candidates, by number; those without their parents and those behind one that ends the
    text are left out.
    """
    tree = TokenTree(ctx.tokens[-1])
    places = {-1: 0}
    for number in sorted(chosen):
        one = found[number]
        parent = places.get(one.parent)
        if parent is None or (parent and ctx.ends(tree, parent)):
            continue
        places[number] = tree.add(parent, one.token, value=one.total, source=source)
    return tree
