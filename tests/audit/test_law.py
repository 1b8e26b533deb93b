"""The enumerated law of a method on the toy model, and how real options are taken there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from foretell.audit import law
from foretell.audit.report import FAILED, HELD, NO_CLAIM, UNTESTED
from foretell.core.context import Context
from foretell.core.drafter import Drafter
from foretell.core.tree import TokenTree
from foretell.core.types import Sampling
from foretell.drafters.lookup import datastore
from foretell.drafters.lookup.input_guided import InputGuided
from foretell.spec import resolve_method
from foretell.speculation.strategy import Speculative


def test_the_law_is_enumerated_exactly() -> None:
    for spec in ("plain", "ngram", "draft:length=1"):
        for sampling in law.SAMPLINGS:
            found = law.enumerate_law(resolve_method(spec)[1], sampling, 2)
            assert found.error < 1e-12 and len(found.stats) >= 3
            assert spec == "plain" or sum(stats.drafted for stats in found.stats) > 0


def test_every_sampling_is_random() -> None:
    assert all(isinstance(s, Sampling) and s.temperature > 0 for s in law.SAMPLINGS)


def test_the_reference_sums_to_one_and_stops_at_ends() -> None:
    sampling = Sampling(temperature=1.0, max_new_tokens=3, stop_token_ids=(1,))
    expected = law.plain_law(law.Toy(3, 3), sampling, law.PROMPT)
    assert sum(expected.values()) == pytest.approx(1)
    assert all(1 not in output[:-1] for output in expected)
    assert all(len(output) == 3 or output[-1] == 1 for output in expected)


# --- options that name tokens or files of the real model


def test_options_that_name_real_tokens_are_mapped_to_the_toy_vocabulary(tmp_path: Path) -> None:
    strategy = resolve_method("input-guided:source=151643 9 3000 7 8,k=4+ngram")[1]
    mapped = law.with_toy_options(strategy, tmp_path)
    assert isinstance(mapped, Speculative)
    assert mapped.drafter.parts[0].source == (2, 0, 0, 1, 2)  # type: ignore[attr-defined]
    assert mapped.drafter.parts[0].k == 4  # type: ignore[attr-defined]
    long = law.with_toy_options(Speculative(InputGuided(tuple(range(9000)))), tmp_path)
    assert len(long.drafter.source) == law.LONGEST_OPTION  # type: ignore[attr-defined]


def test_other_numbers_stay_as_they_are(tmp_path: Path) -> None:
    strategy = resolve_method("rsd-c:length=2,branches=3 4")[1]
    assert law.with_toy_options(strategy, tmp_path) == strategy


@pytest.mark.parametrize("spec", ["input-guided:source=151643 9 3000 7 8", "rest:path={store}"])
def test_the_law_of_a_correct_method_with_real_options_holds(spec: str, tmp_path: Path) -> None:
    store = tmp_path / "real.safetensors"
    datastore.build_datastore(store, [[1000, 2000, 3000, 1000, 2000]])
    strategy = resolve_method(spec.format(store=store))[1]
    check = law.check_law(strategy, exact=True)
    assert check.verdict == HELD, check.detail
    assert check.numbers["error"] < 1e-12


@dataclass(frozen=True)
class Trained(Drafter):
    """A drafter whose weights are in a file."""

    weights: str = ""

    def propose(self, ctx: Context, state: None, budget: int) -> TokenTree:
        return TokenTree(ctx.tokens[-1])


def test_a_file_that_the_toy_model_cannot_take_is_no_failure(tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    path.write_bytes(b"weights")
    check = law.check_law(Speculative(Trained(str(path))), exact=True)
    assert check.verdict == NO_CLAIM
    assert check.detail == f"not enumerated: weights={path} is a file of the real model"
    assert check.numbers == {}


def test_a_law_without_drafts_is_untested() -> None:
    check = law.check_law(Speculative(Trained()), exact=True)
    assert check.verdict == UNTESTED and "choose options with which it drafts" in check.detail


def test_a_method_that_needs_long_repetitions_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(law, "SAMPLINGS", law.SAMPLINGS[:1])
    assert law.check_law(resolve_method("copyspec:gamma=8")[1], exact=True).verdict == HELD


def test_gumbel_noise_is_not_enumerated(monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(self: Trained, ctx: Context, state: None, budget: int) -> TokenTree:
        ctx.rng.gumbel(3, 0)
        return TokenTree(ctx.tokens[-1])

    monkeypatch.setattr(Trained, "propose", noisy)
    check = law.check_law(Speculative(Trained()), exact=True)
    assert check.verdict == NO_CLAIM and "Gumbel" in check.detail


def test_the_end_processor_refuses_only_behind_ends() -> None:
    processor = law.RefusesBehindEnd(2, 1)
    scores = torch.zeros(1, 3)
    assert processor(torch.tensor([[1, 1, 0, 2]]), scores) is scores
    with pytest.raises(law.AskedBehindEnd, match=r"\[1, 0\], where 1 ends"):
        processor(torch.tensor([[1, 1, 1, 0]]), scores)


def test_what_asks_nothing_behind_an_end_holds() -> None:
    check = law.check_ends(resolve_method("plain")[1], exact=True)
    assert check.verdict == HELD and check.numbers["error"] < 1e-12


@dataclass(frozen=True)
class Curious(Drafter):
    """Asks for the law after each token of the vocabulary before it drafts."""

    def propose(self, ctx: Context, state: None, budget: int) -> TokenTree:
        row = ctx.models["target"].score(ctx.tokens)[0]
        for token in range(ctx.models["target"].vocab):
            ctx.sampler.law(row, [*ctx.output, token])
        return TokenTree(ctx.tokens[-1])


@pytest.mark.parametrize("exact", [True, False])
def test_asking_behind_an_end_fails_whatever_the_guarantee(exact: bool) -> None:
    check = law.check_ends(Speculative(Curious()), exact)
    assert check.verdict == FAILED and check.detail == "asked what follows [0], where 0 ends a text"
    assert law.check_law(Speculative(Curious()), exact).verdict != FAILED


@pytest.mark.parametrize("spec", ["ngram", "token-recycling:nodes=8", "draft:length=2", "stand"])
def test_methods_ask_nothing_behind_an_end(spec: str) -> None:
    check = law.check_ends(resolve_method(spec)[1], exact=True)
    assert check.verdict == HELD, check.detail
