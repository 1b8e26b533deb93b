"""A head of the last three tokens under a layer over all of the target's states drafts a tree.

What the last three tokens on the way to a node say together stands for the node's hidden state; one
layer that attends to the target's states of all tokens before makes a better estimate of it. The
estimate takes the state's place for the nodes below, and each level has a matrix of its own that
makes the distribution of it and of the last state that is known. Level by level the `breadth`
likeliest nodes get `breadth` children each, and of all of them the `total` likeliest are verified.

Paper: Zeng et al., arXiv:2402.15758
Guarantee: exact
Cost: target 1, head depth
Needs: hidden states of the target; a head made for it
Trains: `foretell train head --kind chimera`
Try: --model MODEL --method chimera:head=FOLDER --compare
Differs:
- heads share the target's output matrix, cut to its commonest tokens and not trained, after a
matrix each; the paper's have an output matrix each, of twice the width
- the tree grows by the head's own probabilities; the paper's has a fixed shape of 25 nodes
- it learns the target's distributions (KL) and states along the text's own tokens, and through all
levels; the paper's learns from tokens it drafted itself, level by level
- the optimiser is Muon
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from foretell.core.settings import Range
from foretell.drafters.heads.base import HeadTreeDrafter


@dataclass(frozen=True)
class Chimera(HeadTreeDrafter):
    """Counts of levels and nodes."""

    head: str = ""  # folder of the head; without one, the head that ships for the target
    depth: Annotated[int, Range(1, 64)] = 4  # levels of the tree, as many as the head has at most
    # nodes of a level that have children, and children of each
    breadth: Annotated[int, Range(1, 64)] = 10
    total: Annotated[int, Range(1, 1023)] = 25  # nodes that are verified at most
    # no level follows one whose best path is less likely
    least: Annotated[float, Range(0, 1, open_high=True)] = 0.0
