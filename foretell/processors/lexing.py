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


def lex_line(line: str, open_quotes: str = "") -> tuple[tuple[str, ...], str]:
    """The symbols of a line, and the triple quotes that it leaves open.

    Keywords and operators stand for themselves; names, numbers, strings, comments and what stands
    in square brackets are one symbol each. `open_quotes`: the triple quotes that the lines before
    left open; a line of such a text stands for itself, so that only the same text is the same line.
    """
    line_symbols: list[str] = []
    position = 0
    if open_quotes:
        quote_end = line.find(open_quotes)
        if quote_end < 0:
            return (line.strip(),), open_quotes
        line_symbols.append(line[:quote_end].strip())
        position = quote_end + len(open_quotes)
    while position < len(line):
        lexed_part = PARTS.match(line, position)
        assert lexed_part is not None, "every letter is a part"
        part_kind = lexed_part.lastgroup
        position = lexed_part.end()
        if part_kind == "triple":
            line_symbols.append(STRING)
            quote_end = line.find(lexed_part["triple"], position)
            if quote_end < 0:
                return _collapse_lists(line_symbols), lexed_part["triple"]
            position = quote_end + 3
        elif part_kind == "name":
            line_symbols.append(lexed_part[0] if keyword.iskeyword(lexed_part[0]) else NAME)
        elif part_kind == "operator":
            line_symbols.append(lexed_part[0])
        elif part_kind != "space":
            line_symbols.append(
                {"comment": COMMENT, "string": STRING, "number": NUMBER}[str(part_kind)]
            )
    return _collapse_lists(line_symbols), ""


def _collapse_lists(line_symbols: list[str]) -> tuple[str, ...]:
    """Replaces what stands in square brackets by one symbol."""
    collapsed_symbols: list[str] = []
    opening_positions: list[int] = []
    for symbol in line_symbols:
        if symbol == "[":
            opening_positions.append(len(collapsed_symbols))
        if symbol == "]" and opening_positions:
            collapsed_symbols[opening_positions.pop() :] = [LIST]
        else:
            collapsed_symbols.append(symbol)
    return tuple(collapsed_symbols)
