"""Lookahead: its window, its pool and the tree of both; its exactness is in test_laws.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretell.core.context import Context
from foretell.core.drafter import Feedback
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Outcome, Reply, Sampling
from foretell.drafters.lookup.lookahead import Lookahead, Pool, State
from foretell.engine.engine import Engine
from foretell.speculation.strategy import Speculative
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from tests import laws
from tests.texts import set_text

SPECS = [
    "lookahead:window=2,n=3,guesses=2,pool_from_prompt=1",
    "lookahead:window=1,n=2,pool_from_prompt=1",
]

VOCAB = 6
ALL = 4096  # nodes: more than any tree here


def context(drafter: Lookahead, prompt: list[int], tokens: int = 90) -> Context:
    engine = Engine({"target": Toy(VOCAB)})
    return Context(engine, Request(prompt, Speculative(drafter), Sampling(max_new_tokens=tokens)))


def commit(
    drafter: Lookahead,
    ctx: Context,
    state: State,
    tree: TokenTree,
    best: list[int],
    tokens: list[int],
) -> None:
    """One step's end: `best[i]` is the best token after node i."""
    set_text(ctx, [*ctx.tokens, *tokens])
    reply = Reply(torch.eye(VOCAB)[best], {}, list(range(len(tree))))
    drafter.observe(ctx, state, Feedback(tree, reply, Outcome([], tokens[-1]), tokens))


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens_to(node)) for node in range(1, len(tree))}


def prefixes(words: list[int] | tuple[int, ...]) -> set[tuple[int, ...]]:
    return {tuple(words[:i]) for i in range(1, len(words) + 1)}


class Twin:
    """Level by level and with lists, as the method is usually told. `levels[0]` follows the
    root.
    """

    def __init__(self, drafter: Lookahead, first: list[int]):
        self.w, self.n, self.g = drafter.window, drafter.n, drafter.guesses
        self.levels, self.pool = [first], dict[int, list[tuple[int, ...]]]()

    def columns(self) -> list[list[int]]:
        """The words from the root to the end of each column."""
        first = self.levels[0]
        return [
            [*first[:j], *(level[j] for level in self.levels[1:])] for j in range(len(first) + 1)
        ]

    def tree(self, root: int) -> set[tuple[int, ...]]:
        drafts = self.pool.get(root, [])
        return set[tuple[int, ...]]().union(
            *(prefixes(words) for words in [*self.columns(), *drafts])
        )

    def move(self, root: int, new: list[int]) -> None:
        """`new`: the best token after each column."""
        if len(self.levels) < self.n - 1:
            self.levels = [*(level[1:] for level in self.levels), new[1:]]
            return
        for j, token in enumerate(new):
            key = [root, *self.levels[0]][j]
            gram = (*(level[j] for level in self.levels[1:]), token)
            old = [g for g in self.pool.get(key, []) if g != gram]
            self.pool[key] = [*old, gram][-self.g :]
        levels = [*self.levels[1:], new]
        self.levels = [levels[0][1:], *levels[1:]]


@given(
    seed=st.integers(0, 999),
    window=st.integers(1, 4),
    n=st.integers(2, 5),
    guesses=st.integers(1, 3),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
)
def test_window_and_drafts_are_those_of_a_loop_over_levels(
    seed: int, window: int, n: int, guesses: int, prompt: list[int]
) -> None:
    drafter, draw = Lookahead(window, n, guesses), np.random.default_rng(seed)
    ctx = context(drafter, prompt)
    state = drafter.start(ctx)
    twin = Twin(drafter, [column[0] for column in state.columns[1:]])
    assert len(twin.levels[0]) == window + n - 3 and {*twin.levels[0]} <= {*prompt}
    for count in draw.integers(1, 4, 12):
        root = ctx.tokens[-1]
        tree = drafter.propose(ctx, state, ALL)
        tree.check()
        assert not tree.has_draws and paths(tree) == twin.tree(root)
        nodes = {tuple(tree.tokens_to(node)): node for node in range(len(tree))}
        best = draw.integers(0, VOCAB, len(tree)).tolist()
        twin.move(root, [best[nodes[tuple(words)]] for words in twin.columns()])
        commit(drafter, ctx, state, tree, best, draw.integers(0, VOCAB, count).tolist())


def test_a_window_worked_out_by_hand() -> None:
    drafter = Lookahead(window=2, n=3, guesses=2)
    ctx = context(drafter, [4, 5, 0])
    state = drafter.start(ctx)
    state.columns = [
        [0],
        [1],
        [2],
    ]  # 0 > 1 > 2: one column more than the window has, for the step that fills it
    tree = drafter.propose(ctx, state, ALL)
    assert tree.tokens == [0, 1, 2] and tree.parents == [-1, 0, 1]
    commit(drafter, ctx, state, tree, [3, 4, 5], [3])  # after 1 comes 4, after 1 2 comes 5
    tree = drafter.propose(ctx, state, ALL)  # 3 > 4 and 3 > 2 > 5
    assert paths(tree) == {(4,), (2,), (2, 5)}
    best = [0] * len(tree)
    best[tree.find_child(0, 4)], best[tree.find_child(tree.find_child(0, 2), 5)] = 1, 2
    commit(drafter, ctx, state, tree, best, [2])  # 3 4 1 and 2 5 2 are n-grams now
    assert state.pool.recent_grams(3) == [(4, 1)] and state.pool.recent_grams(2) == [(5, 2)]
    tree = drafter.propose(ctx, state, ALL)  # 2 > 1, 2 > 5 > 2: the window; 2 > 5 > 2: the draft
    assert paths(tree) == {(1,), (5,), (5, 2)}
    assert tree.matches == [0, 1, 1, 0], "the draft stands first and is known as a copy"


def settled(drafter: Lookahead) -> tuple[Context, State]:
    """With a full window, and a pool that holds as many n-grams of every token as it may."""
    ctx = context(drafter, [0, 1, 2, 3, 4, 5])
    state, draw = drafter.start(ctx), np.random.default_rng(1)
    for _ in range(40):
        tree = drafter.propose(ctx, state, ALL)
        commit(
            drafter,
            ctx,
            state,
            tree,
            draw.integers(0, VOCAB, len(tree)).tolist(),
            [int(draw.integers(VOCAB))],
        )
    assert [len(column) for column in state.columns] == [drafter.n - 1] * drafter.window
    assert all(len(state.pool.recent_grams(token)) == drafter.guesses for token in range(VOCAB))
    return ctx, state


def test_a_small_budget_leaves_out_drafts_and_then_columns() -> None:
    drafter = Lookahead()
    ctx, state = settled(drafter)
    grams = state.pool.recent_grams(ctx.tokens[-1])
    window = drafter.window * (drafter.n - 1) - 1
    for budget in range(1, 60):
        tree = drafter.propose(ctx, state, budget)
        tree.check()
        assert len(tree) <= budget
        whole = sum(prefixes(gram) <= paths(tree) for gram in grams)
        if budget >= drafter.n:
            assert prefixes(grams[0]) <= paths(tree), "the most recent draft stays"
        if budget >= 1 + window + drafter.n - 1:
            assert state.shown == drafter.window and whole >= min(7, (budget - 1 - window) // 4)
        else:
            assert state.shown < drafter.window
    assert whole == 7


def test_depth_bounds_the_tree_and_what_is_left_out_waits() -> None:
    drafter = Lookahead(window=4, n=4, guesses=2, pool_from_prompt=True)
    for left in range(1, 9):
        ctx = context(drafter, [0, 1, 2, 0, 1], left)
        state = drafter.start(ctx)
        before = [list(column) for column in state.columns]
        tree = drafter.propose(ctx, state, ALL)
        assert max(tree.depths) == min(left - 1, 5)
        commit(drafter, ctx, state, tree, [0] * len(tree), [3])
        shown = min(left, 6)
        moved = 1 if shown > 1 else 0
        assert [len(column) for column in state.columns] == [1 + moved] * (shown - moved) + [1] * (
            6 - shown
        )
        assert [column[0] for column in state.columns] == [column[0] for column in before[moved:]]


def test_a_step_that_asks_for_no_drafts_learns_nothing() -> None:
    drafter = Lookahead(window=1, n=2)
    ctx = context(drafter, [0, 1, 2, 3])
    state = drafter.start(ctx)
    tree = drafter.propose(ctx, state, ALL)
    commit(drafter, ctx, state, tree, [5], [4])
    assert state.pool.recent_grams(3) == [(5,)], "a window of one column is the root alone"
    commit(drafter, ctx, state, TokenTree(4), [0], [1])
    assert [*state.pool.grams] == [3], "the column was another token's"


def test_a_step_without_a_window_leaves_it_as_it_is() -> None:
    drafter = Lookahead(window=3, n=3)
    ctx = context(drafter, [0, 1, 2, 3])
    state = drafter.start(ctx)
    for tokens in ([4], [5]):
        before = [list(column) for column in state.columns]
        commit(
            drafter, ctx, state, TokenTree(ctx.tokens[-1]), [1], tokens
        )  # no draft was asked for
        drafter.propose(ctx, state, ALL)
        commit(
            drafter, ctx, state, TokenTree(ctx.tokens[-1]), [1], tokens
        )  # one was, and was not verified
        drafter.propose(ctx, state, 1)
        commit(drafter, ctx, state, TokenTree(ctx.tokens[-1]), [1], tokens)  # there was no room
        assert (
            state.columns[1:] == before[1:] and len(state.columns[0]) == 1 and not state.pool.grams
        )


def test_the_prompts_own_n_grams_are_drafted_and_the_outputs_after_them() -> None:
    drafter = Lookahead(window=2, n=3, pool_from_prompt=True)
    ctx = context(drafter, [1, 2, 3, 1, 4, 5, 1])
    state = drafter.start(ctx)
    assert state.pool.recent_grams(1) == [(4, 5), (2, 3)]
    commit(drafter, ctx, state, TokenTree(1), [0], [0, 2])
    assert state.pool.recent_grams(1) == [(0, 2), (4, 5), (2, 3)] and state.pool.recent_grams(
        5
    ) == [(1, 0)]
    assert not Lookahead(window=2, n=3).start(ctx).pool.grams


def test_a_pool_keeps_the_most_recent_of_a_token_and_of_all() -> None:
    pool = Pool(max_grams=2, max_total=4)
    for gram in ((1,), (2,), (1,), (3,)):
        pool.add_gram(0, gram)
    assert pool.recent_grams(0) == [(3,), (1,)]
    pool.add_gram(5, (0,))
    pool.add_gram(6, (0,))
    assert pool.recent_grams(0) and pool.count == 4  # looked up, so 5 is now the oldest
    pool.add_gram(7, (0,))
    assert pool.recent_grams(5) == [] and pool.count == 4 == sum(map(len, pool.grams.values()))
    for token in range(100):
        pool.add_gram(token % 9, (token,))
        assert pool.count == sum(map(len, pool.grams.values())) <= 4 and all(pool.grams.values())
    assert Pool(3, 1).recent_grams(0) == []


class Successor(Toy):
    """A text that walks through the vocabulary: the next token is a function of the last one."""

    def row(self, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return 9.0 * np.eye(self.vocab)[(5 * int(tokens[positions.argmax()]) + 3) % self.vocab]


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_whole_n_grams_are_accepted_where_the_windows_guesses_are_right(temperature: float) -> None:
    models = {"target": Successor(16)}
    setting = laws.Setting(Sampling(max_new_tokens=80, temperature=temperature))
    live = laws.generate(Speculative(Lookahead(), nodes=55), [1, 2], setting, models)
    assert live.ctx.output == laws.generate(Plain(), [1, 2], setting, models).ctx.output
    assert live.ctx.stats.steps <= 3 + 6 + 80 / 5, (
        "three steps fill the window, then 5 tokens come at once"
    )
