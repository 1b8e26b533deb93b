"""Marks in a text of tokens, special or not, and what is asked after it."""

from __future__ import annotations

from typing import Any

import pytest

from foretell.core.context import Context
from foretell.core.request import Request
from foretell.core.tokenizer_bytes import Words
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.errors import Unsupported
from foretell.rewards.questions import Speaker
from foretell.strategies.plain import Plain
from foretell.strategies.samples.segments import (
    MARKS,
    SUMMARY,
    THINK,
    THOUGHT,
    Watch,
    count_opening,
    encode_marked,
    question_tokens,
    shown_text,
    summary_of,
)
from foretell.testing.toy import Toy
from tests.speaking import Chat, Speaking, chat, one_of, tokens_of
from tests.speaking import shown as whole

LETTERS = Words([bytes([code]) for code in range(128)])
SPECIAL = Words(
    [bytes([code]) for code in range(128)] + [None] * 3, {THINK: 128, SUMMARY: 129, "<x>": 130}
)
PIECES = Words([*(bytes([code]) for code in range(128)), b"k></", b"y>"])


@pytest.mark.parametrize("words", [LETTERS, SPECIAL, PIECES])
def test_marks_are_found_in_tokens_of_any_size(words: Words) -> None:
    text = f"a{THINK}b{THOUGHT}\n{SUMMARY}"
    tokens = encode_marked(words, text)
    assert shown_text(words, tokens) == text
    watch = Watch(words)
    found: dict[str, int] = {}
    for count, token in enumerate(tokens, 1):
        watch.push(token)
        for mark in MARKS:
            if mark in shown_text(words, tokens[:count]):
                found.setdefault(mark, count)
    assert watch.ends == found and set(found) == {THINK, THOUGHT, SUMMARY}
    assert watch.length == len(tokens) and not watch.thinking
    assert words is PIECES or (129 in tokens) == (words is SPECIAL)


def test_of_special_tokens_only_marks_are_shown() -> None:
    assert shown_text(SPECIAL, [128, 130, 97]) == "<think>a"


def test_thoughts_that_a_prompt_opens() -> None:
    for words in (LETTERS, SPECIAL):
        for end in ("", "\n", "\n\n"):
            prompt = encode_marked(words, f"user{THINK}?\n{THINK}{end}")
            count = count_opening(words, prompt)
            assert shown_text(words, prompt[-count:]) == f"{THINK}{end}"
        assert count_opening(words, encode_marked(words, f"{THINK}a")) == 0


@pytest.mark.parametrize(
    ("text", "summary"),
    [
        ("\n* a\n* b\n</summary> more", "* a\n* b"),
        ("<think>hm</think>\n<summary>\n* a", "* a"),
        (" \n", ""),
        ("* a <think>", "* a <think>"),
    ],
)
def test_a_summary_has_no_marks(text: str, summary: str) -> None:
    assert summary_of(text) == summary


def speaker(model: Any) -> Speaker:
    engine = Engine({"target": model})
    return Speaker.find_speaker(Context(engine, Request([1], Plain(), Sampling())), "asker")


def test_a_question_goes_on_with_the_conversation() -> None:
    asked = question_tokens(speaker(Speaking(one_of)), "Why?")  # type: ignore[arg-type]
    begun = tokens_of([("user", "So?")])
    said = [*begun, *b"Hm", *asked]
    assert whole(said) == chat([("user", "So?"), ("assistant", "Hm"), ("user", "Why?")])
    bare = Toy(128)
    bare.tokenizer = LETTERS
    assert LETTERS.text(question_tokens(speaker(bare), "Why?")) == b"\n\nWhy?\n\n"


class Forgetful(Chat):
    """Shows the last turn alone."""

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        return f"{len(messages)}: " + super().apply_chat_template(messages[-1:], **options)


def test_a_template_that_changes_what_was_said_is_refused() -> None:
    model = Speaking(one_of)  # type: ignore[arg-type]
    model.tokenizer = Forgetful()
    with pytest.raises(Unsupported, match="a chat template that only adds to what was said"):
        question_tokens(speaker(model), "Why?")
