"""A head that takes in drafted tokens through a gate drafts a tree without unlikely siblings.

Two layers over the target's last state and the newest token make a vector. Below, the vector takes
in each drafted token as far as its direction is that of the vector, and is read together with the
token. Children whose chance is under a quarter of their best sibling's are dropped, and of all
nodes the `total` with the likeliest paths are verified.

Paper: Xiao et al., arXiv:2405.00263 (the sampler), arXiv:2408.00264 (the network)
Guarantee: exact
Cost: target 1, head depth
Needs: hidden states of the target; a head made for it
Trains: `foretell train head --kind clover`
Try: --model MODEL --method clover:head=FOLDER --compare
Differs:
- tokens are read as the target's embeddings; the paper takes the rows of its output matrix
- siblings are bounded by `breadth`, and by no share of the chances (top-p)
- the budget of nodes is spent on all levels at once, by the chances of paths
- of the output matrix the rows of the commonest tokens alone are computed
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
class Clover(Drafter):
    """Counts of levels and nodes, and which siblings are dropped."""

    head: str = ""  # folder of the head; without one, the head that ships for the target
    depth: int = 5  # levels of the tree
    breadth: int = 10  # nodes of a level that have children, and children of each
    total: int = 25  # nodes that are verified at most
    share: float = 0.25  # of their best sibling's chance that children need

    models = ("head",)
    needs = ("tree",)

    @property
    def shape(self) -> TreeShape:
        return TreeShape(self.depth, self.breadth, self.total, share=self.share)

    def __post_init__(self) -> None:
        self.shape.check("clover")

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        return attach_head(models["target"], "clover", "clover", self.head)

    def start(self, ctx: Context) -> HeadReader:
        return HeadReader(ctx)

    def steps(self, ctx: Context, reader: HeadReader, budget: int) -> Drafting:
        tree = yield from grow(ctx, reader, budget, self.shape, "clover")
        return tree
