"""Remembers, for every token, the best next tokens of its last row, and drafts the tree they span.

The store holds the top candidates of each token as the target last saw them, learnt from the rows
of every verified node, also the rejected ones, and shared by all requests. A tree is grown from it
best first: a candidate's probability is the measured acceptance of its rank, times its parent's.

Paper: Luo et al., Turning Trash into Treasure: Accelerating Inference with Token Recycling,
arXiv:2408.08696
Guarantee: exact
Cost: target 1
Needs: a model that takes trees
Trains: nothing
Differs:
- the tree grows best first under the measured acceptance of each rank, where the paper fills a
fixed tree of 80 nodes found offline
- how many nodes is the policy's choice; nodes=80,floor=0 is the paper's size
- a token never seen has no children rather than eight times token 0
- rows of refused nodes that were not asked for while many others came are forgotten
- rows still empty are filled from the prompt's own pairs
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Feedback
from foretell.core.settings import Range
from foretell.core.tree import TokenTree
from foretell.core.tree_building import grow_tree
from foretell.ops.logits import best_logits

RATE = 1 / 32  # of the running acceptance
# unread rows that are all read for a draft; of more, as after a pause, only what is looked for
FEW = 16
UNREAD = 64  # unread rows that are no burden
HELD = 1 << 21  # entries of unread rows at most, where these are more
ROW = 200  # bytes of an entry besides its candidates


class Store:
    """`rows[token]`: candidates, best first. `chance[rank]`: how often the candidate of that rank
    was accepted.

    Bounded by the vocabulary: k candidates for every token. The target's rows of logits are held
    unread until somebody asks for their tokens: finding the best of a row takes time.
    """

    def __init__(self, k: int, vocab: int):
        self.k, self.vocab = k, vocab
        self.rows: dict[int, list[int]] = {}
        self.chance = [0.4 * 0.4**rank for rank in range(k)]
        self._forget_unread()

    def _forget_unread(self) -> None:
        self.blocks: list[torch.Tensor] = []  # of rows of logits, (N, V) each
        self.starts: list[int] = []  # of each block: its first row's place among all held
        self.held = 0  # rows in all blocks
        self.unread: dict[int, int] = {}  # token -> the place of its last row
        self.passed: set[int] = set()  # places of rows that the text really went through

    @property
    def nbytes(self) -> int:
        return len(self.rows) * (ROW + 8 * self.k)

    def hold_rows(self, tokens: Sequence[int], rows: torch.Tensor, path: Sequence[int]) -> None:
        """Holds row i of rows (N, V) for tokens[i]. `path`: the rows that the text went through; of
        two of one token the later in `path` is kept, else the later one.
        """
        for row in (*range(len(tokens)), *path):
            self.unread[tokens[row]] = self.held + row
        self.passed.update(self.held + row for row in path)
        self.starts.append(self.held)
        self.blocks.append(rows)
        self.held += len(rows)
        if self.held > max(UNREAD, HELD // rows.shape[-1]):
            # Nobody asked for them for long: nothing is learnt from what was refused then.
            for token, row_number in list(self.unread.items()):
                if row_number not in self.passed:
                    del self.unread[token]
            self.read_all()

    def read_row(self, token: int) -> None:
        """Takes in the unread row of this token."""
        row = self._unread_row(self.unread.pop(token))
        self.rows[token] = best_logits(row[None], self.k)[1][0].tolist()

    def read_all(self) -> None:
        """Takes in all unread rows."""
        tokens, row_numbers = list(self.unread), list(self.unread.values())
        if len(self.blocks) == 1:
            best_ids = best_logits(self.blocks[0], self.k)[1].tolist()
            candidates = [best_ids[row_number] for row_number in row_numbers]
        elif row_numbers:
            rows = torch.stack([self._unread_row(row_number) for row_number in row_numbers])
            candidates = best_logits(rows, self.k)[1].tolist()
        else:
            candidates = []
        self.rows.update(zip(tokens, candidates, strict=True))
        self._forget_unread()

    def _unread_row(self, row_number: int) -> torch.Tensor:
        block_index = bisect_right(self.starts, row_number) - 1
        return self.blocks[block_index][row_number - self.starts[block_index]]

    def tensors(self) -> dict[str, torch.Tensor]:
        """`tokens` (N,), `rows` (N, k) filled up with -1, `chance` (k,)."""
        if self.unread:
            self.read_all()
        rows = [row + [-1] * (self.k - len(row)) for row in self.rows.values()]
        return {
            "tokens": torch.tensor(list(self.rows), dtype=torch.int32),
            "rows": torch.tensor(rows, dtype=torch.int32).reshape(-1, self.k),
            "chance": torch.tensor(self.chance, dtype=torch.float64),
        }

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Puts these in place of what was learnt. Raises ValueError."""
        missing_parts = {"tokens", "rows", "chance"} - tensors.keys()
        if missing_parts:
            raise ValueError(f"lacks {', '.join(sorted(missing_parts))}")
        tokens, rows, chance = tensors["tokens"], tensors["rows"], tensors["chance"]
        if tokens.ndim != 1 or rows.shape != (len(tokens), self.k) or chance.shape != (self.k,):
            shapes = f"tokens {tuple(tokens.shape)} and rows {tuple(rows.shape)}"
            raise ValueError(f"the shapes of {shapes} do not fit")
        if tokens.dtype != torch.int32 or rows.dtype != torch.int32:
            raise ValueError(f"tokens are {tokens.dtype} and {rows.dtype}, not {torch.int32}")
        if len(tokens):
            lowest_token = min(int(tokens.min()), int(rows[:, 0].min()), int(rows.min()) + 1)
            if lowest_token < 0 or max(int(tokens.max()), int(rows.max())) >= self.vocab:
                raise ValueError(f"a row is empty, or a token is none of {self.vocab}")
            if len(tokens.unique()) < len(tokens):
                raise ValueError("a token stands there twice")
        if not bool(((chance >= 0) & (chance <= 1)).all()):
            raise ValueError("a chance is not between 0 and 1")
        self.rows = {}
        for token, row in zip(tokens.tolist(), rows.tolist(), strict=True):
            self.rows[token] = [candidate for candidate in row if candidate >= 0]
        self.chance = chance.tolist()


@dataclass(frozen=True)
class TokenRecycling(Drafter):
    """Two counts and a probability."""

    k: Annotated[int, Range(1, 64)] = 8  # candidates kept of each token
    depth: Annotated[int, Range(1, 64)] = 6  # levels
    floor: Annotated[float, Range(0, 1)] = 0.01  # tokens less likely to be reached are not drafted

    needs = ("tree", "rows")

    def start(self, ctx: Context) -> Store:
        store = ctx.shared(lambda: Store(self.k, ctx.models["target"].vocab))
        tokens = ctx.tokens
        for token, following in zip(tokens[-2::-1], tokens[:0:-1], strict=False):
            row = store.rows.setdefault(token, [])
            if len(row) < self.k and following not in row:
                row.append(following)
        return store

    def propose(self, ctx: Context, state: Store, budget: int) -> TokenTree:
        if 0 < len(state.unread) <= FEW:
            state.read_all()

        def successors(tree: TokenTree, node: int) -> Iterable[tuple[int, float]]:
            token = tree.tokens[node]
            if token in state.unread:  # after a pause few of many are asked for
                state.read_row(token)
            return zip(state.rows.get(token, ()), state.chance, strict=False)

        depth = min(self.depth, ctx.depth)
        return grow_tree(ctx.tokens[-1], successors, budget, depth, "token-recycling", self.floor)

    def observe(self, ctx: Context, state: Store, step: Feedback) -> None:
        tokens, parents = step.tree.tokens, step.tree.parents
        for node, accepted in step.outcome.tested:
            row = state.rows.get(tokens[parents[node]], ())
            if tokens[node] in row:  # whoever proposed it
                rank = row.index(tokens[node])
                state.chance[rank] += RATE * (accepted - state.chance[rank])
        if step.outcome.tested:
            state.chance.sort(reverse=True)
        # Where a token stands twice in a tree, what really happened is remembered.
        state.hold_rows(tokens, step.reply.logits, (0, *step.outcome.path))
