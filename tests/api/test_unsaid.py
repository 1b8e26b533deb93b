"""Texts that must not come out, against every way to write them."""

from __future__ import annotations

import random
import re

import pytest
import torch

import foretell
from foretell.api.unsaid import Unsaid
from foretell.core.tokenizer_bytes import Words
from foretell.errors import BadConfig
from tests import tiny

PIECES = [None, b"a", b"b", b"ab", b"ba", b"{", b'{"', b'a{"b', b"\xc3", b"\xa9", b"\xff", b"aa"]


def test_the_tokens_that_would_complete_a_text_are_those_and_no_others() -> None:
    draw = random.Random(4)
    words = Words(PIECES)
    for text in (b"{", b"ab", b"aab", b"bab", "é".encode(), b"abab{"):
        for _ in range(60):
            prompt = draw.choices(range(len(PIECES)), k=draw.randrange(3))
            output = draw.choices(range(len(PIECES)), k=draw.randrange(6))
            written = b"".join(PIECES[token] or b"" for token in output)
            if text in written:
                assert not Unsaid(text, words).completing_tokens(text, len(PIECES))[
                    len(PIECES) - 1 :
                ]
                continue
            scores = Unsaid(text, words).make_processor(len(prompt))(
                torch.tensor([[*prompt, *output]], dtype=torch.long), torch.zeros(1, len(PIECES))
            )
            want = [text in written + (piece or b"") for piece in PIECES]
            assert (scores[0] < 0).tolist() == want, (text, output)


@pytest.mark.parametrize(
    ("method", "temperature"),
    [(m, t) for m in ("plain", "ngram:k=3,nodes=6") for t in (0.0, 1.0)] + [("best-of:n=2", 1.0)],
)
def test_bad_words_never_stand_in_the_text(method: str, temperature: float) -> None:
    lm = tiny.lm()
    options = {"temperature": temperature, "max_new_tokens": 40, "seed": 3}
    free = lm.generate("def add(a, b):", method, **options).text
    common = max(set(re.findall(r"\w", free)), key=free.count)
    banned = [common, "{", free[3:5], "re"]
    held = lm.generate("def add(a, b):", method, **options, bad_words=banned).text
    assert held and not any(word in held for word in banned)
    form = {"regex": '[{"ab]{9}'}
    formed = lm.generate("x", method, **form, **options, bad_words=["{", "ab"]).text
    assert re.fullmatch('["ab]{9}', formed) and "ab" not in formed


def test_ids_are_banned_as_ids() -> None:
    lm = tiny.lm()
    free = lm.generate("The", "plain", max_new_tokens=8).tokens
    held = lm.generate("The", "plain", max_new_tokens=8, bad_words=[free[:2]]).tokens
    assert held[0] == free[0] and held[1] != free[1]


def test_texts_are_refused_where_tokens_have_none() -> None:
    bare = foretell.wrap(tiny.llama(), None, name="bare")
    with pytest.raises(foretell.errors.ForetellError, match="bad_words"):
        bare.generate([1, 2], "plain", bad_words=["a"])
    for name in ("stop", "bad_words"):
        with pytest.raises(BadConfig, match=rf"{name}: \\ud83d is half a character"):
            tiny.lm().generate("a", "plain", **{name: ["a\ud83d"]})
    with pytest.raises(BadConfig, match=r"prompt: \\ud83d is half a character"):
        tiny.lm().generate("a\ud83d", "plain")
