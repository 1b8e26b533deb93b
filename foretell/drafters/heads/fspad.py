"""A head whose features are gated by the drawn tokens drafts a tree of its likeliest paths.

The head is EAGLE-1's with two additions. The target's state does not tell which token was drawn
from it, so the token gates a product twice as wide, which is added to the state before the layer.
And the estimate of the next state goes through an adapter to the output matrix: training pulls the
estimate alone to the target's state, and the adapter is free to make the distributions right. Nodes
below are given the estimate. The tree is EAGLE-2's: level by level the `breadth` likeliest nodes
get `breadth` children each, and of all of them the `total` likeliest are verified.

Paper: Gui et al., arXiv:2408.15562; the tree is EAGLE-2's, arXiv:2406.16858
Guarantee: exact
Cost: target 1, head depth
Needs: hidden states of the target; a head made for it
Trains: `foretell train head --kind fspad`
Try: --model MODEL --method fspad:head=FOLDER --compare
Differs:
- the authors' code is not public: the gate's and the adapter's matrices and the losses' weights are
our reading of the abstract
- both begin as nothing, so that training begins with EAGLE-1
- the head is computed by torch, also where the C library computes the target
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
class Fspad(HeadTreeDrafter):
    """Counts of levels and nodes; `least` is a probability."""

    head: str = ""  # folder of the head; without one, the head that ships for the target
    depth: Annotated[int, Range(1, 64)] = 8  # levels of the tree
    # nodes of a level that have children, and children of each
    breadth: Annotated[int, Range(1, 64)] = 10
    total: Annotated[int, Range(1, 1023)] = 59  # nodes that are verified at most
    # no level follows one whose best path is less likely
    least: Annotated[float, Range(0, 1, open_high=True)] = 0.0

    in_one_call = True
