"""The paper's law of sequences: what equation 2 says, by hand; greedy it is exact, drawn it is
not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell.core.context import Context
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.drafters.model import omni
from foretell.engine.engine import Engine
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from tests import laws, vocabularies

PROMPT = (0, 1, 0, 0, 1)


def test_the_declared_law_is_equation_two() -> None:
    ours, theirs = vocabularies.PAIRS["sequences"]
    shared = omni.Shared(ours, theirs, 5, 2)
    law = torch.tensor([0.7, 0.3], dtype=torch.float64)
    plain = omni.Omni._law_below(shared, law, 0, [0.7], 0)
    assert plain.tolist() == pytest.approx([0.7, 0, 0.3, 0, 0])
    merged = omni.Omni._law_below(shared, law, 0, [0.7, 0.5], 1)
    assert merged.tolist() == pytest.approx([0.35, 0.35, 0.3, 0, 0])
    longer = omni.Omni._law_below(shared, law, 0, [0.7, 0.5, 0.4], 3)
    assert longer.tolist() == pytest.approx([0.56, 0, 0.3, 0.14, 0])


def test_at_temperature_zero_tokens_are_those_of_plain_decoding() -> None:
    accepted = 0
    for pair in ("merged", "sequences", "partial", "special"):
        models = vocabularies.pair(pair, copy=2.5)
        for options in ({}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 3}):
            one = laws.Setting(Sampling(max_new_tokens=20, **options), eos=(1,))
            found = [
                laws.generate(strategy, PROMPT, one, models)
                for strategy in (laws.build("omni"), Plain())
            ]
            assert found[0].ctx.output == found[1].ctx.output
            accepted += found[0].ctx.stats.accepted
    assert accepted


def test_drawn_its_law_is_near_the_targets_and_not_it() -> None:
    """So it is named lossy; with vocabularies that need no sequences nothing is lost."""
    one = laws.SETTINGS["plain"]
    one = replace(one, sampling=replace(one.sampling, max_new_tokens=2))
    off = {}
    for pair in ("merged", "same"):
        models: Any = vocabularies.pair("merged")
        if pair == "same":
            models = {"target": Toy(3, 3, copy=0.5), "draft": Toy(3, 5, copy=0.5)}
            models["draft"] = Toy(3, 5, copy=0.5)
        law = laws.enumerate_law(laws.build("omni:length=3"), PROMPT, one, models)
        off[pair] = law.distance(laws.reference(models["target"], PROMPT, one))
        assert law.accepted
    assert 1e-3 < off["merged"] < 0.1 and off["same"] < laws.EXACT


def test_the_longest_known_sequence_is_merged() -> None:
    models = vocabularies.pair("sequences", copy=1.0)
    strategy: Any = laws.build("omni:length=3")
    engine = Engine(models)
    ctx = Context(engine, Request(PROMPT, strategy, Sampling()))
    state = strategy.drafter.start(ctx.scope_to(strategy.drafter))
    word = strategy.drafter._find_word
    assert word(state, (0, 1, 1)) == (1, 0)
    state.observe([1, 3])
    assert word(state, (0, 1, 1)) == (3, 3) and word(state, (0, 1, 0)) == (2, 1)
    assert word(state, (0, 0, 1)) == (1, 0) and word(state, (1, 0)) == (1, 2)
