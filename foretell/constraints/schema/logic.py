"""What can be said of JSON schemas without any text: what others are not of one, whether two share
a value, and which properties and items one has looked at.

All of it is written in the words of JSON schemas again, so that it can be compiled as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

from foretell.constraints.schema.patterns import other_than
from foretell.constraints.schema.reading import TYPES, Document, NotHeld, key_of, type_of

LONGEST = 200  # letters of a text that others are to differ from
STEPS = 20_000  # schemas that are looked at, again and again
WAYS = 64  # ways in which a schema may be met, where they are told apart
DEEP = 32  # references that are followed
KINDS = {  # the type that a keyword speaks of
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), "number"),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys(("minItems", "maxItems", "prefixItems", "items", "contains"), "array"),
    **dict.fromkeys(("required", "properties", "minProperties", "maxProperties"), "object"),
    **dict.fromkeys(("dependentRequired", "dependentSchemas"), "object"),
    "additionalProperties": "object",
}
# What a keyword becomes where it does not hold: by its value plus a step.
TURNED = {
    "minimum": ("exclusiveMaximum", 0),
    "maximum": ("exclusiveMinimum", 0),
    "exclusiveMinimum": ("maximum", 0),
    "exclusiveMaximum": ("minimum", 0),
    "minLength": ("maxLength", -1),
    "maxLength": ("minLength", 1),
    "minItems": ("maxItems", -1),
    "maxItems": ("minItems", 1),
    "minProperties": ("maxProperties", -1),
    "maxProperties": ("minProperties", 1),
}
WITHOUT = {  # keywords that forbid nothing by themselves
    *("$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$comment", "$defs", "definitions"),
    *("$vocabulary", "title", "description", "default", "example", "examples", "deprecated"),
    *("readOnly", "writeOnly", "contentMediaType", "contentEncoding", "contentSchema"),
    *("then", "else", "minContains", "maxContains", "discriminator", "x-guidance"),
}


HARD = {  # keywords that forbid something, and cannot be turned round whatever their value
    *("additionalItems", "additionalProperties", "contains", "dependencies", "format", "items"),
    *("multipleOf", "pattern", "patternProperties", "propertyNames", "uniqueItems"),
    *("unevaluatedItems", "unevaluatedProperties", "$recursiveRef"),
}
EMPTY = {  # values by which keywords say nothing
    **dict.fromkeys(("items", "additionalProperties", "propertyNames"), True),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), True),
    "uniqueItems": False,
}


class Logic:
    """Of the parts of one document. Raises NotHeld where no schema says what is asked."""

    def __init__(self, document: Document):
        self.document = document
        self.steps = 0

    def _step(self) -> None:
        """Schemas that hold each other can be looked at for ever."""
        self.steps += 1
        if self.steps > STEPS:
            raise NotHeld("#", "what its parts share takes too long to find", "simplify it")

    # --- not

    def no(self, node: Any, depth: int = 0) -> Any:
        """A schema of exactly the values that are not of this one."""
        if isinstance(node, bool):
            return not node
        self._step()
        place = self.document.places.get(id(node), "#")
        if depth > DEEP:
            raise NotHeld(place, "a schema that holds itself cannot be turned round")
        ways = [
            way
            for key, value in node.items()
            if key not in WITHOUT
            for way in self._no(node, key, value, f"{place}/{key}", depth + 1)
        ]
        return {"anyOf": ways} if ways else False

    def _no(
        self, node: Mapping[str, Any], key: str, value: Any, place: str, depth: int
    ) -> list[Any]:
        """The ways in which one keyword does not hold."""
        kind = KINDS.get(key)
        no = self.no
        if key in TURNED and not isinstance(value, bool):
            turned, step = TURNED[key]
            return [] if value + step < 0 and step else [{"type": kind, turned: value + step}]
        if key in ("$ref", "$dynamicRef"):
            return [no(self.document.target(node, key), depth)]
        if key == "type":
            return _other_types([value] if isinstance(value, str) else value, place)
        if key in ("const", "enum"):
            return _other_values(value if key == "enum" else [value], place)
        if key == "not":
            return [value]
        if key == "allOf":
            return [no(part, depth) for part in value]
        if key == "anyOf":
            return [{"allOf": [no(part, depth) for part in value]}]
        if key == "oneOf":
            pairs = [{"allOf": list(pair)} for pair in combinations(value, 2)]
            return [{"allOf": [no(part, depth) for part in value]}, *pairs]
        if key == "if":
            then, other = (no(node.get(name, True), depth) for name in ("then", "else"))
            return [{"allOf": [value, then]}, {"allOf": [no(value, depth), other]}]
        if key == "required":
            return [{"type": kind, "properties": {name: False}} for name in value]
        if key == "properties":
            return [
                {"type": kind, "required": [name], "properties": {name: no(part, depth)}}
                for name, part in value.items()
            ]
        if key == "prefixItems":
            return [
                {
                    "type": kind,
                    "minItems": number + 1,
                    "prefixItems": [True] * number + [no(part, depth)],
                }
                for number, part in enumerate(value)
            ]
        if key == "items" and value is False:
            return [{"type": kind, "minItems": 1 + len(node.get("prefixItems", ()))}]
        if key == "contains" and node.get("minContains", 1) == 1 and "maxContains" not in node:
            return [{"type": kind, "items": no(value, depth)}]
        if key == "dependentRequired":
            return [
                {"type": kind, "required": [name], "properties": {other: False}}
                for name, others in value.items()
                for other in others
            ]
        if key == "dependentSchemas":
            return [
                {"type": kind, "required": [name], "allOf": [no(part, depth)]}
                for name, part in value.items()
            ]
        if key not in HARD or (key in EMPTY and value is EMPTY[key]):
            return []
        raise NotHeld(place, f"{key} is not supported within a negation")

    # --- whether two schemas share a value

    def apart(self, one: Any, two: Any) -> bool:
        """Whether it is certain that they share none."""
        shared = self._types(one, 0) & self._types(two, 0)
        return all(self._apart_within(kind, one, two) for kind in shared)

    def _apart_within(self, kind: str, one: Any, two: Any) -> bool:
        sides = [self._parts(node) for node in (one, two)]
        listed = [_values(kind, parts) for parts in sides]
        if listed[0] is not None and listed[1] is not None and not listed[0] & listed[1]:
            return True
        if kind in ("integer", "number"):
            (low, high), (lower, higher) = map(_bounds, sides)
            return high < lower or higher < low
        if kind == "object":
            for name in {name for parts in sides for part in parts for name in _needed(part)}:
                first, second = (_property(parts, name) for parts in sides)
                if first is False or second is False or self.apart(first, second):
                    return True
        return False

    def listed(self, node: Any) -> list[Any] | None:
        """The values of a schema that says no more than these, each once; None: it says more."""
        parts = self._parts(node)
        if not all(part.keys() <= {*WITHOUT, "enum", "const", "type", "$ref"} for part in parts):
            return None
        values = [values for part in parts for values in _listed(part)]
        if any(part.get("type") == "boolean" for part in parts):
            values.append([False, True])
        if not values:
            return None
        keys = set.intersection(*({key_of(one) for one in some} for some in values))
        types = self._types(node, 0)
        kept = {key_of(one): one for one in values[0] if key_of(one) in keys}
        return [one for one in kept.values() if type_of(one) in types]

    def _parts(self, node: Any, depth: int = 0) -> list[Mapping[str, Any]]:
        """Schemas that all hold where this one does, itself first."""
        if isinstance(node, bool) or depth > DEEP:
            return [] if node is not False else [{"enum": []}]
        self._step()
        found = [node]
        for key in ("$ref", "$dynamicRef"):
            if key in node:
                found += self._parts(self.document.target(node, key), depth + 1)
        for part in node.get("allOf", ()):
            found += self._parts(part, depth + 1)
        return found

    def _types(self, node: Any, depth: int) -> set[str]:
        """The types that a value may have, numbers that are whole told from others."""
        types = set(TYPES)
        for part in self._parts(node):
            if "type" in part:
                named = part["type"]
                named = {named} if isinstance(named, str) else set(named)
                types &= named | ({"integer"} if "number" in named else set())
            for values in _listed(part):
                types &= {type_of(value) for value in values}
            for key in ("anyOf", "oneOf"):
                if key in part and depth < DEEP:
                    types &= set().union(*(self._types(way, depth + 1) for way in part[key]))
        return types

    # --- what was looked at

    def told(self, node: Any, keyword: str, depth: int = 0) -> list[Way]:
        """The ways to meet a schema, which together are all, with what each has looked at: of
        properties or of items, as `keyword` asks, unevaluatedProperties or unevaluatedItems.
        """
        if isinstance(node, bool):
            return [Way((node,))]
        self._step()
        place = f"{self.document.places.get(id(node), '#')}/{keyword}"
        if depth > DEEP:
            raise NotHeld(place, f"{keyword} is not supported in a schema that holds itself")
        below = ("allOf", "anyOf", "if", "then", "else", "dependentSchemas", "$ref", "$dynamicRef")
        plain = {key: value for key, value in node.items() if key not in below}
        if keyword in plain and depth:
            plain.pop(keyword)
            inner = self.document.adopt({**node, keyword: True}, node)
            return [way.closed(keyword, node[keyword]) for way in self.told(inner, keyword)]
        seen = _seen(node, keyword, place)
        ways = [Way((self.document.adopt(plain, node),), *seen)]

        def with_(ways: list[Way], others: list[Way]) -> list[Way]:
            if len(ways) * len(others) > WAYS:
                raise NotHeld(place, f"{keyword}: more than {WAYS} ways to meet the schema")
            return [way.beside(other) for way in ways for other in others]

        for key in ("$ref", "$dynamicRef"):
            if key in node:
                only = self.document.adopt({key: node[key]}, node)
                found = self.told(self.document.target(node, key), keyword, depth + 1)
                if len(found) == 1:
                    found = [Way((only,), *found[0].seen)]
                ways = with_(ways, found)
        for part in node.get("allOf", ()):
            ways = with_(ways, self.told(part, keyword, depth + 1))
        if "anyOf" in node:
            told = [self.told(part, keyword, depth + 1) for part in node["anyOf"]]
            if len(told) > 6:
                raise NotHeld(place, f"{keyword} is not supported beside more than 6 of anyOf")
            met: list[Way] = []
            for count in range(1, len(told) + 1):
                for some in combinations(told, count):
                    joint = [Way(())]
                    for one in some:
                        joint = with_(joint, one)
                    met += joint
            ways = with_(ways, met)
        if "oneOf" in node:  # which stays: exactly one of its parts holds
            ways = with_(
                ways, [way for part in node["oneOf"] for way in self.told(part, keyword, depth + 1)]
            )
        if "if" in node:
            kept = self.told(node["if"], keyword, depth + 1)
            kept = with_(kept, self.told(node.get("then", True), keyword, depth + 1))
            other = self.told(node.get("else", True), keyword, depth + 1)
            ways = with_(ways, [*kept, *with_([Way((self.no(node["if"]),))], other)])
        for name, part in node.get("dependentSchemas", {}).items():
            has = Way(({"type": "object", "required": [name]},))
            hasnt = Way(({"properties": {name: False}},))
            ways = with_(ways, [*with_([has], self.told(part, keyword, depth + 1)), hasnt])
        return ways


@dataclass(frozen=True)
class Way:
    """Schemas that all hold, and what they have looked at: names and patterns of properties, how
    many first items, and whether that is all there is.
    """

    schemas: tuple[Any, ...]
    names: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    first: int = 0
    whole: bool = False

    @property
    def seen(self) -> tuple[tuple[str, ...], tuple[str, ...], int, bool]:
        return self.names, self.patterns, self.first, self.whole

    def beside(self, other: Way) -> Way:
        return Way(
            self.schemas + other.schemas,
            tuple(dict.fromkeys(self.names + other.names)),
            tuple(dict.fromkeys(self.patterns + other.patterns)),
            max(self.first, other.first),
            self.whole or other.whole,
        )

    def closed(self, keyword: str, rest: Any) -> Way:
        """The same where all that is left is of the schema `rest`, and so looked at."""
        return Way((self.schema(keyword, rest),), whole=True)

    def schema(self, keyword: str, rest: Any) -> dict[str, Any]:
        """The schema of the way, with its rest."""
        parts = list(self.schemas)
        if self.whole:
            return {"allOf": parts}
        if keyword == "unevaluatedItems":
            return {"allOf": [*parts, {"prefixItems": [True] * self.first, "items": rest}]}
        looked: dict[str, Any] = {"properties": dict.fromkeys(self.names, True)}
        if self.patterns:
            looked["patternProperties"] = dict.fromkeys(self.patterns, True)
        return {"allOf": [*parts, {**looked, "additionalProperties": rest}]}


def _listed(part: Mapping[str, Any]) -> list[Sequence[Any]]:
    """The lists of values that a schema gives, of which its own must be."""
    listed = [part["enum"]] if isinstance(part.get("enum"), list) else []
    return [*listed, [part["const"]]] if "const" in part else listed


def _values(kind: str, parts: Sequence[Mapping[str, Any]]) -> set[Any] | None:
    """The values of a type in all of these lists; None: there are no lists."""
    sets = [
        {key_of(one) for one in values if type_of(one) == kind}
        for part in parts
        for values in _listed(part)
    ]
    return set.intersection(*sets) if sets else None


def _bounds(parts: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    low, high = (
        [part[name] for part in parts if isinstance(part.get(name), (int, float))]
        for name in ("minimum", "maximum")
    )
    return max(low, default=-math.inf), min(high, default=math.inf)


def _needed(part: Mapping[str, Any]) -> Sequence[str]:
    needed: Sequence[str] = part.get("required", ())
    return needed


def _property(parts: Sequence[Mapping[str, Any]], name: str) -> Any:
    """What an object's property must be of; False: it has none of that name."""
    found = []
    for part in parts:
        named = part.get("properties", {})
        if name in named:
            found.append(named[name])
        elif part.get("additionalProperties") is False and not part.get("patternProperties"):
            return False
    return {"allOf": found}


def _seen(
    node: Mapping[str, Any], keyword: str, place: str
) -> tuple[tuple[str, ...], tuple[str, ...], int, bool]:
    """What the keywords of one schema look at, those of its parts left aside."""
    if keyword == "unevaluatedItems":
        if "contains" in node:
            raise NotHeld(place, f"{keyword} is not supported beside contains")
        return (), (), len(node.get("prefixItems", ())), "items" in node
    names, patterns = (tuple(node.get(key, ())) for key in ("properties", "patternProperties"))
    return names, patterns, 0, "additionalProperties" in node


def _other_types(types: Sequence[str], place: str) -> list[Any]:
    if "integer" in types and "number" not in types:
        raise NotHeld(place, "numbers that are not whole are not supported")
    named = {*types, *(("integer",) if "number" in types else ())}
    left = [kind for kind in TYPES if kind not in named and kind != "integer"]
    return [{"type": left}] if left else []


def _other_values(values: Sequence[Any], place: str) -> list[Any]:
    """The ways to be none of these values: one for each type."""
    ways: list[Any] = _other_types([*{_wide(value) for value in values}], place)
    kinds: dict[str, list[Any]] = {}
    for value in values:
        kinds.setdefault(_wide(value), []).append(value)
    for kind, some in kinds.items():
        if kind == "boolean":
            ways += [{"const": not some[0]}] if len({*some}) == 1 else []
        elif kind == "string" and max(map(len, some)) <= LONGEST:
            ways.append({"type": kind, "pattern": other_than(some)})
        elif kind == "number":
            ends = [None, *sorted({*some}), None]
            for low, high in pairwise(ends):
                above = {} if low is None else {"exclusiveMinimum": low}
                below = {} if high is None else {"exclusiveMaximum": high}
                ways.append({"type": kind, **above, **below})
        elif kind != "null":
            what = "long texts" if kind == "string" else f"{kind}s"
            raise NotHeld(place, f"values other than {what} are not supported")
    return ways


def _wide(value: Any) -> str:
    return type_of(value).replace("integer", "number")
