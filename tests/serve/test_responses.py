"""Which tokens an answer's text holds, and what its numbers say."""

from __future__ import annotations

from typing import Any

import pytest

from foretell.cards import card
from foretell.errors import BadConfig
from foretell.serve.responses import Spelling
from foretell.serve.served import Served
from tests import tiny


def decode(tokens: Any) -> str:
    """Each token is a letter; 9 is half a character, and two of them are an ü."""
    raw = b"".join(b"\xc3" if t == 9 else b"\xbc" if t == 8 else bytes([96 + t]) for t in tokens)
    return raw.decode("utf-8", errors="replace")


def entries(*tokens: int) -> list[dict[str, Any]]:
    return [{"token": token} for token in tokens]


def told(spelling: Spelling, tokens: list[int], text: str, done: bool = False) -> list[Any]:
    return [(start, e["token"]) for start, e in spelling.push_entries(entries(*tokens), text, done)]


def test_tokens_are_told_with_their_text() -> None:
    spelling = Spelling(decode, frozenset())
    assert told(spelling, [1, 2], "ab") == [(0, 1), (1, 2)]
    assert told(spelling, [3], "") == []  # it may begin a stop string
    assert told(spelling, [4], "cd") == [(2, 3), (3, 4)]
    assert told(spelling, [], "", done=True) == []


def test_nothing_behind_a_stop_string_is_told() -> None:
    spelling = Spelling(decode, frozenset())
    assert told(spelling, [1, 2, 3], "a") == [(0, 1)]
    assert told(spelling, [], "", done=True) == []


def test_halves_of_characters_go_together() -> None:
    spelling = Spelling(decode, frozenset())
    assert told(spelling, [1, 9], "a") == [(0, 1)]
    assert told(spelling, [8, 2], "üb") == [(1, 9), (1, 8), (2, 2)]


def test_a_half_at_the_end_is_told() -> None:
    spelling = Spelling(decode, frozenset())
    assert told(spelling, [1, 9], "a") == [(0, 1)]
    assert told(spelling, [], "\ufffd", done=True) == [(1, 9)]


def test_the_end_is_told_behind_the_text() -> None:
    spelling = Spelling(decode, frozenset({5}))
    assert told(spelling, [1, 5], "a", done=True) == [(0, 1), (1, 5)]


def test_bytes_of_tokens() -> None:
    served = Served(tiny.lm(draft=False), "tiny")
    text = "Größe 🙂 x\n"
    ids = served.lm.encode(text)
    assert b"".join(map(served.token_bytes, ids)) == text.encode()
    assert served.token_bytes(0) == tiny.EOS.encode()
    assert served.token_bytes(10**6) == b""


@pytest.mark.parametrize(
    ("method", "claim"),
    [("plain", "exact"), ("suffix+token-recycling", "exact"), ("suffix:rule=walk", "exact"),
     ("suffix:rule=typical", "lossy")],
)  # fmt: skip
def test_a_method_guarantees_what_its_weakest_part_does(method: str, claim: str) -> None:
    name, guarantee = Served(tiny.lm(draft=False), "tiny").describe_method(method)
    assert name == method.partition(":")[0] and guarantee.split(":")[0] == claim
    if claim == "lossy":
        assert guarantee == card("typical", "rule").guarantee


@pytest.mark.parametrize(
    ("kv", "claim"), [("offload", "exact"), ("gear+offload", "lossy"), ("offload+snapkv", "lossy")]
)
def test_joined_cache_policies_guarantee_what_the_weakest_does(kv: str, claim: str) -> None:
    name, guarantee = Served(tiny.lm(draft=False), "tiny").describe_method(
        "plain", part_specs={"kv": kv}
    )
    assert name == "plain" and guarantee.split(":")[0] == claim


@pytest.mark.parametrize("method", ["a-star", "deal", "transfer-q", "pg-td"])
def test_a_method_that_needs_a_reward_has_it_from_the_request(method: str) -> None:
    served = Served(tiny.lm(draft=False), "tiny")
    name, guarantee = served.describe_method(method, "keywords:words=a")
    assert name == method and guarantee.startswith("lossy")
    with pytest.raises(BadConfig, match="needs a reward"):
        served.describe_method(method)


@pytest.mark.parametrize(
    ("kind", "spec", "name"),
    [
        ("kv", "snapkv:budget=64", "snapkv"),
        ("guidance", "cfg:g=2", "cfg"),
        ("processor", "momentum+rpg:decay=0.8", "momentum"),
        ("constraint", "monitor:file=a.py", "monitor"),
    ],
)
def test_what_changes_a_text_beside_its_method_is_told(kind: str, spec: str, name: str) -> None:
    served = Served(tiny.lm(draft=False), "tiny")
    assert served.describe_method("plain", None, {kind: None})[1] == "exact"
    assert served.describe_method("plain", None, {kind: spec})[1] == card(name, kind).guarantee
