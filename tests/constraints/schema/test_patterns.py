"""Regular expressions from one dialect to the other, by what they match."""

from __future__ import annotations

import json
import random
import re

import pytest

from foretell.constraints.compiling import build_matcher
from foretell.constraints.schema.patterns import escape_literal, limit_to_ascii, other_than
from foretell.errors import BadConfig
from tests.schemas import compiled, takes, tokens


@pytest.mark.parametrize(
    ("regex", "good", "bad"),
    [
        (r"\d{4}", "2024", "٢٠٢٤"),
        (r"[\d\w]", "_", "é"),
        (r"[^\D]", "3", "٣"),
        (r"\s", "\t", "\u00a0"),
        (r"\S\W", "a\u00a0", "a_"),
        (r"(?u)\d", "٣", "x"),
        (r"(?u:\w)\d", "é3", "é٣"[::-1]),
        (r"\\d", r"\d", "3"),
        (r"[[:digit:]&&[^3]]\.", "4.", "3."),
        ("[é-ü]", "ö", "x"),
    ],
)
def test_classes_of_a_regex_mean_ascii_unless_it_says_otherwise(
    regex: str, good: str, bad: str
) -> None:
    start = build_matcher("regex", regex, tokens())
    assert takes(start, good) and not takes(start, bad), limit_to_ascii(regex)


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^\p{Letter}+$", "é", "3"),
        (r"^\p{L}\x41\u0042\cA$", "éAB\x01", "éAB"),
        (r"^[^]$", "\n", ""),
        (r"^[a\-\]]{2}$", "-]", "ab"),
        (r"^[+--]$", ",", "a"),
        (r"^[[a]$", "[", "b"),
        (r"^[\b]$", "\b", "b"),
        (r"^a{,2}$", "a{,2}", "aa"),
        (r"^\ud83d\ude00$", "😀", "a"),
        (r"^\s$", "\ufeff", "\u200b"),
        (r"^\S\W\D$", "aé٣", "a_٣"),
        (r"a\/b", "xa/by", "ab"),
        (r"^(a|b$)", "ax", "xa"),
    ],
)
def test_patterns_mean_what_they_mean_in_javascript(pattern: str, good: str, bad: str) -> None:
    start = compiled({"type": "string", "pattern": pattern})
    assert takes(start, json.dumps(good)) or takes(start, json.dumps(good, ensure_ascii=False))
    assert not takes(start, json.dumps(bad, ensure_ascii=False))


def test_other_texts_than_some_are_all_others() -> None:
    draw = random.Random(2)
    letters = "ab\n]^"
    for _ in range(40):
        some = {"".join(draw.choices(letters, k=draw.randrange(4))) for _ in range(4)}
        regex = re.compile(other_than(some).replace("[^]", r"[\s\S]"))
        for _ in range(50):
            text = "".join(draw.choices(letters, k=draw.randrange(5)))
            assert (regex.fullmatch(text) is None) == (text in some)


def test_a_text_is_matched_literally() -> None:
    for text in ("a.b", "{[(-&~#/ \n\t\x00é\u2028🙂", r"\d^$"):
        assert takes(build_matcher("regex", escape_literal(text), tokens()), text)
    with pytest.raises(BadConfig, match="look-around"):
        compiled({"pattern": "(?=a)"})
