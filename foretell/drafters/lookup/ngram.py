"""Copies what followed the last occurrence of the text's newest tokens.

The longest of the last n, n-1, ..., 1 tokens that stands earlier in prompt or output is looked up
in an index of n-grams, and the k tokens after its most recent earlier place are proposed as a
chain. Where nothing matches nothing is proposed.

Paper: Saxena, Prompt Lookup Decoding, 2023, github.com/apoorvumang/prompt-lookup-decoding; Yang et
al. (LLMA), arXiv:2304.04487
Guarantee: exact
Cost: target 1
Needs: nothing
Trains: nothing
Differs:
- the most recent place is copied from rather than the first
- a copy that reaches the end of the text goes on into itself, so that a text that repeats a few
tokens is drafted k tokens deep
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from foretell.core.context import Context
from foretell.core.drafter import Drafter
from foretell.core.settings import Range
from foretell.core.tree import TokenTree
from foretell.drafters.lookup.lookup import Index, copy_tokens


@dataclass(frozen=True)
class Ngram(Drafter):
    """Both are counts of tokens."""

    n: Annotated[int, Range(1, 64)] = 3  # longest n-gram looked up
    k: Annotated[int, Range(1, 1024)] = 10  # tokens copied

    def start(self, ctx: Context) -> Index:
        return Index(self.n)

    def propose(self, ctx: Context, state: Index, budget: int) -> TokenTree:
        tokens = ctx.tokens
        tree = TokenTree(tokens[-1])
        state.extend(tokens)
        position, n = state.find_longest(tokens)
        copy_length = min(self.k, budget - 1, ctx.depth)
        if n and copy_length > 0:
            tree.chain(copy_tokens(tokens, position, copy_length), "ngram", match=n)
        return tree
