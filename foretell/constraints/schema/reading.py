"""A JSON schema as a document: where its parts lie, and what its references mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote, urljoin

from foretell.errors import BadConfig

DEEPEST = 100  # levels of a schema
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
# Keywords whose values are schemas: one, a list of them, or one for each of some names.
ONE = {
    *("additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if"),
    *("items", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
}
MANY = {"allOf", "anyOf", "oneOf", "prefixItems", "items"}
NAMED = {
    *("$defs", "definitions", "dependentSchemas", "dependencies", "patternProperties"),
    "properties",
}
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
VALUES = ("const", "enum", "default", "example", "examples")  # whose insides are no schemas


class NotHeld(BadConfig):
    """The error of a keyword that no text can be held to."""

    def __init__(self, place: str, problem: str, cure: str = "change it"):
        super().__init__(f"json_schema{f' at {place}' if place != '#' else ''}: {problem}; {cure}")


class Document:
    """The parts of one schema, by their identities; parts made of them may be adopted."""

    def __init__(self, root: Any):
        self.root = root
        self.places: dict[int, str] = {}  # of each object its JSON pointer
        self.keywords: dict[
            str, list[tuple[str, Any]]
        ] = {}  # by keyword: pointers, and values there
        self._base_addresses: dict[int, str] = {}  # and the address that its references go from
        self._nodes_by_address: dict[str, Any] = {"": root}  # by address
        self.anchor_counts: Counter[str] = Counter()  # anchors by name
        self.fractions: set[float] = set()  # bounds of numbers that are not whole
        self._adopted: list[Any] = []  # adopted, so that no other object gets their identity
        self._read_node(root, "#", "", True, 0)

    def _read_node(
        self, node: Any, place: str, base_address: str, is_schema: bool, depth: int
    ) -> None:
        if depth > 2 * DEEPEST:
            raise NotHeld("#", f"it has more than {DEEPEST} levels", "flatten it")
        if isinstance(node, list):
            for index, part in enumerate(node):
                self._read_node(part, f"{place}/{index}", base_address, is_schema, depth + 1)
        if not isinstance(node, Mapping):
            return
        if is_schema:
            base_address = self._note_names(node, base_address)
        self.places[id(node)] = place
        self._base_addresses[id(node)] = base_address
        for keyword, value in node.items():
            if is_schema and keyword in VALUES:
                continue
            if keyword in BOUNDS and isinstance(value, float) and not value.is_integer():
                self.fractions.add(value)
            inner_place = f"{place}/{_escape_pointer(keyword)}"
            if is_schema:
                self.keywords.setdefault(keyword, []).append((inner_place, value))
            if is_schema and keyword in NAMED and isinstance(value, Mapping):
                self.places[id(value)] = inner_place
                for name, part in value.items():
                    self._read_node(
                        part,
                        f"{inner_place}/{_escape_pointer(name)}",
                        base_address,
                        True,
                        depth + 2,
                    )
            else:
                holds_schema = is_schema and (keyword in ONE or keyword in MANY)
                self._read_node(value, inner_place, base_address, holds_schema, depth + 1)

    def _note_names(self, node: Mapping[str, Any], base_address: str) -> str:
        """Notes the names that a schema gives itself; returns the address it goes from."""
        schema_id = node.get("$id", node.get("id"))
        if isinstance(schema_id, str) and not schema_id.startswith("#"):
            base_address = _join_address(base_address, schema_id).rstrip("#")
            self._nodes_by_address[base_address] = node
        for keyword in ("$anchor", "$dynamicAnchor"):
            anchor = node.get(keyword)
            if isinstance(anchor, str):
                self._nodes_by_address[f"{base_address}#{anchor}"] = node
                self.anchor_counts[anchor] += keyword == "$dynamicAnchor"
        return base_address

    def adopt_part(self, new_part: dict[str, Any], source: Any) -> dict[str, Any]:
        """Registers an object made of a part, which then lies where that part does."""
        self.places[id(new_part)] = self.places.get(id(source), "#")
        self._base_addresses[id(new_part)] = self._base_addresses.get(id(source), "")
        self._adopted.append(new_part)
        return new_part

    def resolve_reference(self, node: Mapping[str, Any], keyword: str) -> Any:
        """Returns the part that a reference means. Raises NotHeld."""
        reference = node[keyword]
        place = f"{self.places.get(id(node), '#')}/{keyword}"
        if not isinstance(reference, str):
            raise NotHeld(place, "it must be a text")
        address = _join_address(self._base_addresses.get(id(node), ""), reference)
        address, _, fragment = address.partition("#")
        fragment = unquote(fragment)
        address_name = address if fragment[:1] in ("", "/") else f"{address}#{fragment}"
        if address_name not in self._nodes_by_address:
            cure = "write what it means into $defs" if address else "correct it"
            raise NotHeld(place, f"{reference!r} is nowhere in the schema", cure)
        target = self._nodes_by_address[address_name]
        for pointer_step in fragment.split("/")[1:] if fragment[:1] == "/" else ():
            name = pointer_step.replace("~1", "/").replace("~0", "~")
            is_member = isinstance(target, Mapping) and name in target
            if is_member:
                target = target[name]
            elif isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                target = target[int(name)]
            else:
                raise NotHeld(place, f"{reference!r} is nowhere in the schema", "correct it")
        return target


def _escape_pointer(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _join_address(base: str, reference: str) -> str:
    """Joins a reference to the address that it is read at."""
    if reference.startswith("#") or not reference:
        return base + reference
    if base.startswith("urn:"):  # whose parts have no order
        return reference
    try:
        return urljoin(base, reference)
    except ValueError:
        return reference


def is_exact(value: Any) -> bool:
    """Whether the numbers in a value are such that llguidance reads them as they are."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return True
    if isinstance(value, int):
        return abs(value) <= 2**53
    if isinstance(value, float):
        return not value or (float(f"{value:.15g}") == value and 1e-22 <= abs(value) <= 1e22)
    inner_values: Iterable[Any] = value.values() if isinstance(value, Mapping) else value
    return all(map(is_exact, inner_values))


def key_of(value: Any) -> Any:
    """Returns a hashable key, equal for equal JSON values and for no others."""
    if isinstance(value, Mapping):
        return "object", frozenset((name, key_of(part)) for name, part in value.items())
    if isinstance(value, list):
        return "array", tuple(map(key_of, value))
    return type_of(value).replace("integer", "number"), value


def type_of(value: Any) -> str:
    """The narrowest of TYPES that a JSON value has."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    typed_names: list[tuple[Any, str]] = [
        (float, "number"),
        (str, "string"),
        (Mapping, "object"),
        (list, "array"),
    ]
    return next(name for python_type, name in typed_names if isinstance(value, python_type))
