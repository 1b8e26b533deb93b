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
- verification walks the tree by one draw a node, which accepts each token with the same chance as
the paper's trials in turn
- `least` is ours: levels that are hardly ever reached are not worth the head's forward
- `reads` is ours: of a long prompt the last tokens tell the head nearly as much as all of them
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
class Eagle3(Drafter):
    """Counts of levels and nodes; `least` is a probability."""

    head: str = ""  # folder of the head; without one, the head that ships for the target
    depth: int = 8  # levels of the tree
    breadth: int = 10  # nodes of a level that have children, and children of each
    total: int = 59  # nodes that are verified at most
    least: float = 0.0  # no level follows one whose best path is less likely
    reads: int = 0  # tokens of a prompt that the head reads, the last ones; 0: all of them

    models = ("head",)
    needs = ("tree",)

    def __post_init__(self) -> None:
        self.shape.check("eagle3")

    @property
    def shape(self) -> TreeShape:
        return TreeShape(self.depth, self.breadth, self.total, self.least, reads=self.reads)

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        return attach_head(models["target"], "eagle3", "eagle3", self.head, self.shape)

    def start(self, ctx: Context) -> HeadReader:
        return HeadReader(ctx)

    def steps(self, ctx: Context, reader: HeadReader, budget: int) -> Drafting:
        tree = yield from grow(ctx, reader, budget, self.shape, "eagle3")
        return tree
