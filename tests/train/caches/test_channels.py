"""The pieces of text that channels are found by."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretell.errors import BadConfig
from foretell.kv.select.channels import CHANNELS
from foretell.train.caches.channels import FindChannels, cut_pieces, find_channels
from tests import tiny


def test_pieces_are_the_beginnings_of_documents() -> None:
    lm = tiny.lm()
    long, short = "ab, cd. " * 60, "x"
    config = FindChannels(samples=5, length=20, each=3)
    found = list(cut_pieces(lm, [long, short, long], config))
    tokens = lm.encode(long, special=False)
    whole = [tokens[first : first + 20] for first in (0, 20, 40)]
    assert found == [*whole, *whole[:2]]


def test_a_table_is_written_and_texts_that_are_too_short_are_refused(tmp_path: Path) -> None:
    lm = tiny.lm()
    out = tmp_path / "c.safetensors"
    report = find_channels(lm, tiny.TEXTS, out, FindChannels(length=16))
    assert report["tokens"] > 30 and 0.25 <= report["quarter"] <= 1
    assert CHANNELS.read_table(out)[0].shape == (2, 2, 8)
    with pytest.raises(BadConfig, match="no piece of 8 tokens"):
        find_channels(lm, ["x"], out, FindChannels())
    with pytest.raises(BadConfig, match="length=7"):
        FindChannels(length=7)
