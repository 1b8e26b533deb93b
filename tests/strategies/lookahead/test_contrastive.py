"""Contrastive search against plain loops over fresh forwards, on toys and on transformers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell.cache.prefix_tree import PrefixTree
from foretell.core.request import Request
from foretell.core.source import Direct
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.engine.prefix_cache import Reuse
from foretell.errors import BadConfig, Unsupported
from foretell.guidance.cfg import Cfg
from foretell.models.decoder.decoder import Decoder
from foretell.strategies.lookahead.contrastive import Contrastive
from foretell.strategies.plain import Plain
from foretell.strategies.state_likeness import Directions
from foretell.testing.toy import Toy, ToyRecurrent
from tests import laws
from tests.cache.users import Evictor
from tests.models.decoder.families import tiny
from tests.strategies.choosing import PROMPT, VOCAB, logs, write

SPECS = ["contrastive:alpha=0.4,k=2"]
STOP = 3


def fresh_states(model: Any, tokens: Sequence[int]) -> list[list[float]]:
    """What leaves the last layer at each token, from an empty cache."""
    ask = Ask(TokenTree(tokens[0]).chain(tokens[1:]), rows=(), taps=(len(model.layout),))
    job, _ = model.cache().prepare(ask, tokens[:1], len(tokens))
    states = model.forward([job])[0].hidden[len(model.layout)]
    return [list(state) for state in states.tolist()]


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    product = sum(x * y for x, y in zip(a, b, strict=True))
    return product / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def expected(config: Contrastive, toy: Toy, prompt: Sequence[int], count: int) -> list[int]:
    """The text; every row and every state is worked out anew."""
    output: list[int] = []
    while len(output) < count and (not output or output[-1] != STOP):
        text = [*prompt, *output]
        law = logs(laws.row(toy, text))
        order = sorted(range(len(law)), key=lambda token: -law[token])[: config.k]
        scores = []
        for token in order:
            *seen, newest = fresh_states(toy, [*text, token])
            near = max(cosine(newest, state) for state in seen)
            scores.append((1 - config.alpha) * math.exp(law[token]) - config.alpha * near)
        output.append(order[scores.index(max(scores))])
    return output


@pytest.mark.parametrize("config", [Contrastive(), Contrastive(0.4, 2), Contrastive(1.0, 5)])
def test_the_text_is_that_of_plain_loops(config: Contrastive) -> None:
    other = 0
    for seed in range(5):
        sampling = Sampling(max_new_tokens=10, stop_token_ids=(STOP,))
        live = write(config, sampling, seed)
        assert live.ctx.output == expected(config, Toy(VOCAB, seed, copy=1.0), PROMPT, 10)
        other += live.ctx.output != write(Plain(), sampling, seed).ctx.output
        assert not live.caches
    assert other


def test_one_forward_a_token_serves_all_candidates() -> None:
    live = write(Contrastive(), Sampling(max_new_tokens=9))
    assert live.ctx.stats.calls == {"target": 1 + 9, "states": 1}


def test_states_of_a_long_prompt_and_of_a_shared_one_are_all_there() -> None:
    """Slip: those of the last piece of a prompt only, or those after a shared prefix only."""
    prompt = [(7 * i + i // 5) % VOCAB for i in range(530)]
    toy = Toy(VOCAB, 1, copy=1.0)
    wanted = expected(Contrastive(0.9, 3), toy, prompt, 3)
    last = expected(Contrastive(0.9, 3), toy, prompt[-18:], 3)
    engine = Engine({"target": toy})
    engine.reuse = Reuse(engine, PrefixTree(1 << 24))
    for _ in range(2):
        live = engine.add(Request(prompt, Contrastive(0.9, 3), Sampling(max_new_tokens=3)))
        list(engine.run())
        assert live.error is None, live.error
        assert live.ctx.output == wanted != last


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_states_are_those_that_transformers_calls_the_last(family: str) -> None:
    """Slip: states before the last norm, whose weights turn them."""
    network, config = tiny(family), Contrastive()
    with torch.no_grad():
        network.model.norm.weight.copy_(torch.linspace(-1, 3, 32).roll(5))
    text = [5, 9, 2, 7, 5, 9]
    live = run_one(Decoder(network, family), text, config, Sampling(max_new_tokens=8))
    for _ in range(8):
        with torch.inference_mode():
            now = network(torch.tensor([text]), output_hidden_states=True)
            law = now.logits[0, -1].softmax(-1)
            order = law.topk(config.k).indices.tolist()
            batch = torch.tensor([[*text, token] for token in order])
            states = network(batch, output_hidden_states=True).hidden_states[-1]
        near = torch.cosine_similarity(states[:, -1:], states[:, :-1], dim=-1).amax(-1)
        scores = (1 - config.alpha) * law[order] - config.alpha * near
        text.append(order[int(scores.argmax())])
    assert live.ctx.output == text[6:]


def run_one(target: Any, prompt: Sequence[int], config: Any, sampling: Sampling) -> Live:
    engine = Engine({"target": target})
    live = engine.add(Request(prompt, config, sampling))
    list(engine.run())
    assert live.error is None, live.error
    return live


@pytest.mark.parametrize("config", [Contrastive(alpha=0.0), Contrastive(k=1)])
def test_switched_off_it_is_greedy_decoding(config: Contrastive) -> None:
    for setting in ("plain", "penalties", "grammar"):
        base = laws.SETTINGS[setting].sampling
        sampling = replace(base, temperature=0.0, max_new_tokens=8, logprobs=2)
        for seed in range(3):
            off, plain = write(config, sampling, seed), write(Plain(), sampling, seed)
            assert off.ctx.output == plain.ctx.output and off.logprobs == plain.logprobs
            assert off.ctx.stats.calls == plain.ctx.stats.calls


def test_other_requests_and_rows_of_the_same_law_change_nothing() -> None:
    sampling = Sampling(max_new_tokens=10, logprobs=1)
    alone = write(Contrastive(), sampling)
    among = write(Contrastive(), sampling, beside=[Plain(), Contrastive(0.3, 2)])
    assert alone.ctx.output == among.ctx.output and len(alone.logprobs) == 10
    outputs = []
    for source in (Direct(), Cfg(g=1.0), Cfg(g=3.0)):
        engine = Engine({"target": Toy(VOCAB, 0, copy=1.0)})
        live = engine.add(Request(PROMPT, Contrastive(), sampling, source=source))
        list(engine.run())
        assert live.error is None, live.error
        outputs.append(live.ctx.output)
    assert outputs[0] == outputs[1] == alone.ctx.output != outputs[2]


def test_directions_grow() -> None:
    states = torch.randn(200, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    seen = Directions(states[:3])
    for start in range(3, 190, 11):
        seen.add(states[start : start + 11])
    near = seen.nearest(states[190:])
    for state, value in zip(states[190:], near.tolist(), strict=True):
        best = max(cosine(state.tolist(), other.tolist()) for other in states[:190])
        assert value == pytest.approx(best, abs=1e-12)


def test_what_it_cannot_honour_is_refused_by_name() -> None:
    for options in ({"temperature": 0.5}, {"top_k": 3}):
        with pytest.raises(BadConfig, match=f"contrastive cannot honour {next(iter(options))}"):
            Engine({"target": Toy(4)}).add(Request([0, 1], Contrastive(), Sampling(**options)))
    with pytest.raises(BadConfig, match="under the cache policy Evictor"):
        Engine({"target": Toy(4)}).add(Request([0, 1], Contrastive(), policy=Evictor()))
    with pytest.raises(Unsupported, match="t"):
        Engine({"target": ToyRecurrent(4)}).add(Request([0, 1], Contrastive()))
    for fields in ({"alpha": 1.1}, {"alpha": math.nan}, {"k": 0}):
        with pytest.raises(BadConfig, match=next(iter(fields))):
            Contrastive(**fields)
