"""A smaller model drafts several independent chains, which k-sequential selection verifies.

All chains are drawn from the draft model's distribution under the request's sampling options, and
one draft forward grows each of them by one token. Chains with a common beginning share its nodes,
and every node is tried as often as it was drawn. At a node all k chains that have come so far face
one threshold, min(1, p / (r q)), with r as small as is valid for k; those that hold the accepted
token go on together. At temperature 0 there is one chain of best tokens.

Paper: Sun, Suresh, Ro, Beirami, Jain, Yu, SpecTr: Fast Speculative Decoding via Optimal Transport,
arXiv:2310.15141
Guarantee: exact
Cost: target 1, draft length
Needs: a draft model with the target's tokenizer (the vocabularies may be padded to different
sizes); a target that takes trees, unless drafts is 1
Trains: the draft model, best distilled from the target
Differs:
- a budget below drafts times length makes fewer chains, then a shorter one
- nothing is drafted after a token that ends the text
- joined with other drafters by +, or with a rule= that the user names, the tree is verified by
another rule, which its distributions allow as well
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting
from foretell.core.settings import Range
from foretell.core.tree import TokenTree
from foretell.drafters.model.chains import draw_chains
from foretell.drafters.model.reader import DraftReader


@dataclass(frozen=True)
class Spectr(Drafter):
    """Both are counts."""

    length: Annotated[int, Range(1, 64)] = 8  # tokens of a chain
    drafts: Annotated[int, Range(1, 64)] = 8  # independent chains

    models = ("draft",)
    draws = True
    rule = "kseq"

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("tree",) if self.drafts > 1 else ()

    def start(self, ctx: Context) -> DraftReader:
        return DraftReader(ctx)

    def steps(self, ctx: Context, reader: DraftReader, budget: int) -> Drafting:
        tree = TokenTree(ctx.tokens[-1])
        if reader.can_read(ctx.tokens):
            max_chains = 1 if ctx.sampler.greedy else self.drafts
            chain_count = min(max_chains, max(1, (budget - 1) // self.length))
            yield from draw_chains(ctx, reader, tree, chain_count, self.length, budget, "spectr")
        return tree
