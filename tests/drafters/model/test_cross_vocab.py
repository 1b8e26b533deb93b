"""Drafts of the tokens that two vocabularies share: exact for any pair, by the declared law."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell.core.request import Request
from foretell.core.tokenizer_bytes import Words
from foretell.core.tree import Law
from foretell.core.types import Sampling
from foretell.drafters.model import cross_vocab
from foretell.engine.engine import Engine
from foretell.errors import Unsupported
from foretell.strategies.plain import Plain
from foretell.testing.outcomes import Enumerator
from tests import laws, vocabularies

PROMPT = (0, 1, 0, 0, 1)
SETTINGS = ("plain", "top-p", "penalties", "bias, ends")


def setting(name: str, tokens: int = 2) -> laws.Setting:
    one = laws.SETTINGS[name]
    return replace(one, sampling=replace(one.sampling, max_new_tokens=tokens))


@pytest.mark.parametrize("pair", vocabularies.PAIRS)
def test_the_law_is_the_targets_between_any_tokenizers(pair: str) -> None:
    models = vocabularies.pair(pair)
    strategy = laws.build("cross-vocab:length=2")
    target: Any = models["target"]
    prompt = vocabularies.PROMPTS.get(pair, PROMPT)
    accepted = refused = 0
    for name in SETTINGS:
        law = laws.enumerate_law(strategy, prompt, setting(name), models)
        assert law.distance(laws.reference(target, prompt, setting(name))) < laws.EXACT, name
        accepted += law.accepted
        refused += law.drafted - law.accepted
    assert accepted and refused


@pytest.mark.parametrize("slip", ["ids of the draft model", "not renormalised", "one pair more"])
def test_a_wrong_law_is_noticed(slip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Power: laws that a careless mapping would declare."""
    models = vocabularies.pair("partial")
    plain_law = Law

    def wrong(q: torch.Tensor) -> Law:
        if slip == "ids of the draft model":
            return plain_law(q.roll(1))
        if slip == "not renormalised":
            return plain_law(q * 0.6)
        return plain_law((q + q.roll(1)) / 2)

    monkeypatch.setattr(cross_vocab, "Law", wrong)
    strategy = laws.build("cross-vocab:length=1")
    law = laws.enumerate_law(strategy, PROMPT, setting("plain"), models)
    target: Any = models["target"]
    assert law.distance(laws.reference(target, PROMPT, setting("plain"))) > 1e-3


def test_the_first_law_is_the_draft_models_on_what_is_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    declared: list[torch.Tensor] = []

    def note(q: torch.Tensor) -> Law:
        declared.append(q)
        return Law(q)

    monkeypatch.setattr(cross_vocab, "Law", note)
    models = vocabularies.pair("partial")  # a and c are shared; the text is in both
    sampling = Sampling(temperature=0.7, max_new_tokens=2)
    laws.generate(laws.build("cross-vocab"), [0, 2, 2, 0], laws.Setting(sampling), models)
    draft: Any = models["draft"]
    # Their tokens for "acca": "a", "cc", "a".
    row = draft.score([0, 3, 0])[0]
    want = (row[[0, 1]] / 0.7).softmax(-1).tolist()
    assert declared[0].tolist() == pytest.approx([want[0], 0, want[1]], abs=1e-12)


def test_acceptance_is_the_overlap_of_the_laws() -> None:
    models = vocabularies.pair("partial")
    target: Any = models["target"]
    draft: Any = models["draft"]
    q_type = torch.float64
    p = torch.tensor(laws.expected_law(target, [0, 2], [], setting("plain")), dtype=q_type)
    row = draft.score([0, 1])[0]
    q = torch.zeros(3, dtype=q_type)
    q[[0, 2]] = row[[0, 1]].softmax(-1)
    weight = 0.0

    def once(door: Any) -> float:
        engine = Engine(models)
        sampling = Sampling(temperature=1.0, max_new_tokens=2)
        strategy = laws.build("cross-vocab:length=1")
        live = engine.add(Request([0, 2], strategy, sampling, rng=door))
        while not live.ctx.stats.drafted:
            engine.step()
        accepted = live.ctx.stats.accepted
        engine.end(live)
        return float(accepted)

    for chance, accepted in Enumerator.walk_outcomes(once):
        weight += chance * accepted
    assert weight == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-9)


@pytest.mark.parametrize("pair", vocabularies.PAIRS)
def test_greedy_tokens_are_those_of_plain_decoding(pair: str) -> None:
    models = vocabularies.pair(pair, copy=2.5)
    for options in ({}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 3}):
        one = laws.Setting(Sampling(max_new_tokens=20, **options), eos=(1,))
        found = [
            laws.generate(strategy, PROMPT, one, models)
            for strategy in (laws.build("cross-vocab"), Plain())
        ]
        assert found[0].ctx.output == found[1].ctx.output


def test_a_form_without_shared_tokens_drafts_nothing() -> None:
    models = vocabularies.pair("partial")
    one = laws.formed("(bb)*", 3, temperature=1.0, max_new_tokens=6)
    live = laws.generate(laws.build("cross-vocab"), [0, 2], one, models)
    assert live.ctx.output == [1] * 6 and not live.ctx.stats.calls["draft"] > 6


def test_vocabularies_that_share_nothing_are_refused() -> None:
    models = vocabularies.pair("merged")
    models["draft"].tokenizer = Words([b"x", b"y"])
    with pytest.raises(Unsupported, match="tokens that the target has as well; use cross-text"):
        laws.generate(laws.build("cross-vocab"), [0], laws.Setting(Sampling()), models)
    models["draft"].tokenizer = None
    with pytest.raises(Unsupported, match=r"a tokenizer whose tokens are pieces"):
        laws.generate(laws.build("cross-vocab"), [0], laws.Setting(Sampling()), models)
