"""Cautious next token prediction against loops over the toy's rows."""

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
from foretell.strategies.lookahead import cntp as module
from foretell.strategies.lookahead.cntp import Cntp
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from tests import laws
from tests.strategies.choosing import VOCAB, law_after, write

SPECS = ["cntp:most=3,high=1.2,longest=3"]
MARK = 2  # the token that stands for a punctuation mark


@pytest.fixture(autouse=True)
def marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MARKS", (laws.spell([MARK]),))


def expected(config: Cntp, seed: int, draws: int, count: int) -> tuple[list[int], int]:
    """The text, every row worked out anew, and how often several ways were tried."""
    toy, rng = Toy(VOCAB, seed, copy=1.0), Rng(draws)
    output: list[int] = []
    cautious = 0

    def drawn(text: list[int], purpose: str, position: int, index: int) -> tuple[int, float]:
        law = torch.tensor(law_after(toy, text), dtype=torch.float64)
        token = rng.sample(law.exp(), purpose, position, index)
        return token, float(law[token])

    while len(output) < count:
        law = law_after(toy, output)
        entropy = -sum(math.exp(x) * x for x in law)
        share = min(1.0, max(0.0, (entropy - config.low) / (config.high - config.low)))
        trials = int(1 + (config.most - 1) * share)
        if trials < 2:
            output.append(drawn(output, "target", len(output), 0)[0])
            continue
        cautious += 1
        best: tuple[float, list[int]] = (-math.inf, [])
        for trial in range(1, trials + 1):
            path: list[int] = []
            total = 0.0
            while len(path) < min(config.longest, count - len(output)):
                place = len(output) + len(path)
                token, value = drawn([*output, *path], "draft", place, trial)
                path.append(token)
                total += value
                if token == MARK:
                    break
            if total / len(path) > best[0]:
                best = total / len(path), path
        output += best[1]
    return output, cautious


@pytest.mark.parametrize("config", [Cntp(), Cntp(4, 0.3, 1.4, 3), Cntp(2, 0.0, 0.5, 9)])
def test_the_text_is_that_of_plain_loops(config: Cntp) -> None:
    tried = other = 0
    for seed in range(5):
        sampling = Sampling(temperature=1.0, seed=seed, max_new_tokens=14)
        live = write(config, sampling, seed)
        want, cautious = expected(config, seed, seed, 14)
        assert live.ctx.output == want
        tried += cautious
        other += want != write(Plain(), sampling, seed).ctx.output
        assert not live.caches
    assert tried and other


def test_rows_that_were_looked_at_are_not_computed_again() -> None:
    """One forward a token of the longest way: the rows of the one that is taken are kept."""
    config = Cntp(8, 0.0, 0.01, 3)
    live = write(config, Sampling(temperature=1.0, max_new_tokens=12))
    assert live.ctx.stats.calls["target"] <= 1 + len(live.ctx.output) * config.longest


def test_one_way_is_plain_sampling_and_temperature_0_is_greedy() -> None:
    for setting in ("plain", "penalties", "grammar"):
        base = laws.SETTINGS[setting].sampling
        for seed in range(3):
            sampling = replace(base, seed=seed, max_new_tokens=8)
            assert write(Cntp(1), sampling).ctx.output == write(Plain(), sampling).ctx.output
            greedy = replace(sampling, temperature=0.0)
            assert write(Cntp(), greedy).ctx.output == write(Plain(), greedy).ctx.output


def test_other_requests_change_nothing() -> None:
    for seed in range(4):
        sampling = Sampling(temperature=1.0, seed=seed, max_new_tokens=12)
        alone = write(Cntp(4), sampling)
        assert alone.ctx.output == write(Cntp(4), sampling, beside=[Plain(), Cntp(3)]).ctx.output


def test_a_stop_inside_a_way_ends_the_text() -> None:
    for seed in range(6):
        sampling = Sampling(temperature=1.0, seed=seed, max_new_tokens=20, stop_token_ids=(3,))
        output = write(Cntp(5, 0.0, 0.5), sampling).ctx.output
        assert output.count(3) == (output[-1] == 3)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"cntp cannot run on .*: it needs a tokenizer"):
        Engine({"target": Toy(4)}).add(Request([0, 1], Cntp(), Sampling()))
    for fields in ({"most": 0}, {"low": 2.0}, {"longest": 0}):
        with pytest.raises(BadConfig, match=next(iter(fields))):
            Cntp(**fields)
