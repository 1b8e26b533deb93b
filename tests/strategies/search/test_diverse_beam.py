"""Diverse beam search against plain loops over the toy's rows."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.errors import BadConfig
from foretell.strategies.search.beam import Beam
from foretell.strategies.search.diverse_beam import DiverseBeam
from foretell.testing.toy import Toy
from tests import laws

SPECS = ["diverse-beam:width=4,groups=2,diversity=2"]
PROMPT = [0, 1, 2, 0]
VOCAB = 5


def search(
    config: Beam | DiverseBeam, tokens: int, seed: int = 0, stops: tuple[int, ...] = ()
) -> Live:
    engine = Engine({"target": Toy(VOCAB, seed, copy=1.0)})
    sampling = Sampling(max_new_tokens=tokens, stop_token_ids=stops)
    live = engine.add(Request(PROMPT, config, sampling))
    list(engine.run())
    assert live.error is None, live.error
    return live


def expected(config: DiverseBeam, tokens: int, seed: int) -> set[tuple[tuple[int, ...], float]]:
    """All texts with their log-probabilities, by loops: nothing ends before the limit."""
    toy = Toy(VOCAB, seed, copy=1.0)
    each = config.width // config.groups
    groups: list[list[tuple[tuple[int, ...], float, float]]] = [[((), 0.0, 0.0)]] * config.groups
    for _ in range(tokens):
        chosen: Counter[int] = Counter()
        for g in range(config.groups):
            options = []
            for text, score, logprob in groups[g]:
                row = laws.row(toy, [*PROMPT, *text])
                total = math.log(sum(math.exp(x) for x in row))
                for token in range(VOCAB):
                    gain = row[token] - total
                    cost = config.diversity * chosen[token]
                    options.append(((*text, token), score + gain - cost, logprob + gain))
            groups[g] = sorted(options, key=lambda option: -option[1])[:each]
            chosen.update(text[-1] for text, _, _ in groups[g])
    return {(text, round(logprob, 8)) for group in groups for text, _, logprob in group}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("width", "groups"), [(4, 2), (6, 3), (3, 3)])
def test_texts_are_those_of_plain_loops(width: int, groups: int, seed: int) -> None:
    config = DiverseBeam(width, groups, diversity=0.7, penalty=0.0)
    live = search(config, 5, seed)
    assert {(tuple(text), round(score, 8)) for text, score, _ in live.answers} == expected(
        config, 5, seed
    )
    scores = [score for _, score, _ in live.answers]
    assert scores == sorted(scores, reverse=True) and live.ctx.output == live.answers[0][0]
    assert live.ctx.stats.calls == {"target": 5} and list(live.ctx.branches) == [0]


def test_one_group_is_beam_search_and_without_diversity_all_groups_are_alike() -> None:
    for seed in range(4):
        beams = search(Beam(4), 6, seed).answers
        assert search(DiverseBeam(4, 1), 6, seed).answers == beams
        twice = search(DiverseBeam(8, 2, diversity=0.0), 6, seed).answers
        assert twice == [answer for answer in beams for _ in range(2)]


def test_the_first_group_is_beam_search_and_may_end_before_the_others() -> None:
    longer = 0
    for seed in range(8):
        alone = search(Beam(2), 12, seed, stops=(3,))
        live = search(DiverseBeam(4, 2, diversity=0.4), 12, seed, stops=(3,))
        assert all(answer in live.answers for answer in alone.answers)
        assert not live.caches and list(live.ctx.branches) == [0]
        longer += live.ctx.stats.calls["target"] > alone.ctx.stats.calls["target"]
    assert longer


def test_with_a_high_price_first_tokens_all_differ() -> None:
    live = search(DiverseBeam(5, 5, diversity=1e6), 4)
    assert {text[0] for text, _, _ in live.answers} == set(range(VOCAB))


def test_fields_have_bounds() -> None:
    with pytest.raises(BadConfig, match="divides width=6"):
        DiverseBeam(6, 4)
    with pytest.raises(BadConfig, match="diversity"):
        DiverseBeam(diversity=-1.0)
