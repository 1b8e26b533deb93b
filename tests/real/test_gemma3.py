"""Gemma 3 270M, a .gguf file run in its own formats: no draft, batch or piece of a prompt changes
a token.

`FORETELL_TEXTS=200 python -m pytest -m real tests/real/test_gemma3.py` compares that many greedy
texts by each way, and half as many sampled ones; without it there are 20 and 10.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

import foretell
from foretell.bench.sets import prompt_ids, read_sets
from tests.cache.users import by_chunks

pytestmark = pytest.mark.real

GREEDY = int(os.environ.get("FORETELL_TEXTS", "20"))
SAMPLED = GREEDY // 2
TOKENS = 32
STRIDE = 3  # between two prompts that follow each other: 56 ship, so all of them come
DRAFTERS = ("suffix", "ngram", "auto")
BATCH = 8
CHUNKS = (7, 64)  # tokens of a prompt that are read at a time
SHORTEST = 32  # tokens of a beginning
WINDOW = 512  # tokens that most layers see


@pytest.fixture(scope="module")
def prompts(gemma: foretell.LM) -> list[list[int]]:
    """What ships, each fourth one as it is and beginnings of the others, of another length each
    time: longer and shorter than a window.
    """
    shipped = [prompt_ids(gemma, prompt) for found in read_sets(()).values() for prompt in found]
    draw = random.Random(0)
    beginnings = []
    for number in range(GREEDY):
        ids = shipped[number * STRIDE % len(shipped)]
        length = draw.randint(min(SHORTEST, len(ids)), len(ids)) if number % 4 else len(ids)
        beginnings.append(ids[:length])
    lengths = [len(ids) for ids in beginnings]
    assert min(lengths) < WINDOW < max(lengths)
    return beginnings


@pytest.fixture(scope="module")
def greedy(gemma: foretell.LM, prompts: list[list[int]]) -> list[list[int]]:
    """Plain decoding, one text at a time."""
    return [write(gemma, ids, "plain").tokens for ids in prompts]


@pytest.fixture(scope="module")
def sampled(gemma: foretell.LM, prompts: list[list[int]]) -> list[list[int]]:
    """Plain decoding at random, one text at a time, each with a seed of its own."""
    return [
        write(gemma, ids, "plain", temperature=0.8, seed=seed).tokens
        for seed, ids in enumerate(prompts[:SAMPLED])
    ]


@pytest.fixture(params=CHUNKS)
def chunk(request: pytest.FixtureRequest, gemma: foretell.LM) -> Iterator[int]:
    """Prompts are read by so many tokens at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemma.engine, "plan", by_chunks(request.param))
        yield request.param


def write(lm: foretell.LM, ids: Any, method: str, **more: Any) -> Any:
    """Each way of writing has a tenant of its own: nobody goes on from rows of another one."""
    options = {"max_new_tokens": TOKENS, "temperature": 0.0, "tenant": method} | more
    return lm.generate(ids, method, **options)


@pytest.mark.parametrize("method", DRAFTERS)
def test_drafts_change_no_greedy_text(
    gemma: foretell.LM, prompts: list[list[int]], greedy: list[list[int]], method: str
) -> None:
    found = [write(gemma, ids, method) for ids in prompts]
    assert [out.tokens for out in found] == greedy
    assert method == "auto" or sum(out.stats.drafted for out in found)


@pytest.mark.parametrize("method", DRAFTERS)
def test_drafts_change_no_sampled_text(
    gemma: foretell.LM, prompts: list[list[int]], sampled: list[list[int]], method: str
) -> None:
    found = [
        write(gemma, ids, method, temperature=0.8, seed=seed).tokens
        for seed, ids in enumerate(prompts[:SAMPLED])
    ]
    assert found == sampled


def test_a_batch_changes_no_text(
    gemma: foretell.LM,
    prompts: list[list[int]],
    greedy: list[list[int]],
    sampled: list[list[int]],
) -> None:
    texts = []
    for start in range(0, len(prompts), BATCH):
        texts += write(gemma, prompts[start : start + BATCH], "plain", tenant="batch")
    assert [out.tokens for out in texts] == greedy
    seeds = list(range(SAMPLED))
    drawn = write(gemma, prompts[:SAMPLED], "suffix", tenant="drawn", temperature=0.8, seed=seeds)
    assert [out.tokens for out in drawn] == sampled


def test_a_prompt_in_pieces_changes_no_text(
    gemma: foretell.LM, prompts: list[list[int]], greedy: list[list[int]], chunk: int
) -> None:
    found = [write(gemma, ids, "plain", tenant=f"chunks of {chunk}").tokens for ids in prompts]
    assert found == greedy


def test_it_knows_something(gemma: foretell.LM) -> None:
    """What it was taught comes out: a slip in a layer leaves grammar, and takes facts first."""
    facts = {
        "The capital of Japan is the city of": "Tokyo",
        "Water is made of hydrogen and": "oxygen",
        "Monday, Tuesday, Wednesday, Thursday,": "Friday",
    }
    for beginning, wanted in facts.items():
        out = gemma.generate(gemma.encode(beginning), "plain", max_new_tokens=4, temperature=0.0)
        assert wanted in out.text, beginning
