"""The law of a path against transformers' own processors, applied token by token as its generate
does.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st

from foretell.core import draws
from foretell.core.distribution import Sampler, Target
from foretell.core.random import Rng
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, BadModel
from foretell.testing.toy import Toy
from foretell.verification.acceptance import walk_tree
from tests import laws

VOCAB = 7
fields = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.5, 1.0, 1.7])},
    optional={
        "top_k": st.integers(0, VOCAB + 2),
        "top_p": st.sampled_from([0.3, 0.8, 0.95, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1, 0.5]),
        "typical_p": st.sampled_from([0.4, 0.9]),
        "repetition_penalty": st.sampled_from([0.7, 1.5]),
        "presence_penalty": st.sampled_from([-1.0, 0.5]),
        "frequency_penalty": st.sampled_from([-0.5, 0.25]),
        "no_repeat_ngram_size": st.integers(0, 3),
        "logit_bias": st.dictionaries(
            st.integers(0, VOCAB - 1), st.sampled_from([-2.0, 0.5, 3.0]), max_size=3
        ),
        "bad_words": st.lists(
            st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=2), max_size=2
        ),
        "min_new_tokens": st.integers(0, 4),
        "stop_token_ids": st.just([2]),
        "logits_processors": st.just([laws.Grammar()]),
    },
)


def stepwise(
    s: Sampling, prompt: list[int], output: list[int], row: torch.Tensor, eos: list[int]
) -> torch.Tensor:
    """The law (V,) by transformers' processors in the order of its generate, the counted penalties
    by loops.
    """
    ids, scores = torch.tensor([prompt + output]), row[None].clone()
    early = hf.LogitsProcessorList()
    if s.repetition_penalty != 1:
        early.append(hf.RepetitionPenaltyLogitsProcessor(s.repetition_penalty))
    if s.no_repeat_ngram_size:
        early.append(hf.NoRepeatNGramLogitsProcessor(s.no_repeat_ngram_size))
    if s.bad_words:
        early.append(hf.NoBadWordsLogitsProcessor([list(w) for w in s.bad_words]))
    early += list(s.logits_processors)
    scores = early(ids, scores)
    for token in set(output):
        scores[0, token] -= s.presence_penalty + s.frequency_penalty * output.count(token)
    if s.logit_bias:
        scores = hf.SequenceBiasLogitsProcessor([[[t], b] for t, b in s.logit_bias.items()])(
            ids, scores
        )
    ends = [*eos, *s.stop_token_ids]
    if ends and s.min_new_tokens:
        ban = hf.MinNewTokensLengthLogitsProcessor(len(prompt), s.min_new_tokens, ends)
        scores = ban(ids, scores)
    if s.temperature == 0:
        return torch.nn.functional.one_hot(scores[0].argmax(), VOCAB).to(row)
    late = hf.LogitsProcessorList([hf.TemperatureLogitsWarper(float(s.temperature))])
    if s.top_k:
        late.append(hf.TopKLogitsWarper(s.top_k))
    late.append(hf.TopPLogitsWarper(s.top_p))
    if s.min_p:
        late.append(hf.MinPLogitsWarper(s.min_p))
    if s.typical_p < 1:
        late.append(hf.TypicalLogitsWarper(s.typical_p))
    return late(ids, scores)[0].softmax(-1)


@given(
    fields,
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
    st.lists(st.integers(0, VOCAB - 1), max_size=6),
    st.integers(0, 999),
    st.booleans(),
)
def test_every_option_means_what_transformers_means_by_it(
    options: dict[str, Any], prompt: list[int], text: list[int], seed: int, eos: bool
) -> None:
    sampling = Sampling(**options)
    sampler = Sampler(sampling, prompt, [5] if eos else [], VOCAB)
    draw = torch.Generator().manual_seed(seed)
    for n in range(len(text) + 1):
        row = torch.randn(VOCAB, dtype=torch.float64, generator=draw) * 2
        want = stepwise(sampling, prompt, text[:n], row, [5] if eos else [])
        before = row.clone()
        if not bool(want.isfinite().all()):
            with pytest.raises(BadConfig, match="no token possible"):
                sampler.law(row, text[:n])
            continue
        got = sampler.law(row, text[:n])
        assert got.tolist() == pytest.approx(want.tolist(), abs=1e-9)
        if sampler.greedy:
            assert int(sampler.scores(row, text[:n]).argmax()) == int(want.argmax())
        assert torch.equal(row, before), "the model's row was changed"


def test_the_twin_in_the_laws_agrees_with_transformers() -> None:
    for setting in laws.SETTINGS.values():
        toy = Toy(3, 4)
        for output in ([], [0], [1, 1], [2, 0, 1], [1, 0]):
            if setting.form and (not laws.can_match(setting.form, 3, *output) or len(output) > 2):
                continue
            row = torch.tensor(laws.row(toy, [1, 2, *output]), dtype=torch.float64)
            sampler = Sampler(setting.sampling, [1, 2], setting.eos, 3)
            want = laws.expected_law(toy, [1, 2], output, setting)
            assert sampler.law(row, output).tolist() == pytest.approx(want, abs=1e-12)


def test_a_target_gives_each_node_the_law_of_its_own_path() -> None:
    sampling = Sampling(temperature=1.0, frequency_penalty=0.5, repetition_penalty=1.3)
    sampler = Sampler(sampling, [1, 2], (), VOCAB)
    rows = torch.randn(3, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    target = Target(rows, sampler, [3], TokenTree(3).chain([4, 4]))
    for node, output in enumerate(([3], [3, 4], [3, 4, 4])):
        assert torch.equal(target.p(node), sampler.law(rows[node], output))


def test_ties_go_to_the_lowest_id_everywhere() -> None:
    row = torch.tensor([0.0, 2.0, 1.0, 2.0, 2.0, 0.0, 0.0])
    for sampling in (Sampling(), Sampling(frequency_penalty=0.1), Sampling(no_repeat_ngram_size=2)):
        sampler = Sampler(sampling, [0], (), VOCAB)
        target = Target(row[None], sampler, [], TokenTree(0))
        assert (
            target.best_token(0)
            == int(sampler.scores(row, []).argmax())
            == int(sampler.law(row, []).argmax())
            == 1
        )


def test_ends_and_bans() -> None:
    sampler = Sampler(Sampling(min_new_tokens=1, stop_token_ids=[3]), [0], [5], VOCAB)
    row = torch.zeros(VOCAB)
    row[[3, 5, 6]] = torch.tensor([9.0, 8.0, 7.0])
    assert [int(sampler.scores(row, text).argmax()) for text in ([], [1])] == [
        6,
        3,
    ] and sampler.stops == {3, 5}
    assert Sampler(Sampling(ignore_eos=True, stop_token_ids=[3]), [0], [5], VOCAB).stops == {3}


OUTSIDE: list[dict[str, Any]] = [
    {"logit_bias": {VOCAB: 1.0}},
    {"stop_token_ids": [-1]},
    {"bad_words": [[1, VOCAB]]},
]


@pytest.mark.parametrize("options", OUTSIDE)
def test_tokens_outside_the_vocabulary_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(BadConfig, match=f"{next(iter(options))}.*vocabulary"):
        Sampler(Sampling(**options), [0], (), VOCAB)


def test_a_processor_that_returns_another_shape_is_told() -> None:
    sampler = Sampler(
        Sampling(logits_processors=[lambda ids, scores: scores[:, :3]]), [0], (), VOCAB
    )
    with pytest.raises(BadConfig, match="logits_processors"):
        sampler.law(torch.zeros(VOCAB), [])


BAD = {
    "max_new_tokens": -1,
    "min_new_tokens": 1.5,
    "temperature": -0.1,
    "top_k": -1,
    "top_p": 0.0,
    "min_p": 1.1,
    "typical_p": 0,
    "repetition_penalty": 0,
    "presence_penalty": 101,
    "frequency_penalty": float("nan"),
    "no_repeat_ngram_size": -2,
    "seed": "x",
    "n": 0,
    "logprobs": -1,
    "stop": [""],
    "bad_words": [[]],
    "json_schema": False,
    "regex": "",
    "grammar": 7,
    "processor": "momentum",
}


@pytest.mark.parametrize(("name", "value"), BAD.items())
def test_a_value_out_of_range_is_told_with_its_name(name: str, value: Any) -> None:
    with pytest.raises(BadConfig, match=f"{name}="):
        Sampling(**{name: value})


def test_the_ranges_cover_every_field_that_has_one() -> None:
    free = {"logit_bias", "stop_token_ids", "ignore_eos", "logits_processors", "constraint"}
    assert {f.name for f in dataclasses.fields(Sampling)} == {*BAD, *free}
    with pytest.raises(BadConfig, match="min_new_tokens=5 is above max_new_tokens=4"):
        Sampling(min_new_tokens=5, max_new_tokens=4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_possible_is_said_and_not_decided(temperature: float) -> None:
    sampler = Sampler(Sampling(temperature=temperature, no_repeat_ngram_size=1), [0, 1], [], 3)
    with pytest.raises(BadConfig, match="no token possible"):
        sampler.law(torch.zeros(3), [2])
    with pytest.raises(BadConfig, match="no token possible"):
        Target(torch.zeros(1, 3), sampler, [2], TokenTree(2)).best_token(0)


class Broken(Toy):
    """Its logits are not numbers from the sixth token on."""

    def row(self, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
        row = super().row(tokens, positions)
        return np.full_like(row, self.value) if len(tokens) > 5 else row

    value = np.nan


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("spec", ["plain", "ngram", "draft"])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0}, {"repetition_penalty": 1.2}], ids=str
)
def test_logits_that_are_no_numbers_are_the_models_fault(
    options: dict[str, Any], spec: str, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws, "lies_off_cpu", lambda rows: elsewhere)
    for value in (np.nan, -np.inf):
        monkeypatch.setattr(Broken, "value", value)
        engine = Engine({"target": Broken(8), "draft": Toy(8, noise=0.3)})
        sampling = Sampling(max_new_tokens=20, **options)
        live = engine.add(Request([1, 2, 1], laws.build(spec), sampling))
        list(engine.run())
        assert isinstance(live.error, BadModel) and "weights" in str(live.error)
        assert live.reason == "error" and len(live.ctx.output) <= 3


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_temperature_too_small_for_the_numbers_is_refused(
    elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws, "lies_off_cpu", lambda rows: elsewhere)
    rows = torch.tensor([[3.0, 1.0, 2.0]])
    sampler = Sampler(Sampling(temperature=1e-40), [0], (), 3)
    with pytest.raises(BadConfig, match="temperature=1e-40: must be 0, or large enough"):
        walk_tree(TokenTree(0), Target(rows, sampler, [], TokenTree(0)), Rng(0), 0)


def test_a_processor_that_returns_nan_is_named() -> None:
    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores * torch.nan

    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature=temperature, logits_processors=(processor,))
        with pytest.raises(BadConfig, match="logits_processors: one returned NaN"):
            Sampler(sampling, [0], (), 3).law(torch.zeros(3), [])
