"""Adaptive decoding against plain loops over the toy's rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.errors import BadConfig
from foretell.strategies.lookahead.adadec import Adadec
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from tests import laws

SPECS = ["adadec:theta=0.5,width=2,ahead=2"]
PROMPT = [0, 1, 2, 0]
VOCAB = 5


def write(
    config: Any, sampling: Sampling, seed: int = 0, eos: tuple[int, ...] = (), vocab: int = VOCAB
) -> Live:
    engine = Engine({"target": Toy(vocab, seed, copy=1.0)}, eos=eos)
    live = engine.add(Request(PROMPT, config, sampling))
    list(engine.run())
    assert live.error is None, live.error
    return live


def logs(row: Sequence[float]) -> list[float]:
    total = math.log(sum(math.exp(x - max(row)) for x in row)) + max(row)
    return [x - total for x in row]


def expected(config: Adadec, seed: int, count: int, stop: int | None = None) -> list[int]:
    """The text by loops; every row is worked out anew."""
    toy = Toy(VOCAB, seed, copy=1.0)
    output: list[int] = []
    while len(output) < count and (not output or output[-1] != stop):
        law = logs(laws.row(toy, [*PROMPT, *output]))
        order = sorted(range(VOCAB), key=lambda token: -law[token])
        entropy = -sum(math.exp(x) * x for x in law)
        room = count - len(output) - 1
        if entropy < config.theta or not room:
            output.append(order[0])
            continue
        means = []
        for token in order[: config.width]:
            path, total = [token], law[token]
            for _ in range(min(config.ahead, room)):
                if path[-1] == stop:
                    break
                below = logs(laws.row(toy, [*PROMPT, *output, *path]))
                path.append(max(range(VOCAB), key=lambda token: below[token]))
                total += below[path[-1]]
            means.append(total / len(path))
        output.append(order[means.index(max(means))])
    return output


@pytest.mark.parametrize("stop", [None, 3])
@pytest.mark.parametrize(
    "config", [Adadec(), Adadec(0.6, 2, 3), Adadec(0.0, 5, 1), Adadec(1.3, 3, 9)]
)
def test_the_text_is_that_of_plain_loops(config: Adadec, stop: int | None) -> None:
    other = 0
    for seed in range(6):
        sampling = Sampling(max_new_tokens=14, stop_token_ids=() if stop is None else (stop,))
        live = write(config, sampling, seed)
        assert live.ctx.output == expected(config, seed, 14, stop)
        other += live.ctx.output != write(Plain(), sampling, seed).ctx.output
        assert not live.caches
    assert other, "it takes other tokens than greedy decoding"


@pytest.mark.parametrize("setting", ["plain", "penalties", "grammar", "form, ends"])
def test_above_any_entropy_it_is_greedy_decoding(setting: str) -> None:
    base = laws.SETTINGS[setting]
    sampling = replace(base.sampling, temperature=0.0, max_new_tokens=8, logprobs=2)
    for seed in range(4):
        live = write(Adadec(theta=math.inf), sampling, seed, base.eos, vocab=3)
        plain = write(Plain(), sampling, seed, base.eos, vocab=3)
        assert live.ctx.output == plain.ctx.output and live.logprobs == plain.logprobs
        assert live.ctx.stats.calls == plain.ctx.stats.calls


def test_rows_that_were_looked_at_are_not_computed_again() -> None:
    config, sampling = Adadec(1.0, 3, 5), Sampling(max_new_tokens=30)
    forwards = write(config, sampling).ctx.stats.calls["target"]
    pauses = again = 0
    toy, output = Toy(VOCAB, 0, copy=1.0), expected(config, 0, 30)
    for place in range(30):
        law = logs(laws.row(toy, [*PROMPT, *output[:place]]))
        pauses += -sum(math.exp(x) * x for x in law) >= config.theta
        again += 1
    assert pauses > 3
    assert forwards <= again + pauses * config.ahead - pauses


def test_what_it_cannot_honour_is_refused_by_name() -> None:
    with pytest.raises(BadConfig, match="adadec cannot honour temperature"):
        Engine({"target": Toy(4)}).add(Request([0, 1], Adadec(), Sampling(temperature=0.5)))
    for fields in ({"theta": math.nan}, {"width": 0}, {"ahead": 0}):
        with pytest.raises(BadConfig, match=next(iter(fields))):
            Adadec(**fields)
