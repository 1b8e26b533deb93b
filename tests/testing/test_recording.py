"""A recording in place of a model: its rows on and off the recorded text, and that the engine
repeats it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretell.core.context import Context
from foretell.core.drafter import Drafter
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.engine.engine import Engine
from foretell.engine.scheduler import CHUNK
from foretell.speculation.strategy import Speculative
from foretell.testing.recording import Recording
from tests import laws

TEXT = [3, 1, 4, 1, 5, 2, 6, 5]


def said(rows: torch.Tensor) -> list[int | None]:
    """The token each row is one-hot on, None where it is zero; anything else fails."""
    assert bool(((rows == 0) | (rows == 1)).all()) and bool((rows.sum(-1) <= 1).all())
    return [int(row.argmax()) if row.any() else None for row in rows]


def forked() -> TokenTree:
    """Below 3 1 4: the recorded 1 5 2 as nodes 2, 3 and 6; the others are wrong, or right after a
    wrong one.
    """
    tree = TokenTree(4)
    for parent, token in ((0, 7), (0, 1), (2, 5), (2, 4), (1, 5), (3, 2), (4, 2)):
        tree.add(parent, token)
    return tree


def test_a_row_is_the_recorded_token_on_the_text_and_nothing_off_it() -> None:
    model = Recording(8, TEXT)
    assert said(model.score(TEXT[:3])) == [1]
    assert said(model.score(TEXT[:3], TokenTree(4).chain([1, 5, 2, 6]))) == [1, 5, 2, 6, 5]
    assert said(model.score(TEXT[:3], TokenTree(4).chain([1, 6, 2, 6]))) == [1, 5, None, None, None]
    assert said(model.score(TEXT[:3], forked())) == [1, None, 5, 2, None, None, 6, None]
    assert said(model.score([3, 2, 4], TokenTree(4).chain([1]))) == [None, None], (
        "the text before is another"
    )


def test_behind_the_end_nothing_is_recorded() -> None:
    model = Recording(8, TEXT)
    assert said(model.score(TEXT)) == [None]
    assert said(model.score(TEXT[:7], TokenTree(6).chain([5, 1, 1]))) == [5, None, None, None]


def test_the_buffer_is_clean_at_each_forward() -> None:
    model = Recording(8, TEXT)
    for size in (5, 2, 6, 1, 3):
        rows = model.score(TEXT[:2], TokenTree(1).chain(TEXT[2 : 2 + size]))
        assert said(rows) == [*TEXT[2:], None][: size + 1]
        assert int(model.rows.sum()) == int(rows.sum()) and rows.shape[1] == 8


@given(st.integers(0, 7))
def test_a_tree_that_grows_is_judged_with_what_was_there(kept: int) -> None:
    model, whole = Recording(8, TEXT), forked()
    cache, tree = model.cache(), TokenTree(4)
    for node in range(1, kept + 1):
        tree.add(whole.parents[node], whole.tokens[node])
    for asked in (tree, whole):
        job, _ = cache.prepare(
            Ask(asked, rows=range(len(tree) if asked is whole else 0, len(asked))), TEXT[:3], CHUNK
        )
        model.forward([job])
        rows = model.rows[: len(job.rows)]
    assert said(torch.from_numpy(rows)) == [1, None, 5, 2, None, None, 6, None][len(tree) :]


def test_one_forward_answers_several_jobs() -> None:
    model = Recording(8, TEXT)
    jobs = [
        model.cache().prepare(Ask(tree), TEXT[:3], CHUNK)[0]
        for tree in (forked(), TokenTree(4).chain([1, 1]))
    ]
    one, two = model.forward(jobs)
    assert said(one.logits) == [1, None, 5, 2, None, None, 6, None] and said(two.logits) == [
        1,
        5,
        None,
    ]


@dataclass(frozen=True)
class Guessing(Drafter):
    """Random trees, at times right: `right` is the text, `seed` what is made of it."""

    right: tuple[int, ...]
    seed: int

    def propose(self, ctx: Context, state: None, budget: int) -> TokenTree:
        rng, tree = np.random.default_rng((self.seed, len(ctx.tokens))), TokenTree(ctx.tokens[-1])
        for _ in range(int(rng.integers(0, budget))):
            parent = int(rng.integers(0, len(tree)))
            place = len(ctx.tokens) + tree.depths[parent]
            if tree.depths[parent] < ctx.depth:
                tree.add(
                    parent,
                    self.right[place] if rng.random() < 0.7 else int(rng.integers(0, 4)),
                    value=0.1,
                )
        return tree


@given(st.lists(st.integers(0, 3), min_size=2, max_size=40), st.integers(1, 39), st.integers(0, 99))
def test_whatever_is_drafted_the_recording_comes_out(text: list[int], cut: int, seed: int) -> None:
    prompt, answer = text[: min(cut, len(text) - 1)], text[min(cut, len(text) - 1) :]
    setting = laws.Setting(Sampling(max_new_tokens=len(answer)))
    model = Recording(4, text)
    live = laws.generate(
        Speculative(Guessing(tuple(text), seed), nodes=8), prompt, setting, {"target": model}
    )
    assert live.ctx.output == answer and live.reason == "length"
    stats = live.ctx.stats
    assert stats.steps + 1 == model.calls and len(answer) == stats.accepted + model.calls


def test_long_prompts_are_taken_in_by_chunks() -> None:
    text = [i % 7 for i in range(3 * CHUNK)]
    model = Recording(8, text)
    engine = Engine({"target": model})
    live = engine.add(
        Request(text[:-20], laws.build("ngram", nodes=8), Sampling(max_new_tokens=20))
    )
    assert [e.done for e in engine.run()][-1] == "length"
    assert live.ctx.output == text[-20:] and live.ctx.stats.accepted == 20 - (
        live.ctx.stats.steps + 1
    )


def test_it_is_nothing_to_learn_logits_from() -> None:
    assert Recording.caps == {"tree"}
