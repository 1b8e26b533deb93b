r"""Regular expressions of one dialect in the words of another, which is that of Rust.

JSON schemas write them as JavaScript does, where `.` stops at more line ends, `[` is a letter
within a class, and `\d` means ten digits. Those of a request mean ASCII by `\d`, `\w` and `\s`,
unless they ask for more by `(?u)`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

ANY = r"[^]*"  # any text, in JavaScript's words
DIGITS, WORD = "0-9", "A-Za-z0-9_"
BLANKS = r" \t\n\r\x0b\x0c"
SPACES = BLANKS + r"\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}"
NO_BREAK = r"[^\n\r\x{2028}\x{2029}]"
Tree = dict[str, "Tree"]  # of the letters of words, with "" where one ends
REPEATED = re.compile(r"\{\d+(,\d*)?\}")
UNICODE = re.compile(r"\(\?[a-z]*u")  # in Rust's words: letters and digits of all scripts


def limit_to_ascii(regex: str) -> str:
    r"""A regex of Rust whose `\d`, `\w` and `\s` mean ASCII, unless it says otherwise."""
    if UNICODE.search(regex):
        return regex
    output_parts, class_depth = [], 0
    for part in re.findall(r"\\.|[^\\]|\\", regex, re.DOTALL):
        if part == "[":
            class_depth += 1
        elif part == "]" and class_depth:
            class_depth -= 1
        output_parts.append(
            _class_pattern(part[1:], bool(class_depth), BLANKS) or part if part[0] == "\\" else part
        )
    return "".join(output_parts)


def rust_of_javascript(pattern: str) -> str:
    """Rewrites the pattern of a JSON schema in the words of Rust, where Rust has words for it."""
    output_parts: list[str] = []
    position, in_class = 0, False
    while position < len(pattern):
        letter = pattern[position]
        if letter == "\\" and position + 1 < len(pattern):
            part, position = _translate_escape(pattern, position, in_class)
            output_parts.append(part)
            continue
        if in_class:
            in_class = letter != "]"
            if pattern.startswith(
                "--", position
            ):  # of which one is a letter; Rust means a difference
                class_begins = output_parts[-1] in ("[", "[^")
                output_parts.append(r"\--" if class_begins else r"-\-")
                position += 1
            else:
                output_parts.append(f"\\{letter}" if letter in "[&~" else letter)
        elif letter == "[":
            class_opening = next(
                opening
                for opening in ("[^]", "[]", "[^", "[")
                if pattern.startswith(opening, position)
            )
            in_class = class_opening in ("[^", "[")
            output_parts.append(
                {"[^]": r"(?s:.)", "[]": r"[^\x00-\x{10ffff}]"}.get(class_opening, class_opening)
            )
            position += len(class_opening) - 1
        elif letter == ".":
            output_parts.append(NO_BREAK)
        elif letter == "{" and not REPEATED.match(pattern, position):
            output_parts.append(r"\{")
        else:
            output_parts.append(letter)
        position += 1
    return "".join(output_parts)


def _translate_escape(pattern: str, position: int, in_class: bool) -> tuple[str, int]:
    """Translates the escape that begins at a position; returns it and the position after it."""
    letter = pattern[position + 1]
    class_pattern = _class_pattern(letter, in_class, SPACES)
    if class_pattern is not None:
        return class_pattern, position + 2
    if letter == "b" and in_class:
        return r"\x08", position + 2
    if letter == "c" and (control := re.match("[A-Za-z]", pattern[position + 2 :])):
        return f"\\x{{{ord(control[0]) % 32:x}}}", position + 3
    if letter == "0":
        return r"\x00", position + 2
    surrogate_pair = re.compile(r"\\u([dD][89abAB]..)\\u([dD][c-fC-F]..)").match(pattern, position)
    if surrogate_pair:
        code_point = (
            0x10000
            + ((int(surrogate_pair[1], 16) & 0x3FF) << 10)
            + (int(surrogate_pair[2], 16) & 0x3FF)
        )
        return f"\\x{{{code_point:x}}}", surrogate_pair.end()
    escape_end = position + 2
    if letter in "pPuk" and (
        named_part := re.compile(r"\{\w+(=\w+)?\}").match(pattern, escape_end)
    ):
        escape_end = named_part.end()
    return pattern[position:escape_end], escape_end


def _class_pattern(letter: str, in_class: bool, blank_characters: str) -> str | None:
    """Writes a class, given by its letter, in full; None: it is no such letter."""
    class_characters = {"d": DIGITS, "w": WORD, "s": blank_characters}.get(letter.lower())
    if class_characters is None:
        return None
    if letter.islower():
        return class_characters if in_class else f"[{class_characters}]"
    return f"[^{class_characters}]"


def escape_literal(text: str) -> str:
    """A regex, in either dialect, that this text alone matches."""
    output_parts = []
    for letter in text:
        if letter.isalnum() or letter == "_" or (not letter.isascii() and letter.isprintable()):
            output_parts.append(letter)
        elif letter.isascii() and letter.isprintable() and letter != " ":
            output_parts.append(f"\\{letter}")
        elif ord(letter) < 0x10000:
            output_parts.append(f"\\u{ord(letter):04x}")
        else:
            output_parts.append(letter)
    return "".join(output_parts)


def other_than(words: Iterable[str]) -> str:
    """A regex, as a JSON schema has it, of all texts but these."""
    tree: Tree = {}
    for word in words:
        branch = tree
        for letter in word:
            branch = branch.setdefault(letter, {})
        branch[""] = {}
    return f"^{_differing_pattern(tree)}$"


def _differing_pattern(tree: Tree) -> str:
    next_letters = [letter for letter in tree if letter]
    differing_start = (
        f"[^{''.join(map(escape_literal, next_letters))}]{ANY}" if next_letters else f"[^]{ANY}"
    )
    ways = [
        differing_start,
        *(escape_literal(letter) + _differing_pattern(tree[letter]) for letter in next_letters),
    ]
    return f"(?:{'|'.join(ways)}){'' if '' in tree else '?'}"
