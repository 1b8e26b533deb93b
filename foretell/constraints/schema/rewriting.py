"""A JSON schema in the words that the grammar compiler keeps to exactly.

What it cannot be held to is refused by its keyword and its place before a text begins. Keywords
that the compiler lacks are said by others where that is the same: `if` by `anyOf` and a negation,
`dependentRequired` by the properties that are missing, `propertyNames` by patterns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import combinations, permutations
from typing import Any

from foretell.constraints.schema.distinct import HELD, MARK
from foretell.constraints.schema.formats import FORMATS, LONGEST, UNCHECKED
from foretell.constraints.schema.logic import WITHOUT, Logic
from foretell.constraints.schema.patterns import rust_of_javascript
from foretell.constraints.schema.reading import (
    DEEPEST,
    TYPES,
    Document,
    NotHeld,
    exact,
)

OPTIONS = "x-guidance"  # where a schema says how it is to be read
LEAVE = f'leave it out, or ignore it: "{OPTIONS}": {{"lenient": true}}'
NEAR, NEAREST = 1e-9, 1e-30  # how far numbers stay from one that they must not be, and from zero
PARTS = 20_000  # schemas that one may become
CHOICES = 128  # alternatives that a keyword may become
ESCAPES = 'nrbtf\\"'  # of JSON texts, without \u
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
Schema = dict[str, Any]


def rewritten(schema: Any) -> Any:
    """The schema for the compiler. Raises NotHeld, a BadConfig, with the place of what is wrong."""
    given = schema.get(OPTIONS) if isinstance(schema, dict) else None
    if given is not None and not isinstance(given, dict):
        raise NotHeld(f"#/{OPTIONS}", "it must be an object", "correct it")
    options = dict(given or {})
    loose = bool(options.get("coerce_one_of") or options.get("lenient"))
    try:
        work = Rewriting(Document(schema), bool(options.get("lenient")), loose)
        made = work.whole()
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError, RecursionError):
        raise NotHeld("#", "a keyword has a value that it cannot have", "correct it") from None
    if isinstance(made, bool):
        made = {} if made else {"anyOf": []}
    if work.named:  # another spelling of a name is the same name, so names have one spelling
        kept = options.get("json_allowed_escapes", ESCAPES)
        options["json_allowed_escapes"] = "".join(one for one in ESCAPES if one in kept)
    return {**made, OPTIONS: options} if options else made


class Rewriting:
    """Of one document.

    `named`: whether somewhere an object has properties of given names and others.
    """

    def __init__(self, document: Document, lenient: bool, loose: bool):
        self.document = document
        self.logic = Logic(document)
        self.lenient = lenient
        self.loose = loose
        self.named = False
        self.parts = 0
        self.depth = 0
        self.targets: dict[int, str] = {}  # names of what references mean
        self.pending: list[tuple[str, Any]] = []

    def whole(self) -> Any:
        made = self.schema(self.document.root, "#")
        defined: Schema = {}
        while self.pending:
            name, target = self.pending.pop()
            defined[name] = self.schema(target, "#")
        if defined and isinstance(made, Mapping):
            return {**made, "$defs": defined}
        return made

    def schema(self, node: Any, place: str) -> Any:
        """One part. `place`: of what it was made of, unless it is itself in the document."""
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            raise NotHeld(place, "a schema is an object, true or false", "correct it")
        place = self.document.places.get(id(node), place)
        self.parts += 1
        if self.parts > PARTS:
            raise NotHeld("#", "written out it is too large", "simplify it")
        if self.depth > DEEPEST:
            raise NotHeld("#", f"it has more than {DEEPEST} levels", "flatten it")
        self.depth += 1
        try:
            return self._told(node, place) or self._said(node, place)
        finally:
            self.depth -= 1

    def _told(self, node: Schema, place: str) -> Any:
        """A schema that asks what others looked at, without that; None: it does not."""
        for key in ("unevaluatedProperties", "unevaluatedItems"):
            rest = node.get(key, True)
            if rest is True:
                continue
            left = {name: part for name, part in node.items() if name != key}
            try:
                told = self.logic.told(self.document.adopt(left, node), key)
            except NotHeld:
                if not self.lenient:
                    raise
                return self.schema(left, place)
            return self.schema({"anyOf": [way.schema(key, rest) for way in told]}, place)
        return None

    def _said(self, node: Schema, place: str) -> Any:
        """What its keywords say, one by one."""
        made: Schema = {}
        others: list[Any] = []  # that have to hold as well
        for key, value in node.items():
            if key in WITHOUT:
                continue
            below = f"{place}/{key}"
            try:
                others += HOW.get(key, Rewriting._unknown)(self, node, value, below, made)
            except NotHeld:
                if not self.lenient:
                    raise
            except (TypeError, ValueError, AttributeError, KeyError, OverflowError):
                raise NotHeld(below, f"{key} has no such value", "correct it") from None
        if others:
            made["allOf"] = [*made.pop("allOf", []), *others]
        named = made.keys() & {"properties", "patternProperties", "required"}
        if named and made.get("additionalProperties") is not False:
            self.named = True
        return made

    # --- keywords: each notes what it says in `made`, and returns what has to hold as well

    def _unknown(self, node: Schema, value: Any, place: str, made: Schema) -> list[Any]:
        return []

    def _needed(self, node: Schema, value: Any, place: str, made: Schema) -> list[Any]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise NotHeld(place, "it must be a list of names", "correct it")
        made["required"] = value
        return []

    def _type(self, node: Schema, value: Any, place: str, made: Schema) -> list[Any]:
        for name in [value] if isinstance(value, str) else value:
            if name not in TYPES:
                raise NotHeld(place, f"{name!r} is no type", f"choose of {', '.join(TYPES)}")
        made["type"] = value
        return []

    def _value(self, node: Schema, value: Any, place: str, made: Schema) -> list[Any]:
        if not exact(value):
            raise NotHeld(place, "numbers of more than 15 digits are not supported", LEAVE)
        key = place.rpartition("/")[2]
        if key == "enum" and not isinstance(value, list):
            raise NotHeld(place, "it must be a list", "correct it")
        made[key] = value
        return []

    def _number(self, node: Schema, value: Any, place: str, made: Schema) -> list[Any]:
        key = place.rpartition("/")[2]
        if isinstance(value, bool) and key.startswith("exclusive"):  # as in draft 4
            bound = node.get(f"m{key.removeprefix('exclusiveM')}")
            if value and bound is not None:
                made[key] = bound
            return []
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise NotHeld(place, f"{key} must be a number", "correct it")
        if isinstance(value, int) and key != "multipleOf" and 2**53 < abs(value) < 2**63:
            value = _rounded(value, down="ax" in key)
        elif not exact(value):
            raise NotHeld(place, "numbers of more than 15 digits are not supported", LEAVE)
        side = 1 if key == "exclusiveMinimum" else -1
        within = (int(other) == value and other * side > 0 for other in self.document.fractions)
        if key.startswith("exclusive") and value * side >= 0 and any(within):
            # The compiler forgets it where the other bound lies within the same whole number.
            nearest = value + side * (NEAR if value else NEAREST)
            return [{key.replace("exclusiveM", "m"): nearest}]
        made[key] = value
        return []

    def _count(self, node: Schema, value: Any, place: str, made: Schema) -> list[Any]:
        made[place.rpartition("/")[2]] = _whole(value, place)
        return []

    def _pattern(self, node: Schema, value: Any, place: str, made: Schema) -> list[Any]:
        made["pattern"] = rust_of_javascript(value)
        return []

    def _format(self, node: Schema, value: Any, place: str, made: Schema) -> list[Any]:
        if value in UNCHECKED:
            raise NotHeld(place, f"the format {value} is not supported", LEAVE)
        if value not in FORMATS:
            return []
        limit = {"maxLength": LONGEST[value]} if value in LONGEST else {}
        return [{"pattern": f"^(?:{FORMATS[value]})$", **limit}]

    def _inside(self, node: Schema, value: Any, place: str, made: Schema) -> list[Any]:
        made[place.rpartition("/")[2]] = self.schema(value, place)
        return []

    def _named(self, node: Schema, value: Any, place: str, made: Schema) -> list[Any]:
        made["properties"] = {
            name: self.schema(part, f"{place}/{name}") for name, part in value.items()
        }
        return []

    def _patterns(self, node: Schema, value: Any, place: str, made: Schema) -> list[Any]:
        made["patternProperties"] = {
            rust_of_javascript(pattern): self.schema(part, f"{place}/{pattern}")
            for pattern, part in value.items()
        }
        return []

    def _items(self, node: Schema, value: Any, place: str, made: Schema) -> list[Any]:
        if not isinstance(value, list):
            return self._inside(node, value, place, made)
        self._listed(node, value, place.replace("items", "prefixItems"), made)  # older drafts
        if "additionalItems" in node:
            made["items"] = self.schema(node["additionalItems"], place)
        return []

    def _listed(self, node: Schema, value: Any, place: str, made: Schema) -> list[Any]:
        key = place.rpartition("/")[2]
        made[key] = [self.schema(part, f"{place}/{i}") for i, part in enumerate(value)]
        return []

    def _reference(self, node: Schema, value: Any, place: str, made: Schema) -> list[Any]:
        key = place.rpartition("/")[2]
        anchor = str(value).rpartition("#")[2]
        if key == "$dynamicRef" and self.document.dynamic[anchor] > 1:
            raise NotHeld(place, f"$dynamicRef is not supported for several {anchor!r}", LEAVE)
        target = self.document.target(node, key)
        if isinstance(target, bool):
            return [target]
        name = self.targets.get(id(target))
        if name is None:
            name = self.targets[id(target)] = str(len(self.targets))
            self.pending.append((name, target))
        if "$ref" in made:
            return [{"$ref": f"#/$defs/{name}"}]
        made["$ref"] = f"#/$defs/{name}"
        return []

    def _refused(self, node: Schema, value: Any, place: str, made: Schema) -> list[Any]:
        raise NotHeld(place, f"{place.rpartition('/')[2]} is not supported", LEAVE)

    # --- logic

    def _not(self, node: Schema, value: Any, place: str, made: Schema) -> list[Any]:
        return [self.schema(self.logic.no(value), place)]

    def _if(self, node: Schema, value: Any, place: str, made: Schema) -> list[Any]:
        then, other = node.get("then", True), node.get("else", True)
        if then is True and other is True:
            return []
        no = self.logic.no(value)
        if other is True:
            return [self.schema({"anyOf": [no, then]}, place)]
        if then is True:
            return [self.schema({"anyOf": [value, other]}, place)]
        ways = [{"allOf": [value, then]}, {"allOf": [no, other]}]
        return [self.schema({"anyOf": ways}, place)]

    def _one_of(self, node: Schema, value: Any, place: str, made: Schema) -> list[Any]:
        """Where parts may share a value, each without the others."""
        if self.loose:
            return [self.schema({"anyOf": value}, place)]
        ways = []
        for number, part in enumerate(value):
            overlapping = [
                other
                for place_, other in enumerate(value)
                if place_ != number and not self.logic.apart(part, other)
            ]
            try:
                ways.append({"allOf": [part, *map(self.logic.no, overlapping)]})
            except NotHeld:
                cure = f'write anyOf, or read it so: "{OPTIONS}": {{"coerce_one_of": true}}'
                said = "oneOf is not supported where its parts may share a value"
                raise NotHeld(place, said, cure) from None
        return [self.schema({"anyOf": ways}, place)]

    # --- objects

    def _required_with(self, node: Schema, value: Any, place: str, made: Schema) -> list[Any]:
        """dependentRequired, dependentSchemas, and the older dependencies, which is either."""
        found = []
        for name, what in value.items():
            need = {"required": [name, *what]} if isinstance(what, list) else {"allOf": [what]}
            ways = [
                {"properties": {name: False}},
                {"type": "object", "required": [name], "allOf": [need]},
            ]
            found.append(self.schema({"anyOf": ways}, f"{place}/{name}"))
        return found

    def _names(self, node: Schema, value: Any, place: str, made: Schema) -> list[Any]:
        if value is True:
            return []
        if value is False:
            return [{"maxProperties": 0}]
        listed = self.logic.listed(value)
        if listed is not None:
            names = dict.fromkeys((one for one in listed if isinstance(one, str)), True)
            return [{"properties": names, "additionalProperties": False}]
        value = {name: part for name, part in value.items() if name not in WITHOUT}
        if value == {"type": "string"}:
            return []
        if value.get("type", "string") != "string" or not value.keys() <= {"type", *NAME_WORDS}:
            raise NotHeld(place, "propertyNames is supported for one pattern or lengths", LEAVE)
        said = value.keys() - {"type"}
        if said <= {"minLength", "maxLength"}:
            low, high = (value.get(key) for key in ("minLength", "maxLength"))
            most = "" if high is None else _whole(high, place)
            pattern = f"^(?s:.{{{_whole(low or 0, place)},{most}}})$"
        elif said == {"pattern"}:
            pattern = rust_of_javascript(value["pattern"])
        elif said == {"format"} and value["format"] in FORMATS.keys() - LONGEST.keys():
            pattern = f"^(?:{FORMATS[value['format']]})$"
        else:
            raise NotHeld(place, "propertyNames is supported for one pattern or lengths", LEAVE)
        return [{"patternProperties": {pattern: True}, "additionalProperties": False}]

    def _how_many(self, node: Schema, value: Any, place: str, made: Schema) -> list[Any]:
        """minProperties and maxProperties: told by which of the properties there are.

        Names that nobody gave could come twice, so two of these cannot be asked for.
        """
        if "minProperties" in node and place.endswith("maxProperties"):
            return []  # both were looked at together
        low = _whole(node.get("minProperties", 0), place)
        high = math.inf
        if "maxProperties" in node:
            high = _whole(node["maxProperties"], place)
        needed = set(node.get("required", ()))
        free = [
            name
            for name, part in node.get("properties", {}).items()
            if name not in needed and part is not False
        ]
        open_ = node.get("additionalProperties") is not False or node.get("patternProperties")
        if high < max(low, len(needed)):
            return [{"type": [kind for kind in TYPES if kind not in ("object", "integer")]}]
        if low <= len(needed) and high == math.inf:
            return []
        lacking = max(0, low - len(needed))
        key = place.rpartition("/")[2]
        twice = NotHeld(place, f"{key} is not supported above 1 where names are free", LEAVE)
        if not free:
            if open_ and lacking > 1:
                raise twice
            made.update({"minProperties": low} if lacking else {})
            made.update({} if high == math.inf else {"maxProperties": high})
            return []
        ways: list[Schema] = []
        if high == math.inf and open_:
            if lacking > 1:
                raise twice
            ways = [{"required": [name]} for name in free]
            ways.append({"properties": dict.fromkeys(free, False), "minProperties": low})
        elif high == math.inf:
            ways = [{"required": list(some)} for some in combinations(free, lacking)]
        else:
            for count in range(min(len(free), int(high) - len(needed)) + 1):
                if open_ and lacking - count > 1:
                    raise twice
                if not open_ and lacking > count:
                    continue
                for some in combinations(free, count):
                    way: Schema = {"required": list(some)}
                    way["properties"] = {name: False for name in free if name not in some}
                    if open_:
                        way |= {"minProperties": low, "maxProperties": high}
                    ways.append(way)
                    if len(ways) > CHOICES:
                        raise NotHeld(place, f"{key} is not supported beside so many", LEAVE)
        if len(ways) > CHOICES:
            raise NotHeld(place, f"{key} is not supported beside so many", LEAVE)
        return [{"anyOf": [{**way, "type": "object"} for way in ways] + [_but("object")]}]

    # --- arrays

    def _contains(self, node: Schema, value: Any, place: str, made: Schema) -> list[Any]:
        low, high = _whole(node.get("minContains", 1), place), node.get("maxContains")
        if low == 0 and high is None:
            return []
        if value is True:
            most = {} if high is None else {"maxItems": _whole(high, place)}
            return [{"minItems": low, **most}]
        if value is False:
            return [_but("array")] if low else []
        if high == 0:
            return [self.schema({"items": self.logic.no(value)}, place)] if not low else [False]
        most_items = node.get("maxItems")
        if high is not None or most_items is None:
            raise NotHeld(place, "contains is not supported without maxItems", LEAVE)
        ways = []
        for some in combinations(range(_whole(most_items, place)), low):
            first = [value if number in some else True for number in range(some[-1] + 1)]
            ways.append({"type": "array", "minItems": len(first), "prefixItems": first})
            if len(ways) > CHOICES:
                raise NotHeld(place, "contains is not supported beside so many items", LEAVE)
        return [self.schema({"anyOf": [*ways, _but("array")]}, place)]

    def _unique(self, node: Schema, value: Any, place: str, made: Schema) -> list[Any]:
        """Items that all differ: of few listed values by all their orders, else by a mark."""
        most = node.get("maxItems", math.inf)
        if value is False or most <= 1:
            return []
        listed = self.logic.listed(node.get("items", True))
        if listed is None or "prefixItems" in node:
            made[MARK] = True
            return []
        if len(listed) > 4:
            raise NotHeld(place, HELD, LEAVE)
        ways = [
            {"type": "array", "minItems": count, "maxItems": count,
             "prefixItems": [{"const": one} for one in some]}
            for count in range(len(listed) + 1)
            for some in permutations(listed, count)
        ]  # fmt: skip
        return [{"anyOf": [*ways, _but("array")]}]


NAME_WORDS = ("minLength", "maxLength", "pattern", "format")
HOW: dict[str, Callable[[Rewriting, Any, Any, str, Schema], list[Any]]] = {
    "type": Rewriting._type,
    **dict.fromkeys(("const", "enum"), Rewriting._value),
    **dict.fromkeys(NUMBERS, Rewriting._number),
    **dict.fromkeys(COUNTS[:4], Rewriting._count),
    **dict.fromkeys(COUNTS[4:], Rewriting._how_many),
    "pattern": Rewriting._pattern,
    "format": Rewriting._format,
    "properties": Rewriting._named,
    "patternProperties": Rewriting._patterns,
    "additionalProperties": Rewriting._inside,
    "required": Rewriting._needed,
    "items": Rewriting._items,
    **dict.fromkeys(("prefixItems", "allOf", "anyOf"), Rewriting._listed),
    **dict.fromkeys(("$ref", "$dynamicRef"), Rewriting._reference),
    "$recursiveRef": Rewriting._refused,
    "not": Rewriting._not,
    "if": Rewriting._if,
    "oneOf": Rewriting._one_of,
    **dict.fromkeys(
        ("dependentRequired", "dependentSchemas", "dependencies"), Rewriting._required_with
    ),
    "propertyNames": Rewriting._names,
    "contains": Rewriting._contains,
    "uniqueItems": Rewriting._unique,
}


def _but(kind: str) -> Schema:
    """All values but those of a type."""
    return {"type": [name for name in TYPES if name not in (kind, "integer")]}


def _rounded(value: int, down: bool) -> int:
    """The nearest whole number below or above that a double has, which is stricter than a bound."""
    near = float(value)
    if (near > value) == down and near != value:
        near = math.nextafter(near, -math.inf if down else math.inf)
    return int(near)


def _whole(value: Any, place: str) -> int:
    """A count, which may be written with a fraction of zero. Raises NotHeld."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
        raise NotHeld(place, "it must be a whole number", "correct it")
    if not 0 <= value <= 2**53:
        raise NotHeld(place, "it must be between 0 and 2^53", "correct it")
    return int(value)
