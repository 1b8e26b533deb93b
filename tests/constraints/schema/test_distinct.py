"""Arrays whose items differ, against the package jsonschema and against all tokens."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from foretell.constraints.grammars import Grammars
from foretell.constraints.schema.distinct import DistinctMatcher
from foretell.errors import BadConfig
from tests import tiny
from tests.schemas import compiled, takes, texts

TEXTS = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
WHOLE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "minItems": 3}
KINDS = {"type": "array", "items": {"$ref": "#/$defs/kind"}, "uniqueItems": True}
DEFINED = {"kind": {"enum": ["a", "b", 1]}}
OPTIONAL = {"anyOf": [TEXTS, {"type": "null"}]}
MODEL = {
    "type": "object",
    "properties": {"tags": OPTIONAL, "list": {"items": {"type": "string"}}, "kinds": KINDS,
                   "more": {"items": {"properties": {"numbers": WHOLE}}}},
    "$defs": DEFINED,
}  # fmt: skip


def value(draw: random.Random, depth: int = 2) -> Any:
    kind = draw.randrange(6 if depth else 4)
    if kind < 2:
        return draw.choice(["a", "b", "a\n", "e", ""])
    if kind < 4:
        return draw.choice([0, 1, -1, 10, 1.0, 2.5, None])
    if kind == 4:
        return [value(draw, depth - 1) for _ in range(draw.randrange(4))]
    names = draw.sample(["tags", "list", "kinds", "more", "numbers"], 2)
    return {name: value(draw, depth - 1) for name in names}


@pytest.mark.parametrize("schema", [TEXTS, WHOLE, {**KINDS, "$defs": DEFINED}, OPTIONAL, MODEL])
def test_it_takes_what_is_valid_and_nothing_else(schema: Any) -> None:
    draw, start = random.Random(1), compiled(schema)
    valid = Draft202012Validator(schema).is_valid
    met = set()
    for _ in range(250):
        some = draw.choice([lambda: value(draw, 0), lambda: draw.choice([0, 1, -1, 10, 12])])
        made = [some() for _ in range(draw.randrange(5))] if draw.random() < 0.6 else None
        one = value(draw) if made is None else made
        if isinstance(one, dict) and made is None and draw.random() < 0.5:
            one = one | {"tags": [draw.choice("ab") for _ in range(2)]}
        if "1.0" in json.dumps(one):  # whole numbers are written without a fraction
            continue
        taken = any(takes(start, text) for text in texts(one))
        met.add(taken)
        assert taken == valid(one), one
    assert met == {True, False}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (TEXTS, ['["a" , "ab"]', '["\\n"]'], ['["a" , "a"]', '["\\n","\\u000a"]', '["\\"","\\""]']),
        ({**TEXTS, "items": {"type": "number"}}, ["[1,1.5]", "[10,1]"], ["[1,1.0]", "[0,-0]"]),
        (WHOLE, ["[0,1,10]", "[1,0,2]"], ["[0,1,0]", "[1,0,-0]", "[0,1]"]),
        ({"items": TEXTS}, ['[["a"],["a"]]'], ['[["a"],["b","b"]]']),
    ],
)
def test_values_are_compared_and_not_their_texts(
    schema: Any, good: list[str], bad: list[str]
) -> None:
    start = compiled(schema)
    assert [text for text in good if not takes(start, text)] == []
    assert [text for text in bad if takes(start, text)] == []


@pytest.mark.parametrize("schema", [TEXTS, WHOLE, MODEL])
def test_a_mask_has_all_tokens_but_those_that_repeat_an_item(schema: Any) -> None:
    """And a text is never stuck: something may always follow, or it is whole."""
    grammars = Grammars(tiny.tokenizer(), len(tiny.tokenizer()), [0])
    grammar = grammars.compile_form({"json_schema": schema})
    begun = '["a","a' if schema is TEXTS else ""
    draw = random.Random(3)
    removed = 0
    pieces = [grammars._llguidance_tokens.decode_bytes([token]) for token in range(grammar.vocab)]
    for _ in range(6):
        matcher: Any = grammar.matcher.deep_copy()
        assert isinstance(matcher, DistinctMatcher)
        for token in tiny.tokenizer()(begun)["input_ids"]:
            assert matcher.consume_token(token)
        for _ in range(40):
            bits, inner = (int.from_bytes(m.compute_bitmask(), "little")
                           for m in (matcher, matcher.matcher))  # fmt: skip
            allowed = [token for token in range(grammar.vocab) if bits >> token & 1 and token]
            for token in range(1, grammar.vocab):
                if inner >> token & 1:
                    fits = matcher.validate_tokens([token]) == 1
                    assert fits == (token in allowed)
                    removed += not fits
            assert allowed or matcher.is_accepting()
            if not allowed:
                break
            short = sorted(allowed, key=lambda token: len(pieces[token]))
            token = draw.choice(short[:12])
            assert matcher.consume_token(token)
            if draw.random() < 0.2:
                matcher.rollback(1)
    assert removed or schema is MODEL


def test_texts_of_a_model_have_distinct_items() -> None:
    lm = tiny.lm()
    for method in ("plain", "ngram:k=3,nodes=6"):
        for seed in range(3):
            out = lm.generate('["a","a","a"', method, json_schema={**TEXTS, "minItems": 2},
                              temperature=0.5 * seed, seed=seed, max_new_tokens=60)  # fmt: skip
            made = json.loads(out.text)
            assert len({*made}) == len(made) >= 2 and out.finish_reason == "stop"


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"properties": {"a": {"uniqueItems": True}}}, "#/properties/a/uniqueItems: unique"),
        ({**TEXTS, "items": {"type": "string", "format": "date"}}, "at #/uniqueItems: uniqueItems"),
        ({**TEXTS, "items": {"type": "object"}}, "supported for free texts and numbers"),
        ({**TEXTS, "items": {"type": "integer", "maximum": 3}}, "supported for free texts"),
        ({**TEXTS, "items": {"enum": [1, 2, 3, 4, 5]}}, "at most 4 listed values"),
        ({"anyOf": [TEXTS, {"type": "array", "items": {"type": "null"}}]}, "one of several ways"),
        ({"allOf": [TEXTS, {"items": {"pattern": "^a$"}}]}, "supported for free texts"),
    ],
)
def test_what_cannot_be_seen_to_is_refused(schema: Any, said: str) -> None:
    with pytest.raises(BadConfig) as caught:
        compiled(schema)
    assert said in str(caught.value) and "\n" not in str(caught.value), caught.value
