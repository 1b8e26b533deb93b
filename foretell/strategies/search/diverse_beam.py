"""Diverse beam search: groups of beams, of which the later ones avoid what the earlier ones chose.

`width` beams are divided into `groups`, which advance in turn. Of a group's continuations by a
token, `diversity` is taken from the score for every beam of an earlier group that has just chosen
this token at the same place (Hamming diversity). Within a group it is beam search by these scores.
The answer is the text that is the likeliest by itself, all texts with their scores are in
`Output.samples`.

Paper: Vijayakumar et al., Diverse Beam Search: Decoding Diverse Solutions from Neural Sequence
Models, arXiv:1610.02424
Guarantee: lossy: it looks for likely texts that differ, where plain decoding takes the likeliest
token
Cost: target 1
Needs: nothing
Trains: nothing
Differs:
- texts are told in the order of their own log-probability by length, the released code's by the
score that holds what was taken
- a group is over by the rule of `beam`, the released code runs to a fixed length
- groups advance one after the other within a step, where the released code staggers them by a step
each; the scores are the same
- Hamming diversity only
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from foretell.core.context import Context
from foretell.core.settings import Range
from foretell.core.types import Steps
from foretell.errors import BadConfig
from foretell.strategies.search.beam_search import Beams, refuse_for_search, search_beams
from foretell.strategies.search.beams import Group


@dataclass(frozen=True)
class DiverseBeam(Beams):
    """Beam search with groups=1; the released example has width=10, groups=5."""

    width: Annotated[int, Range(1, 256)] = 6  # beams in all
    groups: Annotated[int, Range(1, 256)] = 3
    diversity: Annotated[float, Range(0, 1_000_000_000)] = 0.5  # of log-probability
    # power of the length that scores are divided by
    penalty: Annotated[float, Range(-10, 10)] = 1.0

    draws = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.groups:
            allowed_groups = f"a number that divides width={self.width}"
            raise BadConfig.field("diverse-beam:groups", self.groups, allowed_groups)

    def run(self, ctx: Context) -> Steps:
        """Raises BadConfig, before anything runs, for an option that cannot be honoured."""
        refuse_for_search("diverse-beam", ctx)
        group_width = self.width // self.groups
        return search_beams(
            ctx, [Group(group_width, self.penalty) for _ in range(self.groups)], self.diversity
        )
