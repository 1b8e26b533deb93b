"""Which replica a prompt goes to."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from foretell.cluster.prefixes import PREFIX, preferred_order, prefix_key


def key(tenant: bytes = b"", **body: Any) -> str:
    return prefix_key(json.dumps(body).encode(), tenant)


def test_prompts_that_begin_alike_have_one_key() -> None:
    alike = "x" * PREFIX
    assert key(prompt=alike + "a") == key(prompt=alike + "b") != key(prompt="y" + alike)
    assert key(prompt=[alike + "a", "z"]) == key(prompt=alike)
    assert key(prompt=[1, 2, 3]) == key(prompt=[[1, 2, 3], [4]]) != key(prompt=[1, 2])
    assert key(prompt=alike, temperature=1) == key(prompt=alike)
    assert key(prompt=alike) != key(prompt=alike, tenant=b"Bearer a")
    assert key(prompt=alike, model="a") != key(prompt=alike, model="b")


def test_a_chat_is_known_by_its_first_message() -> None:
    first = {"role": "system", "content": "You are brief."}
    in_parts = {"role": "system", "content": [{"type": "text", "text": "You are brief."}]}
    asks = [{"role": "user", "content": str(i)} for i in range(2)]
    assert key(messages=[first, asks[0]]) == key(messages=[in_parts, asks[1]])
    assert key(messages=[asks[0]]) != key(messages=[asks[1]])


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"3", b"\xff", b'{"prompt": 3}', b'{"prompt": ""}'),
        *(b'{"messages": [3]}', b'{"messages": [{"role": "user", "content": [3]}]}'),
        b"[" * 100_000,
    ],
)
def test_what_has_no_prompt_may_go_anywhere(body: bytes) -> None:
    assert prefix_key(body) == ""


def test_replicas_are_chosen_evenly_and_few_requests_move() -> None:
    names = ["a", "b", "c", "d"]
    keys = [str(i) for i in range(4000)]
    before = {key: preferred_order(key, names) for key in keys}
    counts = Counter(order[0] for order in before.values())
    assert all(900 < counts[name] < 1100 for name in names)
    seconds = Counter(order[1] for order in before.values() if order[0] == "a")
    assert all(250 < seconds[name] < 420 for name in "bcd")
    without = {key: preferred_order(key, ["a", "b", "c"])[0] for key in keys}
    assert all(without[key] == before[key][0] for key in keys if before[key][0] != "d")
