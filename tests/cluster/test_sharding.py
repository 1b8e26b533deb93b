"""Pieces of a batch."""

from __future__ import annotations

from typing import Any

from foretell.batch.requests import Item
from foretell.cluster.sharding import cut_batch, prompt_codes

LONG = "The same long beginning of a prompt, which is worth computing once and no more. " * 3


def item(line: int, prompt: Any) -> Item:
    key = "messages" if isinstance(prompt, list) and isinstance(prompt[0], dict) else "prompt"
    return Item(line, f"id-{line}", "/v1/completions", {key: prompt})


def test_requests_that_begin_alike_stay_together() -> None:
    others = [f"{i} something else altogether" for i in range(40)]
    prompts = [*others[:20], *(LONG + str(i) for i in range(12)), *others[20:]]
    items = [item(line, prompt) for line, prompt in enumerate(prompts, 1)]
    found = cut_batch(items, workers=2)
    assert sorted(one.line for piece in found for one in piece) == list(range(1, 53))
    (together,) = [piece for piece in found if any(20 < one.line <= 32 for one in piece)]
    assert {one.line for one in together} == set(range(21, 33))
    assert len(found) >= 2 * 2 and max(map(len, found)) <= 16


def test_a_large_group_is_several_pieces() -> None:
    items = [item(line, LONG + str(line)) for line in range(1, 101)]
    found = cut_batch(items, workers=2, largest=30)
    assert [len(piece) for piece in found] == [30, 30, 30, 10]


def test_the_beginning_of_any_body() -> None:
    assert prompt_codes({"prompt": "ab"}) == [97, 98]
    assert prompt_codes({"prompt": [5, 6]}) == [5, 6]
    assert prompt_codes({"prompt": [[5, 6], [7]]}) == [5, 6]
    assert prompt_codes({"prompt": ["ab", "c"]})[:2] == [97, 98]
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert "hello" in "".join(map(chr, prompt_codes({"messages": parts})))
    for wrong in (None, 3, {"a": None}, [], [None], [True, "x"]):  # its worker says what is wrong
        assert isinstance(prompt_codes({"prompt": wrong}), list)
    assert cut_batch([], workers=2) == []
    assert [len(piece) for piece in cut_batch([item(1, "x")], workers=8)] == [1]
