"""A bound on the tokens of a text: beside what tokenizers of many kinds make of it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from foretell.api.token_bounds import Fewest
from tests import tiny

WILD = [
    *(
        "a",
        "aaaa",
        " ",
        "    ",
        "\n",
        "é",
        "e\u0301",
        "ᾧ",
        "\u1112\u1161\u11ab",
        "漢",
        "🙂",
        "\u212a",
    ),
    *("\u212b", "\U0001d400\u0308\u0304", "<|end|>", "the ", "0", "\x04", "\x1d", "_", "İ", "ﬃ"),
]
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SPACES = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}


def changed(**parts: Any) -> PreTrainedTokenizerFast:
    """The tests' tokenizer with other parts; those of the model by their names with `model_`."""
    told = json.loads(tiny.tokenizer().backend_tokenizer.to_str())
    for name, part in parts.items():
        if name == "forget":
            told["model"]["vocab"] = {
                text: place for text, place in told["model"]["vocab"].items() if text not in part
            }
            told["model"]["merges"] = []
        elif name.startswith("model_"):
            told["model"][name.removeprefix("model_")] = part
        elif name == "added":
            told["added_tokens"][0] |= part
        else:
            told[name] = part
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(told)))


def texts() -> list[str]:
    dice = random.Random(0)
    long = [one * 200 for one in WILD]
    return ["", *long, *("".join(dice.choices(WILD, k=80)) for _ in range(60))]


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"forget": ("a", "Ä", "Ġ")},  # bytes without a token are dropped
        {"normalizer": {"type": "NFC"}},
        {"normalizer": {"type": "NFKC"}},
        {"normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Lowercase"}, {"type": "NFD"}]}},
        {"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "__"}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": True}, BYTES]}},
        {"pre_tokenizer": SPACES, "model_unk_token": "<|end|>"},
    ],
)  # fmt: skip
def test_no_text_has_fewer_tokens(parts: dict[str, Any]) -> None:
    tokenizer = changed(**parts)
    fewest = Fewest(tokenizer)
    assert fewest.longest > 0
    for text in texts():
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert fewest.tokens(text) <= len(ids), text


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "  "}, "content": " "}},
        {"normalizer": {"type": "NFC"}, "forget": ("a",)},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}, "model_unk_token": "<|end|>"},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed",
                           "invert": False}, "model_unk_token": "<|end|>"},
        {"pre_tokenizer": SPACES, "model_unk_token": "<|end|>", "model_fuse_unk": True},
        {"pre_tokenizer": SPACES},
        {"added": {"rstrip": True}},
        {"added": {"lstrip": True}},
    ],
)  # fmt: skip
def test_where_anything_may_be_dropped_nothing_is_said(parts: dict[str, Any]) -> None:
    assert Fewest(changed(**parts)).tokens("a" * 1000) == 0


def test_it_says_something_of_long_texts() -> None:
    fewest = Fewest(tiny.tokenizer())
    assert fewest.tokens("漢" * 1000) * fewest.longest >= 3000
    assert Fewest(None).tokens("a") == 0
    lone = fewest.tokens("\ud800")  # which the tokenizer refuses itself
    assert lone <= 1
