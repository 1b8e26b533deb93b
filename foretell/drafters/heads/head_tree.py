"""Trees of a head that reads the target's states: the best children of the best nodes, level by
level.

The head computes a level in one forward, or grows the whole tree in one call where it can. Tokens
are chosen, not drawn, by the head's own probabilities, whatever the sampling.
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

    def max_depth(self, ctx: Context, depth: int) -> int:
        """How deep a tree may be that it has room for."""
        return min(depth, self.deepest, ctx.depth, self.model.context - len(ctx.tokens))


def grow_head_tree(
    ctx: Context, reader: HeadReader, budget: int, shape: TreeShape, source: str
) -> Generator[Ask, Any, TokenTree]:
    """The best of all candidates, `budget` nodes with the root at most.

    A probability never grows on the way down, so the best ones have their parents among them.
    """
    depth = reader.max_depth(ctx, shape.depth)
    if depth < 1 or budget < 2:
        return TokenTree(ctx.tokens[-1])
    candidates: list[Candidate] = []
    if "grows" in reader.model.caps and not shape.share:
        root = TokenTree(ctx.tokens[-1])
        reply = yield Ask(root, reader.name, ctx.branch, rows=[0], follow=depth)
        candidates = followed_candidates(reply.followed)
    if not candidates:
        candidates = yield from candidates_by_levels(ctx, reader, depth, shape)
    return best_tree(ctx, candidates, min(shape.total, budget - 1), source)


def followed_candidates(followed: Sequence[tuple[int, float, int]]) -> list[Candidate]:
    """Candidates that a head grew by itself."""
    candidates: list[Candidate] = []
    for token, probability, parent in followed:
        parent_total, level = (
            (candidates[parent].total, candidates[parent].level + 1) if parent >= 0 else (1.0, 0)
        )
        candidates.append(Candidate(token, parent, probability, parent_total * probability, level))
    return candidates


def candidates_by_levels(
    ctx: Context, reader: HeadReader, depth: int, shape: TreeShape
) -> Generator[Ask, Any, list[Candidate]]:
    """All candidates of at most `depth` levels, by one ask a level."""
    levels = Levels(ctx, reader)
    candidates: list[Candidate] = []
    frontier = [-1]
    for _ in range(depth):
        rows = yield from levels.ask_rows(candidates, frontier)
        first_number = len(candidates)
        for parent, row in zip(frontier, rows, strict=True):
            add_candidates(candidates, parent, row, shape.breadth, reader, shape.share)
        ranked_numbers = sorted(
            range(first_number, len(candidates)), key=lambda number: -candidates[number].total
        )
        frontier = ranked_numbers[: shape.breadth]
        # none: rows without a distribution
        if not frontier or candidates[frontier[0]].total < shape.least:
            break
    return candidates


def candidates_by_ranks(
    ctx: Context, reader: HeadReader, rank_paths: Sequence[Path]
) -> Generator[Ask, Any, list[Candidate]]:
    """The candidates at these places, parents first; each is the ranks on the way to it."""
    levels = Levels(ctx, reader)
    candidates: list[Candidate] = []
    numbers: dict[Path, int] = {(): -1}
    for level in range(reader.max_depth(ctx, max(map(len, rank_paths)))):
        level_paths = [rank_path for rank_path in rank_paths if len(rank_path) == level + 1]
        parents = [
            path
            for path in dict.fromkeys(rank_path[:-1] for rank_path in level_paths)
            if path in numbers
        ]
        rows = yield from levels.ask_rows(candidates, [numbers[path] for path in parents])
        for path, row in zip(parents, rows, strict=True):
            ranks = [rank_path[-1] for rank_path in level_paths if rank_path[:-1] == path]
            first_number = len(candidates)
            count = add_candidates(candidates, numbers[path], row, max(ranks) + 1, reader)
            numbers |= {(*path, rank): first_number + rank for rank in range(count)}
    requested_numbers = {numbers[rank_path] for rank_path in rank_paths if rank_path in numbers}
    assert len(requested_numbers) == len(candidates), (
        "ranks of children begin with 0 and leave none out"
    )
    return candidates


def add_candidates(
    candidates: list[Candidate],
    parent: int,
    row: torch.Tensor,
    count: int,
    reader: HeadReader,
    min_share: float = 0.0,
) -> int:
    """Adds the `count` best tokens of a row (Vd,) after a candidate, -1 the root, best first;
    returns how many there are. Those less likely than `min_share` of the best are left out.
    """
    probabilities, token_indices = row.softmax(-1).topk(min(count, len(row)))
    probabilities = probabilities[probabilities >= min_share * probabilities[0]]
    token_indices = token_indices[: len(probabilities)]
    parent_total, level = (
        (candidates[parent].total, candidates[parent].level + 1) if parent >= 0 else (1.0, 0)
    )
    for probability, token_index in zip(
        probabilities.tolist(), token_indices.tolist(), strict=True
    ):
        token = reader.tokens[token_index]
        candidates.append(Candidate(token, parent, probability, parent_total * probability, level))
    return len(probabilities)


class Levels:
    """The tree of nodes that a head is asked about, with the states that it left."""

    def __init__(self, ctx: Context, reader: HeadReader):
        self.ctx, self.reader = ctx, reader
        self.tree = TokenTree(ctx.tokens[-1])
        self.left: list[torch.Tensor] = []  # by each node of the tree
        self.features: list[torch.Tensor] = []  # that each node below the root reads

    def ask_rows(
        self, candidates: Sequence[Candidate], frontier: Sequence[int]
    ) -> Generator[Ask, Any, list[torch.Tensor]]:
        """The rows after these candidates, -1 the root. Those above them that were not asked about
        yet are asked about too.
        """
        rows = [self._node_of(candidates, number) for number in frontier]
        node_features = torch.stack(self.features) if self.features else None
        reply = yield Ask(
            self.tree,
            self.reader.name,
            self.ctx.branch,
            rows=rows,
            taps=(STATE,),
            features=node_features,
        )
        states = dict(zip(reply.new, reply.hidden[STATE], strict=True))
        self.left += [states[node] for node in range(len(self.left), len(self.tree))]
        return list(reply.logits)

    def _node_of(self, candidates: Sequence[Candidate], number: int) -> int:
        """A candidate's node. One that is new with its parent is given what its parent was."""
        if number < 0:
            return 0
        candidate = candidates[number]
        if not candidate.asked:
            parent = self._node_of(candidates, candidate.parent)
            candidate.asked = self.tree.add(parent, candidate.token)
            has_state = parent < len(self.left)
            self.features.append(self.left[parent] if has_state else self.features[parent - 1])
        return candidate.asked


def best_tree(ctx: Context, candidates: Sequence[Candidate], count: int, source: str) -> TokenTree:
    """The `count` candidates of the highest totals, after none that ends the text."""
    ranked_numbers = sorted(range(len(candidates)), key=lambda number: -candidates[number].total)
    return candidate_tree(ctx, candidates, ranked_numbers[:count], source)


def candidate_tree(
    ctx: Context, candidates: Sequence[Candidate], chosen_numbers: Iterable[int], source: str
) -> TokenTree:
    """The tree of candidates with these numbers; those without their parents and those after one
    that ends the text are left out.
    """
    tree = TokenTree(ctx.tokens[-1])
    tree_nodes = {-1: 0}
    for number in sorted(chosen_numbers):
        candidate = candidates[number]
        parent = tree_nodes.get(candidate.parent)
        if parent is None or (parent and ctx.ends(tree, parent)):
            continue
        tree_nodes[number] = tree.add(parent, candidate.token, value=candidate.total, source=source)
    return tree
