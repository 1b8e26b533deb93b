"""Copies from where the text's last few tokens stood first.

Every run of `gamma` tokens of prompt and output is remembered with the place where it first stood.
When the newest `gamma` tokens have stood before, the `copy` tokens after that place are proposed as
a chain. One length of pattern, long enough that a match is rarely chance, is what sets it
apart from `ngram`.

Paper: Dumitru, Zhang, Yadav, Surdeanu, CopySpec: Accelerating LLMs with Speculative Copy-and-Paste,
arXiv:2502.08923
Guarantee: exact
Cost: target 1
Needs: nothing
Trains: nothing
Differs:
- patterns are compared, where the reference trusts their hash
- a copy that reaches the end of the text goes on into itself
- a draft model that takes over where nothing matches is left to compositions of drafters
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
class Copyspec(Drafter):
    """Both are counts of tokens."""

    gamma: Annotated[int, Range(1, 64)] = 3  # length of a pattern
    copy: Annotated[int, Range(1, 1024)] = 10  # tokens copied

    def start(self, ctx: Context) -> Index:
        return Index(self.gamma, first_only=True, min_length=self.gamma)

    def propose(self, ctx: Context, state: Index, budget: int) -> TokenTree:
        tokens = ctx.tokens
        tree = TokenTree(tokens[-1])
        state.extend(tokens)
        position = state.find_last(tokens, self.gamma)
        copy_length = min(self.copy, budget - 1, ctx.depth)
        if position >= 0 and copy_length > 0:
            tree.chain(copy_tokens(tokens, position, copy_length), "copyspec", match=self.gamma)
        return tree
