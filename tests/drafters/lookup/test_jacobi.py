"""Speculative Jacobi: which rows its drafts come from, and that the declared laws matter. See also
test_laws.py.
"""

from __future__ import annotations

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
from foretell.core.tree import Law, TokenTree
from foretell.core.types import Outcome, Reply, Sampling
from foretell.drafters.lookup.jacobi import Jacobi, State
from foretell.engine.engine import Engine
from foretell.speculation.strategy import Speculative
from foretell.testing.toy import Toy
from tests import laws
from tests.texts import set_text

SPECS = ["jacobi:window=2"]

VOCAB = 5
SAMPLINGS = [
    Sampling(max_new_tokens=60),
    Sampling(max_new_tokens=60, repetition_penalty=1.5, frequency_penalty=0.4),
    Sampling(max_new_tokens=60, temperature=1.0),
    Sampling(
        max_new_tokens=60, temperature=0.8, top_p=0.8, presence_penalty=0.7, logit_bias={1: 1.0}
    ),
]


def context(drafter: Jacobi, prompt: list[int], sampling: Sampling, vocab: int = VOCAB) -> Context:
    return Context(Engine({"target": Toy(vocab)}), Request(prompt, Speculative(drafter), sampling))


def commit(
    drafter: Jacobi,
    ctx: Context,
    state: State,
    tree: TokenTree,
    rows: torch.Tensor,
    tokens: list[int],
) -> None:
    """One step's end: the first of `tokens` are the accepted ones."""
    set_text(ctx, [*ctx.tokens, *tokens])
    path = list(range(1, len(tokens)))
    outcome = Outcome(path, tokens[-1], [(n, True) for n in path])
    drafter.observe(
        ctx, state, Feedback(tree, Reply(rows, {}, list(range(len(tree)))), outcome, tokens)
    )


@settings(max_examples=40)
@given(
    seed=st.integers(0, 999),
    sampling=st.sampled_from(SAMPLINGS),
    window=st.integers(1, 6),
    back=st.integers(1, 4),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
)
def test_every_place_is_drawn_from_the_newest_row_for_its_position(
    seed: int, sampling: Sampling, window: int, back: int, prompt: list[int]
) -> None:
    """The twin keeps the laws by their position in the output, where the drafter keeps rows and
    counts.
    """
    drafter, draw = Jacobi(window, back), np.random.default_rng(seed)
    ctx = context(drafter, prompt, sampling)
    state, known = drafter.start(ctx), dict[int, torch.Tensor]()
    for _ in range(8):
        budget, verified = int(draw.choice([1, 3, 7])), draw.random() < 0.8
        tree = drafter.propose(ctx, state, budget)
        tree.check()
        assert len(tree) == 1 + min(window, budget - 1, ctx.depth) and tree.is_chain
        output, text = ctx.output, list(ctx.tokens)
        for place, node in enumerate(range(1, len(tree))):
            law, q = tree.laws[node], known.get(len(output) + place)
            if q is None:
                want = text[-back] if back <= len(text) else text[0]
            else:
                want = (
                    int(q.argmax())
                    if ctx.sampler.greedy
                    else ctx.rng.sample(q, "draft", len(output), place)
                )
            assert tree.tokens[node] == want
            if ctx.sampler.greedy:
                assert law is None
            else:
                one_hot = torch.eye(VOCAB, dtype=torch.float64)[want]
                assert law is not None and torch.equal(
                    law.dense(VOCAB).double(), one_hot if q is None else q
                )
            text.append(want)
        seen = (
            tree if verified else TokenTree(tree.tokens[0])
        )  # where nothing is verified the older rows still count
        rows = torch.from_numpy(draw.normal(0, 2, (len(seen), VOCAB)))
        if len(seen) > 1:
            chain = seen.tokens[1:]
            known = {
                len(output) + r: ctx.sampler.law(rows[r], [*output, *chain[:r]])
                for r in range(len(seen))
            }
        accepted = int(draw.integers(len(seen)) * draw.random())
        other = [t for t in range(VOCAB) if t not in seen.tokens[accepted + 1 : accepted + 2]]
        commit(
            drafter,
            ctx,
            state,
            seen,
            rows,
            [*seen.tokens[1 : accepted + 1], int(draw.choice(other))],
        )


def test_a_step_that_asks_for_no_drafts_keeps_the_rows() -> None:
    drafter = Jacobi(4)
    ctx = context(drafter, [1, 2, 3], SAMPLINGS[0])
    state = drafter.start(ctx)
    tree = drafter.propose(ctx, state, 9)
    assert tree.tokens == [3, 1, 2, 3, 1]
    commit(drafter, ctx, state, tree, torch.eye(VOCAB)[[0, 4, 2, 0, 3]], [4])
    for token in (0, 2):
        root = TokenTree(ctx.tokens[-1])
        commit(drafter, ctx, state, root, torch.eye(VOCAB)[[token]], [token])
    assert drafter.propose(ctx, state, 9).tokens == [2, 0, 3, 2, 0], (
        "two places have rows, the others repeat"
    )


class Positional(Toy):
    """Its law depends on the position alone, so rows after a wrong text are right."""

    def row(self, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return super().row(np.zeros(1), positions.max(keepdims=True))


class Watched(Jacobi):
    """Collects whether the tested drafts were redrawn ones and accepted."""

    seen: list[tuple[bool, bool]]

    def observe(self, ctx: Context, state: State, step: Feedback) -> None:
        at, rows = len(ctx.output) - len(step.tokens) - state.start, len(state.rows)
        self.seen.extend((at + node - 1 < rows, good) for node, good in step.outcome.tested)
        super().observe(ctx, state, step)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_a_wrong_text_changes_no_row_every_redrawn_token_is_accepted(
    temperature: float,
) -> None:
    Watched.seen = []
    setting = laws.Setting(Sampling(max_new_tokens=48, temperature=temperature, seed=5))
    live = laws.generate(
        Speculative(Watched(8), nodes=8), [1, 2, 3], setting, {"target": Positional(8)}
    )
    redrawn = [good for drawn, good in Watched.seen if drawn]
    assert len(redrawn) > 20 and all(redrawn)
    assert not all(good for drawn, good in Watched.seen if not drawn)
    assert live.ctx.stats.steps < 24


@pytest.mark.parametrize("setting", ["plain", "penalties", "top-p", "bias, ends"])
@pytest.mark.parametrize("rule", ["default", "block"])
def test_the_law_of_four_tokens(setting: str, rule: str) -> None:
    """Long enough that redrawn tokens are tested after redrawn ones."""
    prompt, vocab = ((0, 1, 0), 2) if setting != "bias, ends" else ((0, 1, 2, 0, 1), 3)
    laws.check_law(
        laws.build("jacobi:window=2,back=2", rule),
        setting,
        4,
        warm=False,
        prompt=prompt,
        vocab=vocab,
    )


class Flat(Jacobi):
    """Declares one law for all redrawn tokens."""

    def propose(self, ctx: Context, state: State, budget: int) -> TokenTree:
        tree, vocab = super().propose(ctx, state, budget), ctx.sampler.vocab
        tree.laws = [
            Law(torch.full((vocab,), 1 / vocab)) if q and q.ids is None else q for q in tree.laws
        ]
        return tree


class Updated(Jacobi):
    """Declares what the row's law would be behind the new text, which is not what was drawn
    from.
    """

    def propose(self, ctx: Context, state: State, budget: int) -> TokenTree:
        tree, first = super().propose(ctx, state, budget), len(ctx.output) - state.start
        for node in range(1, min(len(tree), len(state.rows) - first + 1)):
            words = [*ctx.output, *tree.tokens_to(node - 1)]
            tree.laws[node] = Law(ctx.sampler.law(state.rows[first + node - 1], words))
        return tree


@pytest.mark.parametrize(("slip", "setting"), [(Flat, "plain"), (Updated, "penalties")])
def test_another_law_than_that_of_the_draw_is_caught(slip: type[Jacobi], setting: str) -> None:
    world: dict[str, Any] = {"tokens": 4, "warm": False, "prompt": (0, 1, 0), "vocab": 2}
    laws.check_law(Speculative(Jacobi(2), nodes=4), setting, **world)
    with pytest.raises(AssertionError, match="the law of the first 4 tokens is off"):
        laws.check_law(Speculative(slip(2), nodes=4), setting, **world)


class Strict:
    """No token twice in a row; asked after such a text it has no answer."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        text = ids[0].tolist()
        if any(a == b for a, b in pairwise(text)):
            raise ValueError("asked after a text that is forbidden")
        scores = scores.clone()
        scores[0, text[-1]] = -torch.inf
        return scores


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("back", [1, 2, 3])
def test_no_processor_is_asked_behind_a_text_it_forbids(temperature: float, back: int) -> None:
    sampling = Sampling(max_new_tokens=40, temperature=temperature, logits_processors=(Strict(),))
    models = {"target": Toy(4, copy=1.0)}
    live = laws.generate(
        laws.build(f"jacobi:window=6,back={back}"), [1, 2, 3], laws.Setting(sampling), models
    )
    assert len(live.ctx.output) == 40 and live.ctx.stats.drafted
    assert bool(live.ctx.stats.accepted) == (back > 1)


def test_nothing_is_drawn_behind_an_end() -> None:
    drafter = Jacobi(4, back=2)
    ctx = context(
        drafter, [1, 2], Sampling(max_new_tokens=20, stop_token_ids=(1,), logit_bias={3: 0.5})
    )
    state = drafter.start(ctx)
    tree = drafter.propose(ctx, state, 9)
    assert tree.tokens == [2, 1], "the chain stops at a token that ends the text"
    commit(drafter, ctx, state, tree, torch.zeros(2, VOCAB), [4])
    assert state.chain == [] and len(state.rows) == 1


def test_budget_and_depth_bound_the_chain() -> None:
    for budget, left, want in ((1, 20, 0), (4, 20, 3), (40, 20, 16), (40, 3, 2), (40, 1, 0)):
        drafter = Jacobi()
        ctx = context(drafter, [1, 2, 3], Sampling(max_new_tokens=left, temperature=1.0))
        assert len(drafter.propose(ctx, drafter.start(ctx), budget)) == 1 + want
