"""Prompt lookup: what it proposes; its exactness is in test_laws.py."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foretell.core.context import Context
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.drafters.lookup.ngram import Ngram
from foretell.engine.engine import Engine
from foretell.speculation.strategy import Speculative
from foretell.testing.toy import Toy
from tests import laws
from tests.texts import set_limit, set_text

SPECS = ["ngram:n=1,k=2"]


def context(prompt: list[int], new: int = 20) -> Context:
    return Context(
        Engine({"target": Toy(8)}),
        Request(prompt, laws.build("ngram"), Sampling(max_new_tokens=new)),
    )


def lookup(tokens: list[int], n: int, k: int) -> list[int]:
    """The definition in loops: longest n first, the most recent earlier place, k tokens, its own
    after the text's.
    """
    for size in range(min(n, len(tokens)), 0, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                text = list(tokens)
                for at in range(end, end + k):
                    text.append(text[at])
                return text[len(tokens) :]
    return []


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=24),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(0, 9),
)
def test_proposes_what_followed_the_longest_most_recent_match(
    tokens: list[int], n: int, k: int, start: int
) -> None:
    drafter, budget = Ngram(n, k), 30
    ctx = context(tokens[:1])
    state = drafter.start(ctx)
    for end in range(
        min(max(1, start), len(tokens)), len(tokens) + 1
    ):  # the index grows with the text
        set_text(ctx, tokens[:end])
        set_limit(ctx, end + 10)
        tree = drafter.propose(ctx, state, budget)
    tree.check()
    assert tree.is_chain and tree.tokens == [tokens[-1], *lookup(tokens, n, k)]


def test_obeys_budget_and_depth() -> None:
    ctx, drafter = context([1, 2, 3, 4, 5, 1, 2], 4), Ngram(k=5)
    assert drafter.propose(ctx, drafter.start(ctx), 100).tokens == [
        2,
        3,
        4,
        5,
    ]  # 4 new tokens: the last is not drafted
    assert drafter.propose(ctx, drafter.start(ctx), 3).tokens == [2, 3, 4]
    assert drafter.propose(ctx, drafter.start(ctx), 1).tokens == [2]
    set_limit(ctx, len(ctx.tokens) + 1)
    assert drafter.propose(ctx, drafter.start(ctx), 100).tokens == [2]


def test_nothing_matches_nothing_is_drafted() -> None:
    setting = laws.Setting(Sampling(max_new_tokens=1))
    live = laws.generate(Speculative(Ngram(), nodes=8), [5], setting, {"target": Toy(8)})
    assert live.ctx.stats.drafted == 0 and len(live.ctx.output) == 1
    ctx = context([1, 2, 3])
    assert len(Ngram().propose(ctx, Ngram().start(ctx), 9)) == 1


def test_a_text_that_repeats_is_copied() -> None:
    """With a toy that repeats what it saw, most tokens come from drafts."""
    live = laws.generate(
        Speculative(Ngram(), nodes=8),
        [1, 2, 3, 4] * 3,
        laws.Setting(Sampling(max_new_tokens=40)),
        {"target": Toy(8, copy=4.0)},
    )
    assert live.ctx.stats.mat > 2
