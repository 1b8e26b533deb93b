"""Trained rows that follow a text's end in the target's own forward draft the next tokens.

Below each node that the target verifies hang up to three rows without a token, whose embeddings are
trained and the same everywhere. Row i says, through the whole target, what follows i tokens further
on. The rows of the node at which a step ends draft the next tree, which is as deep as that node had
rows: there is a tree for each number. Nodes at which steps seldom end have fewer rows, and how many
nodes and rows a forward has is what brings most tokens for its measured time.

Paper: Chen et al., Hardware-Aware Parallel Prompt Decoding for Memory-Efficient Acceleration of LLM
Inference, arXiv:2405.18628
Guarantee: exact
Cost: target 1
Needs: a target whose layers can be entered with given states; rows made for it
Trains: `foretell train head --kind ppd`
Try: --model MODEL --method ppd:head=FOLDER --compare
Differs:
- there is one row a depth (the paper's ensembles of rows brought no tree of their own)
- verification is exact at any temperature
- rows learn at many places of a text at once
- the sizes of all states' trees are searched, that of state 1 too
- without counted shares, the r-th rank is right 1/r^2 as often as the first
"""

from __future__ import annotations

from dataclasses import dataclass

from foretell.drafters.heads.row_drafter import RowsDrafter


@dataclass(frozen=True)
class Ppd(RowsDrafter):
    """Settings of what stands in a forward."""

    head: str = ""  # folder of the rows; without one, those that ship for the target
    limit: int = 0  # nodes and rows of a forward, the root counted; 0: by their measured cost
    sparse: bool = True  # rows where they promise most; else all of them below every node

    name = "ppd"

    def __post_init__(self) -> None:
        self.check_limit()
