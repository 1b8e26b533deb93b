"""Lines as symbols."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.processors.lexing import lex_line

LINES = {
    "for i in range(10):": "for NAME in NAME ( NUMBER ) :",
    "x = [1, [2, 3]] + a[i]  # more": "NAME = LIST + NAME LIST COMMENT",
    "print(f'{x}', r\"\\d\")": "NAME ( STRING , STRING )",
    "a **= 0x1f; b != .5e3": "NAME **= NUMBER ; NAME != NUMBER",
    "s = 'never closed": "NAME = STRING",
    "x = '''one''' + \"\"\"two\"\"\"": "NAME = STRING + STRING",
    "rows = [": "NAME = [",
    "], 4": "] , NUMBER",
    "größe = né$": "NAME = NAME $",
    "   ": "",
}


@pytest.mark.parametrize(("line", "wanted"), LINES.items())
def test_a_line_is_its_symbols(line: str, wanted: str) -> None:
    assert lex_line(line) == (tuple(wanted.split()), "")


def test_a_text_in_triple_quotes_goes_on_over_lines() -> None:
    found, inside = lex_line('"""One.')
    assert (found, inside) == (("STRING",), '"""')
    assert lex_line("  for x ''' in y", inside) == (("for x ''' in y",), '"""')
    assert lex_line('end""" + x', inside) == (("end", "+", "NAME"), "")


@given(st.text(alphabet="ab1 '\"#[]=\\.\t", max_size=20))
def test_every_line_has_symbols(line: str) -> None:
    found, _ = lex_line(line)
    assert bool(found) == bool(line.strip())
