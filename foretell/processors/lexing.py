"""Lines of code as symbols: what a line is made of, whatever its names and numbers are."""

from __future__ import annotations

import keyword
import re

STARTERS = frozenset(
    "assert if elif else print def try while import from for class # ''' \"\"\"".split()
)
NAME, NUMBER, STRING, LIST, COMMENT = "NAME", "NUMBER", "STRING", "LIST", "COMMENT"
PARTS = re.compile(
    r"""(?P<space>\s+)
    |(?P<comment>\#.*)
    |[rbfuRBFU]{0,2}(?P<triple>'{3}|"{3})
    |(?P<string>[rbfuRBFU]{0,2}(?:'(?:\\.|[^'\\])*(?:'|$)|"(?:\\.|[^"\\])*(?:"|$)))
    |(?P<number>\d[\w.]*|\.\d[\w.]*)
    |(?P<name>[^\W\d]\w*)
    |(?P<operator>\*\*=?|//=?|>>=?|<<=?|->|:=|[-+*/%&|^=!<>@]=|\S)
    """,
    re.VERBOSE,
)


def symbols(line: str, inside: str = "") -> tuple[tuple[str, ...], str]:
    """The symbols of a line, and the triple quotes that it leaves open.

    Keywords and operators stand for themselves; names, numbers, strings, comments and what stands
    in square brackets are one symbol each. `inside`: the triple quotes that the lines before left
    open; a line of such a text stands for itself, so that only the same text is the same line.
    """
    found: list[str] = []
    place = 0
    if inside:
        end = line.find(inside)
        if end < 0:
            return (line.strip(),), inside
        found.append(line[:end].strip())
        place = end + len(inside)
    while place < len(line):
        part = PARTS.match(line, place)
        assert part is not None, "every letter is a part"
        kind = part.lastgroup
        place = part.end()
        if kind == "triple":
            found.append(STRING)
            end = line.find(part["triple"], place)
            if end < 0:
                return _with_lists(found), part["triple"]
            place = end + 3
        elif kind == "name":
            found.append(part[0] if keyword.iskeyword(part[0]) else NAME)
        elif kind == "operator":
            found.append(part[0])
        elif kind != "space":
            found.append({"comment": COMMENT, "string": STRING, "number": NUMBER}[str(kind)])
    return _with_lists(found), ""


def _with_lists(found: list[str]) -> tuple[str, ...]:
    """The same with what stands in square brackets as one symbol."""
    made: list[str] = []
    opened: list[int] = []
    for symbol in found:
        if symbol == "[":
            opened.append(len(made))
        if symbol == "]" and opened:
            made[opened.pop() :] = [LIST]
        else:
            made.append(symbol)
    return tuple(made)
