"""Remembers, for every token, the best next tokens of its last row, and drafts the tree they span.

The store holds the top candidates of each token as the target last saw them, learnt from the rows
of every verified node, also the rejected ones, and shared by all requests. A tree is grown from it
best first: a candidate's chance is the measured acceptance of its rank, times its parent's.

Paper: Luo et al., Turning Trash into Treasure: Accelerating Inference with Token Recycling,
arXiv:2408.08696
Guarantee: exact
Cost: target 1
Needs: a model that takes trees
Trains: nothing
Differs:
- the tree grows best first under the measured acceptance of each rank, where the paper fills a
fixed tree of 80 nodes found offline - how many nodes is the policy's choice (nodes=80,floor=0 is
the paper's size) - a token never seen has no children rather than eight times token 0 - rows of
refused nodes that were not asked for while many others came are forgotten - rows still empty are
filled from the prompt's own pairs
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from foretell.core.drafter import Drafter, Feedback
from foretell.core.context import Context
from foretell.core.tree import TokenTree
from foretell.errors import BadConfig
from foretell.ops.rows import best
from foretell.ops.trees import grow

RATE = 1 / 32  # of the running acceptance
# rows put by that are all read when it is asked; of more, as after a pause, only what is looked for
FEW = 16
UNREAD = 64  # rows put by that are no burden
HELD = 1 << 21  # entries of rows put by at most, where these are more
ROW = 200  # bytes of an entry besides its candidates


class Store:
    """`rows[token]`: candidates, best first. `chance[rank]`: how often the candidate of that rank
    was accepted.

    Bounded by the vocabulary: k candidates for every token.
    """

    def __init__(self, k: int):
        self.k = k
        self.rows: dict[int, list[int]] = {}
        self.chance = [0.4 * 0.4**rank for rank in range(k)]
        # The last rows of tokens, put by: which of the `held` rows of the blocks (N, V) is whose,
        # where each begins, and which of them the text really went through.
        self.unread, self.held, self.passed = dict[int, int](), 0, set[int]()
        self.blocks, self.starts = list[torch.Tensor](), list[int]()

    @property
    def nbytes(self) -> int:
        return len(self.rows) * (ROW + 8 * self.k)

    def put(self, tokens: Sequence[int], rows: torch.Tensor, last: Sequence[int]) -> None:
        """`rows[i]` is the row of `tokens[i]`, and of two of a token the one that `last` names
        later is kept.
        """
        self.unread.update({tokens[i]: self.held + i for i in (*range(len(tokens)), *last)})
        self.passed.update(self.held + i for i in last)
        self.starts.append(self.held)
        self.blocks.append(rows)
        self.held += len(rows)
        if self.held > max(UNREAD, HELD // rows.shape[-1]):
            # Nobody asked for them for long: of what was refused then nothing is taken in.
            self.unread = {
                token: place for token, place in self.unread.items() if place in self.passed
            }
            self.read()

    def read(self, token: int = -1) -> None:
        """Takes in the row put by for this token, or all."""
        unread = self.unread if token < 0 else {token: self.unread.pop(token)}
        if token < 0 and len(self.blocks) == 1:
            rows, places = self.blocks[0], [*unread.values()]
        else:
            found = [bisect_right(self.starts, place) - 1 for place in unread.values()]
            few = [
                self.blocks[b][place - self.starts[b]]
                for b, place in zip(found, unread.values(), strict=True)
            ]
            rows, places = torch.stack(few), [*range(len(few))]
        top = best(rows, self.k)[1].tolist()
        self.rows.update(zip(unread, [top[place] for place in places], strict=True))
        if token < 0:
            self.unread, self.blocks, self.starts, self.held, self.passed = {}, [], [], 0, set()

    def tensors(self) -> dict[str, torch.Tensor]:
        """`tokens` (N,), `rows` (N, k) filled up with -1, `chance` (k,)."""
        if self.unread:
            self.read()
        rows = [row + [-1] * (self.k - len(row)) for row in self.rows.values()]
        return {
            "tokens": torch.tensor(list(self.rows), dtype=torch.int32),
            "rows": torch.tensor(rows, dtype=torch.int32).reshape(-1, self.k),
            "chance": torch.tensor(self.chance, dtype=torch.float64),
        }

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if missing := {"tokens", "rows", "chance"} - tensors.keys():
            raise ValueError(f"lacks {', '.join(sorted(missing))}")
        tokens, rows, chance = tensors["tokens"], tensors["rows"], tensors["chance"]
        if tokens.ndim != 1 or rows.shape != (len(tokens), self.k) or chance.shape != (self.k,):
            raise ValueError(
                f"the shapes of tokens {tuple(tokens.shape)} and rows {tuple(rows.shape)} do not fit"
            )
        if len(tokens) and (
            int(tokens.min()) < 0 or int(rows.min()) < -1 or bool((rows[:, 0] < 0).any())
        ):
            raise ValueError("a token is negative or a row empty")
        if not bool(((chance >= 0) & (chance <= 1)).all()):
            raise ValueError("a chance is not between 0 and 1")
        self.rows = {
            token: [t for t in row if t >= 0]
            for token, row in zip(tokens.tolist(), rows.tolist(), strict=True)
        }
        self.chance = chance.tolist()


@dataclass(frozen=True)
class TokenRecycling(Drafter):
    """Two counts and a chance."""

    k: int = 8  # candidates kept of each token
    depth: int = 6  # levels
    floor: float = 0.01  # tokens less likely to be reached are not drafted

    needs = ("tree", "rows")

    def __post_init__(self) -> None:
        for name, low, high in (("k", 1, 64), ("depth", 1, 64)):
            if not low <= getattr(self, name) <= high:
                raise BadConfig.field(
                    f"token-recycling:{name}", getattr(self, name), f"between {low} and {high}"
                )
        if not 0 <= self.floor <= 1:
            raise BadConfig.field("token-recycling:floor", self.floor, "between 0 and 1")

    def start(self, ctx: Context) -> Store:
        store = ctx.shared(lambda: Store(self.k))
        tokens = ctx.tokens
        for token, following in zip(tokens[-2::-1], tokens[:0:-1], strict=False):
            row = store.rows.setdefault(token, [])
            if len(row) < self.k and following not in row:
                row.append(following)
        return store

    def propose(self, ctx: Context, state: Store, budget: int) -> TokenTree:
        if 0 < len(state.unread) <= FEW:
            state.read()
        rows, chance, unread = state.rows, state.chance, state.unread

        def successors(tree: TokenTree, node: int) -> Iterable[tuple[int, float]]:
            token = tree.tokens[node]
            if token in unread:  # after a pause few of many are asked for
                state.read(token)
            return zip(rows.get(token, ()), chance, strict=False)

        return grow(
            ctx.tokens[-1],
            successors,
            budget,
            min(self.depth, ctx.depth),
            "token-recycling",
            self.floor,
        )

    def observe(self, ctx: Context, state: Store, step: Feedback) -> None:
        tokens, parents, rows, chance = (
            step.tree.tokens,
            step.tree.parents,
            state.rows,
            state.chance,
        )
        for node, accepted in step.outcome.tested:
            row = rows.get(tokens[parents[node]], ())
            if (token := tokens[node]) in row:  # whoever proposed it
                rank = row.index(token)
                chance[rank] += RATE * (accepted - chance[rank])
        if step.outcome.tested:
            chance.sort(reverse=True)
        # Where a token stands twice in a tree, what really happened is remembered.
        state.put(tokens, step.reply.logits, (0, *step.outcome.path))
