"""Drafters whose rows run through the target beside the nodes that it verifies, see
drafters/heads/extra_rows.py.

What the rows of the node at which a step ended say is the next draft: its tree is chosen by how
many rows that node had. Where it had none (the first step, or one after a pause) the root alone is
verified, with all its rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from foretell.core.drafter import Drafter, Feedback, Reading, RowsOf
from foretell.core.refusals import refuse_source
from foretell.core.tree import TokenTree
from foretell.drafters.heads.attach import attach_head
from foretell.drafters.heads.extra_rows import Beside, read_beside
from foretell.drafters.heads.networks.ranks import typical_table
from foretell.drafters.heads.prompt_trees import (
    LIMITS,
    StateTrees,
    best_limit,
    best_trees,
    full_trees,
)
from foretell.errors import BadConfig

if TYPE_CHECKING:
    from foretell.core.context import Context
    from foretell.core.model import Model

USUAL = typical_table((0.4, 0.25, 0.15))  # without counted shares: near those of trained rows


@dataclass
class RowsState:
    """State of one request."""

    rows: Any  # the head, drafters.heads.networks.anchored.Rows
    table: tuple[tuple[float, ...], ...]  # by row and rank, how often it is right
    laws: torch.Tensor | None = None  # (n, V) of the node at which the last step ended
    counts: list[int] = field(default_factory=list)  # rows below each node of the tree
    below: list[torch.Tensor] = field(default_factory=list)  # what these said, by node


class RowsDrafter(Drafter):
    """The base of such a drafter, which says its name and has these fields."""

    needs = ("tree", "layers")
    whole = True
    name: ClassVar[str]  # of the method, and of the head's kind
    head: str  # folder of the head
    limit: int  # nodes and rows of a forward, the root counted; 0: by their cost
    sparse: bool  # rows where they promise most; else as many as there are below every node

    def check_limit(self) -> None:
        """Raises BadConfig."""
        if self.limit and not 4 <= self.limit <= 1024:
            allowed_range = "between 4 and 1024, or 0 (by their cost)"
            raise BadConfig.field(f"{self.name}:limit", self.limit, allowed_range)

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        return attach_head(models["target"], self.name, self.name, self.head)

    def start(self, ctx: Context) -> RowsState:
        refuse_source(self.name, ctx.request)
        rows: Any = ctx.models["head"]
        shares: Sequence[Sequence[float]] = (rows.ranks or USUAL)[: rows.deepest]
        vocab = ctx.models["target"].vocab
        return RowsState(rows, tuple(tuple(row[:vocab]) for row in shares))

    def propose(self, ctx: Context, state: RowsState, budget: int) -> TokenTree:
        tree = TokenTree(ctx.tokens[-1])
        if budget < 2 or ctx.depth < 1:
            return tree
        known_rows = 0 if state.laws is None else min(len(state.laws), len(state.table))
        state.counts = [len(state.table)]
        if known_rows:
            plan = self.trees_of_size(ctx, state, budget).trees[known_rows - 1]
            assert state.laws is not None
            rank_count = len(state.table[0])
            best_ranks = state.laws[:known_rows].topk(rank_count, -1).indices.tolist()
            nodes: dict[tuple[int, ...], int] = {(): 0}
            path_chances: dict[tuple[int, ...], float] = {(): 1.0}
            state.counts = [plan.counts[0]]
            for path, count in zip(plan.paths, plan.counts[1:], strict=True):
                parent = nodes.get(path[:-1])
                path_depth = len(path)
                if parent is None or path_depth > ctx.depth or (parent and ctx.ends(tree, parent)):
                    continue
                path_chances[path] = path_chances[path[:-1]] * state.table[path_depth - 1][path[-1]]
                token = best_ranks[path_depth - 1][path[-1]]
                nodes[path] = tree.add(parent, token, value=path_chances[path], source=self.name)
                state.counts.append(count)
        for node, count in enumerate(state.counts):
            # Of the next draft, as deep as the text has room for; none follows an end.
            free_depth = ctx.depth - tree.depths[node] - 1
            ends = node > 0 and ctx.ends(tree, node)
            state.counts[node] = 0 if ends else max(0, min(count, free_depth))
        tree.beside = sum(state.counts)
        return tree

    def trees_of_size(self, ctx: Context, state: RowsState, budget: int) -> StateTrees:
        """Trees of this step's size. Where time may not decide it, all nodes may have all rows."""
        make_trees = best_trees if self.sparse else full_trees
        max_size = LIMITS[-1]
        if ctx.request.room is not None:
            max_size = min(max_size, ctx.request.room.nodes + 1)
        if self.limit or not ctx.timed:
            limit = self.limit or (1 + len(state.table)) * budget
            limit = min(limit, max(max_size, self.limit))
            return make_trees(state.table, limit, min(budget, limit // 2) - 1)
        step_seconds = ctx.shares(max_size)
        limits = [limit for limit in LIMITS if limit <= max_size] or [max_size]
        tree_sets = [
            make_trees(state.table, limit, min(budget, limit // 2) - 1) for limit in limits
        ]
        size_seconds = [float(step_seconds[limit - 1]) for limit in limits]
        return tree_sets[best_limit([trees.tokens for trees in tree_sets], size_seconds)]

    def target_rows(
        self,
        ctx: Context,
        state: RowsState,
        tree: TokenTree,
        taps: tuple[int, ...],
        rows_of: RowsOf,
    ) -> Reading:
        state.below = []
        if not tree.beside:
            return (yield from rows_of(tree, taps))

        def row_vectors(states: torch.Tensor | None) -> torch.Tensor:
            tokens = [tree.tokens[node] for node in extra_rows.nodes]
            entering_rows: torch.Tensor = state.rows.entering(extra_rows.places, tokens, states)
            return entering_rows

        extra_rows = Beside(state.counts, row_vectors, state.rows.entry)
        reply, state.below = yield from read_beside(ctx, tree, extra_rows, taps=taps)
        return reply

    def observe(self, ctx: Context, state: RowsState, step: Feedback) -> None:
        node = step.outcome.path[-1] if step.outcome.path else 0
        state.laws = state.below[node] if state.below and len(state.below[node]) else None
