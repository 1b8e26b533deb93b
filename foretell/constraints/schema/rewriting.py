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
from foretell.constraints.schema.reading import DEEPEST, TYPES, Document, NotHeld, is_exact

OPTIONS = "x-guidance"  # where a schema says how it is to be read
LEAVE = f'leave it out, or ignore it: "{OPTIONS}": {{"lenient": true}}'
NEAR, NEAREST = 1e-9, 1e-30  # how far numbers stay from one that they must not be, and from zero
PARTS = 20_000  # schemas that one may become
CHOICES = 128  # alternatives that a keyword may become
ESCAPES = 'nrbtf\\"'  # of JSON texts, without \u
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
Schema = dict[str, Any]


def rewrite_schema(schema: Any) -> Any:
    """Rewrites a schema for the compiler. Raises NotHeld, a BadConfig, with the place of what is
    wrong.
    """
    given_options = schema.get(OPTIONS) if isinstance(schema, dict) else None
    if given_options is not None and not isinstance(given_options, dict):
        raise NotHeld(f"#/{OPTIONS}", "it must be an object", "correct it")
    options = dict(given_options or {})
    is_loose = bool(options.get("coerce_one_of") or options.get("lenient"))
    try:
        rewriting = Rewriting(Document(schema), bool(options.get("lenient")), is_loose)
        new_schema = rewriting.rewrite_document()
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError, RecursionError):
        raise NotHeld("#", "a keyword has a value that it cannot have", "correct it") from None
    if isinstance(new_schema, bool):
        new_schema = {} if new_schema else {"anyOf": []}
    # Another spelling of a name is the same name, so names have one spelling.
    if rewriting.has_named:
        escapes = options.get("json_allowed_escapes", ESCAPES)
        options["json_allowed_escapes"] = "".join(escape for escape in ESCAPES if escape in escapes)
    return {**new_schema, OPTIONS: options} if options else new_schema


class Rewriting:
    """The rewriting of one document.

    `has_named`: whether somewhere an object has properties of given names and others.
    """

    def __init__(self, document: Document, lenient: bool, loose: bool):
        self.document = document
        self.logic = Logic(document)
        self.lenient = lenient
        self.loose = loose
        self.has_named = False
        self.parts = 0
        self.depth = 0
        self.targets: dict[int, str] = {}  # names of what references mean
        self.pending: list[tuple[str, Any]] = []

    def rewrite_document(self) -> Any:
        new_schema = self.rewrite_part(self.document.root, "#")
        definitions: Schema = {}
        while self.pending:
            name, target = self.pending.pop()
            definitions[name] = self.rewrite_part(target, "#")
        if definitions and isinstance(new_schema, Mapping):
            return {**new_schema, "$defs": definitions}
        return new_schema

    def rewrite_part(self, node: Any, place: str) -> Any:
        """Rewrites one part. `place`: of what it was made of, unless it is itself in the
        document.
        """
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
            return self._expand_unevaluated(node, place) or self._rewrite_keywords(node, place)
        finally:
            self.depth -= 1

    def _expand_unevaluated(self, node: Schema, place: str) -> Any:
        """Rewrites a schema that asks what others evaluated, without that; None: it does not."""
        for keyword in ("unevaluatedProperties", "unevaluatedItems"):
            rest = node.get(keyword, True)
            if rest is True:
                continue
            keywords = {name: part for name, part in node.items() if name != keyword}
            try:
                ways = self.logic.ways_to_meet(self.document.adopt_part(keywords, node), keyword)
            except NotHeld:
                if not self.lenient:
                    raise
                return self.rewrite_part(keywords, place)
            return self.rewrite_part(
                {"anyOf": [way.with_rest(keyword, rest) for way in ways]}, place
            )
        return None

    def _rewrite_keywords(self, node: Schema, place: str) -> Any:
        """Rewrites the keywords of a schema, one by one."""
        new_schema: Schema = {}
        added_schemas: list[Any] = []  # that have to hold as well
        for keyword, value in node.items():
            if keyword in WITHOUT:
                continue
            keyword_place = f"{place}/{keyword}"
            try:
                added_schemas += HOW.get(keyword, Rewriting._ignore_keyword)(
                    self, node, value, keyword_place, new_schema
                )
            except NotHeld:
                if not self.lenient:
                    raise
            except (TypeError, ValueError, AttributeError, KeyError, OverflowError):
                raise NotHeld(keyword_place, f"{keyword} has no such value", "correct it") from None
        if added_schemas:
            new_schema["allOf"] = [*new_schema.pop("allOf", []), *added_schemas]
        name_keywords = new_schema.keys() & {"properties", "patternProperties", "required"}
        if name_keywords and new_schema.get("additionalProperties") is not False:
            self.has_named = True
        return new_schema

    # --- keywords: each notes what it says in `schema`, and returns what has to hold as well

    def _ignore_keyword(self, node: Schema, value: Any, place: str, schema: Schema) -> list[Any]:
        return []

    def _keep_required(self, node: Schema, value: Any, place: str, schema: Schema) -> list[Any]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise NotHeld(place, "it must be a list of names", "correct it")
        schema["required"] = value
        return []

    def _keep_type(self, node: Schema, value: Any, place: str, schema: Schema) -> list[Any]:
        for type_name in [value] if isinstance(value, str) else value:
            if type_name not in TYPES:
                raise NotHeld(place, f"{type_name!r} is no type", f"choose of {', '.join(TYPES)}")
        schema["type"] = value
        return []

    def _keep_value(self, node: Schema, value: Any, place: str, schema: Schema) -> list[Any]:
        if not is_exact(value):
            raise NotHeld(place, "numbers of more than 15 digits are not supported", LEAVE)
        keyword = place.rpartition("/")[2]
        if keyword == "enum" and not isinstance(value, list):
            raise NotHeld(place, "it must be a list", "correct it")
        schema[keyword] = value
        return []

    def _keep_bound(self, node: Schema, value: Any, place: str, schema: Schema) -> list[Any]:
        keyword = place.rpartition("/")[2]
        if isinstance(value, bool) and keyword.startswith("exclusive"):  # as in draft 4
            bound = node.get(f"m{keyword.removeprefix('exclusiveM')}")
            if value and bound is not None:
                schema[keyword] = bound
            return []
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise NotHeld(place, f"{keyword} must be a number", "correct it")
        if isinstance(value, int) and keyword != "multipleOf" and 2**53 < abs(value) < 2**63:
            value = _round_bound(value, rounds_down="ax" in keyword)
        elif not is_exact(value):
            raise NotHeld(place, "numbers of more than 15 digits are not supported", LEAVE)
        direction = 1 if keyword == "exclusiveMinimum" else -1
        inside_integer = (
            int(fraction) == value and fraction * direction > 0
            for fraction in self.document.fractions
        )
        if keyword.startswith("exclusive") and value * direction >= 0 and any(inside_integer):
            # The compiler forgets it where the other bound lies within the same whole number.
            nearest_bound = value + direction * (NEAR if value else NEAREST)
            return [{keyword.replace("exclusiveM", "m"): nearest_bound}]
        schema[keyword] = value
        return []

    def _keep_count(self, node: Schema, value: Any, place: str, schema: Schema) -> list[Any]:
        schema[place.rpartition("/")[2]] = _check_count(value, place)
        return []

    def _translate_pattern(self, node: Schema, value: Any, place: str, schema: Schema) -> list[Any]:
        schema["pattern"] = rust_of_javascript(value)
        return []

    def _expand_format(self, node: Schema, value: Any, place: str, schema: Schema) -> list[Any]:
        if value in UNCHECKED:
            raise NotHeld(place, f"the format {value} is not supported", LEAVE)
        if value not in FORMATS:
            return []
        length_limit = {"maxLength": LONGEST[value]} if value in LONGEST else {}
        return [{"pattern": f"^(?:{FORMATS[value]})$", **length_limit}]

    def _rewrite_inner(self, node: Schema, value: Any, place: str, schema: Schema) -> list[Any]:
        schema[place.rpartition("/")[2]] = self.rewrite_part(value, place)
        return []

    def _rewrite_members(self, node: Schema, value: Any, place: str, schema: Schema) -> list[Any]:
        schema["properties"] = {
            name: self.rewrite_part(part, f"{place}/{name}") for name, part in value.items()
        }
        return []

    def _rewrite_patterns(self, node: Schema, value: Any, place: str, schema: Schema) -> list[Any]:
        schema["patternProperties"] = {
            rust_of_javascript(pattern): self.rewrite_part(part, f"{place}/{pattern}")
            for pattern, part in value.items()
        }
        return []

    def _rewrite_items(self, node: Schema, value: Any, place: str, schema: Schema) -> list[Any]:
        if not isinstance(value, list):
            return self._rewrite_inner(node, value, place, schema)
        # Older drafts have lists here.
        self._rewrite_list(node, value, place.replace("items", "prefixItems"), schema)
        if "additionalItems" in node:
            schema["items"] = self.rewrite_part(node["additionalItems"], place)
        return []

    def _rewrite_list(self, node: Schema, value: Any, place: str, schema: Schema) -> list[Any]:
        keyword = place.rpartition("/")[2]
        schema[keyword] = [self.rewrite_part(part, f"{place}/{i}") for i, part in enumerate(value)]
        return []

    def _follow_reference(self, node: Schema, value: Any, place: str, schema: Schema) -> list[Any]:
        keyword = place.rpartition("/")[2]
        anchor = str(value).rpartition("#")[2]
        if keyword == "$dynamicRef" and self.document.anchor_counts[anchor] > 1:
            raise NotHeld(place, f"$dynamicRef is not supported for several {anchor!r}", LEAVE)
        target = self.document.resolve_reference(node, keyword)
        if isinstance(target, bool):
            return [target]
        name = self.targets.get(id(target))
        if name is None:
            name = self.targets[id(target)] = str(len(self.targets))
            self.pending.append((name, target))
        if "$ref" in schema:
            return [{"$ref": f"#/$defs/{name}"}]
        schema["$ref"] = f"#/$defs/{name}"
        return []

    def _refuse_keyword(self, node: Schema, value: Any, place: str, schema: Schema) -> list[Any]:
        raise NotHeld(place, f"{place.rpartition('/')[2]} is not supported", LEAVE)

    # --- logic

    def _rewrite_not(self, node: Schema, value: Any, place: str, schema: Schema) -> list[Any]:
        return [self.rewrite_part(self.logic.negate(value), place)]

    def _rewrite_if(self, node: Schema, value: Any, place: str, schema: Schema) -> list[Any]:
        then, otherwise = node.get("then", True), node.get("else", True)
        if then is True and otherwise is True:
            return []
        negated = self.logic.negate(value)
        if otherwise is True:
            return [self.rewrite_part({"anyOf": [negated, then]}, place)]
        if then is True:
            return [self.rewrite_part({"anyOf": [value, otherwise]}, place)]
        ways = [{"allOf": [value, then]}, {"allOf": [negated, otherwise]}]
        return [self.rewrite_part({"anyOf": ways}, place)]

    def _rewrite_one_of(self, node: Schema, value: Any, place: str, schema: Schema) -> list[Any]:
        """Says oneOf by anyOf; parts that share a value exclude each other."""
        if self.loose:
            return [self.rewrite_part({"anyOf": value}, place)]
        ways = []
        for part_number, part in enumerate(value):
            overlapping = [
                other_part
                for other_number, other_part in enumerate(value)
                if other_number != part_number and not self.logic.are_disjoint(part, other_part)
            ]
            try:
                ways.append({"allOf": [part, *map(self.logic.negate, overlapping)]})
            except NotHeld:
                cure = f'write anyOf, or read it so: "{OPTIONS}": {{"coerce_one_of": true}}'
                message = "oneOf is not supported where its parts may share a value"
                raise NotHeld(place, message, cure) from None
        return [self.rewrite_part({"anyOf": ways}, place)]

    # --- objects

    def _rewrite_dependent(self, node: Schema, value: Any, place: str, schema: Schema) -> list[Any]:
        """Rewrites dependentRequired, dependentSchemas, and the older dependencies, which is
        either.
        """
        dependent_schemas = []
        for name, rule in value.items():
            need = {"required": [name, *rule]} if isinstance(rule, list) else {"allOf": [rule]}
            ways = [
                {"properties": {name: False}},
                {"type": "object", "required": [name], "allOf": [need]},
            ]
            dependent_schemas.append(self.rewrite_part({"anyOf": ways}, f"{place}/{name}"))
        return dependent_schemas

    def _rewrite_names(self, node: Schema, value: Any, place: str, schema: Schema) -> list[Any]:
        if value is True:
            return []
        if value is False:
            return [{"maxProperties": 0}]
        listed_names = self.logic.listed_values(value)
        if listed_names is not None:
            allowed_names = dict.fromkeys(
                (listed_name for listed_name in listed_names if isinstance(listed_name, str)), True
            )
            return [{"properties": allowed_names, "additionalProperties": False}]
        value = {name: part for name, part in value.items() if name not in WITHOUT}
        if value == {"type": "string"}:
            return []
        if value.get("type", "string") != "string" or not value.keys() <= {"type", *NAME_WORDS}:
            raise NotHeld(place, "propertyNames is supported for one pattern or lengths", LEAVE)
        keywords = value.keys() - {"type"}
        if keywords <= {"minLength", "maxLength"}:
            min_length, max_length = (value.get(keyword) for keyword in ("minLength", "maxLength"))
            upper_limit = "" if max_length is None else _check_count(max_length, place)
            pattern = f"^(?s:.{{{_check_count(min_length or 0, place)},{upper_limit}}})$"
        elif keywords == {"pattern"}:
            pattern = rust_of_javascript(value["pattern"])
        elif keywords == {"format"} and value["format"] in FORMATS.keys() - LONGEST.keys():
            pattern = f"^(?:{FORMATS[value['format']]})$"
        else:
            raise NotHeld(place, "propertyNames is supported for one pattern or lengths", LEAVE)
        return [{"patternProperties": {pattern: True}, "additionalProperties": False}]

    def _limit_properties(self, node: Schema, value: Any, place: str, schema: Schema) -> list[Any]:
        """Says minProperties and maxProperties by which of the properties there are.

        Names that nobody gave could come twice, so two of these cannot be asked for.
        """
        if "minProperties" in node and place.endswith("maxProperties"):
            return []  # both were looked at together
        min_count = _check_count(node.get("minProperties", 0), place)
        max_count = math.inf
        if "maxProperties" in node:
            max_count = _check_count(node["maxProperties"], place)
        required = set(node.get("required", ()))
        optional = [
            name
            for name, part in node.get("properties", {}).items()
            if name not in required and part is not False
        ]
        is_open = node.get("additionalProperties") is not False or node.get("patternProperties")
        if max_count < max(min_count, len(required)):
            return [{"type": [kind for kind in TYPES if kind not in ("object", "integer")]}]
        if min_count <= len(required) and max_count == math.inf:
            return []
        lacking = max(0, min_count - len(required))
        keyword = place.rpartition("/")[2]
        problem = f"{keyword} is not supported above 1 where names are free"
        unsupported = NotHeld(place, problem, LEAVE)
        if not optional:
            if is_open and lacking > 1:
                raise unsupported
            schema.update({"minProperties": min_count} if lacking else {})
            schema.update({} if max_count == math.inf else {"maxProperties": max_count})
            return []
        ways: list[Schema] = []
        if max_count == math.inf and is_open:
            if lacking > 1:
                raise unsupported
            ways = [{"required": [name]} for name in optional]
            ways.append({"properties": dict.fromkeys(optional, False), "minProperties": min_count})
        elif max_count == math.inf:
            ways = [{"required": list(names)} for names in combinations(optional, lacking)]
        else:
            for count in range(min(len(optional), int(max_count) - len(required)) + 1):
                if is_open and lacking - count > 1:
                    raise unsupported
                if not is_open and lacking > count:
                    continue
                for names in combinations(optional, count):
                    way: Schema = {"required": list(names)}
                    way["properties"] = {name: False for name in optional if name not in names}
                    if is_open:
                        way |= {"minProperties": min_count, "maxProperties": max_count}
                    ways.append(way)
                    if len(ways) > CHOICES:
                        raise NotHeld(place, f"{keyword} is not supported beside so many", LEAVE)
        if len(ways) > CHOICES:
            raise NotHeld(place, f"{keyword} is not supported beside so many", LEAVE)
        return [{"anyOf": [{**way, "type": "object"} for way in ways] + [_all_but("object")]}]

    # --- arrays

    def _rewrite_contains(self, node: Schema, value: Any, place: str, schema: Schema) -> list[Any]:
        lower, upper = _check_count(node.get("minContains", 1), place), node.get("maxContains")
        if lower == 0 and upper is None:
            return []
        if value is True:
            limit = {} if upper is None else {"maxItems": _check_count(upper, place)}
            return [{"minItems": lower, **limit}]
        if value is False:
            return [_all_but("array")] if lower else []
        if upper == 0:
            if lower:
                return [False]
            return [self.rewrite_part({"items": self.logic.negate(value)}, place)]
        max_items = node.get("maxItems")
        if upper is not None or max_items is None:
            raise NotHeld(place, "contains is not supported without maxItems", LEAVE)
        ways = []
        for positions in combinations(range(_check_count(max_items, place)), lower):
            prefix = [
                value if position in positions else True for position in range(positions[-1] + 1)
            ]
            ways.append({"type": "array", "minItems": len(prefix), "prefixItems": prefix})
            if len(ways) > CHOICES:
                raise NotHeld(place, "contains is not supported beside so many items", LEAVE)
        return [self.rewrite_part({"anyOf": [*ways, _all_but("array")]}, place)]

    def _mark_unique(self, node: Schema, value: Any, place: str, schema: Schema) -> list[Any]:
        """Makes all items differ: few listed values by all their orders, others by a mark."""
        max_items = node.get("maxItems", math.inf)
        if value is False or max_items <= 1:
            return []
        listed_values = self.logic.listed_values(node.get("items", True))
        if listed_values is None or "prefixItems" in node:
            schema[MARK] = True
            return []
        if len(listed_values) > 4:
            raise NotHeld(place, HELD, LEAVE)
        ways = [
            {"type": "array", "minItems": count, "maxItems": count,
             "prefixItems": [{"const": item_value} for item_value in value_order]}
            for count in range(len(listed_values) + 1)
            for value_order in permutations(listed_values, count)
        ]  # fmt: skip
        return [{"anyOf": [*ways, _all_but("array")]}]


NAME_WORDS = ("minLength", "maxLength", "pattern", "format")
HOW: dict[str, Callable[[Rewriting, Any, Any, str, Schema], list[Any]]] = {
    "type": Rewriting._keep_type,
    **dict.fromkeys(("const", "enum"), Rewriting._keep_value),
    **dict.fromkeys(NUMBERS, Rewriting._keep_bound),
    **dict.fromkeys(COUNTS[:4], Rewriting._keep_count),
    **dict.fromkeys(COUNTS[4:], Rewriting._limit_properties),
    "pattern": Rewriting._translate_pattern,
    "format": Rewriting._expand_format,
    "properties": Rewriting._rewrite_members,
    "patternProperties": Rewriting._rewrite_patterns,
    "additionalProperties": Rewriting._rewrite_inner,
    "required": Rewriting._keep_required,
    "items": Rewriting._rewrite_items,
    **dict.fromkeys(("prefixItems", "allOf", "anyOf"), Rewriting._rewrite_list),
    **dict.fromkeys(("$ref", "$dynamicRef"), Rewriting._follow_reference),
    "$recursiveRef": Rewriting._refuse_keyword,
    "not": Rewriting._rewrite_not,
    "if": Rewriting._rewrite_if,
    "oneOf": Rewriting._rewrite_one_of,
    **dict.fromkeys(
        ("dependentRequired", "dependentSchemas", "dependencies"), Rewriting._rewrite_dependent
    ),
    "propertyNames": Rewriting._rewrite_names,
    "contains": Rewriting._rewrite_contains,
    "uniqueItems": Rewriting._mark_unique,
}


def _all_but(kind: str) -> Schema:
    """A schema of all values but those of a type."""
    return {"type": [name for name in TYPES if name not in (kind, "integer")]}


def _round_bound(value: int, rounds_down: bool) -> int:
    """Rounds to the nearest whole number below or above that a double has: stricter than the
    bound.
    """
    rounded_value = float(value)
    if (rounded_value > value) == rounds_down and rounded_value != value:
        rounded_value = math.nextafter(rounded_value, -math.inf if rounds_down else math.inf)
    return int(rounded_value)


def _check_count(value: Any, place: str) -> int:
    """Returns a count, which may be written with a fraction of zero. Raises NotHeld."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
        raise NotHeld(place, "it must be a whole number", "correct it")
    if not 0 <= value <= 2**53:
        raise NotHeld(place, "it must be between 0 and 2^53", "correct it")
    return int(value)
