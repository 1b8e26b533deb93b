"""Beam search against transformers' own, brute force, and greedy decoding."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.errors import BadConfig
from foretell.models.decoder.decoder import Decoder
from foretell.strategies.plain import Plain
from foretell.strategies.search.beam import Beam
from foretell.strategies.search.beams import Group
from foretell.testing.toy import Toy
from tests import laws
from tests.cache.users import run
from tests.engine.users import Guidance
from tests.models.decoder.families import tiny

SPECS = ["beam:width=1", "beam:width=3,early=yes,penalty=0"]
PROMPT = [5, 9, 2, 7, 5, 9]


def toy_run(
    config: Any, sampling: Sampling, vocab: int = 4, seed: int = 0, eos: tuple[int, ...] = ()
) -> Live:
    engine = Engine({"target": Toy(vocab, seed, copy=1.0)}, eos=eos)
    live = engine.add(Request([0, 1, 2, 0], config, sampling))
    list(engine.run())
    assert live.error is None, live.error
    return live


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("early", [False, True])
def test_texts_and_scores_are_those_of_transformers(penalty: float, early: bool) -> None:
    network = tiny("llama")
    target = Decoder(network, "llama")
    for eos in (None, 11, [3, 40]):
        for width in (1, 4):
            wanted = network.generate(
                torch.tensor([PROMPT]),
                attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
                num_beams=width,
                num_return_sequences=width,
                do_sample=False,
                max_new_tokens=9,
                length_penalty=penalty,
                early_stopping=early,
                eos_token_id=eos,
                pad_token_id=0,
                output_scores=width > 1,
                return_dict_in_generate=True,
            )
            stops = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
            sampling = Sampling(max_new_tokens=9, stop_token_ids=stops)
            config = Beam(width, penalty, early)
            live = run({"target": target}, Request(PROMPT, config, sampling))[0]
            assert len(live.answers) == width
            for (tokens, score, reason), theirs in zip(live.answers, wanted.sequences, strict=True):
                assert tokens == theirs[len(PROMPT) :].tolist()[: len(tokens)]
                assert reason == ("stop" if tokens[-1] in stops else "length")
                assert score <= 0
            if width > 1:
                scores = torch.tensor([score for _, score, _ in live.answers])
                torch.testing.assert_close(scores, wanted.sequences_scores, rtol=1e-4, atol=1e-4)
            assert live.ctx.output == live.answers[0][0]


def test_enough_beams_find_the_likeliest_of_all_texts() -> None:
    toy, length = Toy(4, 0, copy=1.0), 4

    def logprob(text: tuple[int, ...]) -> float:
        total = 0.0
        for place, token in enumerate(text):
            row = laws.row(toy, [0, 1, 2, 0, *text[:place]])
            total += row[token] - math.log(sum(math.exp(x) for x in row))
        return total

    best = sorted(itertools.product(range(4), repeat=length), key=logprob, reverse=True)
    live = toy_run(Beam(width=64, penalty=0.0), Sampling(max_new_tokens=length))
    for (tokens, score, _), text in zip(live.answers[:20], best, strict=False):
        assert abs(score - logprob(tuple(tokens))) < 1e-9
        assert abs(score - logprob(text)) < 1e-9
    assert tuple(live.ctx.output) == best[0]


@pytest.mark.parametrize("setting", ["plain", "penalties", "grammar", "end", "form, ends"])
def test_one_beam_is_greedy_decoding(setting: str) -> None:
    base = laws.SETTINGS[setting]
    for seed in range(6):
        options = {"temperature": 0.0, "top_p": 1.0, "max_new_tokens": 8, "seed": seed}
        sampling = replace(base.sampling, **options)
        if setting == "end":
            sampling = replace(sampling, logits_processors=(), stop=())
        one = toy_run(Beam(width=1), sampling, 3, seed, base.eos).ctx
        assert one.output == toy_run(Plain(), sampling, 3, seed, base.eos).ctx.output


def test_one_forward_a_step_serves_all_and_nothing_is_left() -> None:
    live = toy_run(Beam(width=5), Sampling(max_new_tokens=7))
    assert live.ctx.stats.calls == {"target": 7} and live.ctx.stats.steps == 6
    assert live.ctx.stats.mat == 1.0 and live.ctx.stats.tokens_per_s > 0
    assert list(live.ctx.branches) == [0] and not live.caches


def test_a_text_is_the_same_alone_and_among_others() -> None:
    sampling = Sampling(max_new_tokens=9, stop_token_ids=(2,))
    configs = [Beam(3), Beam(2, 0.0), Beam(4, early=True), Plain()]
    alone = [toy_run(config, sampling).ctx.output for config in configs]
    engine = Engine({"target": Toy(4, 0, copy=1.0)})
    lives = [engine.add(Request([0, 1, 2, 0], config, sampling)) for config in configs]
    list(engine.run())
    assert [live.ctx.output for live in lives] == alone


def test_a_search_that_is_cut_off_anywhere_leaves_no_rows() -> None:
    for steps in range(6):
        engine = Engine({"target": Toy(4, 0, copy=1.0)})
        live = engine.add(Request([0, 1, 2, 0], Beam(4), Sampling(max_new_tokens=20)))
        for _ in range(steps):
            engine.step()
        engine.end(live)
        assert not live.caches and not engine.live


@pytest.mark.parametrize(
    ("options", "word"), [({"temperature": 1.0}, "temperature=1.0"), ({"logprobs": 2}, "logprobs")]
)
def test_what_it_cannot_honour_is_refused_by_name(options: dict[str, Any], word: str) -> None:
    engine = Engine({"target": Toy(4)})
    with pytest.raises(BadConfig, match=f"beam cannot honour {word}"):
        engine.add(Request([0, 1], Beam(), Sampling(**options)))
    with pytest.raises(BadConfig, match="reads the target itself"):
        engine.add(Request([0, 1], Beam(), Sampling(), source=Guidance()))


def test_an_ended_text_among_the_best_is_kept_and_no_other() -> None:
    """Slip: an end that ranks after the first `width` continuations counts."""
    group = Group(2, penalty=0.0)
    (root,) = group.living_beams
    law = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    going = group.advance({root: law}, 4, lambda text: "stop" if text[-1] in (1, 2) else None)
    assert [beam.tokens for _, beam in going] == [(0,), (3,)]
    assert [ended.beam.tokens for ended in group.ended_beams] == [(1,)] and not group.is_over
