"""Planted passkeys: where they stand, that answers are theirs, and texts that cannot be made."""

from __future__ import annotations

from itertools import islice

import pytest

from foretell.errors import BadConfig
from foretell.train.caches.passkeys import Planting

BOOK = "".join(chr(0x4E00 + i % 500) for i in range(9000))


def encode(text: str) -> list[int]:
    return [*map(ord, text)]


def decode(tokens: tuple[int, ...]) -> str:
    return "".join(map(chr, tokens))


PLANTING = Planting(keys=3, words=4, shortest=900, longest=1200)


def test_every_answer_is_the_passkey_that_was_planted() -> None:
    lengths = []
    for text in islice(PLANTING.texts(encode, [BOOK, BOOK], 1), 17):
        lengths.append(len(text.tokens))
        context, tail = (
            decode(text.tokens[: text.question_start]),
            decode(text.tokens[text.question_start :]),
        )
        assert tail.startswith("What is the first passkey")
        places = []
        for nth, (first, last) in zip(("first", "second", "third"), text.answers, strict=True):
            key = decode(text.tokens[first:last])
            assert len(key.split()) == 4
            places.append(
                context.index(f"The {nth} passkey to the vault is this row of words:{key}")
            )
        assert places == sorted(places) and len({*places}) == 3
    assert lengths[:2] == [900, 920] and lengths[15:] == [1200, 900]


def test_a_seed_gives_the_same_texts_and_another_does_not() -> None:
    made = [[*islice(PLANTING.texts(encode, [BOOK], seed), 3)] for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]
    assert len({text.tokens for text in made[0]}) == 3


def test_texts_that_cannot_be_made_are_refused() -> None:
    with pytest.raises(BadConfig, match="too short"):
        list(islice(PLANTING.texts(encode, [BOOK[:100]], 1), 1))
    small = Planting(keys=3, words=4, shortest=100, longest=100)
    with pytest.raises(BadConfig, match=r"shortest=100: .*at least \d+ for the passkeys"):
        next(small.texts(encode, [BOOK], 1))
    for fields in ({"keys": 0}, {"keys": 11}, {"words": 0}, {"shortest": 1300}):
        with pytest.raises(BadConfig, match=next(iter(fields))):
            Planting(**{"keys": 3, "words": 4, "shortest": 900, "longest": 1200, **fields})
