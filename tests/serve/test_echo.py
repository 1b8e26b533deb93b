"""Places of tokens in an echoed prompt, by what each token stands for."""

from __future__ import annotations

from typing import Any

import pytest

from foretell import LM
from foretell.serve.scoring import token_offsets
from foretell.serve.served import Served
from tests import tiny
from tests.serve.asked import completion
from tests.serve.live import running

FOX = "\U0001f98a"


def letters(*pieces: str | bytes) -> list[tuple[bytes, bool]]:
    """Tokens of these texts; special ones are written in angles."""
    made = []
    for piece in pieces:
        data = piece if isinstance(piece, bytes) else piece.encode()
        made.append((data, data.startswith(b"<|")))
    return made


@pytest.mark.parametrize(
    ("text", "tokens", "expected"),
    [
        ("<|im_start|>user\nhi", letters("<|im_start|>", "user", "\n", "hi"), [0, 12, 16, 17]),
        ("hi", letters("<|bos|>", "hi"), [0, 0]),  # it is not in the text
        ("a b", letters(" a", " b"), [0, 1]),  # a space that the tokenizer wrote
        ("a  b", letters("a", " b"), [0, 1]),  # and one that it left out
        (f"{FOX}b", letters(*(bytes([byte]) for byte in FOX.encode()), "b"), [0, 0, 0, 0, 1]),
        (f"a{FOX}", letters("a", FOX.encode()[:2], FOX.encode()[2:]), [0, 1, 1]),
        ("a <|x|> b", letters("a", "<|x|>", " b"), [0, 1, 7]),  # it takes the space before it
        ("e\u0301 x", letters("\u00e9", " x"), [0, 2]),  # composed by the tokenizer
        ("", letters("<|bos|>"), [0]),
        ("hi", letters("hi", "<|eos|>"), [0, 2]),
    ],
)
def test_places_are_those_of_the_text(
    text: str, tokens: list[tuple[bytes, bool]], expected: list[int]
) -> None:
    assert token_offsets(text, tokens) == expected


PROMPTS = [
    "<|end|>user\nhi",
    "<|end|><|end|> a",
    f"  caf\u00e9 {FOX}!",
    "\u4f60\u597d, world",
    "a\n\n b",
]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("form", ["text", "ids"])
def test_each_token_begins_where_its_text_stands(prompt: str, form: str) -> None:
    lm: LM = tiny.lm()
    with running(lm) as live, live.client() as client:
        ids = lm.encode(prompt)
        asked: Any = prompt if form == "text" else ids
        fields = {"echo": True, "logprobs": 0, "max_tokens": 2, "temperature": 0}
        (choice,) = completion(client, asked, **fields, ignore_eos=True)["choices"]
    told, text = choice["logprobs"], choice["text"]
    offsets = told["text_offset"]
    assert text.startswith(prompt if form == "text" else lm.decode(ids))
    assert offsets == sorted(offsets) and len(offsets) == len(ids) + 2
    served = Served(lm, "tiny")
    for token, start, end in zip(ids, offsets, [*offsets[1:], len(text)], strict=False):
        shown = served.token_text(token)
        if form == "ids" and served.is_special(token):
            assert start == end, "it is not in the text"
        elif "\ufffd" in shown:  # a part of a character begins where that does
            assert (
                end - start <= 1 and served.token_bytes(token) in text[start : start + 1].encode()
            )
        else:
            assert text[start:end] == shown
    assert offsets[len(ids)] == len(prompt if form == "text" else lm.decode(ids))
