"""Forms in llguidance's words with bounded free parts, and read so that their texts can end.

A mask says which bytes may come next, not how far it is to an end: within `.*ab` it is always the
same one. But a regular expression of which only texts of at most n characters count,
`/.*ab/ & /(?s:.{0,n})/`, forbids what cannot be completed within them, since llguidance knows which
expressions match nothing. So masks of the bounded form show the way to an end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

from foretell.constraints.compiling import grammar_of

NAMES = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
VALUES = {"enum", "const", "default", "examples"}  # keywords below which there are no schemas
ASKED = ("pattern", "format", "minLength", "maxLength")  # of strings
PARTS = 32  # free parts that are looked at
PAIRS = 32  # of a grammar that are looked at, see `lazily`
NESTED = 4  # simple rules that stand for simple rules
BLANK = ("space", "comment")
QUANTIFIERS = {*"*+?~{"}
OWN = "FORETELL"  # begins the names of terminals that are added
TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?:\\[\s\S]|[^/\\])+/[imslux]*)
    |(?P<head>^[ \t]*[?!]?(?P<name>_?[A-Za-z]\w*)(?:::\w+)?(?:\.-?\d+)?
        (?P<options>\[[^\n]*?\])?[ \t]*:)
    |(?P<json>%json\s*(?=\{))
    |(?P<directive>^[ \t]*%\w+)
    |(?P<word>\w+)
    |(?P<space>\s+)
    |(?P<other>.)""",
    re.VERBOSE | re.MULTILINE,
)


def bounded(name: str, source: str, most: int) -> str | None:
    """The same with at most so many characters in each free part; None where there is none."""
    if name == "regex":
        # Slashes end an expression there.
        inner = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", source).replace("\n", r"\n")
        lark = _bound(most) + f"start: {OWN}_0\n{OWN}_0: {OWN} & {OWN}_BOUND\n{OWN}: /{inner}/\n"
        return grammar_of("grammar", lark)
    if name == "grammar":
        lark = _bounded_lark(source, most)
        return None if lark == source else grammar_of(name, lark)
    schema = json.loads(source)
    less = _bounded_schema(schema, most)
    return None if less == schema else grammar_of(name, json.dumps(less))


def _bound(most: int) -> str:
    return f"{OWN}_BOUND: /(?s:.{{0,{most}}})/\n"


def _bounded_schema(schema: Any, most: int) -> Any:
    if isinstance(schema, list):
        return [_bounded_schema(item, most) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in NAMES and isinstance(value, Mapping):
            names = [_key(name, most) if key == "patternProperties" else name for name in value]
            inner = [_bounded_schema(one, most) for one in value.values()]
            made[key] = dict(zip(names, inner, strict=True))
        else:
            made[key] = value if key in VALUES else _bounded_schema(value, most)
    if not {"pattern", "format", "minLength"}.isdisjoint(made):
        own = made.get("maxLength")
        made["maxLength"] = min(own, most) if isinstance(own, int | float) else most
    return made


def _key(pattern: str, most: int) -> str:
    """The same pattern of keys with so many characters around it, where there may be any."""
    around = f"(?s:.{{0,{most}}})"
    begin = "" if pattern.startswith("^") else f"^{around}"
    end = "" if pattern.endswith("$") else f"{around}$"
    return f"{begin}(?:{pattern}){end}" if begin and end else f"{begin}{pattern}{end}"


# --- grammars


class Piece(NamedTuple):
    """Of a grammar's text: its kind by TOKEN, and for a head the name and what is in brackets."""

    kind: str
    text: str
    name: str = ""
    options: str = ""


def _pieces(source: str) -> Iterator[Piece]:
    """The grammar's text in pieces, all of it."""
    place = 0
    while place < len(source):
        found = TOKEN.match(source, place)
        assert found is not None, "every character is of some kind"
        kind, text = str(found.lastgroup), found[0]
        for outer in ("head", "json"):  # which have groups inside
            kind = outer if found[outer] is not None else kind
        if kind == "json":
            with suppress(ValueError, RecursionError):  # which llguidance will say
                text += source[found.end() : json.JSONDecoder().raw_decode(source, found.end())[1]]
        yield Piece(kind, text, found["name"] or "", found["options"] or "")
        place += len(text)


def parts(name: str, source: str) -> list[tuple[str, str]]:
    """The free parts of a form, as forms: what ends one of them leads on within the whole."""
    if name == "regex":
        return []
    found: dict[tuple[str, str], None] = {}
    if name == "json_schema":
        found.update(dict.fromkeys(_strings(json.loads(source))))
    else:
        pieces = list(_pieces(source))
        terminals = _terminals(pieces)
        for piece in pieces:
            if piece.kind == "json":
                with suppress(ValueError, RecursionError):
                    found.update(dict.fromkeys(_strings(json.loads(piece.text[len("%json") :]))))
            elif piece.kind in ("regex", "string"):
                found["grammar", f"start: {piece.text}"] = None
            elif piece.kind == "head" and _is_terminal(piece):
                found["grammar", f"start: {piece.name}\n{terminals}"] = None
    return list(found)[:PARTS]


def _strings(schema: Any) -> Iterator[tuple[str, str]]:
    """Of a schema and those below it what they ask of strings."""
    if isinstance(schema, list):
        for item in schema:
            yield from _strings(item)
    if not isinstance(schema, Mapping):
        return
    asked = {key: schema[key] for key in ASKED if key in schema}
    if asked:
        yield "json_schema", json.dumps({"type": "string", **asked})
    for key, value in schema.items():
        if key == "patternProperties" and isinstance(value, Mapping):
            for pattern in value:
                yield "json_schema", json.dumps({"type": "string", "pattern": pattern})
        if key in NAMES and isinstance(value, Mapping):
            for inner in value.values():
                yield from _strings(inner)
        elif key not in VALUES:
            yield from _strings(value)


def _bounded_lark(source: str, most: int) -> str:
    made: list[str] = []
    added: dict[str, str] = {}
    for piece in _pieces(source):
        text = piece.text
        if piece.kind == "regex":
            name = added.setdefault(f"{text} & {OWN}_BOUND", f"{OWN}_{len(added)}")
            text = f" {name} "
        elif piece.kind == "head" and _is_terminal(piece) and not piece.options:
            inner = f"{OWN}_OF_{piece.name}"
            added[f"{inner} & {OWN}_BOUND"] = piece.name
            text = f"{inner}:"
        elif piece.kind == "json":
            with suppress(ValueError, RecursionError):
                schema = json.loads(text[len("%json") :])
                text = f"%json {json.dumps(_bounded_schema(schema, most))}"
        made.append(text)
    if not added:
        return "".join(made) if "%json" in source else source
    lines = [f"{name}: {body}\n" for body, name in added.items()]
    return "".join([*made, "\n", _bound(most), *lines])


def lazily(source: str, dead: Callable[[str], bool]) -> str:
    """The grammar with what its free parts take in: where a regular expression would go on over
    what must stand behind it, it ends where that first comes.

    llguidance reads a terminal as far as it goes, so that no text has the form
    `/(.|\\n)*/ "</think>"` there. `dead`: whether a grammar is such a one. Behind a free part may
    stand a text, an expression, a terminal, one of several of these in parentheses, or a rule that
    is no more than that.
    """
    pieces = list(_pieces(source))
    terminals = _terminals(pieces)
    rules = _simple_rules(pieces)
    known: dict[tuple[str, str], str] = {}
    for begin, end in reversed(_definitions(pieces)):
        if not pieces[begin].name or _is_terminal(pieces[begin]) or pieces[begin].options:
            continue
        shown = [place for place in range(begin + 1, end) if pieces[place].kind not in BLANK]
        own = [pieces[place] for place in shown]
        for i in reversed(range(len(own))):
            choices, after = _choices_at(own, i, rules)
            if after < len(own) and own[after].text in ("+", "*"):
                choices = [f"({_one_of(choices)}){own[after].text}"]
                after += 1
            ends, stop = _choices_at(own, after, rules)
            if own[i].kind == "string" or not choices or not ends:
                continue
            if stop < len(own) and own[stop].text in QUANTIFIERS:
                continue
            free, text = _one_of(choices), _one_of(ends)
            if (free, text) not in known:
                if len(known) >= PAIRS:
                    return source
                # Behind nothing both may stand for the same text.
                some = [f"{OWN}: {choice} & /(?s:.+)/" for choice in choices if choice[0] != '"']
                lines = [f"start: {OWN} {text}\n{one}\n{terminals}" for one in some]
                known[free, text] = f"{OWN.lower()}_{len(known)}" if any(map(dead, lines)) else ""
            if known[free, text]:
                own[i] = pieces[shown[i]] = Piece("rule", f" {known[free, text]} ")
                for place in range(i + 1, stop):
                    own[place] = pieces[shown[place]] = Piece("space", "")
    made = "".join(piece.text for piece in pieces)
    for (free, text), name in known.items():
        if name:
            made += f"\n{name}[lazy]: {name.upper()}_LAZY\n{name.upper()}_LAZY: {free} {text}"
    return made


Rules = Mapping[str, Sequence[str]]


def _one_of(choices: Sequence[str]) -> str:
    """An expression of terminals for any of these."""
    return choices[0] if len(choices) == 1 else f"({' | '.join(choices)})"


def _choices_at(pieces: Sequence[Piece], i: int, rules: Rules) -> tuple[list[str], int]:
    """The texts, expressions and terminals one of which stands there, and the place behind; none
    where something else does. `rules`: those of rules that are no more than that.
    """
    if i >= len(pieces):
        return [], i
    kind, text = pieces[i].kind, pieces[i].text
    if text == "(":
        found, behind = _alternatives(pieces, i + 1, rules)
        closed = behind < len(pieces) and pieces[behind].text == ")"
        return (found, behind + 1) if closed else ([], i)
    if kind in ("string", "regex") or (kind == "word" and text.isupper()):
        return [text], i + 1
    return ([*rules[text]], i + 1) if kind == "word" and text in rules else ([], i)


def _alternatives(pieces: Sequence[Piece], i: int, rules: Rules) -> tuple[list[str], int]:
    """The same where there may be | between several."""
    found: list[str] = []
    while True:
        some, i = _choices_at(pieces, i, rules)
        if not some:
            return [], i
        found += some
        if i == len(pieces) or pieces[i].text != "|":
            return found, i
        i += 1


def _simple_rules(pieces: Sequence[Piece]) -> Rules:
    """Of rules that are one of several texts, expressions and terminals, what they are."""
    found: dict[str, list[str]] = {}
    for _ in range(NESTED):
        for begin, end in _definitions(pieces):
            head = pieces[begin]
            if head.name and head.name not in found and not (_is_terminal(head) or head.options):
                own = [piece for piece in pieces[begin + 1 : end] if piece.kind not in BLANK]
                choices, behind = _alternatives(own, 0, found)
                if choices and behind == len(own):
                    found[head.name] = choices
    return found


def _definitions(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """Where definitions and directives begin and end."""
    heads = [place for place, piece in enumerate(pieces) if piece.kind in ("head", "directive")]
    return list(pairwise([*heads, len(pieces)]))


def _terminals(pieces: Sequence[Piece]) -> str:
    """The definitions of terminals, as a part of a grammar."""
    found = ""
    for begin, end in _definitions(pieces):
        if _is_terminal(pieces[begin]):
            found += "\n" + "".join(piece.text for piece in pieces[begin:end])
    return found


def _is_terminal(head: Piece) -> bool:
    return head.name.strip("_").isupper()
