"""A text in another model's tokens: the same bytes at any time, on a branch that only grows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from foretell.core.context import Context
from foretell.core.request import Request
from foretell.core.tokenizer_bytes import TokenizerWords, Words
from foretell.core.types import Commit, Open
from foretell.engine.engine import Engine
from foretell.engine.live import Live, Task
from foretell.engine.messages import handle_message
from foretell.models.translated import Translated
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from tests import tiny
from tests.core.test_tokenizer_bytes import TEXTS, spaced


def translated(ours: Words, theirs: Words, window: int = 4) -> tuple[Translated, Live]:
    models = {"target": Toy(len(ours.pieces)), "draft": Toy(len(theirs.pieces))}
    models["target"].tokenizer, models["draft"].tokenizer = ours, theirs
    engine = Engine(models, () if ours.end is None else (ours.end,))
    ctx = Context(engine, Request([0], Plain()))
    return Translated(ctx, window=window), Live(0, ctx, Task(Plain().run(ctx)), 0.0)


def brought_up(one: Translated, live: Live) -> list[Any]:
    """Runs `tree`, and checks that branch and tree hold the text together."""
    steps = one.open_tree()
    messages = []
    answer = None
    while True:
        try:
            message = steps.send(answer)
        except StopIteration as end:
            tree, node = end.value
            break
        messages.append(message)
        handle_message(live.ctx.engine, live, live.root, message)  # type: ignore[arg-type]
        answer = live.root.answer
    branch = live.ctx.branches[one.branch].tokens
    assert branch[-1] == tree.tokens[0] and [*branch, *tree.tokens_to(node)] == one.token_ids
    return messages


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("window", [1, 4, 10])
def test_it_has_the_texts_bytes_however_it_comes(window: int, swapped: bool) -> None:
    draw = np.random.default_rng(window)
    ours, theirs = TokenizerWords(tiny.tokenizer()), TokenizerWords(spaced())
    if swapped:
        ours, theirs = theirs, ours
    data = "  ".join(TEXTS).encode() * 2
    tokens = ours.encode(data)
    one, live = translated(ours, theirs, window)
    kinds = []
    done = 0
    while done < len(tokens):
        done += int(draw.integers(1, 5))
        one.read_text(tokens[:done])
        text = ours.text(tokens[:done])
        assert theirs.text(one.token_ids) + one.pending_bytes == text and len(one.pending_bytes) < 4
        if one.token_ids:
            kinds += [type(message) for message in brought_up(one, live)]
        assert len(one.token_ids) - one.branch_length <= 3 * window + 8
    assert kinds.count(Open) == 1 and kinds.count(Commit) > 2


def test_the_last_tokens_are_divided_anew() -> None:
    one, _ = translated(Words([b"a", b"b", b"c"]), Words([b"a", b"b", b"ab", b"c", b"abc"]))
    for tokens, ids in (([0], [0]), ([0, 1], [2]), ([0, 1, 2], [4]), ([0, 1, 2, 0], [4, 0])):
        one.read_text(tokens)
        assert one.token_ids == ids
    assert one.translate_back([0, 1, 2, 0], [1, 4]) == [1, 0, 1, 2]


def test_special_tokens_keep_their_names() -> None:
    ours = Words([b"a", None, None, None], {"<s>": 1, "<|user|>": 2, "<|odd|>": 3}, (1,), end=3)
    pieces = [None, b"a", None, None, b"<|", b"odd", b"|>"]
    theirs = Words(pieces, {"<s>": 0, "<|user|>": 2, "</s>": 3}, (0,), end=3)
    one, _ = translated(ours, theirs)
    one.read_text([1, 2, 0, 3, 0])  # begins, a mark, the end inside of a text
    assert one.token_ids == [0, 2, 1, 3, 1]
    assert one.translate_back([1, 2, 0, 3, 0], [1, 3, 1]) == [0, 3]
    assert one.translate_back([1, 2, 0, 3, 0], [2]) == [2]
    unknown = Words(pieces, {"<s>": 0}, (0,))
    one, _ = translated(ours, unknown)
    one.read_text([1, 0, 3, 0])
    assert one.token_ids == [0, 1, 4, 5, 6, 1]  # spelled: the text is not lost
    assert one.translate_back([1, 0], [2]) == []


def test_a_character_that_is_not_whole_waits_for_its_end() -> None:
    ours = Words([b"a", b"\xc3", b"\xa9", b"\xa8"])
    theirs = Words([b"a", "é".encode(), b"\xc3"])
    one, _ = translated(ours, theirs)
    one.read_text([0, 1])
    assert one.token_ids == [0] and one.pending_bytes == b"\xc3"
    assert one.translate_back([0, 1], [1, 0]) == [2, 0]  # completes the character, and goes on
    assert one.translate_back([0, 1], [0, 1]) == []  # has another character there
    assert one.translate_back([0, 1], [1, 2]) == [2]  # what is begun is not proposed
    one.read_text([0, 1, 2])
    assert one.token_ids == [0, 1] and one.pending_bytes == b""


def test_what_cannot_be_written_is_left_out() -> None:
    one, _ = translated(Words([b"a", b"?", b"b"]), Words([b"b", b"a"]))
    one.read_text([0, 1, 2])
    assert one.token_ids == [1, 0]


def test_double_spaces_and_leading_ones_are_kept() -> None:
    ours, theirs = TokenizerWords(tiny.tokenizer()), TokenizerWords(spaced())
    for text in (b" the  dog", b"the dog ", b"   "):
        one, _ = translated(ours, theirs)
        one.read_text(ours.encode(text))
        assert theirs.text(one.token_ids) == text
    before = ours.encode(b"the")
    one, _ = translated(ours, theirs)
    one.read_text(before)
    drafted = theirs.encode(b"  dog ")
    assert ours.text(one.translate_back(before, drafted)) == b"  dog "
