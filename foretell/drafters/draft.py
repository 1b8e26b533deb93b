"""A smaller model drafts: one chain, or several independent ones that share their common beginnings.

The draft model continues the text for `length` tokens, each drawn from its own law under the
request's sampling options (at temperature 0: its best token). With `drafts` above 1, that many
chains are drawn independently and merged by prefix, which is a tree drawn with replacement; one
draft forward grows all of them by one level.

Paper: Leviathan, Kalman, Matias, arXiv:2211.17192; Chen et al., arXiv:2302.01318; several drafts:
Miao et al. (SpecInfer), arXiv:2305.09781
Guarantee: exact
Cost: target 1, draft length
Needs: a draft model with the target's tokenizer (the vocabularies may be padded to different sizes)
Trains: the draft model, best distilled from the target
Differs:
- `confidence` may end a chain early, before a token is drawn - the decision sees the law and not
the draw
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from foretell.core.drafter import Drafter, Drafting
from foretell.core.context import Context
from foretell.core.tree import Law, TokenTree
from foretell.core.types import Ask
from foretell.errors import BadConfig


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

    def start(self, ctx: Context) -> dict[str, int]:
        return {
            "known": 0
        }  # tokens of the text that are sure to be in the draft model's vocabulary

    def steps(self, ctx: Context, state: dict[str, int], budget: int) -> Drafting:
        tokens, sampler, tree = ctx.tokens, ctx.sampler, TokenTree(ctx.tokens[-1])
        model, vocab = ctx.models["draft"], ctx.models["target"].vocab
        if any(token >= model.vocab for token in tokens[state["known"] :]):
            # relatives pad their vocabularies differently; this text is beyond the smaller one
            return tree
        state["known"] = len(tokens)
        level = {0: 1 if sampler.greedy else self.drafts}  # node -> chains that pass through it
        draws = 0
        for _ in range(min(self.length, ctx.depth, model.context - len(tokens), budget - 1)):
            reply = yield Ask(tree, model="draft", rows=list(level))
            below: dict[int, int] = {}
            for (node, chains), row in zip(level.items(), reply.logits, strict=True):
                row = F.pad(row[:vocab], (0, max(0, vocab - len(row))), value=-torch.inf)
                if self.confidence and float(row.softmax(-1).max()) < self.confidence:
                    continue
                q = sampler.law(row, [*ctx.output, *tree.tokens_to(node)])
                if sampler.greedy:
                    below[tree.add(node, int(q.argmax()), source="draft")] = 1
                    continue
                law = Law(q)
                for _ in range(chains):
                    draws += 1
                    drawn = ctx.rng.sample(q, "draft", len(ctx.output), draws)
                    child = tree.add(node, drawn, law, source="draft")
                    below[child] = below.get(child, 0) + 1
            level = below
            if not level or len(tree) >= budget:
                break
        return tree
