"""Drafts as texts between two tokenizers: exact for any pair, and of use on real ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell.core.tokenizer_bytes import Words
from foretell.core.tree import Law, TokenTree
from foretell.core.types import Sampling
from foretell.drafters.model import cross_text
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from tests import laws, vocabularies

PROMPT = (0, 1, 0, 0, 1)
SETTINGS = ("plain", "penalties", "bias, ends")
SMALL = sorted({*vocabularies.PAIRS} - {"sequences"})


def setting(name: str, tokens: int = 2) -> laws.Setting:
    one = laws.SETTINGS[name]
    return replace(one, sampling=replace(one.sampling, max_new_tokens=tokens))


@pytest.mark.parametrize("pair", SMALL)
def test_the_law_is_the_targets_between_any_tokenizers(pair: str) -> None:
    models = vocabularies.pair(pair)
    strategy = laws.build("cross-text")
    target: Any = models["target"]
    accepted = refused = 0
    for prompt in {PROMPT, vocabularies.PROMPTS.get(pair, PROMPT)}:
        for name in SETTINGS:
            law = laws.enumerate_law(strategy, prompt, setting(name), models)
            assert law.distance(laws.reference(target, prompt, setting(name))) < laws.EXACT, name
            accepted += law.accepted
            refused += law.drafted - law.accepted
    assert accepted and refused


@pytest.mark.parametrize("pair", SMALL)
def test_tokens_are_those_of_the_seed_and_of_the_best(pair: str) -> None:
    models = vocabularies.pair(pair, copy=2.5)
    for seed in range(2):
        for temperature in (0.0, 0.9):
            sampling = Sampling(temperature=temperature, seed=seed, max_new_tokens=12)
            found = [
                laws.generate(strategy, PROMPT, laws.Setting(sampling), models)
                for strategy in (laws.build("cross-text"), Plain())
            ]
            assert found[0].ctx.output == found[1].ctx.output
            assert found[0].ctx.stats.drafted


def test_a_law_for_tokens_that_were_not_drawn_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Power: min(1, p/q) with the draft model's probability, though its best token was taken."""
    plain_add = TokenTree.add

    class Slip(TokenTree):
        __slots__ = ()

        def add(self, parent: int, token: int, *args: Any, **named: Any) -> int:
            models = vocabularies.pair("merged")
            draft: Any = models["draft"]
            q = draft.score([1, 0, 1, 1, 0])[0].softmax(-1)
            named["law"] = Law(torch.cat([q, q.new_zeros(1)]))
            return plain_add(self, parent, token, *args, **named)

    monkeypatch.setattr(cross_text, "TokenTree", Slip)
    models = vocabularies.pair("merged")
    strategy = laws.build("cross-text:length=1", nodes=1)
    law = laws.enumerate_law(strategy, PROMPT, setting("plain"), models)
    target: Any = models["target"]
    assert law.distance(laws.reference(target, PROMPT, setting("plain"))) > 1e-3


def test_of_a_perfect_draft_all_is_accepted() -> None:
    """The same model twice, once with a tokenizer that has other ids."""
    target = Toy(6, 4, copy=1.0)

    class Backwards(Toy):
        def row(self, tokens: Any, positions: Any) -> Any:
            return super().row(5 - tokens, positions)[::-1].copy()

    draft = Backwards(6, 4, copy=1.0, name="draft")
    draft.tokenizer = Words(target.tokenizer.pieces[::-1])
    live = laws.generate(
        laws.build("cross-text:length=4"),
        [1, 2, 3],
        laws.Setting(Sampling(max_new_tokens=40)),
        {"target": target, "draft": draft},
    )
    stats = live.ctx.stats
    assert stats.accepted == stats.drafted and stats.calls["target"] == 8


def test_it_stays_within_the_draft_models_context() -> None:
    models = vocabularies.pair("merged")
    models["draft"].context = 16
    want = laws.generate(
        Plain(), PROMPT, laws.Setting(Sampling(max_new_tokens=30)), models
    ).ctx.output
    live = laws.generate(
        laws.build("cross-text"), PROMPT, laws.Setting(Sampling(max_new_tokens=30)), models
    )
    assert live.ctx.output == want and live.ctx.stats.drafted
