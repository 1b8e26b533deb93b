"""Tokens to text: pieces concatenate to the whole, whatever the tokens and however they are cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from foretell.core.text import Detokenizer
from tests import tiny

TOKENIZER = tiny.tokenizer()


def decode(tokens: Sequence[int]) -> str:
    return TOKENIZER.decode(
        list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def pieces(tokens: Sequence[int], cuts: Sequence[int], stops: Sequence[str] = ()) -> list[str]:
    """The texts of pushing `tokens` cut at `cuts`, the last push being final."""
    text = Detokenizer(decode, stops)
    bounds = [0, *sorted(min(c, len(tokens)) for c in cuts), len(tokens)]
    return [
        text.push(tokens[low:high], final=high == len(tokens) and i == len(bounds) - 2)
        for i, (low, high) in enumerate(pairwise(bounds))
    ]


any_tokens = st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=24)


@given(any_tokens, st.lists(st.integers(0, 24), max_size=8))
def test_pieces_of_any_tokens_concatenate_to_the_whole(tokens: list[int], cuts: list[int]) -> None:
    assert "".join(pieces(tokens, cuts)) == decode(tokens)


@given(st.text(max_size=12), st.lists(st.integers(0, 60), max_size=20))
def test_no_half_character_leaves_early(text: str, cuts: list[int]) -> None:
    tokens = TOKENIZER(text)["input_ids"]
    parts = pieces(tokens, cuts)
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts) or "\ufffd" in text


@given(st.text("ab", max_size=16), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_nothing_of_a_stop_string_is_shown(text: str, stops: list[str]) -> None:
    tokens = TOKENIZER(text)["input_ids"]
    expected = text
    for count in range(1, len(tokens) + 1):
        known = decode(tokens[:count])
        if found := [known.find(s) for s in stops if s in known]:
            expected = known[: min(found)]
            break
    assert "".join(pieces(tokens, range(len(tokens)), stops)) == expected


def test_a_token_without_text_keeps_the_context_of_the_next() -> None:
    """A decoder that drops the space of its first token must not lose it after a special token."""
    words = {1: "a", 2: " b", 9: ""}

    def strip(tokens: Sequence[int]) -> str:
        return "".join(words[t] for t in tokens).lstrip(" ")

    text = Detokenizer(strip)
    assert [text.push([t]) for t in (1, 9, 9, 2)] + [text.push([], final=True)] == [
        "a",
        "",
        "",
        " b",
        "",
    ]


def test_after_the_stop_nothing_more_is_shown() -> None:
    text = Detokenizer(decode, ["lazy"])
    out = [text.push([t]) for t in TOKENIZER("the lazy dog")["input_ids"]]
    assert "".join(out) == "the "
    assert text.push(TOKENIZER("more")["input_ids"], final=True) == ""
