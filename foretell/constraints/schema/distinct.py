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
    """Where a value stands in a schema, by the ways in which it may be of it."""

    def __init__(self, atlas: Atlas, ways: Sequence[Way]):
        self.atlas = atlas
        self.ways = ways

    @cached_property
    def unique(self) -> bool:
        """Whether an array here has distinct items. Raises NotHeld where only some of them have."""
        marked = {any(part.get(MARK) for part in way) for way in self._able("array")}
        if len(marked) > 1:
            said = "uniqueItems is not supported in one of several ways to be an array"
            raise NotHeld(self.atlas.said, said)
        return True in marked

    def _able(self, kind: str) -> list[Way]:
        """The ways in which a value of a type may be here."""
        return [way for way in self.ways if all(_may_be(part, kind) for part in way)]

    def item(self, number: int) -> Place:
        ways = self._able("array")
        found = [[one for part in way if (one := _item(part, number)) is not True] for way in ways]
        return self.atlas.place(found)

    def property(self, name: str | None) -> Place:
        """None: of a name that no schema gives."""
        found = []
        for way in self._able("object"):
            others: list[Any] = []
            here: list[Any] = []
            for part in way:
                if name in part.get("properties", {}):
                    here.append(part["properties"][name])
                else:
                    others.append(part.get("additionalProperties", True))
                others += part.get("patternProperties", {}).values()
            found.append([*here, *(one for one in others if one is not True)])
            if others and here:
                found.append(here)
        return self.atlas.place(found)


class Atlas:
    """The places of a rewritten schema. Raises NotHeld where distinct items cannot be seen to."""

    def __init__(self, schema: Mapping[str, Any], place: str):
        """`place`: of the keyword, for errors."""
        self.said = place
        self.defined = schema.get("$defs", {})
        self.known: dict[tuple[tuple[int, ...], ...], Place] = {}
        self.root = self.place([[schema]])
        todo, seen = [self.root], {id(self.root)}
        while todo:
            here = todo.pop()
            if here.unique:
                self._check(here.item(0))
            parts = [part for way in here.ways for part in way]
            names = {name for part in parts for name in part.get("properties", {})}
            longest = max((len(part.get("prefixItems", ())) for part in parts), default=0)
            below = [here.item(number) for number in range(longest + 1)]
            below += [here.property(name) for name in (None, *names)]
            for one in below:
                if id(one) not in seen:
                    seen.add(id(one))
                    todo.append(one)

    def place(self, found: Sequence[Sequence[Any]]) -> Place:
        ways = {
            tuple(map(id, way)): way
            for some in found
            if False not in some
            for way in self._ways(list(some), 0)
        }
        key = tuple(sorted(ways))
        if key not in self.known:
            if len(self.known) > PLACES:
                raise NotHeld(self.said, "uniqueItems is not supported in so large a schema")
            self.known[key] = Place(self, list(ways.values()))
        return self.known[key]

    def _ways(self, parts: list[Any], depth: int) -> list[Way]:
        """Schemas that hold together, told apart by their alternatives."""
        plain: list[Any] = []
        while parts:
            part = parts.pop(0)
            if part is False:
                return []
            if part is True or any(part is one for one in plain):
                continue
            plain.append(part)
            parts += part.get("allOf", [])
            if "$ref" in part:
                parts.append(self.defined[part["$ref"].rpartition("/")[2]])
        ways: list[list[Any]] = [plain]
        for part in plain:
            if "anyOf" in part:
                told = [way for one in part["anyOf"] for way in self._ways([one], depth + 1)]
                ways = [[*way, *other] for way in ways for other in told]
                if len(ways) > PLACES or depth > 32:
                    raise NotHeld(
                        self.said, "uniqueItems is not supported beside so many alternatives"
                    )
        return [tuple(way) for way in ways]

    def _check(self, item: Place) -> None:
        """That an item can always become another value. Raises NotHeld."""
        for way in item.ways:
            types = [part["type"] for part in way if "type" in part]
            kinds = {kind for some in types for kind in ([some] if isinstance(some, str) else some)}
            least = [part.get(name, 0) for part in way for name in ("minimum", "exclusiveMinimum")]
            free = all(part.keys() <= FREE for part in way) and min(least, default=0) >= 0
            if not (types and kinds <= SCALARS and free):
                raise NotHeld(self.said, HELD)


def _may_be(part: Mapping[str, Any], kind: str) -> bool:
    types = part.get("type", kind)
    listed = [*part.get("enum", ()), *([part["const"]] if "const" in part else [])]
    named = types == kind or (isinstance(types, list) and kind in types)
    return named and (not listed or any(type_of(one) == kind for one in listed))


def _item(part: Mapping[str, Any], number: int) -> Any:
    first = part.get("prefixItems", [])
    return first[number] if number < len(first) else part.get("items", True)


@dataclass(frozen=True)
class Frame:
    """An object or an array that is open. `used`: its items, where they must differ."""

    place: Place
    array: bool
    count: int = 0
    used: frozenset[Any] = frozenset()

    @property
    def unique(self) -> bool:
        return self.array and self.place.unique


@dataclass(frozen=True)
class Reading:
    """How far a text of JSON was read. `mode`: value, scalar, text, name, colon or after.

    `written`: of the name or the item that is being written, where it matters.
    """

    place: Place
    frames: tuple[Frame, ...] = ()
    mode: str = "value"
    written: bytes = b""
    escaped: bool = False

    def behind(self, piece: bytes) -> Reading | None:
        """None: an item is there twice."""
        here: Reading | None = self
        for byte in piece:
            here = here._next(byte)  # type: ignore[union-attr]
            if here is None:
                return None
        return None if here is not None and here._stuck() else here

    @property
    def inside(self) -> Frame | None:
        return self.frames[-1] if self.frames else None

    def _stuck(self) -> bool:
        """Whether a whole number that was there can only end: a zero."""
        top = self.inside
        zero = self.mode == "scalar" and self.written in (b"0", b"-0")
        if not zero or top is None or not top.unique or ("number", 0) not in top.used:
            return False
        kinds = [part.get("type") for way in top.place.item(top.count).ways for part in way]
        return not any(kind == "number" or "number" in (kind or ()) for kind in kinds)

    def _next(self, byte: int) -> Reading | None:
        letter = bytes([byte])
        if self.mode in ("text", "name") and (self.escaped or letter != b'"'):
            kept = self.mode == "name" or self._kept()
            written = self.written + letter if kept else b""
            return replace(self, written=written, escaped=letter == b"\\" and not self.escaped)
        if self.mode == "text":
            return self._ended(self.written + letter)
        if self.mode == "name":
            top = self.frames[-1]
            name = json.loads(b'"' + self.written + b'"')
            given = {name for way in top.place.ways for part in way for name in _names(part)}
            place = top.place.property(name if name in given else None)
            return replace(self, place=place, mode="colon", written=b"")
        if self.mode == "scalar":
            if letter not in b",]}" and letter not in BLANK:
                return replace(self, written=self.written + letter)
            ended = self._ended(self.written)
            return None if ended is None else ended._next(byte)
        if letter in BLANK:
            return self
        if letter in b"]}":
            return replace(self, frames=self.frames[:-1], mode="after")
        return self._begun(letter)

    def _begun(self, letter: bytes) -> Reading:
        """Behind a letter with which something begins."""
        top = self.inside
        if letter == b":":
            return replace(self, mode="value")
        if letter == b"," and top is not None:
            top = replace(top, count=top.count + 1)
            place = top.place.item(top.count) if top.array else top.place
            return Reading(place, (*self.frames[:-1], top), "value" if top.array else "after")
        if letter in b"[{":
            frame = Frame(self.place, letter == b"[")
            place = self.place.item(0) if frame.array else self.place
            return Reading(place, (*self.frames, frame), "value" if frame.array else "after")
        if letter == b'"':
            name = top is not None and not top.array and self.mode == "after"
            begun = b"" if name or not self._kept() else letter
            return replace(self, mode="name" if name else "text", written=begun)
        return replace(self, mode="scalar", written=letter)

    def _kept(self) -> bool:
        return self.inside is not None and self.inside.unique

    def _ended(self, written: bytes) -> Reading | None:
        """Behind a text, a number or a word."""
        ended = replace(self, mode="after", written=b"")
        top = self.inside
        if top is None or not top.unique:
            return ended
        value = key_of(json.loads(written))
        if value in top.used:
            return None
        return replace(ended, frames=(*self.frames[:-1], replace(top, used=top.used | {value})))


def _names(part: Mapping[str, Any]) -> Mapping[str, Any]:
    named: Mapping[str, Any] = part.get("properties", {})
    return named


class Vocabulary:
    """The bytes of tokens, and those that may bring something to an end."""

    def __init__(self, pieces: Sequence[bytes]):
        self.pieces = pieces
        ends = set(b'",]}0' + BLANK)
        self.ending = [
            token for token, piece in enumerate(self.pieces) if not ends.isdisjoint(piece)
        ]
        self.quoting = [token for token in self.ending if b'"' in self.pieces[token]]
        self.several = [token for token in self.quoting if b"," in self.pieces[token]]


class DistinctMatcher:
    """A matcher of llguidance without the tokens by which an item would be there twice."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, start: Reading):
        self.matcher = matcher
        self.vocabulary = vocabulary
        self.read: tuple[Reading, Any] = (start, None)  # and what was read before, and so on
        self.fault = ""

    def deep_copy(self) -> DistinctMatcher:
        copy = DistinctMatcher(self.matcher.deep_copy(), self.vocabulary, self.read[0])
        copy.read, copy.fault = self.read, self.fault
        return copy

    def consume_token(self, token: int) -> bool:
        behind = self.read[0].behind(self._piece(token))
        if behind is None:
            self.fault = "an item is there twice"
            return False
        self.read = behind, self.read
        return bool(self.matcher.consume_token(token))

    def try_consume_tokens(self, tokens: list[int]) -> int:
        """How many of these it took."""
        taken = int(self.matcher.try_consume_tokens(tokens[: self.validate_tokens(tokens)]))
        for token in tokens[:taken]:
            behind = self.read[0].behind(self._piece(token))
            assert behind is not None, "these were looked at"
            self.read = behind, self.read
        return taken

    def rollback(self, count: int) -> bool:
        for _ in range(count):
            self.read = self.read[1]
        return bool(self.matcher.rollback(count))

    def validate_tokens(self, tokens: list[int]) -> int:
        return self._apart(tokens[: int(self.matcher.validate_tokens(tokens))])

    def compute_ff_tokens(self) -> list[int]:
        forced = self.matcher.compute_ff_tokens()
        return forced[: self._apart(forced)]

    def compute_ff_bytes(self) -> bytes:
        forced = self.matcher.compute_ff_bytes()
        whole = next(
            (n for n in range(len(forced), 0, -1) if self.read[0].behind(forced[:n]) is not None), 0
        )
        return forced[:whole]

    def compute_bitmask(self) -> bytes:
        bits = self.matcher.compute_bitmask()
        here, known = self.read[0], self.vocabulary
        top = here.inside
        tokens = known.ending
        if here.mode in ("text", "name"):
            met = top is not None and top.unique and top.used
            tokens = known.quoting if met else known.several
        taken = [
            token
            for token in tokens
            if bits[token >> 3] >> (token & 7) & 1 and here.behind(known.pieces[token]) is None
        ]
        if not taken:
            return bits
        left = bytearray(bits)
        for token in taken:
            left[token >> 3] &= ~(1 << (token & 7))
        return bytes(left)

    def is_accepting(self) -> bool:
        return bool(self.matcher.is_accepting())

    def is_error(self) -> bool:
        return bool(self.fault) or bool(self.matcher.is_error())

    def get_error(self) -> str:
        return self.fault or str(self.matcher.get_error())

    def _piece(self, token: int) -> bytes:
        pieces = self.vocabulary.pieces
        return pieces[token] if token < len(pieces) else b""

    def _apart(self, tokens: Sequence[int]) -> int:
        """How many of these may follow as far as items go."""
        here: Reading | None = self.read[0]
        for count, token in enumerate(tokens):
            here = here.behind(self._piece(token)) if here is not None else None
            if here is None:
                return count
        return len(tokens)
