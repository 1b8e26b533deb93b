"""Guesses a window of future tokens by Jacobi iteration and drafts the n-grams it left behind.

Beside every verified token the target answers for a window of guessed ones: `window` columns of n -
1 levels, each level the target's best tokens for the one before. A full column and its next token
are an n-gram that the target itself wrote; a pool keeps the most recent ones by their first token,
and those that begin with the last committed token are the drafts. Window and drafts are one tree:
the first level is a chain, and every column hangs below its place in that chain. So the window is
verified too and may be accepted.

Paper: Fu, Bailis, Stoica, Zhang, Break the Sequential Dependency of LLM Inference Using Lookahead
Decoding, arXiv:2402.02057
Guarantee: exact
Cost: target 1
Needs: a model that takes trees
Trains: nothing
Differs:
- the defaults are the authors' advice for 7B models (their code's own are 60, 8, 60)
- the window begins with tokens spread evenly over the prompt, where the reference takes random ones
of it
- window nodes can be accepted
- a fully matched draft gives its bonus token, which the reference drops when sampling
- where the budget is smaller than the tree, drafts are left out down to the most recent one, then
columns from the right, which wait as they are
- the pool is bounded
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Feedback
from foretell.core.settings import Range
from foretell.core.tree import TokenTree

# Estimated probabilities before anything was measured: of the most recent draft's first token, of
# each older draft's relative to the one before, of the next token of a draft, and of a window's
# token.
FIRST, OLDER, NEXT, WINDOW = 0.4, 0.6, 0.7, 0.15
GOLDEN = 0.618034  # multiples of it fall evenly over [0, 1)


class Pool:
    """Continuations of each token, at most `each` a token and `size` in all.

    Both are least recently used first: tokens by when they were last looked up or added to, the
    continuations of one token by when they were last added.
    """

    def __init__(self, max_grams: int, max_total: int):
        self.each = max_grams
        self.size = max_total
        self.count = 0
        self.grams: OrderedDict[int, dict[tuple[int, ...], None]] = OrderedDict()

    def add_gram(self, token: int, gram: tuple[int, ...]) -> None:
        grams = self.grams.setdefault(token, {})
        self.grams.move_to_end(token)
        if gram in grams:
            del grams[gram]
        elif len(grams) == self.each:
            del grams[next(iter(grams))]
        else:
            self.count += 1
        grams[gram] = None
        if self.count > self.size:
            oldest, grams = next(iter(self.grams.items()))
            del grams[next(iter(grams))]
            self.count -= 1
            if not grams:
                del self.grams[oldest]

    def recent_grams(self, token: int) -> list[tuple[int, ...]]:
        """The continuations of `token`, most recent first."""
        if token not in self.grams:
            return []
        self.grams.move_to_end(token)
        return list(reversed(self.grams[token]))


@dataclass
class State:
    """State of a request."""

    pool: Pool
    # The guesses of each column, oldest level first; the oldest of column 0 is the root itself.
    columns: list[list[int]]
    shown: int = 0  # columns that stand in the tree proposed last
    read: int = 0  # n-grams of the text that are in the pool, where it takes them


@dataclass(frozen=True)
class Lookahead(Drafter):
    """Counts, and a choice."""

    window: Annotated[int, Range(1, 128)] = 7  # columns
    # tokens of an n-gram: one more than the levels of the window
    n: Annotated[int, Range(2, 32)] = 5
    guesses: Annotated[int, Range(1, 128)] = 7  # n-grams drafted at most
    pool_from_prompt: bool = False  # the text's own n-grams go into the pool too
    pool: Annotated[int, Range(1, 1 << 24)] = 65536  # n-grams a request keeps at most

    needs = ("tree", "rows")
    whole = True  # a window cut at random places would lose its trajectories

    def start(self, ctx: Context) -> State:
        tokens = ctx.tokens
        # While the window fills, each step adds a level and moves on by a column, so it begins
        # n - 2 columns wider.
        column_count = self.window + self.n - 3
        columns = [[tokens[-1]]]
        for column_number in range(1, column_count + 1):
            columns.append([tokens[int(column_number * GOLDEN % 1 * len(tokens))]])
        read_grams = max(0, len(tokens) - self.n + 1 - self.pool)
        state = State(Pool(self.guesses, self.pool), columns, read=read_grams)
        self.read_text(ctx, state)
        return state

    def read_text(self, ctx: Context, state: State) -> None:
        """Takes the text's new n-grams into the pool."""
        if not self.pool_from_prompt:
            return
        tokens = ctx.tokens
        gram_end = len(tokens) - self.n + 1
        for gram_start in range(state.read, gram_end):
            state.pool.add_gram(
                tokens[gram_start], tuple(tokens[gram_start + 1 : gram_start + self.n])
            )
        state.read = max(state.read, gram_end)

    def propose(self, ctx: Context, state: State, budget: int) -> TokenTree:
        tree = TokenTree(ctx.tokens[-1])
        columns = state.columns
        columns[0][0] = tree.tokens[0]
        recent_grams = state.pool.recent_grams(tree.tokens[0])
        # Room for one draft is kept free: without it the window is for nothing.
        reserved = min(self.n - 1, ctx.depth) if recent_grams else 0
        free_nodes = budget - 1
        state.shown = 0
        for column_index, column in enumerate(columns):
            column_cost = len(column) - (column_index == 0)
            if free_nodes - column_cost < reserved or column_index + len(column) - 1 > ctx.depth:
                break
            free_nodes -= column_cost
            state.shown += 1
        self._add_drafts(tree, recent_grams, 1 + free_nodes, ctx.depth)
        self._add_window(tree, columns[: state.shown])
        return tree

    def _add_drafts(
        self, tree: TokenTree, grams: list[tuple[int, ...]], max_nodes: int, depth: int
    ) -> None:
        """Adds the n-grams, the most recent first, as long as the tree has at most `max_nodes`
        nodes.
        """
        for rank, gram in enumerate(grams):
            node = 0
            probability = FIRST * OLDER**rank
            for token in gram[:depth]:
                if len(tree) == max_nodes and tree.find_child(node, token) < 0:
                    break
                value = tree.values[node] * probability
                node = tree.add(node, token, value=value, source="lookahead", match=1)
                probability = NEXT

    def _add_window(self, tree: TokenTree, columns: list[list[int]]) -> None:
        """Adds the chain of the first level, and below each of its places the rest of the
        column.
        """
        chain_node = 0
        for column_index, column in enumerate(columns):
            node = chain_node
            for token in column if column_index else column[1:]:
                value = tree.values[node] * WINDOW
                node = tree.add(node, token, value=value, source="lookahead")
            if column_index:
                chain_node = tree.find_child(chain_node, column[0])

    def observe(self, ctx: Context, state: State, step: Feedback) -> None:
        self.read_text(ctx, state)
        columns, tree = state.columns, step.tree
        shown_columns = columns[: state.shown]
        state.shown = 0  # a step may come that does not ask for drafts
        # The node of each column's last level. It is found by its tokens: a draft may share nodes
        # with the window, and the tree may have been cut.
        end_nodes: list[int] = []
        chain_node = 0
        for column_index, column in enumerate(shown_columns):
            if column_index:
                chain_node = tree.find_child(chain_node, column[0])
            node = chain_node
            for token in column[1:]:
                if node >= 0:
                    node = tree.find_child(node, token)
            if node < 0:
                break
            end_nodes.append(node)
        filling = len(columns) > self.window
        if not end_nodes or (filling and len(end_nodes) == 1):
            return  # moving on now would lose a column and gain nothing
        best_tokens = step.reply.logits[end_nodes].argmax(-1).tolist()
        for column, token in zip(columns, best_tokens, strict=False):
            if len(column) == self.n - 1:
                state.pool.add_gram(column[0], (*column[1:], token))
                del column[0]
            column.append(token)
        if filling:
            del columns[0]
