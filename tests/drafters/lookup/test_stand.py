"""Stand: the means it keeps, the laws it draws from, the shape of its trees; its exactness is in
test_laws.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
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
from foretell.drafters.lookup.stand import CHANCE, Stand, State, plan_tree
from foretell.engine.engine import Engine
from foretell.speculation.strategy import Speculative
from foretell.testing.outcomes import Enumerator
from foretell.testing.toy import Toy
from tests import laws

SPECS = ["stand:n=2,k=2,size=3", "stand:n=3,nodes=16"]
VOCAB = 6


def context(
    drafter: Stand,
    prompt: Sequence[int],
    sampling: Sampling | None = None,
    engine: Engine | None = None,
    **more: Any,
) -> Context:
    engine = engine or Engine({"target": Toy(VOCAB)})
    sampling = sampling or Sampling(max_new_tokens=40, temperature=1.0)
    return Context(engine, Request(prompt, Speculative(drafter), sampling, **more)).scope_to(
        drafter
    )


def entry(state: State, *gram: int) -> dict[int, float]:
    """What the request sees after an n-gram."""
    row = state.seen.get(gram)
    assert row is not None
    ids, probs = state.memory.unpack_row(row)
    return dict(zip(ids.tolist(), probs.tolist(), strict=True))


def learn(state: State, gram: tuple[int, ...], ids: Sequence[int], probs: Sequence[float]) -> None:
    state.memory.learn_row(state.seen, gram, ids, probs)


# --- what is learnt


def test_the_rows_of_committed_tokens_are_learnt_behind_their_n_grams() -> None:
    drafter = Stand(k=2)
    ctx = context(drafter, [1, 2, 3])
    state = drafter.start(ctx)
    tree = TokenTree(3).chain([4, 5])
    tree.add(0, 0, value=0.5)
    ctx.tokens.extend([4, 5, 1])
    logits = torch.arange(4 * VOCAB, dtype=torch.float64).reshape(4, VOCAB).sin()
    drafter.observe(
        ctx, state, Feedback(tree, Reply(logits, {}, [0, 1, 2, 3]), Outcome([1, 2], 1), [4, 5, 1])
    )
    texts = {
        0: [1, 2, 3],
        1: [1, 2, 3, 4],
        2: [2, 3, 4, 5],
    }  # node: the end of the text before its row
    want = {tuple(text[-n:]): node for node, text in texts.items() for n in range(2, len(text) + 1)}
    assert set(state.seen.owner_values) == set(state.memory.table.entries) == set(want)
    for gram, node in want.items():
        p = logits[node].softmax(-1).tolist()
        assert entry(state, *gram) == pytest.approx(
            dict(sorted(enumerate(p), key=lambda item: -item[1])[:2])
        )


def test_rows_beyond_an_end_are_not_learnt() -> None:
    drafter = Stand(n=2)
    ctx = context(drafter, [1, 2])
    state = drafter.start(ctx)
    ctx.tokens.append(3)
    step = Feedback(
        TokenTree(2).chain([3, 4]),
        Reply(torch.zeros(3, VOCAB), {}, [0, 1, 2]),
        Outcome([1, 2], 5),
        [3],
    )
    drafter.observe(ctx, state, step)
    assert list(state.seen.owner_values) == [(1, 2)]


def test_the_memory_is_shared_in_a_tenant_and_not_beyond() -> None:
    engine, drafter = Engine({"target": Toy(VOCAB)}), Stand()
    a, b, c = (
        drafter.start(context(drafter, [1, 2], engine=engine, tenant=t)) for t in ("x", "x", "y")
    )
    assert a.memory is b.memory and a.memory is not c.memory and a.index is not b.index


# --- the trees


def filled(drafter: Stand, ctx: Context, seed: int = 0) -> Any:
    """The state, with a memory that knows every pair, and some longer n-grams."""
    state, draw = drafter.start(ctx), np.random.default_rng(seed)
    for gram in [(a, b) for a in range(VOCAB) for b in range(VOCAB)] + [
        (1, 2, 3),
        (2, 3, 1),
        (1, 2, 3, 1),
    ]:
        order, weights = (
            draw.permutation(VOCAB)[: state.memory.k],
            sorted(draw.random(state.memory.k), reverse=True),
        )
        learn(state, gram, order.tolist(), [w / (sum(weights) * 1.1) for w in weights])
    return state


def expected(ctx: Context, state: Any, n: int, words: list[int]) -> list[float]:
    """The law (V,) of a node, worked out with plain loops: longest n-gram, temperature, top-k."""
    text = [*ctx.tokens, *words]
    for size in range(min(n, len(text)), 1, -1):
        gram = tuple(text[-size:])
        if state.seen.get(gram) is not None:
            weights = entry(state, *gram)
            break
    else:
        return [0.0] * VOCAB
    s = ctx.sampler.sampling
    powers = {t: w ** (1 / s.temperature) for t, w in weights.items()}
    if s.top_k:
        powers = {
            t: w
            for t, w in powers.items()
            if w >= sorted(powers.values())[-min(s.top_k, len(powers))]
        }
    return [powers.get(t, 0.0) / sum(powers.values()) for t in range(VOCAB)]


@settings(max_examples=30)
@given(
    st.integers(0, 99),
    st.integers(1, 14),
    st.sampled_from([0, 2]),
    st.floats(0.3, 2.0),
    st.integers(1, 4),
)
def test_children_are_drawn_without_replacement_from_the_laws_they_declare(
    seed: int, budget: int, top_k: int, temperature: float, depth: int
) -> None:
    drafter = Stand(n=3, k=4)
    sampling = Sampling(max_new_tokens=depth + 1, temperature=temperature, top_k=top_k, seed=seed)
    ctx = context(drafter, [1, 2, 3], sampling)
    state = filled(drafter, ctx, seed)
    tree, plan = drafter.propose(ctx, state, budget), plan_tree(budget)
    tree.check()
    assert len(tree) <= budget and max(tree.depths) <= depth and (len(tree) > 1) == (budget > 1)
    for node, tries in enumerate(tree.tries):
        p = expected(ctx, state, 3, tree.tokens_to(node))
        for child in tries:
            law = tree.laws[child]
            assert law is not None and law.dense(VOCAB).tolist() == pytest.approx(
                [x / sum(p) for x in p], abs=1e-6
            )
            assert (
                float(law.probs.sum()) == pytest.approx(1, abs=1e-12)
                and law.token_prob(tree.tokens[child]) > 0
            )
            assert tree.values[child] <= tree.values[node]
            p[tree.tokens[child]] = 0.0
    if not top_k and depth >= max(plan.depths):
        assert sorted(tree.parents) == sorted(plan.parents) or len(tree) == budget, (
            "the memory knew every node"
        )
        assert sorted(tree.depths) == sorted(plan.depths)


def test_the_tree_is_drawn_with_the_chance_its_laws_claim() -> None:
    """All outcomes of one draft: each set of draws is as likely as the product of the declared
    probabilities.
    """
    drafter = Stand(n=3, k=3)
    total = 0.0

    def once(door: Enumerator) -> TokenTree:
        ctx = context(drafter, [1, 2, 3], rng=door)
        state = filled(drafter, ctx)
        return drafter.propose(ctx, state, 5)

    for weight, tree in Enumerator.walk_outcomes(once):
        product = 1.0
        for node in range(1, len(tree)):
            law = tree.laws[node]
            assert law is not None
            product *= law.token_prob(tree.tokens[node])
        assert weight == pytest.approx(product, abs=1e-12)
        total += weight
    assert total == pytest.approx(1)


def test_a_drawn_tree_keeps_its_laws_while_others_learn() -> None:
    drafter = Stand()
    ctx = context(drafter, [1, 2, 3])
    state = filled(drafter, ctx)
    tree = drafter.propose(ctx, state, 12)
    before = [None if law is None else law.dense(VOCAB).tolist() for law in tree.laws]
    for gram in list(state.memory.table.entries):
        learn(state, gram, range(VOCAB), [0.2, 0.2, 0.2, 0.2, 0.1, 0.1])
    assert [None if law is None else law.dense(VOCAB).tolist() for law in tree.laws] == before


def test_at_temperature_zero_the_best_tokens_are_proposed() -> None:
    drafter = Stand(n=3)
    ctx = context(drafter, [1, 2, 3], Sampling(max_new_tokens=40))
    state = filled(drafter, ctx)
    tree = drafter.propose(ctx, state, 30)
    tree.check()
    assert not tree.has_draws and len(tree) == 30
    for node, tries in enumerate(tree.tries):
        row = state.memory.find_row(state.seen, [*ctx.tokens, *tree.tokens_to(node)])
        assert row is not None
        ids, _ = state.memory.unpack_row(row)
        assert [tree.tokens[t] for t in tries] == ids.tolist()[: len(tries)]
        assert [tree.values[t] for t in tries] == pytest.approx(
            [tree.values[node] * c for c in CHANCE[: len(tries)]]
        )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_options_of_the_request_decide_what_can_be_drawn(temperature: float) -> None:
    drafter = Stand(n=2)
    bias = {4: 50.0, 5: -200.0}
    ctx = context(
        drafter, [1, 2], Sampling(max_new_tokens=9, temperature=temperature, logit_bias=bias)
    )
    tree = drafter.propose(ctx, filled(drafter, ctx), 8)
    firsts = [tree.tokens[t] for t in tree.tries[0]]
    assert firsts[0] == 4 and len(firsts) > 1 and 5 not in firsts
    banned = Sampling(max_new_tokens=9, temperature=temperature, bad_words=[[t] for t in range(3)])
    ctx = context(Stand(n=2, k=3), [1, 2], banned)
    state = ctx.owner.start(ctx)
    learn(state, (1, 2), [2, 0, 1], [0.5, 0.3, 0.1])
    assert len(ctx.owner.propose(ctx, state, 8)) == 1, "all that is known here is banned"


def test_what_only_the_text_knows_is_proposed_as_it_stood_there() -> None:
    drafter = Stand(n=3)
    ctx = context(drafter, [1, 2, 3, 1, 2])
    state = drafter.start(ctx)
    tree = drafter.propose(ctx, state, 4)
    assert tree.tokens == [2, 3, 1, 2] and tree.is_chain
    assert all(
        law is not None and law.token_prob(t) == 1.0
        for law, t in zip(tree.laws[1:], tree.tokens[1:], strict=True)
    )
    learn(state, (2, 3), [5, 4, 0, 1, 2, 3], [1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert drafter.propose(ctx, state, 4).tokens == [2, 3, 5], "the memory comes first"
    assert len(drafter.propose(context(drafter, [4]), drafter.start(context(drafter, [4])), 4)) == 1


def test_nothing_is_drafted_behind_an_end_and_no_option_is_asked_there() -> None:
    """Nothing but ends and what may stand before them, so that ends are drafted at every level."""
    for temperature in (0.0, 1.0):
        options = Sampling(
            max_new_tokens=40,
            temperature=temperature,
            stop_token_ids=(0, 1),
            logits_processors=(laws_of_ended_texts,),
        )
        ctx = context(Stand(n=3), [2, 3, 2], options)
        tree = ctx.owner.propose(ctx, filled(ctx.owner, ctx), 40)
        ends = [node for node in range(1, len(tree)) if tree.tokens[node] in (0, 1)]
        assert ends and all(not tree.tries[node] for node in ends)
        assert max(tree.depths) > 1


def laws_of_ended_texts(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor that has no answer after an end."""
    assert not {0, 1} & set(ids[0].tolist()), "asked after an end"
    return scores


@pytest.mark.parametrize("rule", ["default", "walk"])
def test_a_seed_gives_its_tokens_whatever_else_is_in_the_batch(rule: str) -> None:
    """All in one tenant, beside others that learn the same n-grams while they run."""
    models = {"target": Toy(6, copy=1.0, sharpness=4.0)}
    strategy = laws.build("stand", rule)

    def request(seed: int) -> Request:
        options = Sampling(max_new_tokens=40, temperature=1.0, seed=seed)
        return Request([1, 2, 3, 1, 2], strategy, options)

    outputs: list[list[list[int]]] = []
    for beside in (0, 3, 9):
        engine = Engine(models)
        warm = engine.add(request(99))
        laws.finish(engine, warm)
        lives = [engine.add(request(seed)) for seed in range(beside + 1)]
        laws.finish(engine, *lives)
        outputs.append([live.ctx.output for live in lives])
    for few, more in pairwise(outputs):
        assert more[: len(few)] == few
    assert len(set(map(tuple, outputs[-1]))) > 1


def test_many_samples_of_one_problem_need_ever_fewer_steps() -> None:
    engine, strategy = (
        Engine({"target": Toy(16, sharpness=9.0, window=3)}),
        Speculative(Stand(), nodes=16),
    )
    mats = []
    for seed in range(8):
        live = engine.add(
            Request([1, 2, 3], strategy, Sampling(max_new_tokens=40, temperature=0.7, seed=seed))
        )
        laws.finish(engine, live)
        mats.append(live.ctx.stats.mat)
    assert sum(mats[-3:]) > 1.2 * sum(mats[:3])


def test_the_shape_has_every_node_after_its_parent_and_elder_siblings() -> None:
    sizes = [len(plan_tree(n)) for n in (1, 2, 17, 81)]
    assert sizes == [1, 2, 17, 81]
    large, small = plan_tree(81), plan_tree(17)
    assert (large.parents[:17], large.tokens[:17]) == (small.parents, small.tokens)
    for tries in large.tries:
        assert [large.tokens[t] for t in tries] == list(range(len(tries)))
