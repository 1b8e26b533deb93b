"""A head that foretells the target's next state drafts a tree of a fixed shape.

The head is one decoder layer over each token and the target's last state before it, which gives an
estimate of the next state, and the target's output matrix makes tokens of that. The tree is the
paper's: 25 places, five levels deep, each named by the ranks of the tokens on the way to it. One
forward of the head computes a level.

Paper: Li et al., arXiv:2401.15077
Guarantee: exact
Cost: target 1, head 5
Needs: hidden states of the target; a head made for it
Trains: `foretell train head --kind eagle`
Try: --model MODEL --method eagle:head=FOLDER --compare
Differs:
- of the output matrix the rows of the commonest tokens alone are computed
- verification walks the tree by one draw a node, which accepts each token with the same probability
as the paper's trials in turn
- the policy may verify fewer nodes, where more are not worth their time
"""

from __future__ import annotations

from dataclasses import dataclass

from foretell.core.context import Context
from foretell.core.drafter import Drafting
from foretell.drafters.heads.base import HeadDrafter
from foretell.drafters.heads.head_tree import HeadReader, best_tree, candidates_by_ranks

# Of each place the ranks on the way to it, as the authors' code has them.
PLACES = (
    *((0,), (1,), (2,), (3,)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)


@dataclass(frozen=True)
class Eagle(HeadDrafter):
    """The tree has no settings."""

    head: str = ""  # folder of the head; without one, the head that ships for the target

    def steps(self, ctx: Context, reader: HeadReader, budget: int) -> Drafting:
        candidates = yield from candidates_by_ranks(ctx, reader, PLACES)
        return best_tree(ctx, candidates, budget - 1, "eagle")
