"""Remembers, for every token, the best next tokens of its last row, and drafts the tree they span.

The store holds the top candidates of each token as the target last saw them, learnt from the rows of every verified
node, also the rejected ones, and shared by all requests. A tree is grown from it best first: a candidate's chance is
the measured acceptance of its rank, times its parent's.

Paper: Luo et al., Turning Trash into Treasure: Accelerating Inference with Token Recycling, arXiv:2408.08696
Guarantee: exact
Cost: target 1
Needs: a model that takes trees
Trains: nothing
Differs: the tree grows best first under the measured acceptance of each rank, where the paper fills a fixed tree of 80 nodes found offline; how many nodes is the policy's choice (nodes=80 is the paper's size); a token never seen has no children rather than eight times token 0; rows still empty are filled from the prompt's own pairs
"""

from __future__ import annotations

from dataclasses import dataclass

from foretell.drafter import Drafter, Step
from foretell.engine import Context
from foretell.errors import BadConfig
from foretell.tree import TokenTree, grow

RATE = 1 / 32  # of the running acceptance


class Store:
    """`rows[token]`: candidates, best first. `chance[rank]`: how often the candidate of that rank was accepted."""

    def __init__(self, k: int):
        self.rows: dict[int, list[int]] = {}
        self.chance = [0.5 * 0.4**rank for rank in range(k)]


@dataclass(frozen=True)
class TokenRecycling(Drafter):
    """All are counts."""

    k: int = 8  # candidates kept of each token
    depth: int = 6  # levels

    needs = ("tree", "rows")

    def __post_init__(self) -> None:
        for name, low, high in (("k", 1, 64), ("depth", 1, 64)):
            if not low <= getattr(self, name) <= high:
                raise BadConfig.field(f"token-recycling:{name}", getattr(self, name), f"between {low} and {high}")

    def start(self, ctx: Context) -> Store:
        store = ctx.shared(lambda: Store(self.k))
        tokens = ctx.tokens
        for token, following in zip(tokens[-2::-1], tokens[:0:-1], strict=False):
            row = store.rows.setdefault(token, [])
            if len(row) < self.k and following not in row:
                row.append(following)
        return store

    def propose(self, ctx: Context, state: Store, budget: int) -> TokenTree:
        rows, chance = state.rows, state.chance

        def successors(tree: TokenTree, node: int) -> list[tuple[int, float]]:
            return list(zip(rows.get(tree.tokens[node], ()), chance, strict=False))

        return grow(ctx.tokens[-1], successors, budget, min(self.depth, ctx.depth), "token-recycling")

    def observe(self, ctx: Context, state: Store, step: Step) -> None:
        tree, tested = step.tree, dict(step.outcome.tested)
        ranks = {node: rank for tries in tree.tries for rank, node in enumerate(tries)}
        for node, accepted in tested.items():
            rank = ranks[node]
            state.chance[rank] += RATE * (accepted - state.chance[rank])
        state.chance.sort(reverse=True)
        best = step.reply.logits.topk(min(self.k, step.reply.logits.shape[-1])).indices.tolist()
        # Accepted nodes last: where a token stands twice in a tree, what really happened is remembered.
        path = [0, *step.outcome.path]
        for node in [*range(len(tree)), *path]:
            state.rows[tree.tokens[node]] = best[node]
