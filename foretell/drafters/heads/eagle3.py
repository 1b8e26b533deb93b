"""A head that reads three of the target's hidden states drafts a tree of its likeliest paths.

The head is one decoder layer over each token and the state of the token before it, which is a
mixture of a low, a middle and a high layer of the target; below the last token it goes on with its
own states, as it did in training. Level by level the `breadth` likeliest nodes get `breadth`
children each, and of all of them the `total` likeliest are verified. The head's tokens are the
target's commonest, and its output matrix has the target's rows.

Paper: Li et al., arXiv:2503.01840; the tree is EAGLE-2's, arXiv:2406.16858
Guarantee: exact
Cost: target 1, head depth
Needs: hidden states of the target; a head made for it
Trains: `foretell train head --kind eagle3`
Try: --model smollm2 --method eagle3 --compare
Differs:
- the output matrix is cut from the target's and not trained; the paper trains one of its own
- verification walks the tree by one draw a node, which accepts each token with the same probability
as the paper's trials in turn
- `least` is ours: levels that are hardly ever reached are not worth the head's forward
- `reads` is ours: of a long prompt the last tokens tell the head nearly as much as all of them
- the policy may verify fewer nodes than `total`, where more are not worth their time
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from foretell.core.settings import Range
from foretell.drafters.heads.base import HeadTreeDrafter


@dataclass(frozen=True)
class Eagle3(HeadTreeDrafter):
    """Counts of levels and nodes; `least` is a probability."""

    head: str = ""  # folder of the head; without one, the head that ships for the target
    depth: Annotated[int, Range(1, 64)] = 8  # levels of the tree
    # nodes of a level that have children, and children of each
    breadth: Annotated[int, Range(1, 64)] = 10
    total: Annotated[int, Range(1, 1023)] = 59  # nodes that are verified at most
    # no level follows one whose best path is less likely
    least: Annotated[float, Range(0, 1, open_high=True)] = 0.0
    # tokens of a prompt that the head reads, the last ones; 0: all of them
    reads: Annotated[int, Range(0)] = 0

    in_one_call = True
