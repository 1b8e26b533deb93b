"""Beam search: the likeliest text among those that a few beams find side by side.

In every step each of `width` beams is continued by every token; the best continuations go on. One
that ends among the best `width` is set aside with its log-probability divided by its length to the
power `penalty`. The search is over when `width` texts have ended and the best living beam, as it
stands, is worse than all of them; with early=yes as soon as they have ended. The answer is the best
text, all of them with their scores are in `Output.samples`; which is the best is known at the end
only, so nothing is streamed before. Beams share the rows of what they have in common, and one
forward a step serves all. Penalties, bans and forms act on each beam's own text.

Paper: none; the rules are those of transformers' generate(num_beams=...)
Guarantee: lossy: it looks for the likeliest text, where plain decoding takes the likeliest token
Cost: target 1
Needs: nothing
Trains: nothing
Differs:
- penalties and processors act on logits, as everywhere in foretell, transformers' on
log-probabilities; without them its texts and scores are the same
- a continuation that is impossible is never taken, where transformers fills up with such
- nothing is drafted: a beam's next tokens depend on the other beams after every step
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from foretell.core.context import Context
from foretell.core.settings import Range
from foretell.core.types import Steps
from foretell.strategies.search.beam_search import Beams, refuse_for_search, search_beams
from foretell.strategies.search.beams import Group


@dataclass(frozen=True)
class Beam(Beams):
    """Beam search; greedy decoding with width=1."""

    width: Annotated[int, Range(1, 256)] = 4  # beams
    # power of the length that scores are divided by; 0: the likeliest text
    penalty: Annotated[float, Range(-10, 10)] = 1.0
    early: bool = False  # whether it ends as soon as `width` texts have ended

    draws = False

    def run(self, ctx: Context) -> Steps:
        """Raises BadConfig, before anything runs, for an option that cannot be honoured."""
        refuse_for_search("beam", ctx)
        return search_beams(ctx, [Group(self.width, self.penalty, self.early)], 0.0)
