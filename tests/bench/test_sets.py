"""Prompt sets, and prompts of a given length."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretell.bench.sets import LONG, SETS, cut_prompts, read_sets
from foretell.errors import BadConfig
from tests import tiny


def test_prompts_are_cut_to_a_context_and_end_alike() -> None:
    lm = tiny.lm()
    texts = [
        "one two three. " * 3,
        "def add(a, b):\n    return a",
        "The fox " * 4,
        "x = 1",
        "y",
        "z = 3",
    ]
    short = cut_prompts(lm, texts, 20, 8)
    long = cut_prompts(lm, texts, 60, 8)
    assert len(short) == len(long) == LONG
    assert {len(p) for p in short} == {20}
    assert {len(p) for p in long} == {60}
    assert all(b[-20:] == a for a, b in zip(short, long, strict=True))
    assert [lm.decode(p).endswith(texts[k * 6 // 4]) or k == 0 for k, p in enumerate(long)] == [
        True
    ] * 4
    assert lm.decode(short[0]) in texts[0]
    assert len({tuple(p) for p in long}) == 4
    chat = [
        [{"role": "user", "content": "hello there"}],
        [{"role": "user", "content": "more of it"}],
    ]
    assert lm.decode(cut_prompts(lm, chat, 12, 8)[1]).endswith("more of it")
    with pytest.raises(BadConfig, match=r"context of 900 and 8 new tokens: tiny .*holds 128"):
        cut_prompts(lm, texts, 900, 8)
    with pytest.raises(BadConfig, match="all prompts together have"):
        cut_prompts(lm, texts[3:], 60, 8)


def test_the_sets_that_ship_are_the_default(tmp_path: Path) -> None:
    assert list(read_sets([])) == list(SETS)
    assert all(read_sets([]).values())
    (tmp_path / "code.jsonl").write_text('{"prompt": "a"}\n')
    assert read_sets([tmp_path / "code.jsonl"]) == {"code": ["a"]}
    with pytest.raises(BadConfig, match="already a set 'code'"):
        read_sets(["code", tmp_path / "code.jsonl"])
