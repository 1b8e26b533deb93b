"""Sequences of a draft model that are one token here: exact with the whole correction, or without
laws.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell.core.request import Request
from foretell.core.tree import Law
from foretell.core.types import Sampling
from foretell.drafters.model import cross_vocab, omnidraft
from foretell.drafters.model.ngram_pairs import Reading
from foretell.engine.engine import Engine
from foretell.strategies.plain import Plain
from tests import laws, vocabularies

SPECS = ["omnidraft:mode=det", "omnidraft:length=2,forwards=3"]
PROMPT = (0, 1, 0, 0, 1)


def setting(name: str, tokens: int = 2) -> laws.Setting:
    one = laws.SETTINGS[name]
    return replace(one, sampling=replace(one.sampling, max_new_tokens=tokens))


def known(models: Any, spec: str) -> set[tuple[int, ...]]:
    """The sequences that its cache has noted after two texts."""
    stores = laws.warmed(laws.build(spec), models, setting("plain"))
    [cache] = [store for key, store in stores.items() if key[2] == "sequences"]
    return {sequence for entry in cache.entries.values() for sequence, _ in entry.value}


@pytest.mark.parametrize("mode", ["exact", "det"])
@pytest.mark.parametrize("pair", ["merged", "sequences", "partial", "special", "bytes"])
def test_the_law_is_the_targets_between_any_tokenizers(pair: str, mode: str) -> None:
    models = vocabularies.pair(pair)
    spec = f"omnidraft:mode={mode},length=2"
    strategy = laws.build(spec)
    target: Any = models["target"]
    prompt = vocabularies.PROMPTS.get(pair, PROMPT)
    assert bool(known(models, spec)) == (pair in ("merged", "sequences"))
    accepted = refused = 0
    names = ("plain", "top-p", "penalties") if pair == "merged" else ("plain",)
    for name in names:
        law = laws.enumerate_law(strategy, prompt, setting(name), models)
        assert law.distance(laws.reference(target, prompt, setting(name))) < laws.EXACT, name
        accepted += law.accepted
        refused += law.drafted - law.accepted
    assert accepted and refused


@pytest.mark.parametrize("slip", ["the first token keeps all", "no product"])
def test_a_declared_law_without_the_correction_is_noticed(
    slip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Power: what is drawn is the corrected law, what is declared is another."""
    models = vocabularies.pair("merged")
    declared: list[torch.Tensor] = []
    right = Reading.token_masses

    def note(self: Reading, ours: Any, theirs: Any, vocab: int) -> torch.Tensor:
        law = right(self, ours, theirs, vocab)
        wrong = law.clone()
        if slip == "no product":
            wrong[2] = 0
            wrong /= wrong.sum()
        else:
            wrong[ours] = self.laws[()][theirs]
        declared.append(wrong)
        return law

    monkeypatch.setattr(Reading, "token_masses", note)
    monkeypatch.setattr(omnidraft, "Law", lambda q: Law(declared[-1]))
    strategy = laws.build("omnidraft:length=1")
    law = laws.enumerate_law(strategy, PROMPT, setting("plain"), models)
    target: Any = models["target"]
    assert law.distance(laws.reference(target, PROMPT, setting("plain"))) > 1e-3


@pytest.mark.parametrize("spec", ["omnidraft:width=0", "omnidraft:merged=0"])
def test_without_sequences_it_is_the_law_of_shared_tokens(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, list[list[float]]] = {"omnidraft": [], "cross_vocab": []}
    for module in (omnidraft, cross_vocab):
        notes = found[module.__name__.rpartition(".")[2]]

        def note(q: torch.Tensor, notes: Any = notes) -> Law:
            notes.append(q.tolist())
            return Law(q)

        monkeypatch.setattr(module, "Law", note)
    models = vocabularies.pair("sequences")
    one = laws.Setting(Sampling(temperature=0.8, max_new_tokens=12, seed=4))
    for method in (f"{spec},length=4", "cross-vocab:length=4"):
        laws.generate(laws.build(method), PROMPT, one, models)
    assert len(found["omnidraft"]) == len(found["cross_vocab"]) > 4
    for ours, theirs in zip(found["omnidraft"], found["cross_vocab"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-12)


def test_det_gives_the_tokens_of_the_seed() -> None:
    models = vocabularies.pair("sequences", copy=2.0)
    for seed in range(2):
        one = laws.Setting(Sampling(temperature=0.9, seed=seed, max_new_tokens=20))
        found = [
            laws.generate(strategy, PROMPT, one, models)
            for strategy in (laws.build("omnidraft:mode=det"), Plain())
        ]
        assert found[0].ctx.output == found[1].ctx.output and found[0].ctx.stats.drafted


def test_the_draft_models_cache_is_right_after_any_part_of_a_sequence_was_accepted() -> None:
    """Its rows are those of a fresh forward of its own text, whatever was refused."""
    models = vocabularies.pair("sequences", copy=2.0)
    strategy = laws.build("omnidraft:forwards=12")
    engine = Engine(models)
    merged = 0
    for seed in range(2):
        sampling = Sampling(temperature=1.0, seed=seed, max_new_tokens=24)
        live = engine.add(Request(PROMPT, strategy, sampling))
        while live in engine.live:
            engine.step()
            for (name, branch), cache in list(live.caches.items()):
                if name == "draft" and branch in live.ctx.branches and not cache.tokens:
                    laws.check_cache(
                        cache.fork(), models["draft"], live.ctx.branches[branch].tokens
                    )
        stats = live.ctx.stats
        merged += sum(token in (1, 3, 4) for token in live.ctx.output)
        assert live.error is None and stats.accepted
    assert merged
