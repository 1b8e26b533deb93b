"""RASD: the drafted tree, the copied one, their fusion; its exactness is in test_laws.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.core.context import Context
from foretell.core.tree import Law, TokenTree
from foretell.core.types import Ask, Sampling
from foretell.drafters.model import retrieval_fused
from foretell.drafters.model.draft import Draft
from foretell.drafters.model.retrieval_fused import HELD, RetrievalFused
from foretell.errors import BadConfig
from foretell.testing.toy import Toy
from tests import laws
from tests.drafters.driving import drive_step

SPECS = [
    "retrieval-fused:drafts=2,length=2,threshold=0",
    "retrieval-fused:length=1,threshold=0.3,copy=3,longest=1",
    "retrieval-fused:drafts=3,length=1",
]
V = 5
TEXT = st.lists(st.integers(0, V - 1), min_size=1, max_size=20)
TOY = Toy(V, seed=2, sharpness=3.0, copy=1.0)


def drive(
    drafter: RetrievalFused | Draft,
    tokens: list[int],
    sampling: Sampling,
    budget: int = 40,
    draft: Toy = TOY,
) -> tuple[TokenTree, list[Ask], Context]:
    """Runs the drafting of one step, answering each ask with rows worked out by hand."""
    return drive_step(drafter, sampling, TOY, tokens, budget, draft=draft)


def likely(ctx: Context, path: list[int]) -> list[float]:
    """The draft model's law below a path, at temperature 0 of its scores."""
    row = torch.tensor(laws.row(TOY, [*ctx.tokens, *path]), dtype=torch.float64)
    if ctx.sampler.greedy:
        return ctx.sampler.scores(row, path).softmax(-1).tolist()
    return ctx.sampler.law(row, path).tolist()


def continuations(
    tokens: list[int], drafter: RetrievalFused, size: int
) -> tuple[list[list[int]], int]:
    """What followed the newest tokens at their most recent places, and how many tokens matched."""
    for n in range(min(drafter.longest, len(tokens)), drafter.shortest - 1, -1):
        places = [e for e in range(n, len(tokens)) if tokens[e - n : e] == tokens[-n:]][
            -drafter.places :
        ]
        found = []
        for place in places:
            text = list(tokens)
            for _ in range(size):
                text.append(text[place + len(text) - len(tokens)])
            found.append(text[len(tokens) :])
        if places:
            return found, n
    return [], 0


def best(
    ctx: Context, drafter: RetrievalFused, asked: list[list[int]], size: int
) -> list[tuple[float, list[int]]]:
    """Every copied path with its value, best first; `asked`: paths below which the draft model was
    asked.
    """
    found, _ = continuations(ctx.tokens, drafter, size)
    values: list[tuple[float, list[int]]] = []
    queue: list[tuple[list[int], float]] = [([], 1.0)]
    while queue:
        path, value = queue.pop()
        if path:
            values.append((value, path))
        same = [f for f in found if f[: len(path)] == path and len(f) > len(path)]
        for token in {f[len(path)] for f in same}:
            chance = likely(ctx, path)[token] if path in asked else HELD
            if path or path not in asked or chance >= drafter.threshold:
                share = sum(f[len(path)] == token for f in same) / len(same)
                queue.append(([*path, token], value * chance * share))
    return sorted(values, key=lambda v: -v[0])


@settings(max_examples=60)
@given(
    TEXT,
    st.integers(1, 14),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.1, 0.4]),
    st.sampled_from([0.0, 0.9]),
    st.integers(0, 9),
    st.integers(1, 6),
)
def test_the_fused_tree_is_the_drafted_one_and_the_best_copies(
    tokens: list[int],
    budget: int,
    length: int,
    drafts: int,
    threshold: float,
    temperature: float,
    seed: int,
    room: int,
) -> None:
    drafter = RetrievalFused(length, drafts, threshold, longest=2, places=4, copy=4)
    sampling = Sampling(
        temperature=temperature, seed=seed, max_new_tokens=room + 1, repetition_penalty=1.2
    )
    tree, asks, ctx = drive(drafter, tokens, sampling, budget)
    assert len(tree) <= budget and max(tree.depths) <= room and len(asks) <= min(length, room)
    asked = [ask.tree.tokens_to(node) for ask in asks for node in ask.rows]
    drafted = {tuple(ask.tree.tokens_to(n)) for ask in asks for n in range(1, len(ask.tree))}
    if temperature:  # those of the last level were not asked about
        drafted |= {
            tuple(tree.tokens_to(n)) for n in range(1, len(tree)) if tree.laws[n] is not None
        }
        assert drafted == {
            tuple(tree.tokens_to(n)) for n in range(1, len(tree)) if tree.laws[n] is not None
        }
    else:
        assert not tree.has_draws
        level: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in asks:
            options = {
                (*p, t): v * q for p, v in level.items() for t, q in enumerate(likely(ctx, list(p)))
            }
            level = dict(sorted(options.items(), key=lambda o: -o[1])[: min(drafts, budget - 1)])
            drafted |= set(level)
    left, want = budget - 1 - len(drafted), {}
    values = best(ctx, drafter, asked, min(4, room))
    for value, path in values:
        left -= tuple(path) not in drafted
        if left < 0:
            break
        want[tuple(path)] = value
    got = {tuple(tree.tokens_to(n)) for n in range(1, len(tree))}
    assert drafted <= got and len(got) == len(drafted | set(want))
    _, n = continuations(tokens, drafter, 1)
    known = {tuple(path): value for value, path in values}
    for node in range(1, len(tree)):
        path = tuple(tree.tokens_to(node))
        if path not in drafted:  # of equally good copies any may be taken
            assert (
                tree.values[node] == pytest.approx(known[path])
                and tree.values[node] >= min(want.values()) - 1e-12
            )
            assert tree.matches[node] == n and tree.laws[node] is None
        elif path not in known:
            assert tree.matches[node] == 0
    for node in range(1, len(tree)):
        law = tree.laws[node]
        if law is not None:
            assert law.probs.tolist() == pytest.approx(
                likely(ctx, tree.tokens_to(tree.parents[node])), abs=1e-12
            )


TOKENS = [1, 2, 3, 0, 1, 2, 4, 0, 1, 2, 3, 4, 1, 2]


def test_what_the_draft_model_doubts_is_dropped_and_what_it_believes_is_counted() -> None:
    free, _, ctx = drive(RetrievalFused(1, threshold=0.0), TOKENS, Sampling())
    q = likely(ctx, [])
    assert {free.tokens[t] for t in free.tries[0]} >= {3, 4}
    kept, _, _ = drive(RetrievalFused(1, threshold=max(q[3], q[4])), TOKENS, Sampling())
    assert ({kept.tokens[t] for t in kept.tries[0]} >= {3, 4}) == (q[3] == q[4])
    none, _, _ = drive(RetrievalFused(3, threshold=0.999), TOKENS, Sampling())
    chain, _, _ = drive(Draft(3), TOKENS, Sampling())
    assert none.tokens == chain.tokens and none.parents == chain.parents
    three = next(t for t in free.tries[0] if free.tokens[t] == 3)
    if free.matches[three] and q.index(max(q)) != 3:
        assert free.values[three] == pytest.approx(q[3] * 2 / 3)  # two of three places


@pytest.mark.parametrize("seed", range(8))
def test_drawn_tokens_come_first_and_are_those_of_the_draft_method(seed: int) -> None:
    sampling = Sampling(temperature=1.0, seed=seed)
    tree, asks, _ = drive(RetrievalFused(3, 2, threshold=0.0), TOKENS, sampling)
    plain, _, _ = drive(Draft(3, 2), TOKENS, sampling)
    assert len(asks) == 3 and len(tree) > len(plain)
    for node in range(len(plain)):
        drawn = [t for t in tree.tries[node] if tree.laws[t] is not None]
        assert tree.tokens[node] == plain.tokens[node] and drawn == plain.tries[node]
        assert tree.tries[node][: len(drawn)] == drawn


def test_copies_run_on_where_the_drafted_chain_ends() -> None:
    tokens = [1, 2, 3, 4, 0, 1, 2, 3, 4, 0]
    draft = Toy(V, seed=2, sharpness=1.0, copy=6.0)
    tree, _, _ = drive(RetrievalFused(2, copy=8), tokens, Sampling(), draft=draft)
    assert tree.is_chain and tree.tokens == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert set(tree.matches[1:]) == {3} and set(tree.sources[1:]) == {"retrieval-fused"}
    assert tree.values[3:] == pytest.approx([tree.values[2] * HELD**i for i in range(1, 7)])


def test_budget_and_depth_bound_it() -> None:
    for temperature in (0.0, 1.0):
        drafter = RetrievalFused(4, 3, threshold=0.0)
        tree, asks, _ = drive(drafter, TOKENS, Sampling(temperature=temperature), 1)
        assert len(tree) == 1 and not asks
        tree, asks, _ = drive(drafter, TOKENS, Sampling(temperature=temperature, max_new_tokens=1))
        assert len(tree) == 1 and not asks
        assert (
            max(
                drive(drafter, TOKENS, Sampling(temperature=temperature, max_new_tokens=3))[
                    0
                ].depths
            )
            == 2
        )


@pytest.mark.parametrize("draft", [Toy(3, seed=2), Toy(V, seed=2, context=len(TOKENS))])
def test_a_text_beyond_the_draft_model_is_copied_without_it(draft: Toy) -> None:
    tree, asks, _ = drive(
        RetrievalFused(threshold=0.9), TOKENS, Sampling(temperature=1.0), draft=draft
    )
    assert not asks and not tree.has_draws and [tree.tokens[t] for t in tree.tries[0]] == [3, 4]
    assert [tree.values[t] for t in tree.tries[0]] == pytest.approx([HELD * 2 / 3, HELD / 3])


@pytest.mark.parametrize("size", [2, 4])
def test_a_vocabulary_padded_to_another_size_changes_no_law(size: int) -> None:
    models = {"target": Toy(3, 3, copy=0.5), "draft": Toy(size, 5, copy=0.5, name="draft")}
    setting = laws.Setting(Sampling(max_new_tokens=2, temperature=1.0))
    law = laws.enumerate_law(
        laws.build("retrieval-fused:length=2,threshold=0"), [0, 1, 0, 1, 0], setting, models
    )
    assert (
        law.distance(laws.reference(models["target"], [0, 1, 0, 1, 0], setting)) < 1e-9
        and law.accepted
    )


def test_a_law_other_than_the_one_drawn_from_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = laws.build("retrieval-fused:length=2,threshold=0")
    laws.check_law(strategy, tokens=2)
    flat = staticmethod(lambda q: Law(torch.full_like(q, 1 / len(q))))
    monkeypatch.setattr(retrieval_fused, "Law", flat)
    with pytest.raises(AssertionError, match="the law of the first"):
        laws.check_law(strategy, tokens=2)


def test_fusing_saves_target_forwards_over_both_parts() -> None:
    models = {"target": Toy(8, 3, copy=3.0), "draft": Toy(8, 3, copy=3.0, noise=0.6, name="draft")}
    setting, calls = laws.Setting(Sampling(max_new_tokens=60)), {}
    for spec in ("retrieval-fused:length=2", "draft:length=2", "ngram"):
        lives = [
            laws.generate(laws.build(spec, nodes=10), [1, 2, 3, 4, 1, 2, s], setting, models)
            for s in range(4)
        ]
        calls[spec.partition(":")[0]] = sum(live.ctx.stats.calls["target"] for live in lives)
    assert calls["retrieval-fused"] < min(calls["draft"], calls["ngram"]), calls


def test_the_shortest_n_gram_is_no_longer_than_the_longest() -> None:
    with pytest.raises(BadConfig, match="retrieval-fused:shortest=4: must be at most 3"):
        RetrievalFused(shortest=4)
