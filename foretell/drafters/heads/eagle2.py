"""A head that foretells the target's next state drafts a tree of its likeliest paths.

The head is EAGLE-1's: one decoder layer over each token and the target's last state before it,
which gives an estimate of the next state, and the target's output matrix makes tokens of that.
Level by level the `breadth` likeliest nodes get `breadth` children each, and of all of them the
`total` likeliest are verified.

Paper: Li et al., arXiv:2406.16858; the head is EAGLE-1's, arXiv:2401.15077
Guarantee: exact
Cost: target 1, head depth
Needs: hidden states of the target; a head made for it
Trains: `foretell train head --kind eagle`
Try: --model MODEL --method eagle2:head=FOLDER --compare
Differs:
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
class Eagle2(Drafter):
    """Counts of levels and nodes; `least` is a probability."""

    head: str = ""  # folder of the head; without one, the head that ships for the target
    depth: int = 8  # levels of the tree
    breadth: int = 10  # nodes of a level that have children, and children of each
    total: int = 59  # nodes that are verified at most
    least: float = 0.0  # no level follows one whose best path is less likely

    models = ("head",)
    needs = ("tree",)

    def __post_init__(self) -> None:
        self.shape.check("eagle2")

    @property
    def shape(self) -> TreeShape:
        return TreeShape(self.depth, self.breadth, self.total, self.least)

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        return attach_head(models["target"], "eagle2", "eagle", self.head, self.shape)

    def start(self, ctx: Context) -> HeadReader:
        return HeadReader(ctx)

    def steps(self, ctx: Context, reader: HeadReader, budget: int) -> Drafting:
        tree = yield from grow(ctx, reader, budget, self.shape, "eagle2")
        return tree
