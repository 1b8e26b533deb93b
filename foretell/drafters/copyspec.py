"""Copies from where the text's last few tokens stood first.

Every run of `gamma` tokens of prompt and output is remembered with the place where it first stood.
When the newest `gamma` tokens have stood before, the `copy` tokens behind that place are proposed
as a chain. One length of pattern, long enough that a match is rarely chance, is what sets it apart
from `ngram`.

Paper: Dumitru, Zhang, Yadav, Surdeanu, CopySpec: Accelerating LLMs with Speculative Copy-and-Paste,
arXiv:2502.08923
Guarantee: exact
Cost: target 1
Needs: nothing
Trains: nothing
Differs:
- patterns are compared, where the reference trusts their hash - a copy that reaches the end of the
text goes on into itself - a draft model that takes over where nothing matches is left to
compositions of drafters
"""

from __future__ import annotations

from dataclasses import dataclass, field

from foretell.core.drafter import Drafter
from foretell.core.context import Context
from foretell.core.tree import TokenTree
from foretell.errors import BadConfig
from foretell.ops.lookup import copied


@dataclass
class Seen:
    """`first[pattern]`: position behind its first occurrence, of patterns that end before position
    `done`.
    """

    first: dict[tuple[int, ...], int] = field(default_factory=dict)
    done: int = 0


@dataclass(frozen=True)
class Copyspec(Drafter):
    """Both are counts of tokens."""

    gamma: int = 3  # length of a pattern
    copy: int = 10  # tokens copied

    def __post_init__(self) -> None:
        for name, high in (("gamma", 64), ("copy", 1024)):
            if not 1 <= getattr(self, name) <= high:
                raise BadConfig.field(
                    f"copyspec:{name}", getattr(self, name), f"between 1 and {high}"
                )

    def start(self, ctx: Context) -> Seen:
        return Seen()

    def propose(self, ctx: Context, state: Seen, budget: int) -> TokenTree:
        tokens, tree = ctx.tokens, TokenTree(ctx.tokens[-1])
        # A pattern that ends with the last token has nothing behind it yet: it is looked up, and
        # remembered next time.
        for end in range(max(self.gamma, state.done), len(tokens)):
            state.first.setdefault(tuple(tokens[end - self.gamma : end]), end)
        state.done = len(tokens)
        place = state.first.get(tuple(tokens[-self.gamma :]))
        size = min(self.copy, budget - 1, ctx.depth)
        return (
            tree
            if place is None or size < 1
            else tree.chain(copied(tokens, place, size), "copyspec", match=self.gamma)
        )
