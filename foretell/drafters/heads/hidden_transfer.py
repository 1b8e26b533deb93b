"""Linear maps make, of a node's state in the middle of the target, rows of the tokens after it.

What enters a layer at a node becomes, by a trained map for each depth, what a row of a later place
enters that layer with. From there on the rows run through the target beside the nodes, and say at
its end what follows i tokens further on. The rows of the node at which a step ends draft the next
tree, as in `ppd`: nodes at which steps seldom end have fewer of them.

Paper: Wu et al., Parallel Decoding via Hidden Transfer for Lossless Large Language Model
Acceleration, arXiv:2404.12022
Guarantee: exact
Cost: target 1, layers 1
Needs: a target whose layers can be entered with given states; maps made for it
Trains: `foretell train head --kind hidden-transfer`
Try: --model MODEL --method hidden-transfer:head=FOLDER --compare
Differs:
- all rows enter at one layer, a third of the way unless the maps were made for another
- the maps learn from the target's distributions alone, not from its states
- trees, and how many rows a node has, are those of `ppd`
- verification is exact at any temperature
"""

from __future__ import annotations

from dataclasses import dataclass

from foretell.drafters.heads.row_drafter import RowsDrafter


@dataclass(frozen=True)
class HiddenTransfer(RowsDrafter):
    """Settings of what stands in a forward."""

    head: str = ""  # folder of the maps; without one, those that ship for the target
    limit: int = 0  # nodes and rows of a forward, the root counted; 0: by their measured cost
    sparse: bool = True  # rows where they promise most; else all of them below every node

    name = "hidden-transfer"

    def __post_init__(self) -> None:
        self.check_limit()
