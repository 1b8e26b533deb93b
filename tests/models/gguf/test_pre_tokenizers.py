"""Rules of words, by cases made by hand and by the tokenizers that transformers has of them."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import Sequence
from transformers import GPT2Tokenizer, GPTNeoXTokenizerFast, Qwen2Tokenizer
from transformers.integrations.gguf import gguf_tokenizer_mapping
from transformers.models.cohere.tokenization_cohere import CohereTokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from foretell.core.tokenizer_bytes import byte_table
from foretell.models.gguf.pre_tokenizers import NAMED, RULES
from tests import tiny
from tests.models.gguf.tokens import texts_of

PARTS = (
    *" \t\n\r.,'!?/$(a",
    *(
        "  ",
        "\r\n",
        "HTTPServer",
        "don't",
        "WE'LL",
        "x1",
        "1234567",
        "12",
        "\u00bd",
        "\u0663\u0664",
    ),
    *("caf\u00e9", "e\u0301", "\u4f60\u597d", "\u3042\u30a2", "\ud55c\uad6d", "\u05e9\u05dc\u05d5"),
    *(
        "\u0928\u092e\u0938\u094d\u0924\u0947",
        "\U0001f642",
        "\u200d",
        "\u00a0",
        "\u3000",
        "\uff01",
        "___",
        "=>",
        "\u3002",
    ),
)
HUNDRED = "a 1234567 b"
# A rule, a text, and its words with a bar between them.
CASES = (
    ("default", "it's 1234567.", "it|'|s| |123|456|7|."),
    ("gpt-2", "it's  1234567\n\nA", "it|'s| | 1234567|\n|\n|A"),
    ("smollm", HUNDRED, "a| |1|2|3|4|5|6|7| b"),
    ("command-r", "a 12.", "a| |1|2|."),
    ("falcon", HUNDRED, "a| |123|456|7| b"),
    ("falcon", "a...b", "a|...|b"),
    ("llama-bpe", HUNDRED, "a| |123|456|7| b"),
    ("llama-bpe", "I'LL go.\n\n  x", "I|'LL| go|.\n\n| | x"),
    ("qwen2", HUNDRED, "a| |1|2|3|4|5|6|7| b"),
    ("qwen2", "\u0928\u092e\u0938\u094d\u0924\u0947", "\u0928\u092e\u0938|\u094d\u0924|\u0947"),
    ("qwen35", "\u0928\u092e\u0938\u094d\u0924\u0947", "\u0928\u092e\u0938\u094d\u0924\u0947"),
    ("gpt-4o", "HTTPServer don't 1234", "HTTPServer| don't| |123|4"),
    ("gpt-4o", "getValueOf a/b\n", "get|Value|Of| a|/b|\n"),
    ("tekken", "getValue 12 don't", "get|Value| |1|2| don|'t"),
    ("kimi-k2", "ab\u4f60\u597dcd 1234", "ab|\u4f60\u597d|cd| |123|4"),
    ("superbpe", "by the way 1234567", "by the way |1|234|567"),
    ("tiny_aya", HUNDRED, "a| |1|234|567| b"),
    ("afmoe", "a 12345\u4f60x", "a| |12|345|\u4f60|x"),
    # Its signs include the letters of ASCII, which are cut off others again.
    ("deepseek-llm", "na\u00efve \u03c9 12\n\u4f60x", "na|\u00ef|ve| \u03c9| |1|2|\n|\u4f60|x"),
    ("deepseek-coder", "a, b 12\n", "a|,| b| |1|2|\n"),
    ("deepseek-v3", "(ab) 12345 \u4f60\u597da", "(ab|)| |123|45| |\u4f60\u597d|a"),
    ("bloom", "a.b, c 12", "a|.|b|,| c| 12"),
    ("viking", "a.b 12", "a|.|b| |1|2"),
    ("bailingmoe", "a'S 12\n\n", "a|'S| |1|2|\n\n"),
    ("seed-coder", "a=1;\n", "a|=|1|;|\n"),
    ("minicpm5", HUNDRED, "a| |123|456|7| b"),
    ("exaone-moe", "the quick 1", "the quick| |1"),
    ("jais-2", "a      b", "a|    | | b"),
    ("laguna", "a b\nc", "a| b|\n|c"),
    ("ufakzeka", "Ankara'da 12", "Ankara|'da| |1|2"),
    ("youtu", "a\ud55c\uad6d\u3002b", "a|\ud55c\uad6d|\u3002|b"),
    ("spark2_5", "a.\n\n123", "a|.|\n|\n|1|2|3"),
    ("chameleon", "IMGIMGABZ 1", "IMGIMGABZ| |1"),
    ("gemma4", "a b\n\nc", "a b|\n\n|c"),
    ("glm4", HUNDRED, "a| |123|456|7| b"),
)


def words(name: str, text: str) -> list[str]:
    rule = RULES[name]
    letters = [part for part, _ in Sequence(list(rule.steps)).pre_tokenize_str(text)]
    if not rule.by_bytes:
        return letters
    table = byte_table()
    return [bytes(table[letter] for letter in part).decode() for part in letters]


@pytest.mark.parametrize(("name", "text", "parts"), CASES)
def test_texts_are_cut(name: str, text: str, parts: str) -> None:
    assert words(name, text) == parts.split("|")


@pytest.mark.parametrize("names", NAMED)
def test_no_rule_loses_a_letter(names: str) -> None:
    table = byte_table()
    for name in names.split():
        rule = RULES[name]
        for text in texts_of(60, parts=PARTS):
            written = "".join(part for part, _ in _pieces(rule, text))
            if rule.by_bytes:
                written = bytes(table[letter] for letter in written).decode()
            assert written == text


def _pieces(rule: Any, text: str) -> list[Any]:
    return list(Sequence(list(rule.steps)).pre_tokenize_str(text))


def _own_tokenizer(name: str) -> Tokenizer:
    from tokenizers import normalizers

    found = Tokenizer(models.BPE(tiny.tokenizer().get_vocab(), []))
    found.pre_tokenizer = Sequence(list(RULES[name].steps))
    if RULES[name].composed:
        found.normalizer = normalizers.NFC()
    return found


@pytest.mark.parametrize(
    ("names", "theirs"),
    [
        ("gpt-2", GPT2Tokenizer),
        ("olmo mpt", GPTNeoXTokenizerFast),
        ("qwen2", Qwen2Tokenizer),
        ("qwen35", Qwen3_5Tokenizer),
        ("command-r", CohereTokenizer),
    ],
)
def test_families_are_cut_as_transformers_does(names: str, theirs: Any) -> None:
    vocabulary = tiny.tokenizer().get_vocab()
    backend = theirs(vocab=vocabulary, merges=[]).backend_tokenizer
    for name in names.split():
        own = _own_tokenizer(name)
        assert (own.normalizer is None) == (backend.normalizer is None)
        for text in texts_of(400, parts=PARTS):
            composed = backend.normalizer.normalize_str(text) if backend.normalizer else text
            assert own.pre_tokenizer.pre_tokenize_str(
                composed
            ) == backend.pre_tokenizer.pre_tokenize_str(composed), text


def test_names_are_those_that_transformers_has_for_rules() -> None:
    for name, pattern in gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS.items():
        from tokenizers import Regex
        from tokenizers.pre_tokenizers import ByteLevel, Split

        theirs = Sequence([Split(Regex(pattern), "isolated"), ByteLevel(False, use_regex=False)])
        for text in texts_of(100, parts=PARTS):
            assert _pieces(RULES[name], text) == theirs.pre_tokenize_str(text), name
