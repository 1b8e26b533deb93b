"""A head that reads one hidden state of the target drafts all depths of a fixed tree at once.

The head has a small block for each depth, and all of them read the target's last state; the
target's output matrix makes a distribution of what each gives. A place of the tree is named by the
ranks of the tokens on the way to it, and its token is that of its last rank in its depth's
distribution, whatever stands above it. How often each rank is right at each depth was counted when
the head was trained; the tree has the places where the product of these shares is highest.

Paper: Cai et al., arXiv:2401.10774
Guarantee: exact
Cost: target 1, head 1
Needs: a hidden state of the target; a head made for it
Trains: `foretell train head --kind medusa`, or `foretell train medusa-2` together with the target
Try: --model MODEL --method medusa:head=FOLDER --compare
Differs:
- of the output matrix, which is the target's and not trained, the rows of the commonest tokens
alone are computed; published heads of version 1 keep their own, a matrix a depth
- heads are trained apart from the target (Medusa-1); joint training (Medusa-2) makes a LoRA, with
which the target is another model with texts of its own, and heads then draft for that one
- verification is exact; the paper's typical acceptance is the rule `typical`
- the policy may verify fewer nodes than `total`, where more are not worth their time
- without counted shares, the tree is that of the paper's shares of first tokens, with the r-th rank
right 1/r^2 as often
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from foretell.core.context import Context
from foretell.core.drafter import Drafting
from foretell.core.settings import Range
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.drafters.heads.base import HeadDrafter
from foretell.drafters.heads.head_tree import HeadReader
from foretell.drafters.heads.networks.ranks import best_paths, path_probability, typical_table

USUAL = typical_table((0.56, 0.32, 0.20, 0.15, 0.12))  # of the paper's heads for Vicuna-7B


class MedusaReader(HeadReader):
    """The head, and how often its ranks are right."""

    def __init__(self, ctx: Context):
        super().__init__(ctx)
        self.shares: Sequence[Sequence[float]] = getattr(self.model, "ranks", ()) or USUAL


@dataclass(frozen=True)
class Medusa(HeadDrafter):
    """Counts of nodes."""

    head: str = ""  # folder of the head; without one, the head that ships for the target
    total: Annotated[int, Range(1, 1023)] = 63  # nodes that are verified at most

    def start(self, ctx: Context) -> MedusaReader:
        return MedusaReader(ctx)

    def steps(self, ctx: Context, reader: MedusaReader, budget: int) -> Drafting:
        tree = TokenTree(ctx.tokens[-1])
        depth = reader.max_depth(ctx, len(reader.shares))
        if depth < 1 or budget < 2:
            return tree
        reply = yield Ask(tree, reader.name, ctx.branch, rows=[0])
        depth_logits = reply.logits[0].unflatten(0, (-1, len(reader.tokens)))
        rank_shares = [
            row[: depth_logits.shape[1]] for row in reader.shares[: min(depth, len(depth_logits))]
        ]
        best_ranks = depth_logits.topk(max(map(len, rank_shares)), -1).indices.tolist()
        nodes: dict[tuple[int, ...], int] = {(): 0}
        for path in best_paths(rank_shares, min(self.total, budget - 1)):
            parent = nodes.get(path[:-1])
            if parent is None or (parent and ctx.ends(tree, parent)):
                continue
            token = reader.tokens[best_ranks[len(path) - 1][path[-1]]]
            value = path_probability(rank_shares, path)
            nodes[path] = tree.add(parent, token, value=value, source="medusa")
        return tree
