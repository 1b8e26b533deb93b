"""A head that takes in drafted tokens through a gate drafts a tree without unlikely siblings.

Two layers over the target's last state and the newest token make a vector. Below, the vector takes
in each drafted token as far as its direction is that of the vector, and is read together with the
token. Children whose probability is under a quarter of their best sibling's are dropped, and of all
nodes the `total` with the likeliest paths are verified.

Paper: Xiao et al., arXiv:2405.00263 (the sampler), arXiv:2408.00264 (the network)
Guarantee: exact
Cost: target 1, head depth
Needs: hidden states of the target; a head made for it
Trains: `foretell train head --kind clover`
Try: --model MODEL --method clover:head=FOLDER --compare
Differs:
- tokens are read as the target's embeddings; the paper takes the rows of its output matrix
- siblings are bounded by `breadth`, and by no share of the probabilities (top-p)
- the budget of nodes is spent on all levels at once, by the probabilities of paths
- of the output matrix the rows of the commonest tokens alone are computed
- the optimiser is Muon
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from foretell.core.settings import Range
from foretell.drafters.heads.base import HeadTreeDrafter


@dataclass(frozen=True)
class Clover(HeadTreeDrafter):
    """Counts of levels and nodes, and which siblings are dropped."""

    head: str = ""  # folder of the head; without one, the head that ships for the target
    depth: Annotated[int, Range(1, 64)] = 5  # levels of the tree
    # nodes of a level that have children, and children of each
    breadth: Annotated[int, Range(1, 64)] = 10
    total: Annotated[int, Range(1, 1023)] = 25  # nodes that are verified at most
    # of their best sibling's probability that children need
    share: Annotated[float, Range(0, 1, open_high=True)] = 0.25
