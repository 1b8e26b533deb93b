"""Dots that ask for members, against Python's own lexer."""

from __future__ import annotations

import io
import tokenize
from pathlib import Path

import pytest

import foretell
from foretell.constraints.members import DOT, NO_VALUES, Code, find_member_dots

FILES = sorted((Path(foretell.__file__).parent / "ops").glob("*.py"))[1::6]


def by_tokenize(source: str) -> list[int]:
    """The places, in bytes, of dots after a name, a number, a string or a closing bracket."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    lines = source.splitlines(keepends=True)
    found = []
    value = False
    strings = 0  # f-strings that are open, where their parts are tokens
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        strings += (kind == "FSTRING_START") - (kind == "FSTRING_END")
        if strings or kind in ("COMMENT", "NL", "INDENT", "DEDENT"):
            continue
        if token.string == "." and value:
            row, column = token.start
            found.append(starts[row - 1] + len(lines[row - 1][:column].encode()))
        value = kind in ("NUMBER", "STRING", "FSTRING_END") or token.string in (")", "]", "}")
        value |= kind == "NAME" and token.string.encode() not in NO_VALUES
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_they_are_those_of_pythons_lexer(path: Path) -> None:
    source = path.read_text("utf-8")
    wanted = by_tokenize(source)
    assert wanted and find_member_dots(source.encode())[1] == wanted


HARD = r'''
from . import a
from .b import c
from ..d.e import f
import g.h
x = ....__class__
y = 1.5 + 1. + .5 + 1..real + 1.5.real + 0x1f.real + 1e5.real
z = "a.b" 'c.d' + """e.f
g.h""".i + "".j + ''.k + '\'.l'.m + "\\".n + r"\".o".p + b"".q
w = (x
     .r()  # s.t "
     .u)
v = x \
    .v
t = """a""b.c\""".d""".e
'''


def test_hard_cases_are_right() -> None:
    assert find_member_dots(HARD.encode())[1] == by_tokenize(HARD)


@pytest.mark.parametrize(
    ("text", "asks"),
    [
        ("x", True), ("x)", True), ("x]", True), ("'x'", True), ('""', True), ("x ", True),
        ("self", True), ("None", True), ("match", True), ("naïve", True), ("(x\n", True),
        ("", False), ("x = ", False), ("# x", False), ("'x", False), ("'''x''", False),
        ("1", False), ("from ", False), ("return", False), ("x\n", False), ("x.", False),
        ("x = 'a\n", False), ("x = 'a\\'", False), ("x:", False), ("f'{x", False),
    ],
)  # fmt: skip
def test_where_a_dot_asks(text: str, asks: bool) -> None:
    assert find_member_dots(text.encode())[0].read_byte(DOT)[1] == asks


def test_a_text_is_read_in_any_parts() -> None:
    data = (HARD + FILES[0].read_text("utf-8")).encode()
    whole, dots = find_member_dots(data)
    code, found = Code(), []
    for start in range(0, len(data), 7):
        code, places = find_member_dots(data[start : start + 7], code)
        found += [start + place for place in places]
    assert (code, found) == (whole, dots)


def test_no_bytes_are_an_error() -> None:
    for data in (bytes(range(256)) * 2, b')]}\'"""\\', b"'''\xff.\n" * 3):
        find_member_dots(data)
