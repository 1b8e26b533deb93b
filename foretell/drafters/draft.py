"""A smaller model drafts: one chain, or several independent ones that share their common beginnings.

The draft model continues the text for `length` tokens, each drawn from its own law under the request's sampling
options (at temperature 0: its best token). With `drafts` above 1, that many chains are drawn independently and merged
by prefix, which is a tree drawn with replacement; one draft forward grows all of them by one level.

Paper: Leviathan, Kalman, Matias, arXiv:2211.17192; Chen et al., arXiv:2302.01318; several drafts: Miao et al. (SpecInfer), arXiv:2305.09781
Guarantee: exact
Cost: target 1, draft length
Needs: a draft model with the target's tokenizer
Trains: the draft model, best distilled from the target
Differs: `confidence` may end a chain early, before a token is drawn; the decision sees the law and not the draw
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foretell.drafter import Drafter, Drafting
from foretell.engine import Context
from foretell.errors import BadConfig
from foretell.tree import Law, TokenTree
from foretell.types import Ask


@dataclass(frozen=True)
class Draft(Drafter):
    """Lengths and numbers are counts; `confidence` is a probability."""

    length: int = 4  # tokens of a chain
    drafts: int = 1  # independent chains
    confidence: float = 0.0  # a chain ends where the draft model's best token is less likely than this

    models = ("draft",)

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

    def steps(self, ctx: Context, state: Any, budget: int) -> Drafting:
        tokens, position, sampler = ctx.tokens, len(ctx.output), ctx.sampler
        tree = TokenTree(tokens[-1])
        room = ctx.models["draft"].context - len(tokens)
        level = {0: 1 if sampler.greedy else self.drafts}  # node -> chains that pass through it
        count = 0
        for _ in range(min(self.length, ctx.depth, room, budget - 1)):
            reply = yield Ask(tree, model="draft", rows=list(level))
            below: dict[int, int] = {}
            for (node, chains), row in zip(level.items(), reply.logits, strict=True):
                q = sampler.law(row, [*ctx.output, *tree.words(node)])
                best, token = (float(t) for t in q.max(-1)) if self.confidence or sampler.greedy else (1.0, 0)
                if self.confidence and not sampler.greedy and best < self.confidence:
                    continue
                if sampler.greedy:
                    if self.confidence and float(row.softmax(-1)[int(token)]) < self.confidence:
                        continue
                    below[tree.add(node, int(token), source="draft")] = 1
                    continue
                law = Law(q)
                for _ in range(chains):
                    count += 1
                    drawn = ctx.rng.sample(q, "draft", position, count)
                    child = tree.add(node, drawn, law, source="draft")
                    below[child] = below.get(child, 0) + 1
            level = below
            if not level or len(tree) >= budget:
                break
        return tree
