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


def ascii_classes(regex: str) -> str:
    r"""A regex of Rust whose `\d`, `\w` and `\s` mean ASCII, unless it says otherwise."""
    if UNICODE.search(regex):
        return regex
    made, inside = [], 0
    for part in re.findall(r"\\.|[^\\]|\\", regex, re.DOTALL):
        if part == "[":
            inside += 1
        elif part == "]" and inside:
            inside -= 1
        made.append(_class(part[1:], bool(inside), BLANKS) or part if part[0] == "\\" else part)
    return "".join(made)


def rust_of_javascript(pattern: str) -> str:
    """The same texts as the pattern of a JSON schema, where Rust has words for it."""
    made: list[str] = []
    place, inside = 0, False
    while place < len(pattern):
        letter = pattern[place]
        if letter == "\\" and place + 1 < len(pattern):
            part, place = _escape(pattern, place, inside)
            made.append(part)
            continue
        if inside:
            inside = letter != "]"
            if pattern.startswith("--", place):  # of which one is a letter; Rust means a difference
                begins = made[-1] in ("[", "[^")
                made.append(r"\--" if begins else r"-\-")
                place += 1
            else:
                made.append(f"\\{letter}" if letter in "[&~" else letter)
        elif letter == "[":
            opened = next(one for one in ("[^]", "[]", "[^", "[") if pattern.startswith(one, place))
            inside = opened in ("[^", "[")
            made.append({"[^]": r"(?s:.)", "[]": r"[^\x00-\x{10ffff}]"}.get(opened, opened))
            place += len(opened) - 1
        elif letter == ".":
            made.append(NO_BREAK)
        elif letter == "{" and not REPEATED.match(pattern, place):
            made.append(r"\{")
        else:
            made.append(letter)
        place += 1
    return "".join(made)


def _escape(pattern: str, place: int, inside: bool) -> tuple[str, int]:
    """What begins with the backslash at a place, and where it ends."""
    letter = pattern[place + 1]
    known = _class(letter, inside, SPACES)
    if known is not None:
        return known, place + 2
    if letter == "b" and inside:
        return r"\x08", place + 2
    if letter == "c" and (control := re.match("[A-Za-z]", pattern[place + 2 :])):
        return f"\\x{{{ord(control[0]) % 32:x}}}", place + 3
    if letter == "0":
        return r"\x00", place + 2
    pair = re.compile(r"\\u([dD][89abAB]..)\\u([dD][c-fC-F]..)").match(pattern, place)
    if pair:
        code = 0x10000 + ((int(pair[1], 16) & 0x3FF) << 10) + (int(pair[2], 16) & 0x3FF)
        return f"\\x{{{code:x}}}", pair.end()
    end = place + 2
    if letter in "pPuk" and (named := re.compile(r"\{\w+(=\w+)?\}").match(pattern, end)):
        end = named.end()
    return pattern[place:end], end


def _class(letter: str, inside: bool, blanks: str) -> str | None:
    """A class by its letter, in full; None: it is no such letter."""
    meant = {"d": DIGITS, "w": WORD, "s": blanks}.get(letter.lower())
    if meant is None:
        return None
    if letter.islower():
        return meant if inside else f"[{meant}]"
    return f"[^{meant}]"


def literally(text: str) -> str:
    """A regex, in either dialect, that this text alone matches."""
    made = []
    for letter in text:
        if letter.isalnum() or letter == "_" or (not letter.isascii() and letter.isprintable()):
            made.append(letter)
        elif letter.isascii() and letter.isprintable() and letter != " ":
            made.append(f"\\{letter}")
        elif ord(letter) < 0x10000:
            made.append(f"\\u{ord(letter):04x}")
        else:
            made.append(letter)
    return "".join(made)


def other_than(words: Iterable[str]) -> str:
    """A regex, as a JSON schema has it, of all texts but these."""
    tree: Tree = {}
    for word in words:
        branch = tree
        for letter in word:
            branch = branch.setdefault(letter, {})
        branch[""] = {}
    return f"^{_beside(tree)}$"


def _beside(tree: Tree) -> str:
    letters = [letter for letter in tree if letter]
    away = f"[^{''.join(map(literally, letters))}]{ANY}" if letters else f"[^]{ANY}"
    ways = [away, *(literally(letter) + _beside(tree[letter]) for letter in letters)]
    return f"(?:{'|'.join(ways)}){'' if '' in tree else '?'}"
