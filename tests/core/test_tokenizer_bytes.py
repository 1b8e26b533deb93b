"""Tokenizers as bytes: what they write is what was said, whatever their habits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from foretell.core.tokenizer_bytes import (
    Shared,
    TokenizerWords,
    Words,
    are_related,
    continue_tokens,
    letter_words,
    whole_characters,
    words_of,
)
from foretell.errors import Unsupported
from foretell.testing.toy import Toy
from tests import tiny
from tests.vocabularies import other_demo

TEXTS = (
    "def add(a, b):\n    return  a  +  b",
    "the dog does not mind",
    " leading  and trailing ",
    "naïve café, 漢字かな 🙂🙃",
    "<|end|> is a text here",
    "\n\n\t",
    "x",
)


def spaced(prepends: bool = True) -> PreTrainedTokenizerFast:
    """As sentencepiece's models have it: a letter for spaces, put before each text, bytes for what
    is not in the vocabulary, and a token that begins texts.
    """
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [chr(letter) for letter in range(33, 127)]
    pieces += ["\u2581", "\u2581d", "\u2581do", "\u2581dog", "og", "th", "the", "\u2581the", "no"]
    merges = [("\u2581", "d"), ("\u2581d", "o"), ("\u2581do", "g"), ("t", "h"), ("th", "e")]
    merges += [("\u2581", "the"), ("n", "o"), ("o", "g")]
    vocab = {piece: token for token, piece in enumerate(pieces)}
    bpe = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    steps: list[Any] = [normalizers.Replace(" ", "\u2581")]
    if prepends:
        steps.insert(0, normalizers.Prepend("\u2581"))
    bpe.normalizer = normalizers.Sequence(steps)  # type: ignore[assignment]
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    bpe.decoder = decoders.Sequence(parts)  # type: ignore[assignment]
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte-level", "spaces", "spaces, none before", "other demo"])
def test_what_is_encoded_has_the_bytes_of_the_text(kind: str, text: str) -> None:
    tokenizer: Any = {
        "byte-level": tiny.tokenizer,
        "spaces": spaced,
        "spaces, none before": lambda: spaced(False),
        "other demo": lambda: other_demo()[0],
    }[kind]()
    words = TokenizerWords(tokenizer)
    data = text.encode()
    assert words.text(words.encode(data)) == data
    for cut in (1, len(data) // 2, len(data) - 1):  # inside of characters, too
        assert words.text(words.encode(data[:cut])) == data[:cut]
        assert words.text(words.encode(data[cut:])) == data[cut:]
    assert words.end == tokenizer.eos_token_id and not {*words.encode(data)} & {*words.names}


def test_a_text_in_the_middle_is_divided_as_there() -> None:
    words = TokenizerWords(spaced())
    plain = [words.pieces[token] for token in words.encode(b"the dog")]
    assert plain == [b"the", b" dog"] and words.start == (1,)
    assert words.pieces[words.ids[b"A"]] == b"A" and words.ids[b"A"] > 258
    assert words.ids[b"\n"] == 3 + 10


def test_texts_that_look_like_special_tokens_are_texts() -> None:
    words = TokenizerWords(tiny.tokenizer())
    assert len(words.encode(b"<|end|>")) > 1 and words.specials == {"<|end|>": 0}
    assert words.piece(0) is None and words.piece(9999) is None and words.text([0, 9999]) == b""


def test_the_longest_piece_first_and_nothing_for_unknown_bytes() -> None:
    words = Words([b"a", b"ab", b"b", None, b"abc"], {"<x>": 3}, second=[1])
    assert words.encode(b"abcab?a") == [4, 1, 0]
    assert Words([b"x", b"x"], second=[0]).ids == {b"x": 1}


def test_tokenizers_that_cannot_be_read_are_refused() -> None:
    toy = Toy(4)
    toy.tokenizer = None
    with pytest.raises(Unsupported, match=r"cross-text cannot run on toy: .*it has none"):
        words_of(toy, "cross-text")
    toy.tokenizer = object()
    with pytest.raises(Unsupported, match="tokenizer whose tokens are pieces"):
        words_of(toy, "cross-text")
    lower = spaced()
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()  # type: ignore[assignment]
    toy.tokenizer = lower
    with pytest.raises(Unsupported, match="no pieces of the text"):
        words_of(toy, "cross-text")
    toy.tokenizer = tiny.tokenizer()
    assert words_of(toy, "x") is words_of(toy, "x")


def test_relatives_are_told_from_strangers() -> None:
    assert are_related(letter_words(4), letter_words(9)) and are_related(None, letter_words(3))
    assert not are_related(letter_words(4), Words([b"b", b"a", b"x", b"y"]))
    assert are_related(tiny.tokenizer(), tiny.tokenizer()) and not are_related(
        tiny.tokenizer(), spaced()
    )
    assert not are_related(tiny.tokenizer(), letter_words(20))


def test_shared_tokens_are_one_to_one() -> None:
    """Two ids with the same bytes, on either side, and ids beyond a model's rows."""
    ours = Words([b"a", b"b", b"a", None, b"z", None], {"<e>": 3, "<u>": 5}, end=3)
    theirs = Words([b"b", b"b", b"a", None, None, b"z"], {"<u>": 3, "</s>": 4}, end=4)
    shared = Shared(ours, theirs, 6, 6)
    assert shared.partner == {0: 2, 1: 0, 3: 4, 4: 5, 5: 3}
    assert Shared(ours, theirs, 3, 2).partner == {1: 0}
    row = shared.row(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
    assert row.tolist() == [3.0, 1.0, -torch.inf, 5.0, 6.0, 4.0]


@pytest.mark.parametrize(
    ("data", "whole"),
    [
        (b"", 0),
        (b"ab", 2),
        ("é".encode(), 2),
        (b"a\xc3", 1),
        (b"a\xf0\x9f\x99", 1),
        ("🙂".encode(), 4),
        (b"a\xe6\xbc", 1),
        (b"\x99\x99\x99\x99", 4),
        (b"a\xff", 2),
        (b"\xc3a", 2),
    ],
)
def test_characters_that_lack_their_end(data: bytes, whole: int) -> None:
    assert whole_characters(data) == whole


def test_a_continuation_never_changes_what_is_there() -> None:
    words = Words([b"a", b"b", b"ab", b"c", None, b"bc"], {"<s>": 4})
    assert continue_tokens(words, [3], b"ab", 10) == [2]
    assert continue_tokens(words, [0], b"b", 10) == [1]  # `ab` would be one token
    assert continue_tokens(words, [0], b"bc", 10) == [5]
    assert continue_tokens(words, [1, 3], b"a", 1) == [0]
    # not together with what a special one ends
    assert continue_tokens(words, [0, 4], b"b", 10) == [1]
    assert continue_tokens(words, [4], b"abc", 10) == [2, 3]
