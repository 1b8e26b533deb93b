"""Contexts whose rows are given, by the engine and fed to transformers by hand."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import pytest
import torch

from foretell.cache.policy import NEVER
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.kv.encoded.base import Given
from foretell.kv.encoded.encoders import even_groups, window_groups
from foretell.strategies.plain import Plain
from tests.cache.users import by_chunks
from tests.kv.policies import drafted, target

PREFIX = [5, 17, 40]
CONTEXTS = [[1, 2, 3, 4, 9], [60, 61, 62, 63, 64, 65, 66]]
QUESTION = [7, 8, 9]
PROMPT = [*PREFIX, *CONTEXTS[0], *CONTEXTS[1], *QUESTION]


@dataclass
class Means:
    """An encoder: mean embeddings of `ratio` tokens each, `more` times the last one after them."""

    ratio: int
    more: int = 0
    hidden: int = 0
    calls: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hidden = int(target().config.hidden_size)

    def check_size(self, name: str, size: int) -> str:
        return ""

    def row_count(self, n: int) -> int:
        return ceil(n / self.ratio) + self.more

    def row_places(self, n: int) -> torch.Tensor:
        return even_groups(n, self.ratio)

    def encode_rows(self, tokens: Sequence[int]) -> torch.Tensor:
        self.calls.append([*tokens])
        table = target(dtype=torch.float64).embed(tokens)
        places = self.row_places(len(tokens))
        rows = [table[places == i].mean(0) for i in range(self.row_count(len(tokens)) - self.more)]
        return torch.stack([*rows, *[rows[-1]] * self.more])


def policy_of(encoder: Means) -> Given:
    return Given(encoder, len(PREFIX), tuple(map(len, CONTEXTS)), target().vocab)


@torch.inference_mode()
def by_engine(encoder: Means, chunk: int = 1000, strategy: Any = None, tokens: int = 8) -> Any:
    """The greedy text, and how many rows the prompt has, with the positions of all rows."""
    model = target(dtype=torch.float64)
    engine = Engine({"target": model}, plan=by_chunks(chunk))
    sampling = Sampling(temperature=0.0, max_new_tokens=tokens)
    asked = Request(list(PROMPT), strategy or Plain(), sampling, policy=policy_of(encoder))
    live = engine.add(asked)
    counted: Any = None
    while engine.live:
        engine.step()
        cache = live.caches.get(("target", 0))
        if counted is None and cache is not None and cache.length >= len(PROMPT):
            assert cache.positions is None and [*cache.row_positions()] == [*range(cache.base)]
            counted = cache.base - (cache.length - len(PROMPT))
    assert live.error is None
    return live.ctx.output, counted


@torch.inference_mode()
def by_hand(encoder: Means, tokens: int = 8) -> list[int]:
    """The greedy text of transformers' own forward over the same rows."""
    model = target(dtype=torch.float64)
    parts = [model.embed(PREFIX), *map(encoder.encode_rows, CONTEXTS), model.embed(QUESTION)]
    text: list[int] = []
    for _ in range(tokens):
        whole = torch.cat([*parts, model.embed(text)] if text else parts)
        text.append(int(model.hf(inputs_embeds=whole[None]).logits[0, -1].argmax()))
    return text


@pytest.mark.parametrize(("ratio", "more"), [(1, 0), (1, 2), (2, 0), (4, 1), (9, 0)])
def test_the_text_is_that_of_rows_fed_by_hand(ratio: int, more: int) -> None:
    want = by_hand(Means(ratio, more))
    for chunk in (1000, 4, 1):
        encoder = Means(ratio, more)
        output, rows = by_engine(encoder, chunk)
        assert output == want
        assert encoder.calls == CONTEXTS, "each is encoded once, as a whole"
        count = sum(ceil(len(context) / ratio) + more for context in CONTEXTS)
        assert rows == len(PREFIX) + count + len(QUESTION)


def test_rows_that_are_the_tokens_own_give_the_plain_text() -> None:
    model = target(dtype=torch.float64)
    engine = Engine({"target": model})
    sampling = Sampling(temperature=0.0, max_new_tokens=8)
    live = engine.add(Request(list(PROMPT), Plain(), sampling))
    while engine.live:
        engine.step()
    assert by_engine(Means(1))[0] == live.ctx.output
    assert by_engine(Means(2))[0] != live.ctx.output, "else nothing is said"


@pytest.mark.parametrize("wrong", [0, 3, 10])
def test_drafts_leave_the_text_as_it_is(wrong: int) -> None:
    want, _ = by_engine(Means(2, 1), tokens=20)
    got, _ = by_engine(Means(2, 1), strategy=drafted(want, wrong), tokens=20)
    assert got == want


def test_a_slip_is_noticed() -> None:
    class Late(Given):
        """Rows stand where the last token of their context would."""

        def change_rows(self, cache: Any) -> None:
            fresh = self.fresh
            super().change_rows(cache)
            if fresh:
                cache.offset -= 1

    encoder = Means(2)
    slip = Late(encoder, len(PREFIX), tuple(map(len, CONTEXTS)), target().vocab)
    model = target(dtype=torch.float64)
    engine = Engine({"target": model})
    sampling = Sampling(temperature=0.0, max_new_tokens=8)
    live = engine.add(Request(list(PROMPT), Plain(), sampling, policy=slip))
    while engine.live:
        engine.step()
    assert live.ctx.output != by_hand(Means(2))


def test_a_text_that_is_too_short_for_its_contexts_is_read_as_ever() -> None:
    policy = policy_of(Means(2))
    policy.begin_text(len(PROMPT) - len(QUESTION))
    assert policy.room_left(0) == NEVER and not policy.in_context(5)
    policy.begin_text(len(PROMPT))
    assert [policy.room_left(n) for n in (0, 3, 4, 8, 15)] == [3, 5, 4, 7, NEVER]


def test_positions_that_rows_leave_are_counted() -> None:
    assert policy_of(Means(4)).spared == (5 - 2) + (7 - 2)
    assert policy_of(Means(1, 1)).spared == -2
    assert copy.copy(policy_of(Means(4))).fork().spared == 8


def test_groups_are_as_even_as_can_be() -> None:
    for n in range(1, 20):
        for ratio in range(1, 7):
            sizes = even_groups(n, ratio).bincount().tolist()
            count = ceil(n / ratio)
            assert sizes == [n // count + (i < n % count) for i in range(count)]
    assert even_groups(3, 1).tolist() == [0, 1, 2]


def test_groups_end_with_their_window() -> None:
    assert window_groups(10, 2, 4).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert window_groups(7, 3, 6).tolist() == [0, 0, 0, 1, 1, 1, 2]
