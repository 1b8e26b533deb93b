"""The process in which foretell is measured: its answers, asked here."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from comparison import ours
from comparison.ours import Side

import foretell
from tests import tiny

HOW = {"max_new_tokens": 6, "temperature": 0.0, "seed": 0}


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Side:
    monkeypatch.setattr(foretell, "load", lambda model, dtype: tiny.lm())
    return Side("tiny", "float32", 1)


def test_it_says_what_was_loaded(side: Side) -> None:
    told = side.answer({"open": True})
    assert told["opened"] >= 0
    assert (told["eos"], told["executor"]) == ([0], "torch")
    assert told["weights"] > 0
    json.dumps(told)


def test_it_generates_with_any_method(side: Side) -> None:
    chat = [{"role": "user", "content": "def add"}]
    text, from_chat = side.answer({"encode": ["def add", chat]})["ids"]
    assert text == from_chat == tiny.lm().encode("def add"), "it has no chat template"
    expected = tiny.lm().generate(text, "plain", max_new_tokens=6).tokens
    for method in ("plain", "ngram"):
        answer = side.answer({"method": method, "ids": text, **HOW})
        assert answer["tokens"] == expected
        assert sum(answer["counts"]) == len(answer["tokens"])
        json.dumps(answer)
    assert list(side.methods) == ["plain", "ngram"]
    assert side.answer({"forget": True}) == {}


def test_it_times_the_first_token_and_the_steps(
    side: Side, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path))
    assert side.answer({"first": [5, 6]})["seconds"] > 0
    costs = {"seconds": {64: {1: 0.5, 2: 0.6}, 1024: {1: 9.0}}}
    monkeypatch.setattr(side.lm, "measure", lambda fresh: costs if fresh else {})
    assert side.answer({"steps": True}) == {"seconds": {"1": 0.5, "2": 0.6}}


def test_a_failure_is_an_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load(model: str, dtype: str) -> Any:
        print("what a library prints is no answer")
        raise foretell.errors.BadModel(f"{model}: no such folder")

    monkeypatch.setattr(foretell, "load", load)
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"open": true}\n'))
    kept, errors = os.dup(1), os.dup(2)
    try:
        with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            ours.main(json.dumps({"model": "gone", "dtype": "int8", "threads": 1}))
    finally:
        os.dup2(kept, 1)
        os.dup2(errors, 2)
        os.close(kept)
        os.close(errors)
    assert json.loads((tmp_path / "out").read_text()) == {"error": "gone: no such folder"}
