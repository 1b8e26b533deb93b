"""A head of the last three tokens under a layer over all of the target's states drafts a tree.

What the last three tokens on the way to a node say together stands for the node's hidden state; one
layer that attends to the target's states of all tokens before makes a better estimate of it. The
estimate takes the state's place for the nodes below, and each level has a matrix of its own that
makes the law of it and of the last state that is known. Level by level the `breadth` likeliest
nodes get `breadth` children each, and of all of them the `total` likeliest are verified.

Paper: Zeng et al., arXiv:2402.15758
Guarantee: exact
Cost: target 1, head depth
Needs: hidden states of the target; a head made for it
Trains: `foretell train head --kind chimera`
Try: --model MODEL --method chimera:head=FOLDER --compare
Differs:
- heads share the target's output matrix, cut to its commonest tokens and not trained, behind a
matrix each; the paper's have an output matrix each, of twice the width
- the tree grows by the head's own chances; the paper's has a fixed shape of 25 nodes
- it learns the target's laws (KL) and states along the text's own tokens, and through all levels;
the paper's learns from tokens it drafted itself, level by level
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
class Chimera(Drafter):
    """Counts of levels and nodes."""

    head: str = ""  # folder of the head; without one, the head that ships for the target
    depth: int = 4  # levels of the tree, as many as the head has at most
    breadth: int = 10  # nodes of a level that have children, and children of each
    total: int = 25  # nodes that are verified at most
    least: float = 0.0  # no level follows one whose best path is less likely

    models = ("head",)
    needs = ("tree",)

    @property
    def shape(self) -> TreeShape:
        return TreeShape(self.depth, self.breadth, self.total, self.least)

    def __post_init__(self) -> None:
        self.shape.check("chimera")

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        return attach_head(models["target"], "chimera", "chimera", self.head)

    def start(self, ctx: Context) -> HeadReader:
        return HeadReader(ctx)

    def steps(self, ctx: Context, reader: HeadReader, budget: int) -> Drafting:
        tree = yield from grow(ctx, reader, budget, self.shape, "chimera")
        return tree
