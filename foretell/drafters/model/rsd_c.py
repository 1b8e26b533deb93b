"""A smaller model drafts a tree: the children of every node are different tokens.

At each node of depth d - 1 the draft model's distribution, under the request's sampling options,
gives `branches[d - 1]` tokens without replacement, in the order in which they are tried: after a
refusal the next child is tried against what the refused one left of the target's distribution. One
draft forward gives a whole level. Where a token is refused, it is not proposed again, so more is
accepted than of independent chains. At temperature 0 the best tokens take the place of draws.

Paper: Jeon et al., Recursive Speculative Decoding: Accelerating LLM Inference via Sampling Without
Replacement (RSD-C), arXiv:2402.14160
Guarantee: exact
Cost: target 1, draft length
Needs: a draft model with the target's tokenizer; a target that takes trees, unless all branches
are 1
Trains: the draft model, best distilled from the target
Differs:
- the defaults, length 3 and branches 2, are ours: the paper tries several sizes of trees
- children are drawn one after the other, which has the distribution and the order of Gumbel-top-k
- where the budget does not suffice, a level leaves one node to each that follows, and has its own
children shared out evenly
- nothing is drafted after a token that ends the text, and others get what that saves
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
from foretell.drafters.model.without_replacement import Urn, best_tokens
from foretell.errors import BadConfig


@dataclass(frozen=True)
class RsdC(Drafter):
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
            raise BadConfig.field("rsd-c:branches", self.branches, allowed_counts)

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
        returns their nodes.
        """
        output = [*ctx.output, *tree.tokens_to(node)]
        child_nodes: list[int] = []
        if ctx.sampler.greedy:
            for token, probability in best_tokens(ctx.sampler.scores(row, output), count):
                value = tree.values[node] * probability
                child_nodes.append(tree.add(node, token, value=value, source="rsd-c"))
            return child_nodes
        urn = Urn(ctx.sampler.law(row, output))
        while len(child_nodes) < count and urn.left > 0:
            # As many draws were made in this step as there are nodes.
            child_nodes.append(urn.add_draw(ctx, tree, node, len(tree), "rsd-c"))
        return child_nodes
