"""What users meet: models, texts with gaps, streams, refusals."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from foretell.api import LM
from foretell.errors import BadConfig, Unsupported
from foretell.families.canvas import Denoiser
from tests import tiny


@cache
def lm() -> LM:
    hf = tiny.llama()
    words: Any = tiny.tokenizer()
    return LM(Denoiser(hf, "tiny", mask_id=len(words) - 9), words, eos=(0,))


def test_auto_fills_canvases() -> None:
    answer = lm().generate("The quick", max_new_tokens=12, ignore_eos=True)
    again = lm().generate("The quick", method="threshold", max_new_tokens=12, ignore_eos=True)
    assert answer.tokens == again.tokens and len(answer.tokens) == 12


def test_a_stream_brings_the_finished_beginning() -> None:
    pieces = list(
        lm().stream("The", method="confidence:block=4", max_new_tokens=8, ignore_eos=True)
    )
    answer = lm().generate("The", method="confidence:block=4", max_new_tokens=8, ignore_eos=True)
    assert "".join(piece.text for piece in pieces) == answer.text


def test_gaps_are_filled() -> None:
    answer = lm().fill(["The quick", 3, " jumps over", 2], temperature=0.7)
    given = lm().encode(" jumps over", special=False)
    assert len(answer.tokens) == 5 + len(given) and answer.tokens[3 : 3 + len(given)] == given


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([3, "a"], "begins with a gap"),
        (["a", "b"], "no gap"),
        (["a", 0], "1 or more"),
        ("a", "gap"),
    ],
)
def test_bad_gaps_are_named(parts: Any, said: str) -> None:
    with pytest.raises(BadConfig, match=said):
        lm().fill(parts)


def test_it_takes_a_model_that_fills_canvases() -> None:
    ordinary = tiny.lm()
    with pytest.raises(Unsupported, match="fills canvases"):
        ordinary.fill(["The", 3])
    with pytest.raises(Unsupported, match="canvas"):
        ordinary.generate("The", method="threshold")
    with pytest.raises(Unsupported, match="fills canvases"):
        lm().generate("The", method="suffix")
