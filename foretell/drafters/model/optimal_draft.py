"""A smaller model drafts its best tokens and one drawn from the rest, verified at their optimum.

A node with k children has the k - 1 most probable tokens of the draft model's distribution q, under
the request's sampling options, and one token drawn from q without them. The drawn one is tried
first, then the others: so recursive rejection accepts a child as often as any rule could, with the
target's probability of the chosen tokens + sum over the others of min(p, q'), where q' is what the
one token was drawn from. As in other trees of a draft model, one draft forward gives a whole level,
and all nodes of a level have equally many children. At temperature 0 these are the k best tokens.

Paper: Hu, Zheng, Viswanathan, Chen, Rossi, Wu, Manocha, Huang, Towards Optimal Multi-Draft
Speculative Decoding, arXiv:2502.18779
Guarantee: exact
Cost: target 1, draft length
Needs: a draft model with the target's tokenizer (the vocabularies may be padded to different
sizes); a target that takes trees, unless all branches are 1
Trains: the draft model, best distilled from the target
Differs:
- the paper treats the children of one node; the tree with a number of branches for each level, and
its default of 3 levels of 2, are ours
- where the budget does not suffice, a level leaves one node to each that follows, and has its own
children shared out evenly, the likelier nodes of each parent first
- nothing is drafted after a token that ends the text
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting
from foretell.core.settings import Range
from foretell.core.tree import TokenTree
from foretell.drafters.model.levels import grow_levels
from foretell.drafters.model.reader import DraftReader
from foretell.drafters.model.without_replacement import Urn, best_tokens, likeliest_tokens
from foretell.errors import BadConfig

NAME = "optimal-draft"


@dataclass(frozen=True)
class OptimalDraft(Drafter):
    """All are counts."""

    length: Annotated[int, Range(1, 64)] = 3  # levels of the tree
    # children of each node, level by level; the last number holds for all deeper levels
    branches: tuple[int, ...] = (2,)

    models = ("draft",)
    draws = True

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("tree",) if max(self.branches[: self.length]) > 1 else ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.branches or not all(1 <= count <= 64 for count in self.branches):
            allowed_counts = "numbers between 1 and 64, with spaces between"
            raise BadConfig.field(f"{NAME}:branches", self.branches, allowed_counts)

    def start(self, ctx: Context) -> DraftReader:
        return DraftReader(ctx)

    def steps(self, ctx: Context, reader: DraftReader, budget: int) -> Drafting:
        def add_children(tree: TokenTree, node: int, row: torch.Tensor, count: int) -> list[int]:
            return self._add_children(ctx, tree, node, row, count)

        return (
            yield from grow_levels(ctx, reader, budget, self.length, self.branches, add_children)
        )

    def _add_children(
        self, ctx: Context, tree: TokenTree, node: int, row: torch.Tensor, count: int
    ) -> list[int]:
        """Adds `count` children below `node` by row (V,), fewer where fewer tokens are possible;
        returns their nodes, the chosen ones first.
        """
        output = [*ctx.output, *tree.tokens_to(node)]
        if ctx.sampler.greedy:
            best_pairs = best_tokens(ctx.sampler.scores(row, output), count)
            return [
                self._add_chosen(tree, node, token, probability)
                for token, probability in best_pairs
            ]
        q = ctx.sampler.law(row, output)
        best_pairs = likeliest_tokens(q, count - 1)
        urn = Urn(q, [token for token, _ in best_pairs])
        drawn_nodes: list[int] = []
        if urn.left > 0:
            # As many nodes as there are, no draw of this step had that key. Drawn children are
            # tried, hence added, before chosen ones.
            drawn_nodes.append(urn.add_draw(ctx, tree, node, len(tree), NAME))
        return [
            self._add_chosen(tree, node, token, probability) for token, probability in best_pairs
        ] + drawn_nodes

    def _add_chosen(self, tree: TokenTree, node: int, token: int, probability: float) -> int:
        return tree.add(node, token, value=tree.values[node] * probability, source=NAME)
