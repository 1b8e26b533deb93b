"""CopySpec: what it copies; its exactness is in test_laws.py."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foretell.core.context import Context
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.drafters.lookup.copyspec import Copyspec
from foretell.engine.engine import Engine
from foretell.testing.toy import Toy
from tests import laws
from tests.texts import set_limit, set_text

SPECS = ["copyspec:gamma=1,copy=2"]


def context(prompt: list[int], new: int = 20) -> Context:
    return Context(
        Engine({"target": Toy(8)}),
        Request(prompt, laws.build("copyspec"), Sampling(max_new_tokens=new)),
    )


def copied(tokens: list[int], gamma: int, copy: int) -> list[int]:
    """The definition in loops: after the first place where the last gamma tokens stood."""
    for end in range(gamma, len(tokens)):
        if tokens[end - gamma : end] == tokens[-gamma:]:
            text = list(tokens)
            for at in range(end, end + copy):
                text.append(text[at])  # which goes on into itself
            return text[len(tokens) :]
    return []


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=24),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(1, 9),
)
def test_copies_what_followed_the_first_match(
    tokens: list[int], gamma: int, copy: int, start: int
) -> None:
    drafter, ctx = Copyspec(gamma, copy), context(tokens[:1])
    state = drafter.start(ctx)
    for end in range(min(start, len(tokens)), len(tokens) + 1):  # the index grows with the text
        set_text(ctx, tokens[:end])
        set_limit(ctx, end + 10)
        tree = drafter.propose(ctx, state, 30)
    tree.check()
    assert tree.is_chain and tree.tokens == [tokens[-1], *copied(tokens, gamma, copy)]


def test_the_example_of_the_paper_in_small() -> None:
    # The three newest tokens stood at the beginning: what followed them there is drafted.
    ctx, drafter = context([5, 6, 7, 1, 2, 3, 4, 5, 6, 7]), Copyspec(copy=4)
    assert drafter.propose(ctx, drafter.start(ctx), 100).tokens == [7, 1, 2, 3, 4]
    assert drafter.propose(ctx, drafter.start(ctx), 3).tokens == [7, 1, 2]
    set_limit(ctx, len(ctx.tokens) + 2)
    assert drafter.propose(ctx, drafter.start(ctx), 100).tokens == [7, 1]
    set_limit(ctx, len(ctx.tokens) + 1)
    assert drafter.propose(ctx, drafter.start(ctx), 100).tokens == [7]


def test_beats_plain_decoding_in_calls_where_the_text_repeats() -> None:
    setting = laws.Setting(Sampling(max_new_tokens=60))
    live = laws.generate(
        laws.build("copyspec"), [1, 2, 3, 4, 1, 2, 3], setting, {"target": Toy(16, 1, copy=4.0)}
    )
    assert live.ctx.stats.calls["target"] < 40 and live.ctx.stats.accepted > 20
