"""A head whose features are gated by the drawn tokens drafts a tree of its likeliest paths.

The head is EAGLE-1's with two additions. The target's state does not tell which token was drawn
from it, so the token gates a product twice as wide, which is added to the state before the layer.
And the estimate of the next state goes through an adapter to the output matrix: training pulls the
estimate alone to the target's state, and the adapter is free to make the laws right. Nodes below
are given the estimate. The tree is EAGLE-2's: level by level the `breadth` likeliest nodes get
`breadth` children each, and of all of them the `total` likeliest are verified.

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
- verification walks the tree by one draw a node, which accepts each token with the same chance as
the paper's trials in turn
- `least` is ours: levels that are hardly ever reached are not worth the head's forward
- the policy may verify fewer nodes than `total`, where more are not worth their time
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
class Fspad(Drafter):
    """Counts of levels and nodes; `least` is a probability."""

    head: str = ""  # folder of the head; without one, the head that ships for the target
    depth: int = 8  # levels of the tree
    breadth: int = 10  # nodes of a level that have children, and children of each
    total: int = 59  # nodes that are verified at most
    least: float = 0.0  # no level follows one whose best path is less likely

    models = ("head",)
    needs = ("tree",)

    def __post_init__(self) -> None:
        self.shape.check("fspad")

    @property
    def shape(self) -> TreeShape:
        return TreeShape(self.depth, self.breadth, self.total, self.least)

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        return attach_head(models["target"], "fspad", "fspad", self.head, self.shape)

    def start(self, ctx: Context) -> HeadReader:
        return HeadReader(ctx)

    def steps(self, ctx: Context, reader: HeadReader, budget: int) -> Drafting:
        tree = yield from grow(ctx, reader, budget, self.shape, "fspad")
        return tree
