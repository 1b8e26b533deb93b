"""The protocol of a drafter: a frozen dataclass of hyper-parameters with at most three overrides.

Three lifetimes carry the same names everywhere: the *config* is the dataclass itself; what is
*shared* by all requests of an engine and tenant comes from `ctx.shared(factory)`; the *state* of
one request is what `start` returns. Shared things may change speed, never the distribution of the
output: the verifier sees to that, whatever is proposed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretell.core.settings import Settings
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Message, Outcome, Reply

if TYPE_CHECKING:
    from foretell.core.context import Context
    from foretell.core.model import Model

Drafting = Generator[Message, Any, TokenTree]
Reading = Generator[Message, Any, Reply]
RowsOf = Callable[[TokenTree, tuple[int, ...]], Reading]


@dataclass(slots=True)
class Feedback:
    """A step that a drafter learns from: verified tree, target's reply, what became of it."""

    tree: TokenTree
    reply: Reply
    outcome: Outcome
    tokens: list[int]  # committed by the step
    seconds: float = 0.0  # that drafting took, whatever it asked included


class Drafter(Settings):
    """Proposes trees below the last committed token.

    Override `propose` where no model is needed, else `steps`.
    """

    kind = "drafter"
    models: tuple[str, ...] = ()  # models besides the target that it asks
    needs: tuple[str, ...] = ()  # capabilities of the target, see model.py
    draws = False  # its tokens are samples of distributions (unless the request is greedy)
    whole = False  # its trees are verified as they come, never cut to what is worth its cost
    rule = ""  # name of the one for its trees, unless the user names another; "": verify.default
    # Hidden states it wants in Feedback.reply; negative: from the end. There may be fewer layers.
    taps: tuple[int, ...] = ()

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        """Models of its own, by name, made once an engine for this config: a trained head, say.

        `models` are the engine's. A model whose `feeds` names taps of the target reads its states.
        """
        return {}

    def start(self, ctx: Context) -> Any:
        """The state of a new request."""
        return None

    def propose(self, ctx: Context, state: Any, budget: int) -> TokenTree:
        """A tree of at most `budget` nodes, the root ctx.tokens[-1] counted, ctx.depth deep.

        The root alone: no draft.
        """
        raise NotImplementedError

    def steps(self, ctx: Context, state: Any, budget: int) -> Drafting:
        """Proposes with the help of models: yields Asks on ctx.branch, returns the tree."""
        return self.propose(ctx, state, budget)
        yield Ask(TokenTree(0))  # never reached: makes this a generator

    def target_rows(
        self, ctx: Context, state: Any, tree: TokenTree, taps: tuple[int, ...], rows_of: RowsOf
    ) -> Reading:
        """Rows and taps of the tree that is verified: those of `rows_of`, unless it has rows of its
        own computed beside the nodes, which `tree.beside` counts."""
        return (yield from rows_of(tree, taps))

    def observe(self, ctx: Context, state: Any, step: Feedback) -> None:
        """Called after every step, those without a draft included."""
