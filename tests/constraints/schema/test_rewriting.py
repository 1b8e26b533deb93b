"""Rewritten schemas against the package jsonschema, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from foretell.constraints.schema.rewriting import rewrite_schema
from foretell.errors import BadConfig
from tests.schemas import Drawn, compiled, takes, texts


@pytest.mark.parametrize("seed", range(4))
def test_what_compiles_takes_the_valid_answers_and_no_other(seed: int) -> None:
    """Also where a name comes twice, or is spelled with escapes: a reader takes the last one."""
    drawn = Drawn(seed)
    met: Counter[Any] = Counter()
    for _ in range(90):
        schema = drawn.schema()
        parts = {"x": drawn.schema(1), "y": drawn.schema(1)}
        if isinstance(schema, bool) or '"$ref"' in json.dumps(parts):
            continue
        schema["$defs"] = parts
        values = [drawn.value() for _ in range(12)]
        valid = Draft202012Validator(schema).is_valid
        try:
            start = compiled(schema)
        except BadConfig as error:
            met["refused"] += 1
            assert "no value" not in str(error) or not any(map(valid, values)), schema
            continue
        for value in values:
            taken = any(takes(start, text) for text in texts(value))
            met[valid(value), taken] += 1
            assert taken == valid(value), (schema, value)
        objects = [value for value in values if isinstance(value, dict)]
        for first, second in pairwise(objects):
            pairs = [*first.items(), *second.items()]
            text = "{" + ",".join(f"{_spelled(drawn, k)}:{json.dumps(v)}" for k, v in pairs) + "}"
            assert not takes(start, text) or valid(json.loads(text)), (schema, text)
    assert met["refused"] < 60 and min(met[True, True], met[False, False]) > 100, met


def _spelled(drawn: Drawn, name: str) -> str:
    if drawn.draw.random() < 0.7:
        return json.dumps(name)
    return '"' + "".join(f"\\u{ord(letter):04x}" for letter in name) + '"'


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"properties": {"a": {"type": "integer"}}}, ['{"a":1,"b":""}'], ['{"\\u0061":"a"}']),
        ({"properties": {"a\n": {"type": "null"}}}, ['{"a\\n":null}'], ['{"a\\u000a":1}']),
        (
            {"patternProperties": {"^a": {"type": "null"}}, "additionalProperties": {}},
            ['{"a":null,"b":1}'],
            ['{"\\u0061":1}', '{"a":1}'],
        ),
        ({"minProperties": 1}, ['{"a":1}', '{"a":1,"a":1}'], ["{}"]),
        (
            {"properties": {"a": {}, "b": {}}, "additionalProperties": False, "minProperties": 2},
            ['{"a":1,"b":1}'],
            ['{"a":1,"a":1}', '{"a":1}'],
        ),
        (
            {"properties": {"a": {}, "b": {}}, "maxProperties": 1},
            ['{"a":1}', '{"b":1}', '{"c":1}', "{}"],
            ['{"a":1,"b":1}', '{"a":1,"c":1}', '{"c":1,"d":1}'],
        ),
        (
            {"properties": {"a": {"type": "integer"}}, "patternProperties": {"^a": {"minimum": 3}}},
            ['{"a":3,"ab":4}', '{"b":0}'],
            ['{"a":1}', '{"ab":1}', '{"a":3.5}'],
        ),
        ({"required": ["a"], "additionalProperties": {"const": 2}}, ['{"a":2}'], ['{"a":1}']),
        ({"minLength": 2, "maxLength": 2}, ['"🙂🙂"', '"éé"'], ['"🙂"', '"aaa"']),
        ({"pattern": "b"}, ['"abc"'], ['"ac"']),
        ({"pattern": r"^\d$"}, ['"1"'], ['"٣"']),
        ({"pattern": "^a.b$"}, ['"axb"'], ['"a\\rb"', '"a\u2028b"']),
        ({"pattern": r"^[[&&a]\s$"}, ['"&\u00a0"', '"[ "'], ['"b "']),
        ({"exclusiveMinimum": 0, "maximum": 0.04}, ["0.01"], ["0", "0.0", "0.05"]),
        ({"exclusiveMinimum": 1, "maximum": 1.5}, ["1.2"], ["1", "1.0"]),
        ({"minimum": -0.4, "exclusiveMaximum": 0}, ["-0.1"], ["-0", "0"]),
        (
            {"type": "integer", "maximum": 2**63 - 1, "minimum": 2**53 + 1},
            ["9007199254740994", "9223372036854774784"],
            ["9223372036854775808", "9007199254740992"],
        ),
        ({"multipleOf": 0.1}, ["0.3", "-1.2"], ["0.35"]),
        ({"minItems": 1.0, "maxItems": 2.0}, ["[1]"], ["[]", "[1,2,3]"]),
        ({"const": {"a": [1, {"b": None}]}}, ['{"a":[1,{"b":null}]}'], ['{"a":[1,{}]}']),
        ({"not": {"enum": ["ab", "a", 3]}}, ['"abc"', '""', "2", "null"], ['"ab"', '"a"', "3"]),
        ({"items": [{"type": "null"}], "additionalItems": False}, ["[null]"], ["[1]", "[null,1]"]),
        ({"type": "string", "format": "password"}, ['"x"'], ["1"]),
        ({"format": "binary"}, ['"x"', "3"], []),
        (
            {"propertyNames": {"$ref": "#/$defs/kind"}, "$defs": {"kind": {"enum": ["a", 3]}}},
            ['{"a":1}', "{}"],
            ['{"b":1}'],
        ),
        ({"propertyNames": {"format": "date"}}, ['{"2020-02-29":1}'], ['{"2021-02-29":1}']),
        (
            {"$ref": "#/$defs/tree", "$defs": {"tree": {"items": {"$ref": "#/$defs/tree"},
                                                        "type": "array"}}},
            ["[[],[[]]]"],
            ["[1]", "[[[2]]]"],
        ),
        ({"contains": {"const": 1}, "maxItems": 3}, ["[1]", "[0,1]", "3"], ["[]", "[0,2]"]),
        ({"$id": "http://x/y", "$ref": "#b", "$defs": {"b": {"$anchor": "b", "type": "null"}}},
         ["null"], ["1"]),
        ({"$dynamicRef": "#b", "$defs": {"b": {"$dynamicAnchor": "b", "type": "null"}}},
         ["null"], ["1"]),
        (
            {"properties": {"a": {}}, "allOf": [{"properties": {"b": {}}}],
             "unevaluatedProperties": False},
            ['{"a":1,"b":1}'],
            ['{"c":1}'],
        ),
    ],
)  # fmt: skip
def test_a_schema_takes_what_it_says(schema: Any, good: list[str], bad: list[str]) -> None:
    start = compiled(schema)
    assert [text for text in good if not takes(start, text)] == []
    assert [text for text in bad if takes(start, text)] == []


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"not": {"pattern": "a"}}, "#/not/pattern: pattern is not supported within a negation"),
        ({"items": {"contains": True, "maxContains": 0.5}}, "#/items/contains: it must be a"),
        ({"items": {"maximum": 1.9999999999999998}}, "#/items/maximum: numbers of more than"),
        ({"contains": {"type": "null"}}, "#/contains: contains is not supported without maxItems"),
        ({"items": {"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}}, "#/items/oneOf: oneOf is not"),
        ({"$dynamicRef": "#a", "$defs": {"b": {"$dynamicAnchor": "a"},
                                        "c": {"$id": "c", "$dynamicAnchor": "a"}}},
         "#/$dynamicRef: $dynamicRef is not supported for several 'a'"),
        ({"propertyNames": {"minLength": 1, "pattern": "a"}}, "#/propertyNames: propertyNames is"),
        ({"properties": {"a/b": {"format": "regex"}}}, "#/properties/a~1b/format: the format"),
        ({"minProperties": 2}, "#/minProperties: minProperties is not supported above 1"),
        ({"unevaluatedItems": False, "contains": {}}, "#/unevaluatedItems: unevaluatedItems is"),
        ({"patternProperties": {"a*": {}, "aa*": {}}}, "#/patternProperties: patternProperty reg"),
        ({"if": {"multipleOf": 2}, "then": {"minimum": 3}}, "#/if/multipleOf: multipleOf is not"),
        ({"not": {"type": "integer"}}, "#/not/type: numbers that are not whole"),
        ({"dependentSchemas": {"a": {"format": "idn-hostname"}}}, "#/dependentSchemas/a/format: "),
        ({"$recursiveRef": "#"}, "#/$recursiveRef: $recursiveRef is not supported"),
        ({"enum": [2**60 + 1]}, "#/enum: numbers of more than 15 digits"),
        ({"const": 2**53 + 1}, "#/const: numbers of more than 15 digits"),
        ({"items": {"$ref": "other.json"}}, "#/items/$ref: 'other.json' is nowhere in the schema"),
        ({"$ref": "#/$defs/x", "$defs": {}}, "#/$ref: '#/$defs/x' is nowhere in the schema"),
        ({"type": "strin"}, "#/type: 'strin' is no type; choose of null, boolean"),
        ({"required": "a"}, "#/required: it must be a list of names"),
        ({"minLength": -1}, "#/minLength: it must be between 0 and"),
        ({"allOf": 3}, "#/allOf: allOf has no such value"),
        ({"items": 3}, "#/items: a schema is an object, true or false"),
        ({"x-guidance": 3}, "#/x-guidance: it must be an object"),
        ({"enum": []}, "json_schema: no value has this form"),
        ({"anyOf": [False]}, "json_schema: no value has this form"),
    ],
)  # fmt: skip
def test_what_cannot_be_held_is_refused_by_its_keyword_and_place(schema: Any, said: str) -> None:
    with pytest.raises(BadConfig) as caught:
        compiled(schema)
    assert said in str(caught.value) and "\n" not in str(caught.value), caught.value


def test_a_lenient_schema_leaves_out_what_cannot_be_held() -> None:
    schema = {"type": "integer", "contains": {"type": "null"}, "not": {"multipleOf": 3}}
    schema |= {"format": "regex", "x-guidance": {"lenient": True}}
    assert takes(compiled(schema), "3")
    coerced = {"oneOf": [{"pattern": "a"}, {"pattern": "b"}], "x-guidance": {"coerce_one_of": True}}
    assert takes(compiled(coerced), '"ab"')


def test_schemas_that_hold_each_other_end_in_time() -> None:
    ways: list[Callable[[Any], Any]] = [
        lambda part: {"if": part, "then": {"maximum": 2}, "else": {"maximum": 3}},
        lambda part: {"oneOf": [part, {"multipleOf": 2}]},
        lambda part: {"not": {"oneOf": [part, {"minimum": 5}, {"maximum": 7}]}},
    ]
    for around in ways:
        nested: Any = {"minimum": 1}
        for _ in range(24):
            nested = around(nested)
        with pytest.raises(BadConfig, match=r"^json_schema.*; .*$"):
            rewrite_schema(nested)
    deep: Any = {}
    for _ in range(200):
        deep = {"items": deep}
    with pytest.raises(BadConfig, match="more than 100 levels"):
        rewrite_schema(deep)
