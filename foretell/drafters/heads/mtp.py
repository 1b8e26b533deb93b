"""One small layer, used again for every token, drafts from the target's last hidden state.

The layer reads the last token beside the normed state before it, and gives the state that the
target's output matrix reads; that state and the token it chose go through the same layer again. So
it was trained: to predict three tokens ahead, the nearest counting most. A node has the `breadth`
best tokens for children, and of all of them the `total` likeliest are verified; breadth=1,total=3
is the paper's chain.

Paper: DeepSeek-AI, DeepSeek-V3 Technical Report, arXiv:2412.19437; its layer used again for every
token: Cai et al., FastMTP, arXiv:2509.18362
Guarantee: exact
Cost: target 1, head depth
Needs: hidden states of the target; a head made for it
Trains: `foretell train head --kind mtp`
Try: --model MODEL --method mtp:head=FOLDER --compare
Differs:
- the head is trained for a finished target; DeepSeek trains it with the target
- it learns the target's laws (KL); the papers' learns the text's next tokens
- in training a row sees, of the deeper steps, its own rows alone, as it will when it drafts; in the
papers it sees all earlier rows of its step
- it reads the target's last state behind the last norm, as its own are; published heads differ in
this, and are loaded with their model's own layer and norms
- of the output matrix the rows of the commonest tokens alone are computed; a head that came with
its model drafts all
- the tree is ours; the papers draft a chain
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
class Mtp(Drafter):
    """Counts of levels and nodes; `least` is a probability."""

    head: str = ""  # folder of the head; without one, the head that ships for the target
    depth: int = 3  # tokens ahead
    breadth: int = 2  # nodes of a level that have children, and children of each
    total: int = 4  # nodes that are verified at most
    least: float = 0.0  # no level follows one whose best path is less likely

    models = ("head",)
    needs = ("tree",)

    def __post_init__(self) -> None:
        self.shape.check("mtp")

    @property
    def shape(self) -> TreeShape:
        return TreeShape(self.depth, self.breadth, self.total, self.least)

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        return attach_head(models["target"], "mtp", "mtp", self.head, self.shape)

    def start(self, ctx: Context) -> HeadReader:
        return HeadReader(ctx)

    def steps(self, ctx: Context, reader: HeadReader, budget: int) -> Drafting:
        tree = yield from grow(ctx, reader, budget, self.shape, "mtp")
        return tree
