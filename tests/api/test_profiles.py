"""Profiles: when one holds, and that nothing wrong or dangerous is taken from an edited file."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import foretell
from foretell.api import profiles
from foretell.api.defaults import default_method
from foretell.drafters.lookup.ngram import Ngram
from foretell.spec import AUTO, HEAD, HEAD_STEP, QUICK, resolve_method
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from tests import tiny

OTHER = "ngram:n=2,k=3"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache folder of its own; however quick these models are, their default is AUTO."""
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("foretell.api.defaults.STEP", 0.0)


def profile_of(lm: foretell.LM, **change: Any) -> Path:
    """A small profile written by hand, for `lm` here."""
    about = profiles.current_conditions(lm.models)
    path = profiles.path_of(lm.models, lm.path, about)
    document = {
        "schema": profiles.SCHEMA,
        "about": about,
        "model": "tiny",
        "default": AUTO,
        "chosen": OTHER,
        "means": {"plain": 1.0, OTHER: 2.5},
        "final": {"challenger": OTHER, "means": {OTHER: 2.5}},
        "best": {"code": OTHER},
        "shown_only": ["draft"],
        "file": str(path),
        "seconds": 30.0,
        "bench": {},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document | change), "utf-8")
    return path


def warned(lm: foretell.LM) -> str:
    """The one warning that `auto` gives before it stands for the default; it is given once."""
    with pytest.warns(UserWarning) as caught:
        assert lm.auto == AUTO
    (warning,) = caught
    text = str(warning.message)
    assert text.isprintable(), "more than a line"
    assert "is not used; " in text
    assert text.endswith("; run `foretell tune`, or `foretell tune --forget`")
    assert lm.auto == AUTO
    return text


# --- when a profile holds


def test_no_profile_is_no_trouble_and_one_that_fits_counts() -> None:
    assert tiny.lm().auto == AUTO
    profile_of(tiny.lm())
    assert tiny.lm().auto == OTHER


def test_other_models_have_other_conditions() -> None:
    profile_of(tiny.lm())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for another_way in (tiny.lm(torch.bfloat16), tiny.lm(draft=False)):
            assert another_way.auto == AUTO, "it has no profile, and nothing is wrong"
    relative = tiny.relative(tiny.llama())
    assert "(weights)" in warned(foretell.wrap(tiny.llama(3), tiny.tokenizer(), relative, "tiny"))
    other = foretell.wrap(tiny.llama(), tiny.tokenizer(), name="another")
    assert other.auto == AUTO, "a model nobody tuned has no profile that could differ"


def test_other_machines_and_versions_have_other_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    profile_of(tiny.lm())
    with monkeypatch.context() as patch:
        patch.setattr(foretell, "__version__", "9.9")
        assert "foretell 0.1.0 there, foretell 9.9 here" in warned(tiny.lm())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "99")
        assert "there, torch 99 here)" in warned(tiny.lm())
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr("foretell.engine.cost_profile.processor_name", lambda: "Other CPU")
        assert tiny.lm().auto == AUTO


def test_threads_may_change_while_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = tiny.lm()
    profile_of(lm)
    assert lm.auto == OTHER
    monkeypatch.setattr("torch.get_num_threads", lambda: 7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lm.auto == AUTO
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    assert lm.auto == OTHER


def test_all_profiles_of_a_model_can_be_forgotten(tmp_path: Path) -> None:
    profile_of(tiny.lm())
    profile_of(tiny.lm(torch.bfloat16))
    another = foretell.wrap(tiny.llama(), tiny.tokenizer(), name="another")
    kept = profile_of(another)
    assert (
        profiles.forget_profiles("tiny", None) == 2 and profiles.forget_profiles("tiny", None) == 0
    )
    assert tiny.lm().auto == AUTO and another.auto == OTHER and kept.is_file()
    assert profiles.forget_profiles("another", tmp_path) == 0, (
        "a folder of that name is another model"
    )


def test_loading_does_not_look_for_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("looked up")

    monkeypatch.setattr(profiles, "load_profile", never)
    lm = tiny.lm()
    assert lm.generate("a", "plain", max_new_tokens=2).tokens
    assert lm.generate("a", Ngram(), max_new_tokens=2).tokens
    with pytest.raises(AssertionError, match="looked up"):
        lm.generate("a", max_new_tokens=2)


def test_models_that_show_no_weights_are_known_by_their_shape() -> None:
    assert profiles.weights_digest(Toy(5)) == profiles.weights_digest(Toy(5))
    assert profiles.weights_digest(Toy(5)) != profiles.weights_digest(Toy(6))
    assert profiles.weights_digest(None) == "none"
    profile_of(foretell.LM(Toy(5)))
    assert foretell.LM(Toy(5)).auto == OTHER
    assert resolve_method("plain")[1] == Plain()


# --- what is trusted


@pytest.mark.parametrize("spec", ["plain", AUTO, "suffix", "ngram:n=2", "suffix+approx+ngram:k=4"])
def test_auto_may_stand_for_what_is_exact_and_decides_by_cost(spec: str) -> None:
    assert profiles.find_objection(spec) is None


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("draft", "does not decide by cost"),
        ("stand", "does not decide by cost"),
        ("ngram:nodes=3", "does not decide by cost"),
        ("superposed", "not exact"),
        ("beam", "not exact"),
        ("gone", "unknown method"),
        ("auto", "unknown method"),
        ("", "unknown method"),
        ("ngram:zzz=1", "unknown field of ngram"),
        ("ngram:n=many", "ngram:n='many'"),
        ("ngram:n", "write fields as name=value"),
        ("ngram:rule=typical", "rule"),
        ("ngram:rule=default", "rule"),
        ("ngram+suffix: rule =coin", "rule"),
        ("rest", "rest:path is not given"),
        ("rest:path=store.safetensors", "its option path names a file"),
        ("rest: path=store.safetensors", "its option path names a file"),
        ("ngram+rest:path=a/b+suffix", "its option path names a file"),
        ("rest:path=a/b+suffix", "its option path names a file"),
        ("cascade:inner=(rest:path=a)", "its option path names a file"),
        ("input-guided:source=@secrets.txt", "its option source names a file"),
        ("input-guided:source= @secrets.txt", "its option source names a file"),
        ("ngram:n=@secrets.txt", "its option n names a file"),
    ],
)
def test_auto_stands_for_nothing_else(spec: str, reason: str) -> None:
    objection = profiles.find_objection(spec)
    assert objection is not None
    assert reason in objection
    assert objection.isprintable()


def test_an_edited_choice_opens_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("def add(a, b):")
    opened: list[str] = []
    read_bytes = Path.read_bytes

    def noted(path: Path) -> bytes:
        opened.append(str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", noted)
    profile_of(tiny.lm(), chosen=f"input-guided:source=@{secret}")
    text = warned(tiny.lm())
    assert "names a method that `auto` may not stand for (its option source names a file)" in text
    assert str(secret) not in opened


def test_an_edited_choice_does_not_make_auto_lossy() -> None:
    path = profile_of(tiny.lm(), chosen="ngram:rule=typical")
    lm = tiny.lm()
    text = warned(lm)
    assert text == (
        f"{path}: the profile names a method that `auto` may not stand for (it has a rule of its "
        "own) and is not used; run `foretell tune`, or `foretell tune --forget`"
    )
    prompt = "The quick brown fox"
    tokens = lm.generate(prompt, max_new_tokens=20).tokens
    assert tokens == lm.generate(prompt, "plain", max_new_tokens=20).tokens


DAMAGES = {
    "empty": "",
    "cut off": "{",
    "a list": "[]",
    "no bytes of a text": b"\xff",
    "brackets without end": "[" * 100_000,
    "nothing but a schema": '{"schema": "foretell.tune/2"}',
    "another schema": {"schema": "foretell.tune/1"},
    "a method that is gone": {"chosen": "gone"},
    "a number for a method": {"chosen": 3},
    "a line for a method": {"chosen": "ngram\nngram"},
    "a field that is gone": {"chosen": "ngram:zzz=1"},
    "a list of means": {"means": [1.0]},
    "a mean that is no number": {"means": {"plain": float("nan")}},
    "a mean without end": {"means": {"plain": float("inf")}},
    "a mean below zero": {"means": {"plain": -1.0}},
    "a mean of zero": {"means": {"plain": 0}},
    "a mean beyond belief": {"means": {"plain": 1e12}},
    "a mean beyond any float": {"means": {"plain": 10**400}},
    "a text for a mean": {"means": {"plain": "1"}},
    "a truth for a mean": {"means": {"plain": True}},
    "no number deep inside": {"bench": {"cells": [{"ratio": float("nan")}]}},
    "a list of the best": {"best": []},
    "a text for the final": {"final": "won"},
    "a final without means": {"final": {"challenger": OTHER}},
    "no list of methods": {"shown_only": OTHER},
    "negative seconds": {"seconds": -1},
    "a number for a path": {"file": 1},
    "no bench": {"bench": None},
    "a number for conditions": {"about": 1},
    "conditions of another model": {"about": {"threads": "64 threads"}},
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_profile_is_not_used(damage: Any) -> None:
    if isinstance(damage, dict):
        path = profile_of(tiny.lm(), **damage)
    else:
        path = profile_of(tiny.lm())
        path.write_bytes(damage if isinstance(damage, bytes) else damage.encode())
    text = warned(tiny.lm())
    assert text.startswith(f"{path}: the profile ")
    assert "is not used; run `foretell tune`, or `foretell tune --forget`" in text
    assert path.is_file()


def test_a_damaged_profile_of_other_conditions_is_passed_over() -> None:
    path = profile_of(tiny.lm())
    path.write_text("{")
    assert tiny.lm(torch.bfloat16).auto == AUTO


def test_auto_drafts_with_a_small_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = foretell.load("demo", dtype="int8")
    assert lm.default == AUTO, "its draft model is a seventh of it"
    monkeypatch.setattr("foretell.api.defaults.CHEAP", 1 / 4)
    lm.measure()
    assert lm.default == f"{AUTO}+draft:best=yes" and profiles.find_objection(lm.default) is None
    for more in ({}, {"temperature": 1.0, "seed": 5}):
        plain = lm.generate("import os\n\ndef", "plain", max_new_tokens=40, **more)
        assert lm.generate("import os\n\ndef", max_new_tokens=40, **more).tokens == plain.tokens
    monkeypatch.setattr("foretell.api.defaults.are_related", lambda first, second: False)
    lm.measure()
    assert lm.default == AUTO, "its tokens mean something else"
    alone = foretell.wrap(tiny.llama(), tiny.tokenizer())
    alone.measure()
    assert alone.default == AUTO


def test_beside_a_head_that_ships_auto_copies_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm = tiny.lm()
    target, draft = lm.models["target"], lm.models["draft"]
    monkeypatch.setattr("foretell.api.defaults.shipped_head", lambda model, kind: kind == "eagle3")
    assert default_method(target, draft, HEAD_STEP) == f"{QUICK}+{HEAD}"
    assert HEAD not in default_method(target, draft, HEAD_STEP / 2), (
        "growing a tree takes too much of it"
    )
