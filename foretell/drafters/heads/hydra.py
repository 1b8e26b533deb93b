"""Heads that read the tokens drafted so far draft a tree of their likeliest paths.

Each level has a head of its own. It reads the target's last state and all tokens from the newest
one down to the node it drafts after, so that other parents have other children; in Hydra++ a layer
that attends to the text prepares the state. Level by level the `breadth` likeliest nodes get
`breadth` children each, and of all of them the `total` likeliest are verified.

Paper: Ankner et al., arXiv:2402.05109
Guarantee: exact
Cost: target 1, head depth
Needs: hidden states of the target; a head made for it
Trains: `foretell train head --kind hydra`, Hydra++ with `--kind hydra:prefix=yes,blocks=4`
Try: --model MODEL --method hydra:head=FOLDER --compare
Differs:
- the tree grows by the heads' own probabilities; the paper's has a fixed shape, searched for on a
corpus
- heads trained here share the target's output matrix, cut to its commonest tokens and not trained;
the paper's have one each, which begins as the target's, and published heads keep theirs
- heads trained here begin as the target's state with little of the tokens, and Hydra++'s layer
begins as nothing and has no norm after it; there is no dropout
- the optimiser is Muon
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from foretell.core.settings import Range
from foretell.drafters.heads.base import HeadTreeDrafter


@dataclass(frozen=True)
class Hydra(HeadTreeDrafter):
    """Counts of levels and nodes."""

    head: str = ""  # folder of the head; without one, the head that ships for the target
    # levels of the tree, as many as there are heads at most
    depth: Annotated[int, Range(1, 64)] = 4
    # nodes of a level that have children, and children of each
    breadth: Annotated[int, Range(1, 64)] = 10
    total: Annotated[int, Range(1, 1023)] = 63  # nodes that are verified at most
    # no level follows one whose best path is less likely
    least: Annotated[float, Range(0, 1, open_high=True)] = 0.0
