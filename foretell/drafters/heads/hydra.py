"""Heads that read the tokens drafted so far draft a tree of their likeliest paths.

Each level has a head of its own. It reads the target's last state and all tokens from the newest
one down to the node it drafts behind, so that other parents have other children; in Hydra++ a layer
that attends to the text prepares the state. Level by level the `breadth` likeliest nodes get
`breadth` children each, and of all of them the `total` likeliest are verified.

Paper: Ankner et al., arXiv:2402.05109
Guarantee: exact
Cost: target 1, head depth
Needs: hidden states of the target; a head made for it
Trains: `foretell train head --kind hydra`, Hydra++ with `--kind hydra:prefix=yes,blocks=4`
Try: --model MODEL --method hydra:head=FOLDER --compare
Differs:
- the tree grows by the heads' own chances; the paper's has a fixed shape, searched for on a corpus
- heads trained here share the target's output matrix, cut to its commonest tokens and not trained;
the paper's have one each, which begins as the target's, and published heads keep theirs
- heads trained here begin as the target's state with little of the tokens, and Hydra++'s layer
begins as nothing and has no norm behind it; there is no dropout
- the optimiser is Muon
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting
from foretell.core.model import Model
from foretell.drafters.heads.attach import attach_head
from foretell.drafters.heads.head_tree import HeadReader, grow
from foretell.drafters.heads.networks.tree_shape import TreeShape


@dataclass(frozen=True)
class Hydra(Drafter):
    """Counts of levels and nodes."""

    head: str = ""  # folder of the head; without one, the head that ships for the target
    depth: int = 4  # levels of the tree, as many as there are heads at most
    breadth: int = 10  # nodes of a level that have children, and children of each
    total: int = 63  # nodes that are verified at most
    least: float = 0.0  # no level follows one whose best path is less likely

    models = ("head",)
    needs = ("tree",)

    @property
    def shape(self) -> TreeShape:
        return TreeShape(self.depth, self.breadth, self.total, self.least)

    def __post_init__(self) -> None:
        self.shape.check("hydra")

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        return attach_head(models["target"], "hydra", "hydra", self.head)

    def start(self, ctx: Context) -> HeadReader:
        return HeadReader(ctx)

    def steps(self, ctx: Context, reader: HeadReader, budget: int) -> Drafting:
        tree = yield from grow(ctx, reader, budget, self.shape, "hydra")
        return tree
