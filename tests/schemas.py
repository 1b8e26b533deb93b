"""JSON schemas against what they say: compiled for tokens of single bytes, and drawn."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from itertools import islice, permutations, product
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from foretell.constraints.compiling import build_matcher, form_text

NAMES = ("a", "b", "ab")


@cache
def tokens() -> LLTokenizer:
    return LLTokenizer("byte")


def compiled(schema: Any) -> LLMatcher:
    return build_matcher("json_schema", form_text("json_schema", schema), tokens())


def takes(start: LLMatcher, text: str) -> bool:
    matcher = start.deep_copy()
    taken = all(matcher.try_consume_tokens([byte]) for byte in text.encode())
    return taken and bool(matcher.is_accepting())


def texts(value: Any, orders: int = 24) -> Iterator[str]:
    """The compact texts of a value, by the orders of its properties."""
    if isinstance(value, dict):
        for some in islice(permutations(value.items()), orders):
            for inner in islice(product(*(list(texts(one, 6)) for _, one in some)), orders):
                pairs = zip((json.dumps(key) for key, _ in some), inner, strict=True)
                yield "{" + ",".join(f"{key}:{one}" for key, one in pairs) + "}"
    elif isinstance(value, list):
        for inner in islice(product(*(list(texts(one, 6)) for one in value)), orders):
            yield f"[{','.join(inner)}]"
    else:
        yield json.dumps(value)


class Drawn:
    """Values and schemas, small enough that they often meet."""

    def __init__(self, seed: int):
        self.draw = random.Random(seed)

    def value(self, depth: int = 2) -> Any:
        draw = self.draw
        kind = draw.randrange(9 if depth else 6)
        if kind < 2:
            return draw.choice([0, 1, 2, 3, -1, 1.5, 4, 2.5])
        if kind < 4:
            return draw.choice(["", "a", "b", "ab", "ba", "abc"])
        if kind < 6:
            return draw.choice([None, True, False])
        if kind == 6:
            return [self.value(depth - 1) for _ in range(draw.randrange(4))]
        return {name: self.value(depth - 1) for name in draw.sample(NAMES, draw.randrange(4))}

    def schema(self, depth: int = 3) -> Any:
        draw = self.draw
        if draw.random() < 0.06:
            return draw.random() < 0.6
        made: dict[str, Any] = {}
        for _ in range(draw.choice([1, 1, 2, 2, 3])):
            flat = depth == 0 or draw.random() < 0.45
            made |= self._flat() if flat else self._deep(depth - 1)
        return made

    def _flat(self) -> dict[str, Any]:
        draw = self.draw
        types = ["null", "boolean", "integer", "number", "string", "array", "object"]
        return draw.choice(
            [
                {"type": draw.choice([*types, ["integer", "string"], ["object", "array"]])},
                {"type": draw.choice(types)},
                {"const": self.value(1)},
                {"enum": [self.value(1) for _ in range(draw.randrange(1, 4))]},
                {draw.choice(["minimum", "exclusiveMinimum"]): draw.choice([0, 1, 1.5])},
                {draw.choice(["maximum", "exclusiveMaximum"]): draw.choice([2, 3, 1.5])},
                {"multipleOf": draw.choice([2, 0.5, 1.5])},
                {draw.choice(["minLength", "maxLength"]): draw.randrange(3)},
                {"pattern": draw.choice(["^a", "b$", "^ab$", "a|b"])},
                {draw.choice(["minItems", "maxItems"]): draw.randrange(3)},
                {draw.choice(["minProperties", "maxProperties"]): draw.randrange(3)},
                {"required": draw.sample(NAMES, draw.randrange(3))},
                {"dependentRequired": {draw.choice(NAMES): [draw.choice(NAMES)]}},
                {"uniqueItems": draw.random() < 0.7},
            ]
        )

    def _deep(self, depth: int) -> dict[str, Any]:
        draw = self.draw
        one = self.schema(depth)
        some = [self.schema(depth) for _ in range(draw.randrange(1, 3))]
        names = {"pattern": "^a"}, {"maxLength": 1}, {"enum": ["a"]}
        return draw.choice(
            [
                {"properties": dict(zip(draw.sample(NAMES, len(some)), some, strict=True))},
                {"additionalProperties": draw.choice([False, one])},
                {"patternProperties": {draw.choice(["^a", "b$"]): one}},
                {"items": one},
                {"prefixItems": some},
                {"not": one},
                {"if": one, "then": some[0], "else": some[-1]},
                {draw.choice(["anyOf", "allOf", "oneOf"]): some},
                {"dependentSchemas": {draw.choice(NAMES): one}},
                {"propertyNames": draw.choice(names)},
                {"contains": one},
                {"unevaluatedProperties": draw.choice([False, one])},
                {"unevaluatedItems": draw.choice([False, one])},
                {"$ref": draw.choice(["#/$defs/x", "#/$defs/y"])},
            ]
        )
