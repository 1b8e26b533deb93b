"""A smaller model drafts: one chain, or several independent ones merged by common beginnings.

The draft model continues the text for `length` tokens, each drawn from its own law under the
request's sampling options (at temperature 0: its best token). With `drafts` above 1, that many
chains are drawn independently and merged by prefix, which is a tree drawn with replacement; one
draft forward grows all of them by one level. A chain stops at a token that ends the text, and no
level is begun that could exceed the budget.

Paper: Leviathan, Kalman, Matias, arXiv:2211.17192; Chen et al., arXiv:2302.01318; several drafts:
Miao et al. (SpecInfer), arXiv:2305.09781
Guarantee: exact
Cost: target 1, draft length
Needs: a draft model with the target's tokenizer (the vocabularies may be padded to different sizes)
Trains: the draft model, best distilled from the target
Differs:
- `confidence` may end a chain early, before a token is drawn: the decision sees the law, not the
draw
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting
from foretell.core.tree import Law, TokenTree
from foretell.core.types import Ask
from foretell.errors import BadConfig
from foretell.ops.reading import DraftReader
from foretell.ops.trees import add_drawn


@dataclass(frozen=True)
class Draft(Drafter):
    """Lengths and numbers are counts; `confidence` is a probability."""

    length: int = 4  # tokens of a chain
    drafts: int = 1  # independent chains
    # a chain ends where the draft model's best token is less likely than this
    confidence: float = 0.0

    models = ("draft",)
    draws = whole = True

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("tree",) if self.drafts > 1 else ()

    def __post_init__(self) -> None:
        if not 1 <= self.length <= 256:
            raise BadConfig.field("draft:length", self.length, "between 1 and 256")
        if not 1 <= self.drafts <= 64:
            raise BadConfig.field("draft:drafts", self.drafts, "between 1 and 64")
        if not 0 <= self.confidence < 1:
            raise BadConfig.field("draft:confidence", self.confidence, "at least 0 and below 1")

    def start(self, ctx: Context) -> DraftReader:
        return DraftReader(ctx)

    def steps(self, ctx: Context, reader: DraftReader, budget: int) -> Drafting:
        tree = TokenTree(ctx.tokens[-1])
        if not reader.can_read(ctx.tokens):
            return tree
        chains = min(1 if ctx.sampler.greedy else self.drafts, budget - 1)
        level = {0: chains}  # node -> chains that go on from it
        draws = 0
        for _ in range(min(self.length, reader.depth(ctx))):
            # Decided before anything of the level is drawn, so that no draw can sway it.
            if not any(level.values()) or len(tree) + sum(level.values()) > budget:
                break
            reply = yield Ask(tree, "draft", ctx.branch, rows=list(level))
            below: dict[int, int] = {}
            for (node, count), row in zip(level.items(), reader.rows(reply), strict=True):
                if self.confidence and float(row.softmax(-1).max()) < self.confidence:
                    continue
                for child in self._children(ctx, tree, node, row, count, draws):
                    if not ctx.ends(tree, child):
                        below[child] = below.get(child, 0) + 1
                draws += count
            level = below
        return tree

    def _children(
        self, ctx: Context, tree: TokenTree, node: int, row: torch.Tensor, count: int, draws: int
    ) -> list[int]:
        """Continues `count` chains from `node` by row (V,); `draws` were made in this step before.

        Returns the node of each, the same one for those that drew the same token.
        """
        sampler = ctx.sampler
        output = [*ctx.output, *tree.tokens_to(node)]
        if sampler.greedy:
            scores = sampler.scores(row, output)
            token = int(scores.argmax())
            chance = float((scores[token] - scores.logsumexp(-1)).exp())
            return [tree.add(node, token, value=tree.values[node] * chance, source="draft")]
        q = sampler.law(row, output)
        keys = range(draws + 1, draws + 1 + count)
        tokens = [ctx.rng.sample(q, "draft", len(ctx.output), key) for key in keys]
        return add_drawn(tree, node, Law(q), tokens, "draft")
