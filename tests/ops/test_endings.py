"""Endings against brute force on forms of letters, and on JSON."""

from __future__ import annotations

import itertools
import json
import random
import re
from functools import cache
from typing import Any

import numpy as np
import pytest

from foretell.forms import Grammars, Matcher
from foretell.ops.endings import KEPT, Search, Spellings
from tests import laws, tiny

LETTERS = 4
FORMS = ["(a|b)*c", "(ab)*c", "a{3}b*", "a(b|c(d|a))*d", "((a|b)c)+d?", "a{5,}", "[ab]+c{3}"]


@cache
def json_grammars() -> Grammars:
    return Grammars(tiny.tokenizer(), len(tiny.tokenizer()), [0])


def matcher(form: str) -> Matcher:
    return laws.grammars(LETTERS).compile({"regex": form}).track()


def shortest(form: str, output: tuple[int, ...]) -> int | None:
    """Tokens that the shortest ending takes, by trying all; None: more than seven."""
    for length in range(8):
        for rest in itertools.product(range(LETTERS), repeat=length):
            if re.fullmatch(form, laws.spell([*output, *rest])):
                return length
    return None


def begun(form: str, rng: random.Random, most: int = 5) -> list[int]:
    """A text that the form allows, up to a place."""
    tracker, output = matcher(form), []
    for _ in range(rng.randrange(most)):
        able = tracker.allowed(output).nonzero()[:, 0].tolist()
        if not able:
            break
        output.append(rng.choice(able))
    return output


@pytest.mark.parametrize("form", FORMS)
def test_an_ending_ends_the_text_and_none_is_shorter(form: str) -> None:
    rng = random.Random(form)
    for _ in range(12):
        output = begun(form, rng)
        ending = matcher(form).ending(output)
        assert ending is not None
        assert re.fullmatch(form, laws.spell([*output, *ending]))
        assert len(ending) == shortest(form, tuple(output))


@pytest.mark.parametrize("form", FORMS)
def test_what_is_found_depends_on_the_text_alone(form: str) -> None:
    rng = random.Random(form)
    asked = [begun(form, rng) for _ in range(20)]
    tracker = matcher(form)
    found = [tracker.ending(output) for output in asked]
    assert [matcher(form).ending(output) for output in asked] == found
    again = list(zip(asked, found, strict=True))
    rng.shuffle(again)
    for output, ending in again:
        assert tracker.ending(output) == ending


@pytest.mark.parametrize("form", FORMS)
def test_a_token_fits_where_its_ending_does(form: str) -> None:
    rng = random.Random(form)
    told = set()
    for _ in range(6):
        output = begun(form, rng)
        tracker = matcher(form)
        for token in tracker.allowed(output).nonzero()[:, 0].tolist():
            ending = matcher(form).ending([*output, token])
            assert ending is not None
            for room in range(5):
                fits = tracker.ends_within(output, token, room)
                assert fits == (len(ending) <= room)
                told.add(fits)
    assert told == {True, False}


def test_few_places_are_kept() -> None:
    tracker = json_grammars().compile({"json_schema": True}).track()
    ids: list[int] = tiny.tokenizer()('["' + "a b c d " * KEPT)["input_ids"]
    for length in range(1, len(ids)):
        tracker.ending(ids[:length])
    assert len(tracker.endings.places) <= KEPT < len(ids) and () in tracker.endings.places
    ending = tracker.ending(ids[:40])
    assert ending and json.loads(tiny.tokenizer().decode([*ids[:40], *ending]))


@pytest.mark.parametrize(
    ("schema", "begin", "most"),
    [
        ({"type": "string", "minLength": 60}, '"ab', 70),
        ({"type": "array", "minItems": 3, "items": {"enum": ["red", "blue"]}}, "[", 60),
        ({"type": "object", "required": ["b"],
          "properties": {"a": {"type": "array"}, "b": {}, "c": {}}}, "{", 14),
        ({"type": "object", "required": ["b"],
          "properties": {"a": {"type": "array"}, "b": {}, "c": {}}}, "", 14),
        (True, '{"a": [{"b": [[{"c": "x', 24),
        ({"type": "string", "pattern": "^[a-z]{2,4}-[0-9]{3}$"}, "", 12),
        ({"type": "number"}, "-", 2),
    ],
)  # fmt: skip
def test_json_is_closed(schema: object, begin: str, most: int) -> None:
    """Without properties that no schema asks for."""
    tokenizer = tiny.tokenizer()
    tracker = json_grammars().compile({"json_schema": schema}).track()
    output = tokenizer(begin)["input_ids"] if begin else []
    ending = tracker.ending(output)
    assert ending is not None and len(ending) <= most
    text = tokenizer.decode([*output, *ending])
    json.loads(text)
    assert tracker.whole([*output, *ending])
    assert '"c"' not in text.removeprefix(begin) and not (most == 14 and '"a"' in text)


def test_where_nothing_shows_the_way_none_is_found_and_little_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tokens that may follow are the same before digits and behind them."""
    pattern = {"type": "string", "pattern": "[0-9]{9}x"}
    tracker = json_grammars().compile({"json_schema": pattern}).track()
    assert tracker.ending(()) is None
    walked: list[int] = []
    own = Search._walk

    def walk(self: Search, *given: Any) -> list[int] | None:
        walked.append(1)
        return own(self, *given)

    monkeypatch.setattr(Search, "_walk", walk)
    ids: list[int] = tiny.tokenizer()('"some words and many more of them')["input_ids"]
    assert tracker.ending(ids) is None
    assert 0 < len(walked) < len(ids) / 2


def test_what_is_too_much_work_leaves_the_form_itself_usable() -> None:
    grammar = json_grammars().compile({"regex": "(a|b)+c"})
    tracker = grammar.track()

    class Broken:
        """A matcher that has given up."""

        def __getattr__(self, name: str) -> object:
            answers = {"is_error": True, "compute_bitmask": b"", "deep_copy": self}
            return lambda *_: answers.get(name, False)

    place = tracker.endings.places[()]
    object.__setattr__(place, "matcher", Broken())
    ids: list[int] = tiny.tokenizer()("ab")["input_ids"]
    assert tracker.ending(ids) is None and not tracker.ends_within((), ids[1], 5)
    assert tracker.permits(ids)


def test_tokens_are_tried_by_what_they_begin_with() -> None:
    pieces = [b"ab", b"a", b"}}", b"}", b"", b"\xc3", b" {", b"\\n", b"0"]
    spellings = Spellings(pieces)
    everything = np.ones(len(pieces), dtype=bool)
    assert list(spellings.tried(everything)) == [3, 8, 0, 1, 6, 6]
    assert spellings.longest(everything) in (0, 2, 6, 7)
    assert spellings.longest(np.zeros(len(pieces), dtype=bool)) is None
