"""Arrays whose items all differ: what a grammar cannot say, seen to beside it.

A text of JSON is read byte by byte. Where an item of such an array would come to an end that was
there before, the tokens that end it may not follow. Items are free texts or numbers, which can
always go on to another value, so that a text is never stuck.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from foretell.constraints.schema.reading import NotHeld, key_of, type_of

if TYPE_CHECKING:
    from llguidance import LLMatcher

MARK = "x-unique"  # a keyword of rewritten schemas
HELD = "uniqueItems is supported for free texts and numbers, or at most 4 listed values"
PLACES = 2000  # in a schema, by what may stand there
FREE = {"type", "minLength", "minimum", "exclusiveMinimum", "$ref", "allOf", "anyOf"}
SCALARS = {"string", "integer", "number"}
BLANK = b" \t\r\n"
Way = tuple[Any, ...]  # schemas that hold together


class Place:
    """A place of a value in a schema, by the ways in which the value may be of it."""

    def __init__(self, atlas: Atlas, ways: Sequence[Way]):
        self.atlas = atlas
        self.ways = ways

    @cached_property
    def unique(self) -> bool:
        """Whether an array here has distinct items. Raises NotHeld where only some of them have."""
        unique_marks = {any(part.get(MARK) for part in way) for way in self._ways_of_kind("array")}
        if len(unique_marks) > 1:
            message = "uniqueItems is not supported in one of several ways to be an array"
            raise NotHeld(self.atlas.keyword_place, message)
        return True in unique_marks

    def _ways_of_kind(self, kind: str) -> list[Way]:
        """The ways in which a value of a type may be here."""
        return [way for way in self.ways if all(_may_have_type(part, kind) for part in way)]

    def item_place(self, index: int) -> Place:
        ways = self._ways_of_kind("array")
        item_ways = [
            [item_schema for part in way if (item_schema := _item_schema(part, index)) is not True]
            for way in ways
        ]
        return self.atlas.place_of(item_ways)

    def property_place(self, name: str | None) -> Place:
        """The place of a property's value. `name`: None where no schema gives its name."""
        property_ways = []
        for way in self._ways_of_kind("object"):
            other_schemas: list[Any] = []
            named_schemas: list[Any] = []
            for part in way:
                if name in part.get("properties", {}):
                    named_schemas.append(part["properties"][name])
                else:
                    other_schemas.append(part.get("additionalProperties", True))
                other_schemas += part.get("patternProperties", {}).values()
            property_ways.append(
                [*named_schemas, *(schema for schema in other_schemas if schema is not True)]
            )
            if other_schemas and named_schemas:
                property_ways.append(named_schemas)
        return self.atlas.place_of(property_ways)


class Atlas:
    """The places of a rewritten schema. Raises NotHeld where distinct items cannot be seen to."""

    def __init__(self, schema: Mapping[str, Any], place: str):
        """`place`: of the keyword, for errors."""
        self.keyword_place = place
        self.definitions = schema.get("$defs", {})
        self.known_places: dict[tuple[tuple[int, ...], ...], Place] = {}
        self.root = self.place_of([[schema]])
        pending_places, seen_ids = [self.root], {id(self.root)}
        while pending_places:
            current_place = pending_places.pop()
            if current_place.unique:
                self._check_item(current_place.item_place(0))
            way_parts = [part for way in current_place.ways for part in way]
            property_names = {name for part in way_parts for name in part.get("properties", {})}
            max_prefix = max((len(part.get("prefixItems", ())) for part in way_parts), default=0)
            inner_places = [current_place.item_place(number) for number in range(max_prefix + 1)]
            inner_places += [current_place.property_place(name) for name in (None, *property_names)]
            for inner_place in inner_places:
                if id(inner_place) not in seen_ids:
                    seen_ids.add(id(inner_place))
                    pending_places.append(inner_place)

    def place_of(self, candidate_ways: Sequence[Sequence[Any]]) -> Place:
        ways = {
            tuple(map(id, way)): way
            for candidate in candidate_ways
            if False not in candidate
            for way in self._split_ways(list(candidate), 0)
        }
        way_ids = tuple(sorted(ways))
        if way_ids not in self.known_places:
            if len(self.known_places) > PLACES:
                raise NotHeld(
                    self.keyword_place, "uniqueItems is not supported in so large a schema"
                )
            self.known_places[way_ids] = Place(self, list(ways.values()))
        return self.known_places[way_ids]

    def _split_ways(self, parts: list[Any], depth: int) -> list[Way]:
        """Returns the ways to be of all parts: schemas that hold together, by their
        alternatives.
        """
        plain_parts: list[Any] = []
        while parts:
            part = parts.pop(0)
            if part is False:
                return []
            if part is True or any(part is alternative for alternative in plain_parts):
                continue
            plain_parts.append(part)
            parts += part.get("allOf", [])
            if "$ref" in part:
                parts.append(self.definitions[part["$ref"].rpartition("/")[2]])
        ways: list[list[Any]] = [plain_parts]
        for part in plain_parts:
            if "anyOf" in part:
                alternative_ways = [
                    way
                    for alternative in part["anyOf"]
                    for way in self._split_ways([alternative], depth + 1)
                ]
                ways = [
                    [*way, *alternative_way] for way in ways for alternative_way in alternative_ways
                ]
                if len(ways) > PLACES or depth > 32:
                    raise NotHeld(
                        self.keyword_place,
                        "uniqueItems is not supported beside so many alternatives",
                    )
        return [tuple(way) for way in ways]

    def _check_item(self, item: Place) -> None:
        """Checks that an item can always become another value. Raises NotHeld."""
        for way in item.ways:
            type_values = [part["type"] for part in way if "type" in part]
            type_names = {
                kind
                for type_value in type_values
                for kind in ([type_value] if isinstance(type_value, str) else type_value)
            }
            lower_bounds = [
                part.get(name, 0) for part in way for name in ("minimum", "exclusiveMinimum")
            ]
            is_free = all(part.keys() <= FREE for part in way) and min(lower_bounds, default=0) >= 0
            if not (type_values and type_names <= SCALARS and is_free):
                raise NotHeld(self.keyword_place, HELD)


def _may_have_type(part: Mapping[str, Any], kind: str) -> bool:
    type_value = part.get("type", kind)
    listed_values = [*part.get("enum", ()), *([part["const"]] if "const" in part else [])]
    type_matches = type_value == kind or (isinstance(type_value, list) and kind in type_value)
    return type_matches and (
        not listed_values or any(type_of(listed_value) == kind for listed_value in listed_values)
    )


def _item_schema(part: Mapping[str, Any], index: int) -> Any:
    prefix_schemas = part.get("prefixItems", [])
    return prefix_schemas[index] if index < len(prefix_schemas) else part.get("items", True)


@dataclass(frozen=True)
class Frame:
    """An open object or array. `used`: its items, where they must differ."""

    place: Place
    array: bool
    count: int = 0
    used: frozenset[Any] = frozenset()

    @property
    def unique(self) -> bool:
        return self.array and self.place.unique


@dataclass(frozen=True)
class Reading:
    """The state of reading a text of JSON. `mode`: value, scalar, text, name, colon or after.

    `pending`: bytes of the name or the item that is being written, where they matter.
    """

    place: Place
    frames: tuple[Frame, ...] = ()
    mode: str = "value"
    pending: bytes = b""
    escaped: bool = False

    def advance(self, piece: bytes) -> Reading | None:
        """Reads more bytes; None: an item is there twice."""
        reading: Reading | None = self
        for byte in piece:
            reading = reading._read_byte(byte)  # type: ignore[union-attr]
            if reading is None:
                return None
        return None if reading is not None and reading._is_stuck() else reading

    @property
    def innermost(self) -> Frame | None:
        return self.frames[-1] if self.frames else None

    def _is_stuck(self) -> bool:
        """Whether a zero that was there already can only end."""
        frame = self.innermost
        is_zero = self.mode == "scalar" and self.pending in (b"0", b"-0")
        if not is_zero or frame is None or not frame.unique or ("number", 0) not in frame.used:
            return False
        type_values = [
            part.get("type") for way in frame.place.item_place(frame.count).ways for part in way
        ]
        return not any(kind == "number" or "number" in (kind or ()) for kind in type_values)

    def _read_byte(self, byte: int) -> Reading | None:
        letter = bytes([byte])
        if self.mode in ("text", "name") and (self.escaped or letter != b'"'):
            is_kept = self.mode == "name" or self._must_differ()
            pending = self.pending + letter if is_kept else b""
            return replace(self, pending=pending, escaped=letter == b"\\" and not self.escaped)
        if self.mode == "text":
            return self._end_value(self.pending + letter)
        if self.mode == "name":
            frame = self.frames[-1]
            name = json.loads(b'"' + self.pending + b'"')
            property_names = {
                name for way in frame.place.ways for part in way for name in _property_schemas(part)
            }
            value_place = frame.place.property_place(name if name in property_names else None)
            return replace(self, place=value_place, mode="colon", pending=b"")
        if self.mode == "scalar":
            if letter not in b",]}" and letter not in BLANK:
                return replace(self, pending=self.pending + letter)
            ended_reading = self._end_value(self.pending)
            return None if ended_reading is None else ended_reading._read_byte(byte)
        if letter in BLANK:
            return self
        if letter in b"]}":
            return replace(self, frames=self.frames[:-1], mode="after")
        return self._begin_value(letter)

    def _begin_value(self, letter: bytes) -> Reading:
        """Returns the state after a letter with which something begins."""
        enclosing_frame = self.innermost
        if letter == b":":
            return replace(self, mode="value")
        if letter == b"," and enclosing_frame is not None:
            enclosing_frame = replace(enclosing_frame, count=enclosing_frame.count + 1)
            next_place = (
                enclosing_frame.place.item_place(enclosing_frame.count)
                if enclosing_frame.array
                else enclosing_frame.place
            )
            return Reading(
                next_place,
                (*self.frames[:-1], enclosing_frame),
                "value" if enclosing_frame.array else "after",
            )
        if letter in b"[{":
            new_frame = Frame(self.place, letter == b"[")
            next_place = self.place.item_place(0) if new_frame.array else self.place
            return Reading(
                next_place, (*self.frames, new_frame), "value" if new_frame.array else "after"
            )
        if letter == b'"':
            is_name = (
                enclosing_frame is not None and not enclosing_frame.array and self.mode == "after"
            )
            first_bytes = b"" if is_name or not self._must_differ() else letter
            return replace(self, mode="name" if is_name else "text", pending=first_bytes)
        return replace(self, mode="scalar", pending=letter)

    def _must_differ(self) -> bool:
        return self.innermost is not None and self.innermost.unique

    def _end_value(self, value_text: bytes) -> Reading | None:
        """Returns the state after a text, a number or a word; None: an item is there twice."""
        ended_reading = replace(self, mode="after", pending=b"")
        frame = self.innermost
        if frame is None or not frame.unique:
            return ended_reading
        value_key = key_of(json.loads(value_text))
        if value_key in frame.used:
            return None
        return replace(
            ended_reading, frames=(*self.frames[:-1], replace(frame, used=frame.used | {value_key}))
        )


def _property_schemas(part: Mapping[str, Any]) -> Mapping[str, Any]:
    property_schemas: Mapping[str, Any] = part.get("properties", {})
    return property_schemas


class Vocabulary:
    """The bytes of tokens, and those that may bring something to an end."""

    def __init__(self, pieces: Sequence[bytes]):
        self.pieces = pieces
        ending_bytes = set(b'",]}0' + BLANK)
        self.ending_tokens = [
            token
            for token, token_bytes in enumerate(self.pieces)
            if not ending_bytes.isdisjoint(token_bytes)
        ]
        self.quoting_tokens = [token for token in self.ending_tokens if b'"' in self.pieces[token]]
        self.separating_tokens = [
            token for token in self.quoting_tokens if b"," in self.pieces[token]
        ]


class DistinctMatcher:
    """A matcher of llguidance without the tokens by which an item would be there twice."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, start: Reading):
        self.matcher = matcher
        self.vocabulary = vocabulary
        self.readings: tuple[Reading, Any] = (start, None)  # and what was read before, and so on
        self.fault_text = ""

    def deep_copy(self) -> DistinctMatcher:
        copy = DistinctMatcher(self.matcher.deep_copy(), self.vocabulary, self.readings[0])
        copy.readings, copy.fault_text = self.readings, self.fault_text
        return copy

    def consume_token(self, token: int) -> bool:
        next_reading = self.readings[0].advance(self._token_bytes(token))
        if next_reading is None:
            self.fault_text = "an item is there twice"
            return False
        self.readings = next_reading, self.readings
        return bool(self.matcher.consume_token(token))

    def try_consume_tokens(self, tokens: list[int]) -> int:
        """Consumes tokens as far as they may follow; returns how many."""
        consumed_count = int(
            self.matcher.try_consume_tokens(tokens[: self.validate_tokens(tokens)])
        )
        for token in tokens[:consumed_count]:
            next_reading = self.readings[0].advance(self._token_bytes(token))
            assert next_reading is not None, "these were looked at"
            self.readings = next_reading, self.readings
        return consumed_count

    def rollback(self, count: int) -> bool:
        for _ in range(count):
            self.readings = self.readings[1]
        return bool(self.matcher.rollback(count))

    def validate_tokens(self, tokens: list[int]) -> int:
        return self._count_distinct(tokens[: int(self.matcher.validate_tokens(tokens))])

    def compute_ff_tokens(self) -> list[int]:
        forced_tokens = self.matcher.compute_ff_tokens()
        return forced_tokens[: self._count_distinct(forced_tokens)]

    def compute_ff_bytes(self) -> bytes:
        forced_bytes = self.matcher.compute_ff_bytes()
        allowed_length = next(
            (
                length
                for length in range(len(forced_bytes), 0, -1)
                if self.readings[0].advance(forced_bytes[:length]) is not None
            ),
            0,
        )
        return forced_bytes[:allowed_length]

    def compute_bitmask(self) -> bytes:
        bits = self.matcher.compute_bitmask()
        reading, vocabulary = self.readings[0], self.vocabulary
        frame = reading.innermost
        candidate_tokens = vocabulary.ending_tokens
        if reading.mode in ("text", "name"):
            has_used = frame is not None and frame.unique and frame.used
            candidate_tokens = (
                vocabulary.quoting_tokens if has_used else vocabulary.separating_tokens
            )
        forbidden_tokens = [
            token
            for token in candidate_tokens
            if bits[token >> 3] >> (token & 7) & 1
            and reading.advance(vocabulary.pieces[token]) is None
        ]
        if not forbidden_tokens:
            return bits
        remaining_bits = bytearray(bits)
        for token in forbidden_tokens:
            remaining_bits[token >> 3] &= ~(1 << (token & 7))
        return bytes(remaining_bits)

    def is_accepting(self) -> bool:
        return bool(self.matcher.is_accepting())

    def is_error(self) -> bool:
        return bool(self.fault_text) or bool(self.matcher.is_error())

    def get_error(self) -> str:
        return self.fault_text or str(self.matcher.get_error())

    def _token_bytes(self, token: int) -> bytes:
        pieces = self.vocabulary.pieces
        return pieces[token] if token < len(pieces) else b""

    def _count_distinct(self, tokens: Sequence[int]) -> int:
        """Counts the tokens that may follow as far as items go."""
        reading: Reading | None = self.readings[0]
        for count, token in enumerate(tokens):
            reading = reading.advance(self._token_bytes(token)) if reading is not None else None
            if reading is None:
                return count
        return len(tokens)
