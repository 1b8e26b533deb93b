"""Places of a text: it is plain decoding's, the laws are both models', and chains are accepted as
the rules accept them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from foretell.core.random import Door
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.lab.positions import Observed, Position, chain_acceptance
from foretell.spec import resolve_method
from foretell.speculation.strategy import Speculative
from foretell.testing.outcomes import Enumerator
from foretell.testing.toy import Toy
from foretell.verification.block import Block
from foretell.verification.sequential import Sequential
from tests import laws
from tests.verification.tables import chain, enumerate_rule, table, target

PROMPT = [0, 1, 2, 0, 1]
Draw = Callable[[Door], TokenTree]


def observe(
    sampling: Sampling, count: int, length: int, draft: Toy, eos: tuple[int, ...] = ()
) -> tuple[list[int], list[Position | None]]:
    """The text and its places."""
    drafting = resolve_method(f"draft:length={length}")[1]
    assert isinstance(drafting, Speculative)
    places: list[Position | None] = []
    strategy = Observed(drafting.drafter, length, count, places.append)
    engine = Engine({"target": Toy(5, copy=1.0), "draft": draft}, eos)
    live = engine.add(Request(PROMPT, strategy, sampling))
    laws.finish(engine, live)
    return live.ctx.output, places


@pytest.mark.parametrize("seed", range(3))
def test_the_text_is_plain_decoding_s_and_the_laws_are_the_models(seed: int) -> None:
    sampling = Sampling(temperature=0.7, top_p=0.95, max_new_tokens=12, seed=seed)
    draft = Toy(5, noise=0.5, copy=1.0, name="draft")
    output, places = observe(sampling, 6, 3, draft)
    setting = laws.Setting(sampling)
    plain = laws.generate(laws.build("plain"), PROMPT, setting, {"target": Toy(5, copy=1.0)})
    assert output == plain.ctx.output[:6] and len(places) == 6
    for count, place in enumerate(places):
        assert place is not None and len(place.block) == len(place.token_wise) == 3
        for found, model in ((place.p, Toy(5, copy=1.0)), (place.q, draft)):
            want = laws.expected_law(model, PROMPT, output[:count], setting)
            assert found.dtype == torch.float64
            assert found.tolist() == pytest.approx(want, abs=1e-12)


def test_it_ends_with_the_text() -> None:
    sampling = Sampling(temperature=1.0, max_new_tokens=40, seed=2)
    output, places = observe(sampling, 30, 2, Toy(5, noise=0.5, name="draft"), eos=(0, 1))
    assert output[-1] in (0, 1) and len(places) == len(output) < 30


def test_where_the_draft_model_cannot_read_there_is_no_position() -> None:
    sampling = Sampling(temperature=1.0, max_new_tokens=9)
    output, places = observe(sampling, 4, 2, Toy(5, context=7, name="draft"))
    assert len(output) == 4
    assert [place is None for place in places] == [False, False, True, True]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("stops", [(), (1,)])
def test_chains_are_accepted_as_the_rules_accept_them(seed: int, stops: tuple[int, ...]) -> None:
    """Of every length, each drawn chain by itself, over all coins."""
    p, q = table(seed, 3, zeros=seed % 2 == 1), table(seed + 40, 3)
    means = [0.0, 0.0]
    for weight, tree in Enumerator.walk_outcomes(until(chain(q, 3), stops)):
        found = chain_acceptance(tree, target(p, tree, stops))
        for length in range(1, len(tree)):
            beginning = cut(tree, length)
            for rule, accepted in zip((Sequential(), Block()), found, strict=True):
                want = enumerate_rule(rule, beginning, p, stops)[1]
                assert accepted[length - 1] == pytest.approx(want, abs=1e-9)
        means[0] += weight * found[0][-1]
        means[1] += weight * found[1][-1]
    assert means[1] >= means[0] - 1e-9, "blocks accept at least as many"


def until(draw: Draw, stops: tuple[int, ...]) -> Draw:
    """Chains that end with a token that ends the text."""

    def drawn(door: Door) -> TokenTree:
        tree = draw(door)
        for node in range(1, len(tree)):
            if tree.tokens[node] in stops:
                return cut(tree, node)
        return tree

    return drawn


def cut(tree: TokenTree, length: int) -> TokenTree:
    """The first tokens of a chain."""
    beginning = TokenTree(tree.tokens[0])
    for node in range(1, length + 1):
        beginning.add(node - 1, tree.tokens[node], law=tree.laws[node])
    return beginning
