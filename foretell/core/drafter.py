"""The protocol of a drafter: a frozen dataclass of hyper-parameters with at most three overrides.

Three lifetimes carry the same names everywhere: the *config* is the dataclass itself; what is
*shared* by all requests of an engine and tenant comes from `ctx.shared(factory)`; the *state* of
one request is what `start` returns. Shared things may change speed, never output: the verifier sees
to that, whatever is proposed.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Outcome, Reply

if TYPE_CHECKING:
    from foretell.core.engine import Context

Drafting = Generator[Ask | list[Ask], Any, TokenTree]


@dataclass(slots=True)
class Step:
    """What a drafter learns from: the verified tree, the target's reply to all its nodes, what
    became of it.
    """

    tree: TokenTree
    reply: Reply
    outcome: Outcome
    tokens: list[int]  # committed by the step


class Drafter:
    """Proposes trees below the last committed token. Override `propose` where no model is needed,
    else `steps`.
    """

    kind = "drafter"
    models: tuple[str, ...] = ()  # models besides the target that it asks
    needs: tuple[
        str, ...
    ] = ()  # capabilities of the target: `tree` if it branches, `rows` if it learns from logits
    draws = False  # its tokens are samples of laws (unless the request is greedy)
    whole = False  # its trees are verified as they come, never cut to what is worth its cost
    taps: tuple[
        int, ...
    ] = ()  # the target's hidden states it wants in Step.reply; negative: from the end

    def start(self, ctx: Context) -> Any:
        """The state of a new request."""
        return None

    def propose(self, ctx: Context, state: Any, budget: int) -> TokenTree:
        """A tree of at most `budget` nodes below ctx.tokens[-1], at most ctx.depth deep. The root
        alone: no draft.
        """
        raise NotImplementedError

    def steps(self, ctx: Context, state: Any, budget: int) -> Drafting:
        """The same for a drafter that asks models: yields Asks, receives Replies, returns the
        tree.
        """
        return self.propose(ctx, state, budget)
        yield  # makes this a generator

    def observe(self, ctx: Context, state: Any, step: Step) -> None:
        """Called after every step, those without a draft included."""
