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
- it learns the target's distributions (KL); the papers' learns the text's next tokens
- in training a row sees, of the deeper steps, its own rows alone, as it will when it drafts; in the
papers it sees all earlier rows of its step
- it reads the target's last state after the last norm, as its own are; published heads differ in
this, and are loaded with their model's own layer and norms
- of the output matrix the rows of the commonest tokens alone are computed; a head that came with
its model drafts all
- the tree is ours; the papers draft a chain
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from foretell.core.settings import Range
from foretell.drafters.heads.base import HeadTreeDrafter


@dataclass(frozen=True)
class Mtp(HeadTreeDrafter):
    """Counts of levels and nodes; `least` is a probability."""

    head: str = ""  # folder of the head; without one, the head that ships for the target
    depth: Annotated[int, Range(1, 64)] = 3  # tokens ahead
    # nodes of a level that have children, and children of each
    breadth: Annotated[int, Range(1, 64)] = 2
    total: Annotated[int, Range(1, 1023)] = 4  # nodes that are verified at most
    # no level follows one whose best path is less likely
    least: Annotated[float, Range(0, 1, open_high=True)] = 0.0

    in_one_call = True
