"""SkipDecode beside plain loops that know no cache: who goes through which layers, and what comes
out.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from foretell import wrap
from foretell.cache.plan import resume_ask
from foretell.core.model import Model
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, Unsupported
from foretell.strategies.plain import Plain
from foretell.strategies.skipdecode import Skipdecode
from foretell.testing.toy import Toy
from foretell.testing.toy_layers import ToyLayers
from tests import laws
from tests.cache.users import run
from tests.drafters.own.test_layerskip import Counting
from tests.engine.users import Guidance
from tests.models.decoder.families import tiny

PROMPT = [1, 2, 3, 1, 2]


def layers_of(config: Skipdecode, place: int, horizon: int, layers: int) -> tuple[int, ...]:
    active = config.pick_layers(config.layers_at(place, horizon, layers), layers)
    return tuple(range(layers)) if active is None else active


@pytest.mark.parametrize("warm", [0, 1, 3])
def test_each_tokens_layers_are_among_those_of_the_token_before(warm: int) -> None:
    config = Skipdecode(most=0.9, least=0.25, warm=warm)
    sets = [layers_of(config, place, 20, 12) for place in range(30)]
    for before, after in itertools.pairwise(sets):
        assert set(after) <= set(before) and list(after) == sorted(after)
    assert len(sets[0]) == 11 and {len(s) for s in sets[19:]} == {3}, "it stays at the least"
    assert all(s[: min(warm, 3)] == tuple(range(min(warm, 3))) for s in sets)
    assert all(s[-1] == 11 for s in sets if len(s) > warm), "the last layers run, not the middle"
    falls = [len(a) - len(b) for a, b in itertools.pairwise(sets)]
    assert sum(falls) == 8 and set(falls) <= {0, 1}, "linear"


def test_the_schedule_by_hand() -> None:
    config = Skipdecode(most=1.0, least=0.5, warm=1)
    assert [layers_of(config, place, 3, 4) for place in range(4)] == [
        (0, 1, 2, 3), (0, 2, 3), (0, 3), (0, 3),
    ]  # fmt: skip
    assert layers_of(config, 5, 1, 4) == (0, 3), "a horizon of one token"


def expected(toy: ToyLayers, config: Skipdecode, count: int) -> list[int]:
    """The greedy text by loops: every token has its layers, and sees what wrote the same layer."""
    output: list[int] = []
    while len(output) < count:
        keys: list[list[float]] = [[] for _ in range(toy.layers)]
        places: list[list[float]] = [[] for _ in range(toy.layers)]
        for position, token in enumerate([*PROMPT, *output]):
            written = position - len(PROMPT)
            active: Sequence[int] = range(toy.layers)
            if written >= 0:
                active = layers_of(config, written, count, toy.layers)
            state = toy.embedded(np.array([float(token)]))[0]
            for layer in active:
                keys[layer].append(state[0])
                places[layer].append(float(position))
                seen = np.array(keys[layer]), np.array(places[layer])
                state = toy.after_mlp(layer, toy.attended(layer, state[None], [seen]))[0]
        output.append(int(state[1:].argmax()))
    return output


@pytest.mark.parametrize("fields", [{}, {"least": 0.25, "warm": 0}, {"most": 0.75, "least": 0.3}])
def test_the_text_is_that_of_plain_loops(fields: dict[str, Any]) -> None:
    config, toy = Skipdecode(**fields), ToyLayers(8, seed=3)
    want = expected(toy, config, 14)
    for chunk in (512, 2):
        live = run(
            {"target": toy}, Request(PROMPT, config, Sampling(max_new_tokens=14)), chunk=chunk
        )
        assert live[0].ctx.output == want
    plain = run({"target": toy}, Request(PROMPT, Plain(), Sampling(max_new_tokens=14)))[0]
    assert want[0] == plain.ctx.output[0] and want != plain.ctx.output, "it is lossy"


def test_nothing_is_computed_twice() -> None:
    model = Counting(8, seed=3)
    config = Skipdecode(least=0.25)
    live = run({"target": model}, Request(PROMPT, config, Sampling(max_new_tokens=12)))[0]
    sizes = [len(layers_of(config, place, 12, 4)) for place in range(11)]
    assert [count for count, _ in model.ran] == [len(PROMPT), *[1] * 11]
    assert model.pairs == 4 * len(PROMPT) + sum(sizes)
    assert live.ctx.stats.steps == 11 and live.ctx.stats.calls == {"target": 12}


def test_requests_at_the_same_place_share_their_forwards() -> None:
    model = Counting(8, seed=3)
    config, sampling = Skipdecode(least=0.25), Sampling(max_new_tokens=12)
    prompts = ([1, 2], [3, 4, 5], [6])
    alone = [run({"target": model}, Request(p, config, sampling))[0].ctx.output for p in prompts]
    model.ran.clear()
    lives = run({"target": model}, *(Request(p, config, sampling) for p in prompts))
    assert [live.ctx.output for live in lives] == alone
    assert [count for count, _ in model.ran] == [6, *[3] * 11]
    late = Engine({"target": model})
    first = late.add(Request(prompts[0], config, sampling))
    for _ in range(3):
        late.step()
    second = late.add(Request(prompts[1], config, sampling))
    laws.finish(late, first, second)
    assert [first.ctx.output, second.ctx.output] == alone[:2]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_with_all_layers_it_is_plain_decoding_bit_for_bit(temperature: float) -> None:
    models: dict[str, Model] = dict(wrap(tiny("llama")).models)
    sampling = Sampling(
        max_new_tokens=12, temperature=temperature, logprobs=3, repetition_penalty=1.2, seed=5
    )
    ours, theirs = (
        run(models, Request(PROMPT, config, sampling))[0]
        for config in (Skipdecode(1.0, 1.0), Plain())
    )
    assert ours.ctx.output == theirs.ctx.output and ours.logprobs == theirs.logprobs


def test_sampling_options_and_ends_hold() -> None:
    models: dict[str, Model] = dict(wrap(tiny("llama")).models)
    free = run(models, Request(PROMPT, Skipdecode(), Sampling(max_new_tokens=12)))[0].ctx.output
    banned = Sampling(max_new_tokens=12, logit_bias={free[2]: -100.0}, stop_token_ids=(free[1],))
    live = run(models, Request(PROMPT, Skipdecode(horizon=12), banned))[0]
    assert live.ctx.output == free[:2] and live.reason == "stop"
    seeds = [
        run(
            models,
            Request(PROMPT, Skipdecode(), Sampling(max_new_tokens=8, temperature=1.0, seed=s)),
        )
        for s in (1, 1, 2)
    ]
    first, again, other = (lives[0].ctx.output for lives in seeds)
    assert first == again != other


def test_its_rows_are_neither_paused_nor_handed_on() -> None:
    engine = Engine({"target": ToyLayers(8, seed=3)})
    live = engine.add(Request(PROMPT, Skipdecode(), Sampling(max_new_tokens=12)))
    while len(live.ctx.output) < 8:
        engine.step()
    cache = live.caches["target", 0]
    assert not engine.preempt_request(live) and not cache.recomputable
    ask = Ask(TokenTree(live.ctx.tokens[-1]))
    assert resume_ask(ask, (), cache) is ask
    job, _ = cache.prepare(ask, live.ctx.tokens, 99)
    assert len(job.tokens) == len(live.ctx.tokens), "the whole model needs rows of all layers"


def test_what_it_cannot_honour_is_refused() -> None:
    with pytest.raises(Unsupported, match="layers"):
        run({"target": Toy(8)}, Request(PROMPT, Skipdecode(), Sampling()))
    request = Request(PROMPT, Skipdecode(), Sampling(), source=Guidance())
    with pytest.raises(BadConfig, match="the rows of 'guidance'"):
        Engine({"target": ToyLayers(8)}).add(request)


def test_the_last_token_goes_through_no_more_layers_than_the_first() -> None:
    with pytest.raises(BadConfig, match=r"least=0\.9.*at most most=0\.5"):
        Skipdecode(most=0.5, least=0.9)
