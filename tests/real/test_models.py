"""Every real model: what its name stands for, its tokenizer, and that drafts do not change it."""

from __future__ import annotations

from typing import Any

import pytest

import foretell
from foretell.bench.prompts import Prompt
from foretell.bench.sets import prompt_ids
from foretell.loading.fetch import resolve
from foretell.loading.load import load_tokenizer
from tests import tiny
from tests.real.conftest import fetched

pytestmark = pytest.mark.real

# Tokens, layers and context.
SHAPES = {"smollm2": (49152, 30, 8192), "gemma3-270m": (262144, 18, 32768)}
NAMES = tuple(SHAPES)
FIXTURES = {"smollm2": "lm", "gemma3-270m": "gemma"}
QUESTIONS: tuple[Prompt, ...] = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Write a Python function that adds two numbers."}],
    [{"role": "user", "content": "List the days of the week, one on each line."}],
    [
        {
            "role": "user",
            "content": "Repeat this sentence twice: The quick brown fox jumps over the lazy dog.",
        }
    ],
)
# With sizes that are given, since on some machines no draft pays, and with what is measured.
DRAFTERS = ("ngram:nodes=6", "suffix:nodes=6", "token-recycling:nodes=6", "auto")
TOKENS = 40


@pytest.fixture(scope="module", params=NAMES)
def named(request: pytest.FixtureRequest) -> tuple[str, foretell.LM]:
    name = request.param
    return name, request.getfixturevalue(FIXTURES[name])


@pytest.fixture(scope="module")
def plain(named: tuple[str, foretell.LM]) -> list[list[int]]:
    """What plain decoding answers."""
    _, lm = named
    prompts = [prompt_ids(lm, question) for question in QUESTIONS]
    return [out.tokens for out in lm.generate(prompts, "plain", max_new_tokens=TOKENS)]


def test_a_name_is_where_it_was_fetched_to(named: tuple[str, foretell.LM]) -> None:
    name, lm = named
    assert resolve(name) == str(fetched(name)) == str(lm.path)
    model = lm.models["target"]
    assert (model.vocab, len(model.layout), model.context) == SHAPES[name]
    assert model.name == name


@pytest.mark.parametrize("method", DRAFTERS)
def test_drafts_change_no_token(
    named: tuple[str, foretell.LM], plain: list[list[int]], method: str
) -> None:
    name, lm = named
    drafted = 0
    for question, wanted in zip(QUESTIONS, plain, strict=True):
        out = lm.generate(prompt_ids(lm, question), method, max_new_tokens=TOKENS)
        assert out.tokens == wanted, f"{name}, {method}: {question}"
        drafted += out.stats.drafted
    assert drafted or method == "auto", "a method that never drafts changes nothing"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", [*tiny.TEXTS, "a   12 b", "1,234.5\n\n\t7", "<p>x</p>"])
def test_texts_come_back_from_the_tokenizer(users_models: None, name: str, text: str) -> None:
    fetched(name)
    coder: Any = load_tokenizer(name)
    assert coder.decode(coder(text)["input_ids"], skip_special_tokens=True) == text
