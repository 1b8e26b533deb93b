"""A reward that looks ahead, against loops over the toy's rows."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from foretell.core.random import Rng
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, Unsupported
from foretell.strategies.lookahead.deal import Deal
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from tests import laws
from tests.strategies.choosing import VOCAB, Count, law_after, write

SPECS = ["deal:reward=(keywords:words=b),k=2,ahead=2"]


def expected(config: Deal, sampling: Sampling, seed: int) -> list[int]:
    """The text; every row is worked out anew."""
    toy, rng, reward = Toy(VOCAB, seed, copy=1.0), Rng(sampling.seed), Count()
    output: list[int] = []
    while len(output) < sampling.max_new_tokens and (not output or output[-1] != 3):
        law = law_after(toy, output)
        order = sorted(range(VOCAB), key=lambda token: -law[token])[: config.k]
        scores = []
        for token in order:
            path = [token]
            room = sampling.max_new_tokens - len(output) - 1
            for _ in range(min(config.ahead, room)):
                if path[-1] == 3:
                    break
                below = law_after(toy, [*output, *path])
                path.append(max(range(VOCAB), key=lambda token: below[token]))
            value = reward.score(laws.spell([*output, *path]))
            scores.append(law[token] + config.weight * value)
        place = scores.index(max(scores))
        if sampling.temperature:
            weights = torch.tensor(scores, dtype=torch.float64) / sampling.temperature
            place = rng.sample(weights.softmax(0), "target", len(output))
        output.append(order[place])
    return output


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("config", [Deal(Count(), 3, 4), Deal(Count(), 5, 1, 0.3)])
def test_the_text_is_that_of_plain_loops(config: Deal, temperature: float) -> None:
    other = 0
    for seed in range(5):
        sampling = Sampling(
            max_new_tokens=10, temperature=temperature, seed=seed, stop_token_ids=(3,)
        )
        live = write(config, sampling, seed)
        assert live.ctx.output == expected(config, sampling, seed)
        other += live.ctx.output != write(Plain(), sampling, seed).ctx.output
        assert not live.caches
    assert other


def test_each_token_takes_as_many_forwards_as_it_looks_ahead() -> None:
    live = write(Deal(Count(), 3, 4), Sampling(max_new_tokens=20))
    # The first one reads the prompt; later rows are known from looking ahead.
    assert live.ctx.stats.calls["target"] <= 1 + 20 * 4


@pytest.mark.parametrize("fields", [{"weight": 0.0}, {"k": 1}])
def test_without_weight_or_choice_it_is_greedy_decoding(fields: dict[str, float]) -> None:
    for setting in ("plain", "penalties", "grammar"):
        sampling = replace(laws.SETTINGS[setting].sampling, temperature=0.0, max_new_tokens=8)
        for seed in range(3):
            live = write(Deal(Count(), **fields), sampling, seed)  # type: ignore[arg-type]
            assert live.ctx.output == write(Plain(), sampling, seed).ctx.output


def test_where_no_candidate_has_a_number_the_likeliest_is_taken() -> None:
    live = write(Deal(Count(bad="")), Sampling(max_new_tokens=8))
    assert live.ctx.output == write(Plain(), Sampling(max_new_tokens=8)).ctx.output


def test_other_requests_change_nothing() -> None:
    sampling = Sampling(max_new_tokens=10)
    alone = write(Deal(Count(), 3, 3), sampling)
    among = write(Deal(Count(), 3, 3), sampling, beside=[Plain(), Deal(Count(), 2, 2)])
    assert alone.ctx.output == among.ctx.output


def test_what_it_cannot_honour_is_refused_by_name() -> None:
    request = Request([0, 1], Deal(Count()), Sampling(temperature=1.0, top_p=0.5), text=laws.spell)
    with pytest.raises(BadConfig, match="deal cannot honour top_p"):
        Engine({"target": Toy(4)}).add(request)
    with pytest.raises(Unsupported, match=r"deal cannot run on .*: it needs a tokenizer"):
        Engine({"target": Toy(4)}).add(Request([0, 1], Deal(Count()), Sampling()))
    with pytest.raises(BadConfig, match="deal: needs a reward"):
        Deal()
    for fields in ({"k": 0}, {"ahead": 0}, {"weight": math.nan}):
        with pytest.raises(BadConfig, match=next(iter(fields))):
            Deal(Count(), **fields)
