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
    """Answers questions about the parts of one document. Raises NotHeld where no schema is an
    answer.
    """

    def __init__(self, document: Document):
        self.document = document
        self.steps = 0

    def _count_step(self) -> None:
        """Counts a step. Raises NotHeld for too many: schemas that hold each other never end."""
        self.steps += 1
        if self.steps > STEPS:
            raise NotHeld("#", "what its parts share takes too long to find", "simplify it")

    # --- not

    def negate(self, node: Any, depth: int = 0) -> Any:
        """Makes a schema of exactly the values that are not of this one."""
        if isinstance(node, bool):
            return not node
        self._count_step()
        place = self.document.places.get(id(node), "#")
        if depth > DEEP:
            raise NotHeld(place, "a schema that holds itself cannot be turned round")
        failing_ways = [
            way
            for keyword, value in node.items()
            if keyword not in WITHOUT
            for way in self._negate_keyword(node, keyword, value, f"{place}/{keyword}", depth + 1)
        ]
        return {"anyOf": failing_ways} if failing_ways else False

    def _negate_keyword(
        self, node: Mapping[str, Any], keyword: str, value: Any, place: str, depth: int
    ) -> list[Any]:
        """Returns the ways in which one keyword does not hold."""
        value_type = KINDS.get(keyword)
        negate = self.negate
        if keyword in TURNED and not isinstance(value, bool):
            opposite_keyword, bound_step = TURNED[keyword]
            return (
                []
                if value + bound_step < 0 and bound_step
                else [{"type": value_type, opposite_keyword: value + bound_step}]
            )
        if keyword in ("$ref", "$dynamicRef"):
            return [negate(self.document.resolve_reference(node, keyword), depth)]
        if keyword == "type":
            return _other_types([value] if isinstance(value, str) else value, place)
        if keyword in ("const", "enum"):
            return _other_values(value if keyword == "enum" else [value], place)
        if keyword == "not":
            return [value]
        if keyword == "allOf":
            return [negate(part, depth) for part in value]
        if keyword == "anyOf":
            return [{"allOf": [negate(part, depth) for part in value]}]
        if keyword == "oneOf":
            branch_pairs = [{"allOf": list(pair)} for pair in combinations(value, 2)]
            return [{"allOf": [negate(part, depth) for part in value]}, *branch_pairs]
        if keyword == "if":
            negated_then, dependent_name = (
                negate(node.get(name, True), depth) for name in ("then", "else")
            )
            return [
                {"allOf": [value, negated_then]},
                {"allOf": [negate(value, depth), dependent_name]},
            ]
        if keyword == "required":
            return [{"type": value_type, "properties": {name: False}} for name in value]
        if keyword == "properties":
            return [
                {"type": value_type, "required": [name], "properties": {name: negate(part, depth)}}
                for name, part in value.items()
            ]
        if keyword == "prefixItems":
            return [
                {
                    "type": value_type,
                    "minItems": index + 1,
                    "prefixItems": [True] * index + [negate(part, depth)],
                }
                for index, part in enumerate(value)
            ]
        if keyword == "items" and value is False:
            return [{"type": value_type, "minItems": 1 + len(node.get("prefixItems", ()))}]
        if keyword == "contains" and node.get("minContains", 1) == 1 and "maxContains" not in node:
            return [{"type": value_type, "items": negate(value, depth)}]
        if keyword == "dependentRequired":
            return [
                {"type": value_type, "required": [name], "properties": {dependent_name: False}}
                for name, dependent_names in value.items()
                for dependent_name in dependent_names
            ]
        if keyword == "dependentSchemas":
            return [
                {"type": value_type, "required": [name], "allOf": [negate(part, depth)]}
                for name, part in value.items()
            ]
        if keyword not in HARD or (keyword in EMPTY and value is EMPTY[keyword]):
            return []
        raise NotHeld(place, f"{keyword} is not supported within a negation")

    # --- whether two schemas share a value

    def are_disjoint(self, first_node: Any, second_node: Any) -> bool:
        """Whether it is certain that two schemas share no value."""
        shared_types = self._possible_types(first_node, 0) & self._possible_types(second_node, 0)
        return all(self._disjoint_within(kind, first_node, second_node) for kind in shared_types)

    def _disjoint_within(self, kind: str, first_node: Any, second_node: Any) -> bool:
        side_parts = [self._holding_parts(node) for node in (first_node, second_node)]
        listed_values = [_shared_values(kind, parts) for parts in side_parts]
        if (
            listed_values[0] is not None
            and listed_values[1] is not None
            and not listed_values[0] & listed_values[1]
        ):
            return True
        if kind in ("integer", "number"):
            (min_value, max_value), (other_min, other_max) = map(_number_bounds, side_parts)
            return max_value < other_min or other_max < min_value
        if kind == "object":
            for name in {
                name for parts in side_parts for part in parts for name in _required_names(part)
            }:
                first_property, second_property = (
                    _property_schema(parts, name) for parts in side_parts
                )
                if (
                    first_property is False
                    or second_property is False
                    or self.are_disjoint(first_property, second_property)
                ):
                    return True
        return False

    def listed_values(self, node: Any) -> list[Any] | None:
        """The values of a schema that says no more than these, each once; None: it says more."""
        parts = self._holding_parts(node)
        if not all(part.keys() <= {*WITHOUT, "enum", "const", "type", "$ref"} for part in parts):
            return None
        value_lists = [value_lists for part in parts for value_lists in _value_lists(part)]
        if any(part.get("type") == "boolean" for part in parts):
            value_lists.append([False, True])
        if not value_lists:
            return None
        shared_keys = set.intersection(
            *({key_of(listed_value) for listed_value in value_list} for value_list in value_lists)
        )
        possible_types = self._possible_types(node, 0)
        values_by_key = {
            key_of(listed_value): listed_value
            for listed_value in value_lists[0]
            if key_of(listed_value) in shared_keys
        }
        return [
            listed_value
            for listed_value in values_by_key.values()
            if type_of(listed_value) in possible_types
        ]

    def _holding_parts(self, node: Any, depth: int = 0) -> list[Mapping[str, Any]]:
        """Returns the schemas that all hold where this one does, itself first."""
        if isinstance(node, bool) or depth > DEEP:
            return [] if node is not False else [{"enum": []}]
        self._count_step()
        holding_parts = [node]
        for reference_keyword in ("$ref", "$dynamicRef"):
            if reference_keyword in node:
                holding_parts += self._holding_parts(
                    self.document.resolve_reference(node, reference_keyword), depth + 1
                )
        for part in node.get("allOf", ()):
            holding_parts += self._holding_parts(part, depth + 1)
        return holding_parts

    def _possible_types(self, node: Any, depth: int) -> set[str]:
        """The types that a value may have, with integers apart from other numbers."""
        possible_types = set(TYPES)
        for part in self._holding_parts(node):
            if "type" in part:
                type_names = part["type"]
                type_names = {type_names} if isinstance(type_names, str) else set(type_names)
                possible_types &= type_names | ({"integer"} if "number" in type_names else set())
            for values in _value_lists(part):
                possible_types &= {type_of(value) for value in values}
            for choice_keyword in ("anyOf", "oneOf"):
                if choice_keyword in part and depth < DEEP:
                    possible_types &= set().union(
                        *(self._possible_types(way, depth + 1) for way in part[choice_keyword])
                    )
        return possible_types

    # --- what was looked at

    def ways_to_meet(self, node: Any, keyword: str, depth: int = 0) -> list[Way]:
        """Returns the ways to meet a schema, which together are all, with what each has evaluated:
        of properties or of items, as `keyword` asks, unevaluatedProperties or unevaluatedItems.
        """
        if isinstance(node, bool):
            return [Way((node,))]
        self._count_step()
        place = f"{self.document.places.get(id(node), '#')}/{keyword}"
        if depth > DEEP:
            raise NotHeld(place, f"{keyword} is not supported in a schema that holds itself")
        nested_keywords = (
            "allOf",
            "anyOf",
            "if",
            "then",
            "else",
            "dependentSchemas",
            "$ref",
            "$dynamicRef",
        )
        plain_keywords = {key: value for key, value in node.items() if key not in nested_keywords}
        if keyword in plain_keywords and depth:
            plain_keywords.pop(keyword)
            inner_schema = self.document.adopt_part({**node, keyword: True}, node)
            return [
                way.close_rest(keyword, node[keyword])
                for way in self.ways_to_meet(inner_schema, keyword)
            ]
        evaluated_parts = _evaluated_parts(node, keyword, place)
        ways = [Way((self.document.adopt_part(plain_keywords, node),), *evaluated_parts)]

        def with_(ways: list[Way], other_ways: list[Way]) -> list[Way]:
            if len(ways) * len(other_ways) > WAYS:
                raise NotHeld(place, f"{keyword}: more than {WAYS} ways to meet the schema")
            return [way.combine(other_way) for way in ways for other_way in other_ways]

        for key in ("$ref", "$dynamicRef"):
            if key in node:
                reference_node = self.document.adopt_part({key: node[key]}, node)
                target_ways = self.ways_to_meet(
                    self.document.resolve_reference(node, key), keyword, depth + 1
                )
                if len(target_ways) == 1:
                    target_ways = [Way((reference_node,), *target_ways[0].evaluated)]
                ways = with_(ways, target_ways)
        for part in node.get("allOf", ()):
            ways = with_(ways, self.ways_to_meet(part, keyword, depth + 1))
        if "anyOf" in node:
            branch_ways = [self.ways_to_meet(part, keyword, depth + 1) for part in node["anyOf"]]
            if len(branch_ways) > 6:
                raise NotHeld(place, f"{keyword} is not supported beside more than 6 of anyOf")
            joint_ways: list[Way] = []
            for count in range(1, len(branch_ways) + 1):
                for chosen_branches in combinations(branch_ways, count):
                    joint_way = [Way(())]
                    for way_choices in chosen_branches:
                        joint_way = with_(joint_way, way_choices)
                    joint_ways += joint_way
            ways = with_(ways, joint_ways)
        if "oneOf" in node:  # which stays: exactly one of its parts holds
            ways = with_(
                ways,
                [
                    way
                    for part in node["oneOf"]
                    for way in self.ways_to_meet(part, keyword, depth + 1)
                ],
            )
        if "if" in node:
            then_ways = self.ways_to_meet(node["if"], keyword, depth + 1)
            then_ways = with_(
                then_ways, self.ways_to_meet(node.get("then", True), keyword, depth + 1)
            )
            else_ways = self.ways_to_meet(node.get("else", True), keyword, depth + 1)
            ways = with_(ways, [*then_ways, *with_([Way((self.negate(node["if"]),))], else_ways)])
        for name, part in node.get("dependentSchemas", {}).items():
            present_way = Way(({"type": "object", "required": [name]},))
            absent_way = Way(({"properties": {name: False}},))
            ways = with_(
                ways,
                [*with_([present_way], self.ways_to_meet(part, keyword, depth + 1)), absent_way],
            )
        return ways


@dataclass(frozen=True)
class Way:
    """Schemas that all hold, and what they have evaluated: names and patterns of properties, how
    many first items, and whether that is all there is.
    """

    schemas: tuple[Any, ...]
    names: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    item_count: int = 0
    is_complete: bool = False

    @property
    def evaluated(self) -> tuple[tuple[str, ...], tuple[str, ...], int, bool]:
        return self.names, self.patterns, self.item_count, self.is_complete

    def combine(self, other_way: Way) -> Way:
        return Way(
            self.schemas + other_way.schemas,
            tuple(dict.fromkeys(self.names + other_way.names)),
            tuple(dict.fromkeys(self.patterns + other_way.patterns)),
            max(self.item_count, other_way.item_count),
            self.is_complete or other_way.is_complete,
        )

    def close_rest(self, keyword: str, rest: Any) -> Way:
        """Returns the way with all that is left of the schema `rest`, and so evaluated."""
        return Way((self.with_rest(keyword, rest),), is_complete=True)

    def with_rest(self, keyword: str, rest: Any) -> dict[str, Any]:
        """Returns the schema of the way, with its rest."""
        way_schemas = list(self.schemas)
        if self.is_complete:
            return {"allOf": way_schemas}
        if keyword == "unevaluatedItems":
            return {
                "allOf": [*way_schemas, {"prefixItems": [True] * self.item_count, "items": rest}]
            }
        object_schema: dict[str, Any] = {"properties": dict.fromkeys(self.names, True)}
        if self.patterns:
            object_schema["patternProperties"] = dict.fromkeys(self.patterns, True)
        return {"allOf": [*way_schemas, {**object_schema, "additionalProperties": rest}]}


def _value_lists(part: Mapping[str, Any]) -> list[Sequence[Any]]:
    """The lists of values that a schema gives, of each of which a value must be."""
    value_lists = [part["enum"]] if isinstance(part.get("enum"), list) else []
    return [*value_lists, [part["const"]]] if "const" in part else value_lists


def _shared_values(kind: str, parts: Sequence[Mapping[str, Any]]) -> set[Any] | None:
    """The values of a type in all of these lists; None: there are no lists."""
    value_sets = [
        {key_of(value) for value in values if type_of(value) == kind}
        for part in parts
        for values in _value_lists(part)
    ]
    return set.intersection(*value_sets) if value_sets else None


def _number_bounds(parts: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    lower_bounds, upper_bounds = (
        [part[name] for part in parts if isinstance(part.get(name), (int, float))]
        for name in ("minimum", "maximum")
    )
    return max(lower_bounds, default=-math.inf), min(upper_bounds, default=math.inf)


def _required_names(part: Mapping[str, Any]) -> Sequence[str]:
    required_names: Sequence[str] = part.get("required", ())
    return required_names


def _property_schema(parts: Sequence[Mapping[str, Any]], name: str) -> Any:
    """The schema of an object's property; False: the object has no property of that name."""
    property_schemas = []
    for part in parts:
        properties = part.get("properties", {})
        if name in properties:
            property_schemas.append(properties[name])
        elif part.get("additionalProperties") is False and not part.get("patternProperties"):
            return False
    return {"allOf": property_schemas}


def _evaluated_parts(
    node: Mapping[str, Any], keyword: str, place: str
) -> tuple[tuple[str, ...], tuple[str, ...], int, bool]:
    """The parts of a value that the keywords of one schema evaluate: names, patterns, items,
    all.
    """
    if keyword == "unevaluatedItems":
        if "contains" in node:
            raise NotHeld(place, f"{keyword} is not supported beside contains")
        return (), (), len(node.get("prefixItems", ())), "items" in node
    names, patterns = (tuple(node.get(key, ())) for key in ("properties", "patternProperties"))
    return names, patterns, 0, "additionalProperties" in node


def _other_types(types: Sequence[str], place: str) -> list[Any]:
    if "integer" in types and "number" not in types:
        raise NotHeld(place, "numbers that are not whole are not supported")
    excluded_types = {*types, *(("integer",) if "number" in types else ())}
    remaining_types = [kind for kind in TYPES if kind not in excluded_types and kind != "integer"]
    return [{"type": remaining_types}] if remaining_types else []


def _other_values(values: Sequence[Any], place: str) -> list[Any]:
    """Returns the ways to be none of these values: one for each type."""
    ways: list[Any] = _other_types([*{_wide_type(value) for value in values}], place)
    values_by_type: dict[str, list[Any]] = {}
    for value in values:
        values_by_type.setdefault(_wide_type(value), []).append(value)
    for kind, typed_values in values_by_type.items():
        if kind == "boolean":
            ways += [{"const": not typed_values[0]}] if len({*typed_values}) == 1 else []
        elif kind == "string" and max(map(len, typed_values)) <= LONGEST:
            ways.append({"type": kind, "pattern": other_than(typed_values)})
        elif kind == "number":
            interval_ends = [None, *sorted({*typed_values}), None]
            for interval_start, interval_end in pairwise(interval_ends):
                lower_bound = {} if interval_start is None else {"exclusiveMinimum": interval_start}
                upper_bound = {} if interval_end is None else {"exclusiveMaximum": interval_end}
                ways.append({"type": kind, **lower_bound, **upper_bound})
        elif kind != "null":
            value_kinds = "long texts" if kind == "string" else f"{kind}s"
            raise NotHeld(place, f"values other than {value_kinds} are not supported")
    return ways


def _wide_type(value: Any) -> str:
    return type_of(value).replace("integer", "number")
