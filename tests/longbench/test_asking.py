"""What is asked after one reading is what separate requests answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretell.longbench.asking import PIECE, Questions, Scored
from foretell.spec import build_cache_policy
from tests.longbench.models import lm

CONTEXT = [(11 * i + i * i) % 300 + 20 for i in range(150)]
HEAD = [30, 31]
QUESTIONS = [[40, 41, 42], [50], [60, 61, 62, 63, 64]]
GOLDEN = [[70, 71], [80], [90]]
MOST = 6
POLICIES = [
    "snapkv:budget=40",
    "h2o:budget=40,every=4",
    "tova:budget=40",
    "streaming-llm:window=36,every=3",
    "quest:budget=48,dense=0",
]
policies = pytest.mark.parametrize("spec", POLICIES)


def generate(prompt: list[int], method: Any, spec: str | None = None) -> None:
    kv = None if spec is None else build_cache_policy(spec)
    lm().generate(prompt, method, kv=kv, temperature=0.0, max_new_tokens=1)


def asked(order: list[int], spec: str | None = None) -> tuple[list[list[int]], Questions]:
    """The answers to questions that are asked in this order, by their numbers."""
    method = Questions(HEAD, [QUESTIONS[number] for number in order], MOST)
    generate(CONTEXT, method, spec)
    by_number = sorted(zip(order, method.answers, strict=True), key=lambda pair: pair[0])
    return [answer.tokens for _, answer in by_number], method


def plain(prompt: list[int], spec: str | None = None) -> list[int]:
    """What a request of its own answers, cut as answers are."""
    kv = None if spec is None else build_cache_policy(spec)
    out = lm().generate(prompt, "plain", kv=kv, temperature=0.0, max_new_tokens=MOST)
    tokens: list[int] = []
    for token in out.tokens:
        if token in lm().engine.eos:
            break
        tokens.append(token)
        if "\n" in lm().decode(tokens).lstrip("\n"):
            break
    return tokens


def forwarded(method: Any, spec: str | None = None) -> int:
    """Tokens that the target computes."""
    seen = 0
    target = lm().models["target"]
    forward = target.forward

    def counting(jobs: Any) -> Any:
        nonlocal seen
        seen += sum(len(job.tokens) for job in jobs)
        return forward(jobs)

    target.forward = counting  # type: ignore[method-assign]
    try:
        generate(CONTEXT, method, spec)
    finally:
        del target.forward
    return seen


def test_questions_by_themselves_are_answered_as_prompts_of_their_own() -> None:
    found, _ = asked([0, 1, 2])
    assert found == [plain([*CONTEXT, *HEAD, *question]) for question in QUESTIONS]
    assert len({tuple(answer) for answer in found}) > 1


@policies
def test_the_order_of_questions_changes_no_answer(spec: str) -> None:
    want, _ = asked([0, 1, 2], spec)
    for order in ([2, 1, 0], [1, 2, 0]):
        assert asked(order, spec)[0] == want
    for number in range(3):
        method = Questions(HEAD, [QUESTIONS[number]], MOST)
        generate(CONTEXT, method, spec)
        assert method.answers[0].tokens == want[number]


def test_turns_are_answered_behind_the_whole_transcript() -> None:
    method = Questions(HEAD, QUESTIONS, MOST, GOLDEN)
    text = [*CONTEXT, *HEAD, *QUESTIONS[0]]
    generate(text, method)
    for number, answer in enumerate(method.answers):
        assert answer.tokens == plain(text)
        if number < 2:
            text = [*text, *GOLDEN[number], *HEAD, *QUESTIONS[number + 1]]


@policies
def test_a_first_turn_is_a_prompt_under_the_policy(spec: str) -> None:
    method = Questions(HEAD, QUESTIONS, MOST, GOLDEN)
    text = [*CONTEXT, *HEAD, *QUESTIONS[0]]
    generate(text, method, spec)
    assert method.answers[0].tokens == plain(text, spec)


@pytest.mark.parametrize("spec", [None, *POLICIES])
def test_a_context_is_computed_once(spec: str | None) -> None:
    computed = forwarded(Questions(HEAD, QUESTIONS, MOST), spec)
    own = len(CONTEXT) + len(HEAD) + sum(1 + len(one) + MOST for one in QUESTIONS)
    assert len(CONTEXT) < computed <= own < 2 * len(CONTEXT)


@pytest.mark.parametrize("spec", [None, *POLICIES])
def test_what_is_held_are_the_rows_of_the_cache(spec: str | None) -> None:
    _, method = asked([0, 1, 2], spec)
    for answer, question in zip(method.answers, QUESTIONS, strict=True):
        whole = len(CONTEXT) + len(HEAD) + len(question) + len(answer.tokens)
        if spec is None or spec.startswith("quest"):
            assert whole - 1 <= answer.usage.rows <= whole
        elif spec.startswith("snapkv"):  # keeps what follows the prompt
            assert whole - len(CONTEXT) + 39 <= answer.usage.rows <= whole - len(CONTEXT) + 40
        else:
            assert 40 <= answer.usage.rows <= 43
        target = lm().models["target"]
        rows = answer.usage.rows * 2 * 2 * 2 * 8 * target.dtype.itemsize
        if spec is None or not spec.startswith("quest"):
            assert answer.usage.bytes == rows
        else:  # of every page the largest and the smallest keys
            assert rows < answer.usage.bytes < 1.3 * rows
        assert answer.first_s > 0 and (answer.token_s is None) == (len(answer.tokens) < 1)


def test_rows_that_are_stored_count_by_what_they_take() -> None:
    stored = "gear:bits=2,outliers=0,rank=0,later=0,buffer=8"
    full, held = (asked([0], spec)[1].answers[0].usage for spec in (None, stored))
    assert held.rows < full.rows and 0.1 * full.bytes < held.bytes < 0.9 * full.bytes


@pytest.mark.parametrize("spec", [None, *POLICIES])
def test_bits_are_those_of_decoding_token_by_token(spec: str | None) -> None:
    """Given one token at a time, by the probabilities that plain decoding reports."""
    text = [(7 * i + 3 * i * i) % 300 + 20 for i in range(2 * PIECE + 9)]
    method = Scored(text)
    generate(CONTEXT, method, spec)
    want = []
    number = iter(text)

    def forced(tokens: Any, row: torch.Tensor) -> torch.Tensor:
        token = next(number)
        want.append(float(-row.log_softmax(-1).view(-1)[token] / torch.tensor(2.0).log()))
        return torch.full_like(row, -1e9).index_fill_(-1, torch.tensor([token]), 0.0)

    lm().generate(
        CONTEXT,
        "plain",
        kv=None if spec is None else build_cache_policy(spec),
        temperature=0.0,
        max_new_tokens=len(text),
        logits_processors=[forced],
    )
    assert method.bits == pytest.approx(want, abs=1e-4)
    assert len(method.bits) == len(text) and len(method.usages) == 1
