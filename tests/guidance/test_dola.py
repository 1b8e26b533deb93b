"""Contrasted layers: the contrast's law by plain loops over a toy's layers, whatever drafts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from foretell.core.model import Model
from foretell.core.request import Request
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, Unsupported
from foretell.guidance.dola import Dola
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from foretell.testing.toy_layers import ToyLayers
from tests import laws, tiny
from tests.engine.users import log_softmax
from tests.guidance.driving import check_batch, check_drafts, check_off, early_row, keep_plausible


def divergence(first: Sequence[float], second: Sequence[float], reference: bool) -> float:
    """Of two laws, given as logarithms."""
    total = 0.0
    for a, b in zip(first, second, strict=True):
        mean = (math.exp(a) + math.exp(b)) / 2
        if reference:
            total += mean * (math.log(mean) - a) + mean * (math.log(mean) - b)
        else:
            total += math.exp(a) * (a - math.log(mean)) + math.exp(b) * (b - math.log(mean))
    return total / 2


@dataclass(frozen=True)
class Looped(Dola):
    """With its rows worked out by plain loops."""

    def rows(self, models: Mapping[str, Model], prompt: Sequence[int]) -> laws.Rows:
        toy = models["target"]
        assert isinstance(toy, ToyLayers)

        def after(output: Sequence[int]) -> list[float]:
            text = [*prompt, *output]
            last = log_softmax(laws.row(toy, text))
            found = []
            for layer in self.candidate_layers(toy):
                early = log_softmax(early_row(toy, text, layer))
                found.append((divergence(last, early, self.reference), early))
            opponent = max(found, key=lambda pair: pair[0])[1]
            row = [a - b for a, b in zip(last, opponent, strict=True)]
            return keep_plausible(row, last, self.least)

        return after


CASES = [("plain", "penalties"), ("suffix", "form"), ("draft:length=2", "plain")]


@pytest.mark.parametrize(("spec", "setting"), CASES)
@pytest.mark.parametrize("source", [Looped("0 1 2"), Looped("1 2", 0.3, True)], ids=str)
def test_the_law_is_the_contrasts(source: Looped, spec: str, setting: str) -> None:
    laws.check_law(laws.build(spec), setting, 2, drafts=False, source=source)


@dataclass(frozen=True)
class Otherwise(Looped):
    """A slip: what it says of its rows has one opponent for all of them."""

    def rows(self, models: Mapping[str, Model], prompt: Sequence[int]) -> laws.Rows:
        return Looped("0", self.least).rows(models, prompt)


def test_another_opponent_is_caught() -> None:
    with pytest.raises(AssertionError, match="the law of the first"):
        laws.check_law(laws.build("ngram"), source=Otherwise("0 1", 0.0), tokens=3)


@pytest.mark.parametrize("spec", ["suffix", "draft:length=3", "layerskip"])
def test_drafts_change_no_token(spec: str) -> None:
    """Also where the first layers draft, whose states are kept for the verification."""
    check_drafts(Dola("1 3", least=0.02), spec, repetition_penalty=1.2)


def test_alone_as_in_a_batch_and_closed_at_any_step() -> None:
    check_batch(Dola("1 2 3"))


def test_off_are_the_targets_own_rows() -> None:
    check_off(Dola("none"))


class Shaped:
    """What is asked of a model: how many layers it has, and whether its embeddings are its head."""

    def __init__(self, layers: int, tied: bool):
        self.layout = ((1, 1, 1),) * layers
        self.name = "shaped"
        self.config = self
        self.tie_word_embeddings = tied


@pytest.mark.parametrize(
    ("layers", "count", "tied", "wanted"),
    [
        ("low", 32, False, range(0, 16, 2)),
        ("high", 32, False, range(16, 32, 2)),
        ("low", 30, True, range(2, 15, 2)),
        ("low", 80, False, range(0, 20, 2)),
        ("high", 80, False, range(60, 80, 2)),
        ("low", 1, True, [0]),
        ("low", 2, True, [1]),
        ("7 3", 8, True, [7, 3]),
    ],
)
def test_the_candidates_are_those_of_transformers(
    layers: str, count: int, tied: bool, wanted: Sequence[int]
) -> None:
    model: Any = Shaped(count, tied)
    assert list(Dola(layers).candidate_layers(model)) == list(wanted)


@pytest.mark.parametrize("fields", [{"layers": ""}, {"layers": "mid"}])
def test_bad_fields_are_named(fields: dict[str, Any]) -> None:
    with pytest.raises(BadConfig, match=f"dola:{next(iter(fields))}"):
        Dola(**fields)


@pytest.mark.parametrize("layers", ["4", "1 1"])
def test_layers_that_are_not_there_are_refused(layers: str) -> None:
    engine = Engine({"target": ToyLayers(8)})
    live = engine.add(Request([1], Plain(), source=Dola(layers)))
    list(engine.run())
    assert isinstance(live.error, BadConfig) and "from 0 to 3 for toy" in str(live.error)
    with pytest.raises(Unsupported, match="capability 'layers'"):
        Engine({"target": Toy(8)}).add(Request([1], Plain(), source=Dola()))


def test_on_a_transformer_it_is_the_contrast_of_its_hidden_states() -> None:
    model = tiny.llama(num_hidden_layers=4)
    lm = tiny.foretell.wrap(model, tiny.tokenizer(), name="tiny")
    prompt = lm.encode("The quick brown")
    out = lm.generate("The quick brown", "plain", guidance="dola:layers=1 3", max_new_tokens=12)
    again = lm.generate("The quick brown", "suffix", guidance="dola:layers=1 3", max_new_tokens=12)
    assert out.tokens == again.tokens
    text = torch.tensor([[*prompt, *out.tokens]])
    with torch.inference_mode():
        found = model(text, output_hidden_states=True)
        rows = [found.logits[0].log_softmax(-1)]
        for layer in (1, 3):
            rows.append(
                model.lm_head(model.model.norm(found.hidden_states[layer][0])).log_softmax(-1)
            )
    for place, token in enumerate(out.tokens):
        last, *early = (row[len(prompt) - 1 + place].tolist() for row in rows)
        opponent = max(early, key=lambda row: divergence(last, row, False))
        row = [a - b for a, b in zip(last, opponent, strict=True)]
        row = keep_plausible(row, last, 0.1)
        assert row[token] == pytest.approx(max(row), abs=1e-4)
