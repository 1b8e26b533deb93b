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

from foretell.constraints.compiling import build_grammar

NAMES = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
VALUES = {"enum", "const", "default", "examples"}  # keywords below which there are no schemas
ASKED = ("pattern", "format", "minLength", "maxLength")  # of strings
PARTS = 32  # free parts that are looked at
PAIRS = 32  # of a grammar that are looked at, see `make_lazy`
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


def bound_form(name: str, source: str, max_characters: int) -> str | None:
    """Bounds a form to at most so many characters in each free part; None where it has none."""
    if name == "regex":
        # Slashes end an expression there.
        escaped_source = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", source).replace(
            "\n", r"\n"
        )
        lark_text = (
            _bound_terminal(max_characters)
            + f"start: {OWN}_0\n{OWN}_0: {OWN} & {OWN}_BOUND\n{OWN}: /{escaped_source}/\n"
        )
        return build_grammar("grammar", lark_text)
    if name == "grammar":
        lark_text = _bound_lark(source, max_characters)
        return None if lark_text == source else build_grammar(name, lark_text)
    schema = json.loads(source)
    bounded_schema = _bound_schema(schema, max_characters)
    return None if bounded_schema == schema else build_grammar(name, json.dumps(bounded_schema))


def _bound_terminal(max_characters: int) -> str:
    return f"{OWN}_BOUND: /(?s:.{{0,{max_characters}}})/\n"


def _bound_schema(schema: Any, max_characters: int) -> Any:
    if isinstance(schema, list):
        return [_bound_schema(item, max_characters) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    bounded_schema: dict[str, Any] = {}
    for key, value in schema.items():
        if key in NAMES and isinstance(value, Mapping):
            member_names = [
                _bound_key_pattern(name, max_characters) if key == "patternProperties" else name
                for name in value
            ]
            member_schemas = [
                _bound_schema(member_schema, max_characters) for member_schema in value.values()
            ]
            bounded_schema[key] = dict(zip(member_names, member_schemas, strict=True))
        else:
            bounded_schema[key] = value if key in VALUES else _bound_schema(value, max_characters)
    if not {"pattern", "format", "minLength"}.isdisjoint(bounded_schema):
        max_length = bounded_schema.get("maxLength")
        bounded_schema["maxLength"] = (
            min(max_length, max_characters)
            if isinstance(max_length, int | float)
            else max_characters
        )
    return bounded_schema


def _bound_key_pattern(pattern: str, max_characters: int) -> str:
    """Bounds a pattern of keys to so many characters around it, where there may be any."""
    free_characters = f"(?s:.{{0,{max_characters}}})"
    pattern_start = "" if pattern.startswith("^") else f"^{free_characters}"
    pattern_end = "" if pattern.endswith("$") else f"{free_characters}$"
    return (
        f"{pattern_start}(?:{pattern}){pattern_end}"
        if pattern_start and pattern_end
        else f"{pattern_start}{pattern}{pattern_end}"
    )


# --- grammars


class Piece(NamedTuple):
    """A piece of a grammar's text: its kind by TOKEN, and for a head the name and what is in
    brackets.
    """

    kind: str
    text: str
    name: str = ""
    options: str = ""


def _split_pieces(source: str) -> Iterator[Piece]:
    """Splits a grammar's text into pieces that together are all of it."""
    position = 0
    while position < len(source):
        match = TOKEN.match(source, position)
        assert match is not None, "every character is of some kind"
        piece_kind, piece_text = str(match.lastgroup), match[0]
        for outer_kind in ("head", "json"):  # which have groups inside
            piece_kind = outer_kind if match[outer_kind] is not None else piece_kind
        if piece_kind == "json":
            with suppress(ValueError, RecursionError):  # which llguidance will say
                piece_text += source[
                    match.end() : json.JSONDecoder().raw_decode(source, match.end())[1]
                ]
        yield Piece(piece_kind, piece_text, match["name"] or "", match["options"] or "")
        position += len(piece_text)


def free_parts(name: str, source: str) -> list[tuple[str, str]]:
    """The free parts of a form, as forms: what ends one of them leads on within the full form."""
    if name == "regex":
        return []
    found_parts: dict[tuple[str, str], None] = {}
    if name == "json_schema":
        found_parts.update(dict.fromkeys(_string_schemas(json.loads(source))))
    else:
        grammar_pieces = list(_split_pieces(source))
        terminals = _terminal_definitions(grammar_pieces)
        for piece in grammar_pieces:
            if piece.kind == "json":
                with suppress(ValueError, RecursionError):
                    found_parts.update(
                        dict.fromkeys(_string_schemas(json.loads(piece.text[len("%json") :])))
                    )
            elif piece.kind in ("regex", "string"):
                found_parts["grammar", f"start: {piece.text}"] = None
            elif piece.kind == "head" and _is_terminal(piece):
                found_parts["grammar", f"start: {piece.name}\n{terminals}"] = None
    return list(found_parts)[:PARTS]


def _string_schemas(schema: Any) -> Iterator[tuple[str, str]]:
    """Yields what a schema, and those below it, ask of strings, as forms."""
    if isinstance(schema, list):
        for item in schema:
            yield from _string_schemas(item)
    if not isinstance(schema, Mapping):
        return
    string_keywords = {key: schema[key] for key in ASKED if key in schema}
    if string_keywords:
        yield "json_schema", json.dumps({"type": "string", **string_keywords})
    for key, value in schema.items():
        if key == "patternProperties" and isinstance(value, Mapping):
            for pattern in value:
                yield "json_schema", json.dumps({"type": "string", "pattern": pattern})
        if key in NAMES and isinstance(value, Mapping):
            for member_schema in value.values():
                yield from _string_schemas(member_schema)
        elif key not in VALUES:
            yield from _string_schemas(value)


def _bound_lark(source: str, max_characters: int) -> str:
    bound_texts: list[str] = []
    added_terminals: dict[str, str] = {}
    for piece in _split_pieces(source):
        piece_text = piece.text
        if piece.kind == "regex":
            terminal_name = added_terminals.setdefault(
                f"{piece_text} & {OWN}_BOUND", f"{OWN}_{len(added_terminals)}"
            )
            piece_text = f" {terminal_name} "
        elif piece.kind == "head" and _is_terminal(piece) and not piece.options:
            inner_name = f"{OWN}_OF_{piece.name}"
            added_terminals[f"{inner_name} & {OWN}_BOUND"] = piece.name
            piece_text = f"{inner_name}:"
        elif piece.kind == "json":
            with suppress(ValueError, RecursionError):
                schema = json.loads(piece_text[len("%json") :])
                piece_text = f"%json {json.dumps(_bound_schema(schema, max_characters))}"
        bound_texts.append(piece_text)
    if not added_terminals:
        return "".join(bound_texts) if "%json" in source else source
    added_lines = [
        f"{terminal_name}: {terminal_body}\n"
        for terminal_body, terminal_name in added_terminals.items()
    ]
    return "".join([*bound_texts, "\n", _bound_terminal(max_characters), *added_lines])


def make_lazy(source: str, is_dead: Callable[[str], bool]) -> str:
    """The grammar with what its free parts take in: where a regular expression would go on over
    what must follow it, it ends where that first comes.

    llguidance reads a terminal as far as it goes, so that no text has the form
    `/(.|\\n)*/ "</think>"` there. `is_dead`: whether no text has the form of a grammar. After a
    free part may stand a text, an expression, a terminal, one of several of these in parentheses,
    or a rule that is no more than that.
    """
    pieces = list(_split_pieces(source))
    terminal_text = _terminal_definitions(pieces)
    simple_rules = _simple_rules(pieces)
    lazy_names: dict[tuple[str, str], str] = {}
    for start_index, end_index in reversed(_definitions(pieces)):
        if (
            not pieces[start_index].name
            or _is_terminal(pieces[start_index])
            or pieces[start_index].options
        ):
            continue
        shown_positions = [
            position
            for position in range(start_index + 1, end_index)
            if pieces[position].kind not in BLANK
        ]
        shown_pieces = [pieces[position] for position in shown_positions]
        for piece_index in reversed(range(len(shown_pieces))):
            choices, next_index = _choices_at(shown_pieces, piece_index, simple_rules)
            if next_index < len(shown_pieces) and shown_pieces[next_index].text in ("+", "*"):
                choices = [f"({_join_choices(choices)}){shown_pieces[next_index].text}"]
                next_index += 1
            end_choices, stop_index = _choices_at(shown_pieces, next_index, simple_rules)
            if shown_pieces[piece_index].kind == "string" or not choices or not end_choices:
                continue
            if stop_index < len(shown_pieces) and shown_pieces[stop_index].text in QUANTIFIERS:
                continue
            free_text, end_text = _join_choices(choices), _join_choices(end_choices)
            if (free_text, end_text) not in lazy_names:
                if len(lazy_names) >= PAIRS:
                    return source
                # After nothing both may stand for the same text.
                nonempty_rules = [
                    f"{OWN}: {choice} & /(?s:.+)/" for choice in choices if choice[0] != '"'
                ]
                trial_grammars = [
                    f"start: {OWN} {end_text}\n{nonempty_rule}\n{terminal_text}"
                    for nonempty_rule in nonempty_rules
                ]
                lazy_names[free_text, end_text] = (
                    f"{OWN.lower()}_{len(lazy_names)}" if any(map(is_dead, trial_grammars)) else ""
                )
            if lazy_names[free_text, end_text]:
                shown_pieces[piece_index] = pieces[shown_positions[piece_index]] = Piece(
                    "rule", f" {lazy_names[free_text, end_text]} "
                )
                for position in range(piece_index + 1, stop_index):
                    shown_pieces[position] = pieces[shown_positions[position]] = Piece("space", "")
    lazy_grammar = "".join(piece.text for piece in pieces)
    for (free_text, end_text), name in lazy_names.items():
        if name:
            lazy_grammar += (
                f"\n{name}[lazy]: {name.upper()}_LAZY\n{name.upper()}_LAZY: {free_text} {end_text}"
            )
    return lazy_grammar


Rules = Mapping[str, Sequence[str]]


def _join_choices(choices: Sequence[str]) -> str:
    """An expression of terminals for any of these."""
    return choices[0] if len(choices) == 1 else f"({' | '.join(choices)})"


def _choices_at(pieces: Sequence[Piece], piece_index: int, rules: Rules) -> tuple[list[str], int]:
    """The texts, expressions and terminals one of which stands at an index, and the index after
    them; no choices where something else stands there. `rules`: rules that are no more than that.
    """
    if piece_index >= len(pieces):
        return [], piece_index
    piece_kind, piece_text = pieces[piece_index].kind, pieces[piece_index].text
    if piece_text == "(":
        choices, next_index = _alternatives(pieces, piece_index + 1, rules)
        is_closed = next_index < len(pieces) and pieces[next_index].text == ")"
        return (choices, next_index + 1) if is_closed else ([], piece_index)
    if piece_kind in ("string", "regex") or (piece_kind == "word" and piece_text.isupper()):
        return [piece_text], piece_index + 1
    return (
        ([*rules[piece_text]], piece_index + 1)
        if piece_kind == "word" and piece_text in rules
        else ([], piece_index)
    )


def _alternatives(pieces: Sequence[Piece], piece_index: int, rules: Rules) -> tuple[list[str], int]:
    """The choices from an index on, with | between them, and the index after them."""
    choices: list[str] = []
    while True:
        more_choices, piece_index = _choices_at(pieces, piece_index, rules)
        if not more_choices:
            return [], piece_index
        choices += more_choices
        if piece_index == len(pieces) or pieces[piece_index].text != "|":
            return choices, piece_index
        piece_index += 1


def _simple_rules(pieces: Sequence[Piece]) -> Rules:
    """The choices of each rule that is no more than one of several texts, expressions and
    terminals.
    """
    rule_choices: dict[str, list[str]] = {}
    for _ in range(NESTED):
        for start_index, end_index in _definitions(pieces):
            head = pieces[start_index]
            if (
                head.name
                and head.name not in rule_choices
                and not (_is_terminal(head) or head.options)
            ):
                shown_pieces = [
                    piece
                    for piece in pieces[start_index + 1 : end_index]
                    if piece.kind not in BLANK
                ]
                choices, next_index = _alternatives(shown_pieces, 0, rule_choices)
                if choices and next_index == len(shown_pieces):
                    rule_choices[head.name] = choices
    return rule_choices


def _definitions(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """The indices at which definitions and directives begin and end."""
    head_positions = [
        position for position, piece in enumerate(pieces) if piece.kind in ("head", "directive")
    ]
    return list(pairwise([*head_positions, len(pieces)]))


def _terminal_definitions(pieces: Sequence[Piece]) -> str:
    """The definitions of terminals, as a part of a grammar."""
    terminal_text = ""
    for start_index, end_index in _definitions(pieces):
        if _is_terminal(pieces[start_index]):
            terminal_text += "\n" + "".join(piece.text for piece in pieces[start_index:end_index])
    return terminal_text


def _is_terminal(head: Piece) -> bool:
    return head.name.strip("_").isupper()
