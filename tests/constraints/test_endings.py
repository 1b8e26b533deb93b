"""Endings against brute force on forms of letters, and on JSON."""

from __future__ import annotations

import itertools
import json
import random
import re
from functools import cache
from typing import Any

import pytest

from foretell.constraints.ending_tokens import ANCHORS, EFFORT, KEPT, Endings
from foretell.constraints.endings import Alphabet
from foretell.constraints.grammars import Grammars, Matcher
from tests import laws, tiny

LETTERS = 4
FORMS = ["(a|b)*c", "(ab)*c", "a{3}b*", "a(b|c(d|a))*d", "((a|b)c)+d?", "a{5,}", "[ab]+c{3}"]


@cache
def json_grammars() -> Grammars:
    return Grammars(tiny.tokenizer(), len(tiny.tokenizer()), [0])


def matcher(form: str) -> Matcher:
    return laws.grammars(LETTERS).compile_form({"regex": form}).track()


def shortest(form: str, output: tuple[int, ...]) -> int | None:
    """Tokens that the shortest ending takes, by trying all; None: more than seven."""
    for length in range(8):
        for rest in itertools.product(range(LETTERS), repeat=length):
            if re.fullmatch(form, laws.spell([*output, *rest])):
                return length
    return None


def begun(form: str, rng: random.Random, most: int = 5) -> list[int]:
    """A text that the form allows, up to a place."""
    tracker = matcher(form)
    output: list[int] = []
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
    tracker = json_grammars().compile_form({"json_schema": True}).track()
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
    tracker = json_grammars().compile_form({"json_schema": schema}).track()
    output = tokenizer(begin)["input_ids"] if begin else []
    ending = tracker.ending(output)
    assert ending is not None and len(ending) <= most
    text = tokenizer.decode([*output, *ending])
    json.loads(text)
    assert tracker.whole([*output, *ending])
    assert '"c"' not in text.removeprefix(begin) and not (most == 14 and '"a"' in text)


@pytest.mark.parametrize(
    ("form", "begins"),
    [
        ({"regex": ".*ab"}, ["", "xa", "the dog"]),
        ({"regex": ".*(END|STOP)"}, ["", "xEN", "xSTO"]),
        ({"regex": r"[^\s@]+@[^\s@]+\.[a-z]{2,4}"}, ["", "fo", "fo@", "fo@ba", "fo@ba.", "f@b.c"]),
        ({"regex": "(?s).{0,60}END"}, ["", "x" * 60]),
        ({"regex": "(.*x.*y){2}z"}, ["", "ax", "axbyxy"]),
        ({"regex": "(foo.*ab|bar.*cd)"}, ["", "foo, ", "bar, "]),
        ({"regex": "(.*[0-9]{3}x)?[0-9]{3}y"}, ["", "12"]),
        ({"json_schema": {"type": "string", "pattern": "ab"}}, ["", '"x', '"xa']),
        ({"json_schema": {"type": "string", "pattern": "^a.*b$", "minLength": 9}}, ["", '"ax']),
        ({"json_schema": {"type": "string", "pattern": "[0-9]{9}x"}}, ["", '"some words', '"12']),
        ({"json_schema": {"items": {"type": "string", "pattern": "ab|cd"}}}, ["[", '["x', '["ab"']),
        ({"json_schema": {"type": "string", "format": "email"}}, ["", '"fo']),
        ({"json_schema": {"type": "object", "patternProperties": {"ab": {}}, "minProperties": 1,
                          "additionalProperties": False}}, ["", '{"x']),
        ({"grammar": 'start: /(.|\\n)*/ "</think>" a\na: %json {"type": "object"}'}, ["", "hm</t"]),
        ({"grammar": 'start: /(.|\n)*/ "</think>" a\na: /[0-9]/'}, ["", "hm</t"]),
        ({"grammar": 'start: t a\nt[lazy]: /(.|\\n)*<\\/think>/\na: /[0-9]+/'}, ["", "hm", "<"]),
        ({"grammar": 'start: T "!"\nT: (A|B)* "END"\nA: /./\nB: "x"'}, ["", "xxE"]),
        ({"grammar": 'start: /./* "END"'}, ["", "xx"]),
        ({"grammar": 'start: a+\na: "<" /[a-z]+ends/ ">"'}, ["", "<foo", "<aends>"]),
        ({"grammar": 'start: "ok" | /[a-z ]*/ "end" "."'}, ["", "the "]),
        ({"grammar": 'start: x "."\nx[suffix="STOP"]: /.*/'}, ["", "the "]),
        ({"grammar": 'start: /[a-z ]+/ (" done" | " finished")'}, ["", "the dog", "the fin"]),
        ({"grammar": 'start: /[a-z ]+/ tail\ntail: " done" | " finished" // so'}, ["", "the fin"]),
        ({"grammar": "start: /[a-z ]+/ /(done|finished)/"}, ["", "the dog"]),
        ({"grammar": 'start: W+ END "!"\nW: /[a-z ]+/\nEND: "end"'}, ["", "the en"]),
        ({"grammar": 'start: thought ";"\nthought: words\nwords: /[a-z ,.;]+/'}, ["", "the "]),
        ({"grammar": 'start: (/[a-z]+/ | "1") ("x" | "y") z\nz: "0"'}, ["", "the", "1"]),
    ],
)  # fmt: skip
def test_a_free_part_is_led_to_what_must_follow(form: dict[str, Any], begins: list[str]) -> None:
    """Wherever the mask is the same at all places, far from the end and near it."""
    tokenizer = tiny.tokenizer()
    for begin in begins:
        tracker = json_grammars().compile_form(form).track()
        output: list[int] = tokenizer(begin)["input_ids"] if begin else []
        ending = tracker.ending(output)
        assert ending is not None, begin
        assert tracker.whole([*output, *ending]), tokenizer.decode(ending)
        assert all(
            bool(tracker.allowed([*output, *ending[:n]])[ending[n]]) for n in range(len(ending))
        )
        if "regex" in form:
            assert re.fullmatch(form["regex"], begin + tokenizer.decode(ending))


def test_an_ending_of_a_regular_expression_has_the_fewest_characters() -> None:
    tokenizer = tiny.tokenizer()
    for regex, want in (
        (".*(ending|end!)", "end!"),
        ("(a.{9}|b.{3})c", "bxxxc"),
        (r"\s*y(\w+ )*x{2}", "yxx"),
        ("(?s:.)*</think>", "</think>"),
    ):
        ending = json_grammars().compile_form({"regex": regex}).track().ending([])
        assert ending is not None and len(tokenizer.decode(ending)) == len(want)


def test_a_text_far_on_is_not_read_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = json_grammars().compile_form({"regex": "(.*x.*ab|.*y.*cd)"}).track()
    ids: list[int] = tiny.tokenizer()("some words " * 80)["input_ids"]
    steps: list[int] = []
    own = Endings._step_place

    def step(self: Endings, *given: Any) -> Any:
        steps.append(1)
        return own(self, *given)

    monkeypatch.setattr(Endings, "_step_place", step)
    first = tracker.ending(ids)
    assert first and len(steps) < ANCHORS < len(ids) / 4
    assert tracker.ending([*ids, ids[0]]) and len(steps) <= ANCHORS
    again = json_grammars().compile_form({"regex": "(.*x.*ab|.*y.*cd)"}).track()
    assert [again.ending(ids[:n]) for n in range(len(ids) + 1)][-1] == first


def test_little_is_looked_at_where_no_ending_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part after which the same may follow always, of which no last part is known."""
    form = {"grammar": "start: a+ /b/\na: /.{40}/"}
    tracker = json_grammars().compile_form(form).track()
    masks: list[int] = []
    own = Alphabet.following_tokens

    def following_tokens(self: Alphabet, *given: Any) -> Any:
        masks.append(1)
        return own(self, *given)

    monkeypatch.setattr(Alphabet, "following_tokens", following_tokens)
    ids: list[int] = tiny.tokenizer()("some words and many more of them")["input_ids"]
    for n in range(len(ids)):
        tracker.ending(ids[:n])
    assert len(masks) < 3 * EFFORT * len(ids)


def test_what_is_too_much_work_leaves_the_form_itself_usable() -> None:
    grammar = json_grammars().compile_form({"regex": "(a|b)+c"})
    tracker = grammar.track()

    class Broken:
        """A matcher that has given up."""

        def __getattr__(self, name: str) -> object:
            answers: dict[str, Any] = {"is_error": True, "compute_bitmask": b"", "deep_copy": self}
            return lambda *_: answers.get(name, False)

    place = tracker.endings.places[()]
    object.__setattr__(place, "matcher", Broken())
    object.__setattr__(place, "inner", Broken())
    ids: list[int] = tiny.tokenizer()("ab")["input_ids"]
    assert tracker.ending(ids) is None and not tracker.ends_within((), ids[1], 5)
    assert tracker.permits(ids)


def test_bytes_are_tried_by_what_they_close() -> None:
    alphabet = Alphabet(9, {0: "<end>", 3: "<turn>"}, 0)
    assert alphabet.base == 16 and len(alphabet.tokens) == 272

    def bits(*ids: int) -> bytes:
        return sum(1 << one for one in ids).to_bytes(34, "little")

    able = [16 + byte for byte in b'a"}{\\\xc3 0']
    assert bytes(one - 16 for one in alphabet.following_tokens(bits(*able))) == b'}0"a{ '
    assert list(alphabet.following_tokens(bits(0, 3, 16 + 92))) == [16 + 92, 3]
