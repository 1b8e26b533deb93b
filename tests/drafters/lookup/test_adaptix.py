"""Adaptix: the weights its map learns and the trees its search finds; its exactness is in
test_laws.py.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.core.context import Context
from foretell.core.drafter import Feedback
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Outcome, Reply, Sampling
from foretell.drafters.lookup.adaptix import Adaptix, explore_map
from foretell.drafters.lookup.trigrams import DOUBT, GAIN, MOST, Trigrams
from foretell.engine.engine import Engine
from foretell.speculation.strategy import Speculative
from foretell.testing.toy import Toy
from tests import laws

SPECS = ["adaptix:search=false", "adaptix:depth=2,rounds=5,paths=3"]
VOCAB = 8

texts = st.lists(st.integers(0, 2), min_size=1, max_size=30)


def context(
    drafter: Adaptix,
    prompt: Sequence[int],
    new: int = 40,
    engine: Engine | None = None,
    tenant: str = "",
) -> Context:
    engine = engine or Engine({"target": Toy(VOCAB)})
    request = Request(prompt, Speculative(drafter), Sampling(max_new_tokens=new), tenant=tenant)
    return Context(engine, request).scope_to(drafter)


def made(rows: dict[tuple[int, int], dict[int, float]], limit: int = 1 << 20) -> Trigrams:
    store = Trigrams(99, limit)
    for pair, row in rows.items():
        for token, weight in row.items():
            store.learn_gram(pair, token, weight)
    return store


# --- what it learns


def test_the_newest_trigrams_gain_in_every_step_up_to_a_limit() -> None:
    drafter = Adaptix()
    ctx = context(drafter, [7] + [1, 2, 3, 4] * 5)
    state = drafter.start(ctx)
    assert state.rows[7, 1] == {2: 1.0} and state.rows[1, 2] == {3: pytest.approx(1 + 4 * GAIN)}
    step = Feedback(TokenTree(4), Reply(torch.zeros(1, VOCAB), {}, [0]), Outcome([], 5), [5])
    ctx.tokens.append(5)
    drafter.observe(ctx, state, step)
    assert state.rows[3, 4] == pytest.approx({1: 1 + 6 * GAIN, 5: GAIN})
    for _ in range(80):
        drafter.observe(ctx, state, step)
    assert state.rows[3, 4] == pytest.approx({1: MOST, 5: 81 * GAIN if 81 * GAIN < MOST else MOST})


def test_a_step_longer_than_the_window_is_learnt_whole() -> None:
    drafter = Adaptix()
    ctx = context(drafter, [7, 6])
    state = drafter.start(ctx)
    fresh = [i % 6 for i in range(30)]
    ctx.tokens.extend(fresh)
    drafter.observe(
        ctx,
        state,
        Feedback(TokenTree(6), Reply(torch.zeros(1, VOCAB), {}, [0]), Outcome([], 5), fresh),
    )
    assert (
        (7, 6) in state.rows
        and (6, 0) in state.rows
        and state.rows[0, 1] == pytest.approx({2: 5 * GAIN})
    )


def test_the_map_is_shared_in_a_tenant_and_not_beyond() -> None:
    engine, drafter = Engine({"target": Toy(VOCAB)}), Adaptix()
    a, b, c = (
        drafter.start(context(drafter, [i, 1, 2], 9, engine, t))
        for i, t in ((3, "x"), (4, "x"), (5, "y"))
    )
    assert a is b and a is not c and set(a.rows) == {(3, 1), (4, 1)} and set(c.rows) == {(5, 1)}


# --- the search


def twin(
    rows: dict[tuple[int, int], dict[int, float]], pair: tuple[int, int], depth: int, rounds: int
) -> dict[tuple[int, ...], int]:
    """Visits of every path that the search knows, by recursion over paths of tokens."""
    visits: dict[tuple[int, ...], int] = {(): 0}
    score: dict[tuple[int, ...], float] = {(): 0.0}
    draw = random.Random(0)

    def row(path: tuple[int, ...]) -> dict[int, float]:
        return rows.get(((*pair, *path)[-2], (*pair, *path)[-1]), {})

    def worth(path: tuple[int, ...]) -> float:
        n, total = visits[path], visits[path[:-1]]
        if not n:
            return math.inf
        bonus = (
            (32 + math.log((total + 8 + 1) / 8))
            * row(path[:-1])[path[-1]]
            * math.sqrt(total)
            / (1 + n)
        )
        return score[path] / n + bonus

    for _ in range(rounds):
        path: tuple[int, ...] = ()
        while any((*path, t) in visits for t in row(path)):
            path = max(((*path, t) for t in row(path)), key=worth)
        if len(path) < depth - 1 and row(path):
            for token in row(path):
                visits[(*path, token)], score[(*path, token)] = 0, 0.0
            path = (*path, [*row(path)][-1])
        played = path
        while len(played) < depth - 1 and row(played):
            rest = draw.random() * sum(row(played).values())
            for token, weight in row(played).items():  # noqa: B007
                rest -= weight
                if rest < 0:
                    break
            played = (*played, token)
        reward = 1.0
        for i in range(len(played)):
            reward += row(played[:i])[played[i]]
        for i in range(len(path) + 1):
            visits[path[:i]] += 1
            score[path[:i]] += reward
    return visits


maps = st.dictionaries(
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.dictionaries(st.integers(0, 3), st.integers(1, 75).map(lambda n: n * GAIN), min_size=1),
    max_size=12,
)


@settings(max_examples=50)
@given(maps, st.integers(1, 5), st.integers(1, 60), st.integers(1, 12), st.integers(1, 30))
def test_the_search_proposes_what_it_visited_most(
    rows: Any, depth: int, rounds: int, paths: int, size: int
) -> None:
    store = made(rows)
    tree = explore_map(store, (0, 1), size, depth, rounds, paths)
    tree.check()
    whole = explore_map(store, (0, 1), 10_000, depth, rounds, paths)
    visits = twin(store.rows, (0, 1), depth, rounds if (0, 1) in rows else 0)
    kept = sorted(visits, key=lambda path: -visits[path])[:paths]

    def options(path: tuple[int, ...]) -> dict[int, float]:
        return store.rows.get(((0, 1, *path)[-2], (0, 1, *path)[-1]), {})

    value = {(): 1.0}
    for path in kept:
        if path:
            row, parent = options(path[:-1]), path[:-1]
            total = sum(row.values())
            part = visits[path] * total + row[path[-1]]
            value[path] = value[parent] * part / (total + DOUBT) / (visits[parent] + 1)
    by_visits = dict(value)  # below a kept node its visits count, even if it is a best successor
    for path in kept:
        if row := options(path):
            token = max(row, key=row.__getitem__)
            share = by_visits[path] * row[token] / (sum(row.values()) + DOUBT)
            value[(*path, token)] = max(share, value.get((*path, token), 0.0))
    del value[()]
    found = {tuple(whole.tokens_to(n)): whole.values[n] for n in range(1, len(whole))}
    assert found == pytest.approx(value)
    assert tree.values[1:] == pytest.approx(sorted(value.values(), reverse=True)[: size - 1])
    assert max(tree.depths) <= depth and set(tree.sources[1:]) <= {"adaptix"}
    assert all(
        child >= n and tree.values[child] < tree.values[n]
        for n, t in enumerate(tree.tries)
        for child in t
    )


def test_the_search_goes_where_the_weights_are_and_is_the_same_every_time() -> None:
    rows = {
        (0, 1): {2: 0.05, 3: 3.0, 4: 0.4},
        (1, 3): {5: 2.0, 6: 0.1},
        (3, 5): {7: 1.0},
        (5, 7): {8: 1.0},
    }
    trees = [explore_map(made(rows), (0, 1), 99, 4, 150, 24) for _ in range(2)]
    tree = trees[0]
    assert tree.tokens == trees[1].tokens and tree.values == trees[1].values
    assert [tree.tokens[t] for t in tree.tries[0]] == [3, 4, 2], "the likeliest first"
    assert [3, 5, 7, 8] in [tree.tokens_to(n) for n in range(len(tree))], (
        "the last one is the best successor of the third"
    )
    state = random.getstate()
    explore_map(made(rows), (0, 1), 99, 4, 150, 24)
    assert random.getstate() == state, "nobody else's random numbers are touched"


@given(maps, st.integers(1, 5), st.integers(1, 20))
def test_best_first_takes_the_likeliest_of_all_paths(rows: Any, depth: int, size: int) -> None:
    drafter = Adaptix(search=False, depth=depth)
    tree = drafter.propose(context(drafter, [0, 1]), made(rows), size)
    tree.check()
    every, stack = [], [((0, 1), 1.0, 0)]
    while stack:
        path, value, level = stack.pop()
        row = rows.get(path[-2:], {}) if level < depth else {}
        for token, weight in row.items():
            every.append(value * weight / (sum(row.values()) + DOUBT))
            stack.append(((*path, token), every[-1], level + 1))
    assert tree.values[1:] == pytest.approx(sorted(every, reverse=True)[: size - 1])


@pytest.mark.parametrize("search", [True, False])
def test_budget_depth_and_short_texts_bound_the_tree(search: bool) -> None:
    prompt = [1, 2, 3, 1, 2, 4, 1, 2, 3, 5, 1, 2]
    for drafter in (Adaptix(search=search), Adaptix(search=search, depth=2)):
        for budget in (1, 2, 4, 50):
            for new in (1, 2, 3, 40):
                ctx = context(drafter, prompt, new)
                tree = drafter.propose(ctx, drafter.start(ctx), budget)
                tree.check()
                assert len(tree) <= budget and max(tree.depths) <= min(new - 1, drafter.depth)
                assert (len(tree) > 1) == (budget > 1 and new > 1)
                following = {
                    (a, b, c) for a, b, c in zip(prompt, prompt[1:], prompt[2:], strict=False)
                }
                for n in range(1, len(tree)):
                    assert tuple([*prompt, *tree.tokens_to(n)][-3:]) in following
    for short in ([1], [1, 2]):
        ctx = context(drafter, short)
        assert len(drafter.propose(ctx, drafter.start(ctx), 9)) == 1


@pytest.mark.parametrize("search", [True, False])
def test_it_speeds_up_a_text_that_repeats(search: bool) -> None:
    strategy = Speculative(Adaptix(search=search), nodes=8)
    models = {"target": Toy(VOCAB, copy=4.0)}
    live = laws.generate(strategy, [1, 2, 3], laws.Setting(Sampling(max_new_tokens=60)), models)
    assert live.ctx.stats.mat > 1.5
