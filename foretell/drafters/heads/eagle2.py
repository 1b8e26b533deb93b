"""A head that foretells the target's next state drafts a tree of its likeliest paths.

The head is EAGLE-1's: one decoder layer over each token and the target's last state before it,
which gives an estimate of the next state, and the target's output matrix makes tokens of that.
Level by level the `breadth` likeliest nodes get `breadth` children each, and of all of them the
`total` likeliest are verified.

Paper: Li et al., arXiv:2406.16858; the head is EAGLE-1's, arXiv:2401.15077
Guarantee: exact
Cost: target 1, head depth
Needs: hidden states of the target; a head made for it
Trains: `foretell train head --kind eagle`
Try: --model MODEL --method eagle2:head=FOLDER --compare
Differs:
- of the output matrix the rows of the commonest tokens alone are computed
- verification walks the tree by one draw a node, which accepts each token with the same probability
as the paper's trials in turn
- `least` is ours: levels that are hardly ever reached are not worth the head's forward
- the policy may verify fewer nodes than `total`, where more are not worth their time
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from foretell.core.settings import Range
from foretell.drafters.heads.base import HeadTreeDrafter


@dataclass(frozen=True)
class Eagle2(HeadTreeDrafter):
    """Counts of levels and nodes; `least` is a probability."""

    head: str = ""  # folder of the head; without one, the head that ships for the target
    depth: Annotated[int, Range(1, 64)] = 8  # levels of the tree
    # nodes of a level that have children, and children of each
    breadth: Annotated[int, Range(1, 64)] = 10
    total: Annotated[int, Range(1, 1023)] = 59  # nodes that are verified at most
    # no level follows one whose best path is less likely
    least: Annotated[float, Range(0, 1, open_high=True)] = 0.0

    network = "eagle"
    in_one_call = True
