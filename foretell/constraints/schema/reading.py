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
    """Something that a schema says and no text can be held to."""

    def __init__(self, place: str, what: str, cure: str = "change it"):
        super().__init__(f"json_schema{f' at {place}' if place != '#' else ''}: {what}; {cure}")


class Document:
    """The parts of one schema, by their identities; those made of them may be adopted."""

    def __init__(self, root: Any):
        self.root = root
        self.places: dict[int, str] = {}  # of each object its JSON pointer
        self.said: dict[str, list[tuple[str, Any]]] = {}  # by keyword: pointers, and values there
        self._bases: dict[int, str] = {}  # and the address that its references go from
        self._named: dict[str, Any] = {"": root}  # by address
        self.dynamic: Counter[str] = Counter()  # anchors by name
        self.fractions: set[float] = set()  # bounds of numbers that are not whole
        self._kept: list[Any] = []  # adopted, so that no other object gets their identity
        self._read(root, "#", "", True, 0)

    def _read(self, node: Any, place: str, base: str, schema: bool, depth: int) -> None:
        if depth > 2 * DEEPEST:
            raise NotHeld("#", f"it has more than {DEEPEST} levels", "flatten it")
        if isinstance(node, list):
            for number, part in enumerate(node):
                self._read(part, f"{place}/{number}", base, schema, depth + 1)
        if not isinstance(node, Mapping):
            return
        if schema:
            base = self._name(node, base)
        self.places[id(node)] = place
        self._bases[id(node)] = base
        for key, value in node.items():
            if schema and key in VALUES:
                continue
            if key in BOUNDS and isinstance(value, float) and not value.is_integer():
                self.fractions.add(value)
            below = f"{place}/{_escaped(key)}"
            if schema:
                self.said.setdefault(key, []).append((below, value))
            if schema and key in NAMED and isinstance(value, Mapping):
                self.places[id(value)] = below
                for name, part in value.items():
                    self._read(part, f"{below}/{_escaped(name)}", base, True, depth + 2)
            else:
                known = schema and (key in ONE or key in MANY)
                self._read(value, below, base, known, depth + 1)

    def _name(self, node: Mapping[str, Any], base: str) -> str:
        """Notes the names that a schema gives itself; returns the address it goes from."""
        own = node.get("$id", node.get("id"))
        if isinstance(own, str) and not own.startswith("#"):
            base = _joined(base, own).rstrip("#")
            self._named[base] = node
        for key in ("$anchor", "$dynamicAnchor"):
            anchor = node.get(key)
            if isinstance(anchor, str):
                self._named[f"{base}#{anchor}"] = node
                self.dynamic[anchor] += key == "$dynamicAnchor"
        return base

    def adopt(self, made: dict[str, Any], source: Any) -> dict[str, Any]:
        """An object made of a part, which then lies where that does."""
        self.places[id(made)] = self.places.get(id(source), "#")
        self._bases[id(made)] = self._bases.get(id(source), "")
        self._kept.append(made)
        return made

    def target(self, node: Mapping[str, Any], key: str) -> Any:
        """What a reference of a part means. Raises NotHeld."""
        reference = node[key]
        place = f"{self.places.get(id(node), '#')}/{key}"
        if not isinstance(reference, str):
            raise NotHeld(place, "it must be a text")
        address = _joined(self._bases.get(id(node), ""), reference)
        address, _, fragment = address.partition("#")
        fragment = unquote(fragment)
        named = address if fragment[:1] in ("", "/") else f"{address}#{fragment}"
        if named not in self._named:
            cure = "write what it means into $defs" if address else "correct it"
            raise NotHeld(place, f"{reference!r} is nowhere in the schema", cure)
        found = self._named[named]
        for step in fragment.split("/")[1:] if fragment[:1] == "/" else ():
            name = step.replace("~1", "/").replace("~0", "~")
            known = isinstance(found, Mapping) and name in found
            if known:
                found = found[name]
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                raise NotHeld(place, f"{reference!r} is nowhere in the schema", "correct it")
        return found


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _joined(base: str, reference: str) -> str:
    """The address of a reference that is read at another address."""
    if reference.startswith("#") or not reference:
        return base + reference
    if base.startswith("urn:"):  # whose parts have no order
        return reference
    try:
        return urljoin(base, reference)
    except ValueError:
        return reference


def exact(value: Any) -> bool:
    """Whether the numbers in a value are such that llguidance reads them as they are."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return True
    if isinstance(value, int):
        return abs(value) <= 2**53
    if isinstance(value, float):
        return not value or (float(f"{value:.15g}") == value and 1e-22 <= abs(value) <= 1e22)
    inside: Iterable[Any] = value.values() if isinstance(value, Mapping) else value
    return all(map(exact, inside))


def key_of(value: Any) -> Any:
    """Equal for equal JSON values, and for no others; may be hashed."""
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
    kinds: list[tuple[Any, str]] = [
        (float, "number"),
        (str, "string"),
        (Mapping, "object"),
        (list, "array"),
    ]
    return next(name for kind, name in kinds if isinstance(value, kind))
