"""Momentum decoding: the paper's tokens, a table that is taken back, the law whatever drafts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretell.core.distribution import Sampler
from foretell.core.processor import About
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.errors import BadConfig
from foretell.processors.momentum import Grams, Momentum
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from tests import laws, tiny

VOCAB = 7


def length_of_repeat(text: Sequence[int], token: int, longest: int) -> int:
    """r of a token after a text, by looking through the whole text for every length."""
    after = [*text, token]
    found = 0
    for n in range(1, min(longest, len(after)) + 1):
        gram = after[-n:]
        if any(list(text[i : i + n]) == gram for i in range(len(text) - n + 1)):
            found = n
    return found


def papers_token(config: Momentum, row: Sequence[float], text: Sequence[int]) -> int:
    """argmax of p - alpha f(r) over the k best."""
    total = sum(math.exp(x - max(row)) for x in row)
    best = sorted(range(len(row)), key=lambda v: -row[v])[: config.k]

    def score(v: int) -> float:
        r = length_of_repeat(text, v, len(config.resistance) - 1)
        return math.exp(row[v] - max(row)) / total - config.alpha * config.resistance[r]

    return max(best, key=score)


class Looped:
    """The same as a processor, from the beginning for every row."""

    def __init__(self, config: Momentum):
        self.config = config

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        text, row = ids[0].tolist(), scores[0].tolist()
        top = max(row)
        total = sum(math.exp(x - top) for x in row)
        logs = [x - top - math.log(total) for x in row]
        best = sorted(range(len(row)), key=lambda v: -row[v])[: self.config.k]
        best = [v for v in best if row[v] > -math.inf]
        longest = len(self.config.resistance) - 1
        lost = {v: self.config.resistance[length_of_repeat(text, v, longest)] for v in best}
        if not any(lost.values()):
            return scores
        values = {}
        for v in best:
            left = math.exp(logs[v]) - self.config.alpha * lost[v]
            values[v] = math.log(left) if left >= 1e-3 else math.log(1e-3) + left / 1e-3 - 1
        shift = min(0.0, min(values.values()) - logs[best[-1]])
        warped = [values.get(v, log + shift) for v, log in enumerate(logs)]
        return torch.tensor([warped], dtype=scores.dtype)


rows = st.integers(0, 10_000).map(
    lambda seed: (
        torch.randn(VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2
    )
)
texts = st.lists(st.integers(0, 2), max_size=12)
configs = st.builds(
    Momentum,
    alpha=st.sampled_from([0.05, 0.2, 1.0]),
    k=st.integers(1, VOCAB + 1),
    resistance=st.sampled_from([(0, 1, 2, 3, 4, 5), (0, 1, 1, 2), (0, 0, 3)]),
)


@given(configs, rows, texts)
def test_the_best_token_is_the_papers(config: Momentum, row: torch.Tensor, text: list[int]) -> None:
    prompt, output = [1, *text[:4]], text[4:]
    sampler = Sampler(Sampling(processor=(config,)), prompt, (), VOCAB)
    before = row.clone()
    wanted = papers_token(config, row.tolist(), [*prompt, *output])
    assert int(sampler.scores(row, output).argmax()) == wanted
    assert torch.equal(row, before), "the model's row was changed"


@given(configs, st.lists(st.tuples(texts, rows), min_size=1, max_size=6))
def test_a_table_that_was_taken_back_is_one_made_anew(
    config: Momentum, asked: list[tuple[list[int], torch.Tensor]]
) -> None:
    track = config.start_track(About())
    for text, row in asked:
        ids = torch.tensor([text], dtype=torch.long)
        got = track(ids, row[None])
        fresh = config.start_track(About())
        assert torch.equal(got, fresh(ids, row[None]))
        assert track.known_grams == fresh.known_grams and track.new_grams == fresh.new_grams  # type: ignore[attr-defined]
        wanted = Looped(config)(ids, row[None])
        assert torch.allclose(got, wanted, atol=1e-12)
        assert bool((got[0].sort().values[1:] > -math.inf).all())


def test_a_table_that_forgets_nothing_is_caught() -> None:
    class Hoarding(Grams):
        def forget_behind(self, length: int) -> None:
            del self.new_grams[length:]

    row = torch.tensor([[3.0, 2.0, 1.0]])
    track = Hoarding(Momentum())
    for text in ([1, 0], [1, 2]):
        got = track(torch.tensor([text]), row)
    assert not torch.equal(got, Momentum().start_track(About())(torch.tensor([text]), row))


@pytest.mark.parametrize("spec", ["plain", "ngram", "draft:length=2"])
def test_the_law_is_that_of_the_warped_rows(spec: str) -> None:
    config = Momentum(alpha=0.1, k=2)
    for more in ({}, {"frequency_penalty": 0.4, "top_p": 0.9}):
        common: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 3, **more}
        strategy = laws.build(spec)
        models = laws.world(strategy)
        warped = laws.Setting(Sampling(processor=(config,), **common))
        law = laws.enumerate_law(strategy, laws.PROMPT, warped, models)
        looped = laws.Setting(Sampling(logits_processors=(Looped(config),), **common))
        toy: Any = models["target"]
        assert law.distance(laws.reference(toy, laws.PROMPT, looped)) <= laws.EXACT
        plain = laws.Setting(Sampling(**common))
        assert law.distance(laws.reference(toy, laws.PROMPT, plain)) > 1e-3


def outputs(spec: str, **sampling: Any) -> tuple[list[list[int]], int, list[Any]]:
    strategy = laws.build(spec)
    engine = Engine(laws.world(strategy, 16, copy=3.0), (7,))
    lives = [
        engine.add(Request(prompt, strategy, Sampling(max_new_tokens=40, **sampling)))
        for prompt in laws.prompts(6, 16)
    ]
    laws.finish(engine, *lives)
    steps = sum(live.ctx.stats.steps for live in lives)
    return [live.ctx.output for live in lives], steps, [live.logprobs for live in lives]


def test_drafts_change_no_token_and_save_forwards() -> None:
    wanted, steps, _ = outputs("plain", processor=(Momentum(alpha=0.02),))
    for spec in ("suffix", "ngram", "draft:length=3", "token-recycling"):
        got, fewer, _ = outputs(spec, processor=(Momentum(alpha=0.02),))
        assert got == wanted and fewer < steps, spec


def test_it_leaves_the_circles_of_greedy_decoding() -> None:
    def repeated(texts: Sequence[Sequence[int]]) -> float:
        grams = [tuple(text[i : i + 4]) for text in texts for i in range(len(text) - 3)]
        return 1 - len({*grams}) / len(grams)

    assert (
        repeated(outputs("plain", processor=(Momentum(),))[0]) < repeated(outputs("plain")[0]) / 2
    )


@pytest.mark.parametrize("config", [Momentum(alpha=0.0), Momentum(resistance=(0, 0))])
def test_off_is_bit_for_bit_plain_decoding(config: Momentum) -> None:
    for spec in ("plain", "ngram"):
        assert outputs(spec, processor=(config,), logprobs=3) == outputs(spec, logprobs=3)
    assert Sampler(Sampling(processor=(config,)), [1], (), VOCAB).plain


def test_a_grammar_that_forbids_all_of_the_best_finds_another() -> None:
    engine = Engine({"target": Toy(16, 3, copy=4.0)})
    setting = laws.formed("([a-d][e-h])+", 16, max_new_tokens=12)
    sampling = replace(setting.sampling, processor=(Momentum(k=2),))
    live = engine.add(Request([9, 8, 9, 8, 9], Plain(), sampling))
    laws.finish(engine, live)
    assert len(live.ctx.output) == 12 and laws.can_match(setting.form, 16, *live.ctx.output)


@pytest.mark.parametrize("fields", [{"resistance": (1,)}, {"resistance": (0, -1)}], ids=str)
def test_bad_fields_are_named(fields: dict[str, Any]) -> None:
    with pytest.raises(BadConfig, match=f"momentum:{next(iter(fields))}"):
        Momentum(**fields)


def test_requests_of_a_batch_follow_texts_of_their_own() -> None:
    lm = tiny.lm()
    prompts = ["The quick brown fox", "def add(a, b):", "The quick brown dog"]
    alone = [
        lm.generate(p, "suffix", max_new_tokens=24, processor=w).tokens
        for p, w in zip(prompts, ["momentum", None, "momentum:alpha=0.5"], strict=True)
    ]
    many = lm.generate(
        prompts, "suffix", max_new_tokens=24, processor=["momentum", None, "momentum:alpha=0.5"]
    )
    assert [one.tokens for one in many] == alone
    assert alone[1] == lm.generate(prompts[1], "plain", max_new_tokens=24).tokens
