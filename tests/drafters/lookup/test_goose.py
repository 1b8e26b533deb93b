"""Goose: the spine it copies, the branches it remembers, the tree of both; its exactness is in
test_laws.py.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.core.context import Context
from foretell.core.drafter import Feedback
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Outcome, Reply, Sampling
from foretell.drafters.lookup.candidates import ENTRY, KINDS, Store
from foretell.drafters.lookup.goose import Goose, State
from foretell.drafters.lookup.ngram import Ngram
from foretell.drafters.lookup.token_recycling import TokenRecycling
from foretell.engine.engine import Engine
from foretell.errors import BadConfig
from foretell.speculation.strategy import Speculative
from foretell.testing.toy import Toy
from tests import laws
from tests.texts import set_limit, set_text

SPECS = ["goose:longest=2,shortest=1,k=2,depth=2,bypass=0", "goose:shortest=1,harmonic=1,copy=3"]
V = 8
LEAST = 0.01  # value below which the loops do not look on
TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=24)


def context(
    drafter: Goose, tokens: list[int], engine: Engine | None = None, tenant: str = ""
) -> Context:
    request = Request(tokens, Speculative(drafter), Sampling(max_new_tokens=40), tenant=tenant)
    return Context(engine or Engine({"target": Toy(V)}), request)


def learnt(store: Store, seed: int, keys: int = 40) -> None:
    """Random rows after tokens and pairs, and random probabilities."""
    draw = np.random.default_rng(seed)
    for key in draw.choice((V + 1) * V, keys, replace=False).tolist():
        logits = torch.from_numpy(draw.normal(size=V) * 3)
        top = logits.topk(min(store.k, V))
        store.put_rows([key], top.indices.numpy()[None], top.values.softmax(-1).numpy()[None])
    store.chance = draw.uniform(0.02, 0.98, len(store.chance)).tolist()


def begun(drafter: Goose, tokens: list[int], seed: int) -> tuple[Context, State]:
    ctx = context(drafter, tokens)
    state = drafter.start(ctx)
    learnt(state.store, seed)
    return ctx, state


# --- the definition in loops


def spine(tokens: list[int], drafter: Goose, size: int) -> tuple[list[int], int, bool]:
    """(copied tokens, length of the match, whether several places agree on the first of them)."""
    for n in range(min(drafter.longest, len(tokens)), drafter.shortest - 1, -1):
        places = [e for e in range(n, len(tokens)) if tokens[e - n : e] == tokens[-n:]]
        if places:
            text = list(tokens)
            for _ in range(size):
                text.append(text[places[-1] + len(text) - len(tokens)])
            near = [tokens[e] for e in places[-8:]]
            return text[len(tokens) :], n, len(near) > 1 and len(set(near)) == 1
    return [], 0, False


def options(
    path: list[int], tokens: list[int], drafter: Goose, store: Store, size: int, budget: int
) -> dict[int, float]:
    """The probability of every token that may follow this path below the text."""
    copied, n, agreed = spine(tokens, drafter, size)
    held = next((i for i, t in enumerate(path) if copied[i : i + 1] != [t]), len(path))
    if len(path) - held >= drafter.depth:
        return {}
    text = [*tokens, *path]
    row = list(
        zip(*store.candidates_after(text[-2] if len(text) > 1 else -1, text[-1]), strict=True)
    )
    chances = {token: store.chance[kind] for token, kind in row}
    if held < len(path) or held == len(copied):
        return chances
    token = copied[held]
    agree = 1 if not row else 0 if token not in chances else 2 if row[0][0] == token else 1
    length = sum(n + held >= bound for bound in (4, 5, 7, 10))
    mine = store.chance[2 * KINDS + 6 * length + 2 * agree + agreed]
    if drafter.bypass and agreed and mine > 0.5:
        return {token: mine}
    same = chances.pop(token, 0.0)
    left = (1 - mine) / max(sum(chances.values()), 1 - same)
    if drafter.harmonic:
        half = (budget - 1 - len(copied)) / 2
        width = half if held == 0 else half / held / sum(1 / i for i in range(1, len(copied) + 1))
        chances = dict(list(chances.items())[: int(width)])
    return {token: mine, **{t: c * left for t, c in chances.items()}}


@settings(max_examples=60)
@given(
    TEXT,
    st.integers(0, 99),
    st.integers(1, 16),
    st.integers(1, 8),
    st.booleans(),
    st.booleans(),
    st.integers(1, 3),
)
def test_the_tree_is_the_most_probable_one(
    tokens: list[int], seed: int, budget: int, room: int, bypass: bool, harmonic: bool, depth: int
) -> None:
    drafter = Goose(3, 2, copy=6, k=4, depth=depth, bypass=bypass, harmonic=harmonic)
    ctx, state = begun(drafter, tokens, seed)
    set_limit(ctx, len(tokens) + 1 + room)
    tree = drafter.propose(ctx, state, budget)
    tree.check()
    assert len(tree) <= budget and max(tree.depths) <= room and not tree.has_draws
    size = min(6, budget - 1, room)
    values, queue = [], [([], 1.0)]
    while queue:
        path, value = queue.pop()
        if len(path) < room:
            found = options(path, tokens, drafter, state.store, size, budget)
            queue += [([*path, t], value * c) for t, c in found.items() if value * c > LEAST]
        values += [value] if path else []
    want = sorted(values, reverse=True)[: budget - 1]
    assert sorted((v for v in tree.values[1:] if v > LEAST), reverse=True) == pytest.approx(want)
    copied, n, _ = spine(tokens, drafter, size)
    for node in range(1, len(tree)):
        path = tree.tokens_to(node)
        parent = tree.tokens_to(tree.parents[node])
        chance = options(parent, tokens, drafter, state.store, size, budget)[path[-1]]
        assert tree.values[node] == pytest.approx(tree.values[tree.parents[node]] * chance)
        assert tree.matches[node] == (n if path == copied[: len(path)] else 0)


# --- both sources


def test_a_match_is_copied_on_beyond_the_end_of_the_text() -> None:
    drafter = Goose(copy=7)
    ctx = context(drafter, [5, 1, 2, 3, 1, 2, 3])
    state = drafter.start(ctx)
    drafter.propose(ctx, state, 30)
    assert state.spine == [1, 2, 3, 1, 2, 3, 1] and state.match == 3
    assert not state.agreed, "one place agrees with nobody"


def test_places_that_agree_leave_no_room_for_branches_unless_asked_or_doubted() -> None:
    for bypass, chain in ((True, True), (False, False)):
        drafter = Goose(copy=4, bypass=bypass)
        ctx = context(drafter, [1, 2, 3, 4, 5, 1, 2, 3, 4, 6, 1, 2, 3])
        state = drafter.start(ctx)
        state.store.put_rows([3], np.array([[0, 4]]), np.array([[0.6, 0.4]]))
        tree = drafter.propose(ctx, state, 20)
        assert state.agreed and tree.tokens_to(tree.find_child(0, 4)) == [4]
        assert (len(tree.tries[0]) == 1) == chain
        state.store.chance = [0.1] * len(state.store.chance)
        assert len(drafter.propose(ctx, state, 20).tries[0]) > 1


def test_without_a_match_the_candidates_alone_make_the_tree() -> None:
    """Theirs are the rows of token recycling where nothing but the prompt is known."""
    tokens = [1, 2, 1, 3, 4, 1]
    drafter = Goose()
    ctx = context(drafter, tokens)
    state = drafter.start(ctx)
    tree = drafter.propose(ctx, state, 50)
    rival = TokenRecycling(floor=0)
    other = Context(
        Engine({"target": Toy(V)}), Request(tokens, Speculative(rival), Sampling(max_new_tokens=40))
    )
    want = rival.propose(other, rival.start(other), 50)
    assert not state.spine and not any(tree.matches)
    assert (
        [tree.tokens[t] for t in tree.tries[0]] == [want.tokens[t] for t in want.tries[0]] == [3, 2]
    )
    assert max(tree.depths) == max(want.depths) == 6


def test_the_pair_is_asked_before_the_token() -> None:
    drafter = Goose(k=2)
    ctx = context(drafter, [5, 6, 7])
    state = drafter.start(ctx)
    store, row = state.store, np.array([[0.75, 0.25]])
    store.put_rows([7], np.array([[1, 2]]), row)
    assert drafter.propose(ctx, state, 2).tokens == [7, 1]
    store.put_rows([(6 + 1) * V + 7], np.array([[3, 4]]), row)
    assert drafter.propose(ctx, state, 2).tokens == [7, 3]
    assert store.candidates_after(0, 7)[0][0] == 1
    assert list(map(list, store.candidates_after(6, 7))) == [[3, 4], [KINDS + 7, KINDS + 5]]


def test_widths_fall_along_the_spine_where_asked() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]
    drafter = Goose(copy=4, harmonic=True, k=6)
    ctx = context(drafter, tokens)
    state = drafter.start(ctx)
    for token in range(V):
        state.store.put_rows([token], np.arange(6)[None], np.full((1, 6), 1 / 6))
    state.store.chance = [0.01] * 2 * KINDS + [0.5] * 30
    tree = drafter.propose(ctx, state, 1 + 4 + 16)
    widths, node = [], 0
    while tree.matches[node] or node == 0:
        widths.append(sum(tree.matches[t] == 0 for t in tree.tries[node]))
        node = next((t for t in tree.tries[node] if tree.matches[t]), -1)
        if node < 0:
            break
    assert widths[:4] == [5, 3, 1, 1], (
        widths
    )  # 16 / 2 = 8, of which 5 are others; then 8 / i / (1 + 1/2 + 1/3 + 1/4)


@pytest.mark.parametrize("text", ["repeats", "does not"])
def test_it_is_at_least_as_good_as_each_of_its_sources(text: str) -> None:
    prompt = [1, 2, 3, 4, 5, 1, 2, 3] if text == "repeats" else [1, 2, 3]
    mat = {}
    for name, drafter in (
        ("goose", Goose(shortest=1)),
        ("recycling", TokenRecycling()),
        ("spine", Ngram(5, 20)),
    ):
        engine, lives = (
            Engine({"target": Toy(V, 1, copy=3.0 if text == "repeats" else 0.3, sharpness=8.0)}),
            [],
        )
        for seed in range(4):
            lives.append(
                engine.add(
                    Request(
                        [*prompt, seed], Speculative(drafter, nodes=12), Sampling(max_new_tokens=50)
                    )
                )
            )
            laws.finish(engine, lives[-1])
        mat[name] = 200 / sum(live.ctx.stats.steps + 1 for live in lives)
    assert mat["goose"] >= max(mat.values()) - 1e-9 and mat["goose"] > 1.3, mat


# --- learning


def step(ctx: Context, tree: TokenTree, path: list[int], token: int, seed: int = 0) -> Feedback:
    """Commits the path and the token to the text, and says with which rows."""
    rows = torch.from_numpy(np.random.default_rng(seed).normal(size=(len(tree), V)) * 2)
    tokens = [*(tree.tokens[n] for n in path), token]
    set_text(ctx, [*ctx.tokens, *tokens])
    return Feedback(tree, Reply(rows, {}, list(range(len(tree)))), Outcome(path, token), tokens)


def test_every_verified_row_is_kept_for_its_token_and_its_pair_the_accepted_last() -> None:
    drafter = Goose(k=3)
    ctx = context(drafter, [1, 2])
    state = drafter.start(ctx)
    tree = TokenTree(2)
    first = tree.add(0, 3, value=0.5)
    tree.add(first, 2, value=0.25)  # 2 again, as the root, and 3 twice
    tree.add(0, 4, value=0.25)
    tree.add(3, 3, value=0.125)
    done = step(ctx, tree, [first], 6)
    drafter.observe(ctx, state, done)
    last: dict[int, int] = {}
    for node in [0, 1, 2, 3, 4, 0, 1]:
        before = [1, 2, 3, 2, 4][node]
        last[tree.tokens[node]] = last[(before + 1) * V + tree.tokens[node]] = node
    assert last[3] == 1, "the accepted 3 counts, not the last one in the tree"
    for key, node in last.items():
        top = done.reply.logits[node].topk(3)
        want = list(zip(top.indices.tolist(), top.values.softmax(-1).tolist(), strict=True))
        got = np.frombuffer(state.store.rows[key], state.store.row)[0]
        assert got["ids"].tolist() == [t for t, _ in want] and got[
            "scores"
        ].tolist() == pytest.approx([s for _, s in want])


def test_chances_are_learnt_on_the_accepted_path_alone_also_of_what_was_cut() -> None:
    drafter = Goose(copy=3, k=2)
    ctx = context(drafter, [1, 2, 3, 4, 0, 1, 2, 3])
    state = drafter.start(ctx)
    for token in range(V):
        state.store.put_rows([token], np.array([[7, 4]]), np.array([[0.7, 0.3]]))
    drafter.propose(ctx, state, 9)
    assert state.spine == [4, 0, 1]
    store, before = state.store, copy.deepcopy(state.store)
    drafter.observe(
        ctx, state, step(ctx, TokenTree(3).chain([4]), [1], 7)
    )  # the rest of the draft was cut
    # After 3: candidates 7 (class 7) wrong, 4 (class 5) right, the spine's 4 right; after 4: 7
    # right, the others wrong.
    spines = (
        2 * KINDS + 0 * 6 + 2 * 1,
        2 * KINDS + 1 * 6 + 2 * 0,
    )  # held for 3, a low candidate; for 4, none
    kinds = {7: [False, True], 5: [True, False], spines[0]: [True], spines[1]: [False]}
    for kind, chance in enumerate(store.chance):
        want = before.chance[kind]
        for seen, right in enumerate(kinds.get(kind, []), 1):
            want += (right - want) / (4 + seen)
        assert chance == pytest.approx(want) and store.seen[kind] == len(kinds.get(kind, []))
    assert state.spine == [], "a draft is learnt from once"
    chances = list(store.chance[2 * KINDS :])
    drafter.observe(ctx, state, step(ctx, TokenTree(7), [], 1))
    assert store.chance[2 * KINDS :] == chances


def test_of_a_path_that_ends_the_text_nothing_is_learnt_behind_the_end() -> None:
    drafter = Goose(k=2)
    ctx = context(drafter, [1, 2])
    state = drafter.start(ctx)
    state.store.put_rows([2, 3], np.array([[3, 4], [5, 6]]), np.array([[0.7, 0.3], [0.7, 0.3]]))
    before = list(state.store.seen)
    set_text(ctx, [1, 2, 3])
    tree = TokenTree(2).chain([3])
    outcome = Outcome([1], None, [(1, True)])  # type: ignore[arg-type]
    rows = torch.zeros(2, V, dtype=torch.float64)
    drafter.observe(ctx, state, Feedback(tree, Reply(rows, {}, [0, 1]), outcome, [3]))
    trials = sum(state.store.seen) - sum(before)
    assert trials == 2, "the two candidates after the root, none after the end"


def test_it_observes_steps_of_trees_it_did_not_make() -> None:
    drafter = Goose()
    ctx = context(drafter, [3])  # no token before the root
    state = drafter.start(ctx)
    drafter.observe(ctx, state, step(ctx, TokenTree(3), [], 5))
    assert set(state.store.rows) == {3}
    assert drafter.propose(ctx, state, 1).tokens == [5]
    set_limit(ctx, len(ctx.tokens) + 1)
    assert drafter.propose(ctx, state, 9).tokens == [5]


# --- the store


def same(a: Store, b: Store) -> bool:
    return list(a.rows.items()) == list(b.rows.items()) and (a.chance, a.seen) == (b.chance, b.seen)


@settings(max_examples=40)
@given(st.integers(0, 99), st.integers(0, 60), st.integers(1, 12))
def test_a_store_is_what_its_tensors_say(seed: int, keys: int, k: int) -> None:
    store, again = Store(V, k, 1), Store(V, k, 1)
    learnt(store, seed, keys)
    learnt(again, seed + 1, 20)
    again.restore(store.tensors())
    assert same(store, again) and again.nbytes == store.nbytes == len(store.rows) * (ENTRY + 9 * k)
    assert all(
        store.candidates_after(b, t) == again.candidates_after(b, t)
        for b in range(-1, V)
        for t in range(V)
    )


def test_a_store_stays_within_its_megabytes_and_forgets_what_it_saw_longest_ago() -> None:
    store = Store(100_000, 8, 1)
    row = np.arange(8)[None], np.full((1, 8), 0.125)
    most = (1 << 20) // (ENTRY + 9 * 8)
    for key in range(most + 10):
        store.put_rows([key], *row)
        store.put_rows([0], *row)
    assert len(store.rows) == most == store.capacity and store.nbytes <= 1 << 20
    assert [key for key in range(13) if key in store.rows] == [0, 11, 12]
    small = Store(100_000, 8, 1)
    small.capacity = 5
    small.restore(store.tensors())
    assert list(small.rows) == list(store.rows)[-5:]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("keys", lambda t: t + V * V),
        ("keys", lambda t: t - 100),
        ("keys", lambda t: t[:-1]),
        ("keys", lambda t: t.int()),
        ("keys", lambda t: t * 0),
        ("ids", lambda t: t + 1),
        ("ids", lambda t: t[:, 1:]),
        ("ids", lambda t: t.float()),
        ("scores", lambda t: t * 3),
        ("scores", lambda t: t * torch.nan),
        ("scores", lambda t: t.flip(1)),
        ("chance", lambda t: t - 2),
        ("chance", lambda t: t[1:]),
        ("seen", lambda t: t + 65),
        ("seen", None),
        ("more", lambda t: torch.zeros(1)),
    ],
)
def test_a_store_that_does_not_fit_is_refused_and_changes_nothing(name: str, change: Any) -> None:
    store, fresh = Store(V, 3, 1), Store(V, 3, 1)
    learnt(store, 1)
    store.put_rows([V], np.array([[V - 1, 1, 2]]), np.array([[0.5, 0.3, 0.2]]))
    tensors = store.tensors()
    learnt(fresh, 2, 5)
    kept = copy.deepcopy(fresh)
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors.get(name))
    with pytest.raises(ValueError, match=r"key|ids|scores|chance|seen|goose"):
        fresh.restore(tensors)
    assert same(fresh, kept)


def test_the_store_is_shared_in_a_tenant_and_not_beyond() -> None:
    engine, drafter = Engine({"target": Toy(V)}), Goose()
    a, b, c = (
        drafter.start(context(drafter, [i, i + 1], engine, tenant))
        for i, tenant in ((1, "x"), (3, "x"), (5, "y"))
    )
    assert a.store is b.store and a.store is not c.store and set(c.store.rows) == {5}
    assert set(a.store.rows) == {1, 3}


def test_the_shortest_n_gram_is_no_longer_than_the_longest() -> None:
    with pytest.raises(BadConfig, match="goose:shortest=6: must be at most 5"):
        Goose(shortest=6)
