"""Grammars in Lark: what is read in them, and what is left as it stands."""

from __future__ import annotations

import pytest

from foretell.constraints.compiling import build_matcher
from foretell.constraints.schema.lark import compile_lark
from foretell.errors import BadConfig
from tests.schemas import takes, tokens


def test_schemas_in_a_grammar_are_held_as_those_of_a_request() -> None:
    grammar = 'start: "x" answer "y" // %json {"not": 3}\nanswer: %json {"format": "date"}\n'
    start = build_matcher("grammar", grammar, tokens())
    assert takes(start, 'x"2020-02-29"y') and not takes(start, 'x"2021-02-29"y')
    named = 'start: %json {"properties": {"a": {"type": "integer"}}}'
    assert not takes(build_matcher("grammar", named, tokens()), '{"\\u0061":"a"}')


def test_classes_in_regexes_mean_ascii_and_texts_stay() -> None:
    grammar = 'start: /\\d/ "\\\\d%json {" A # /\\d/\nA: /[\\w\\/]/i | /\\d/u\n'
    made = compile_lark(grammar)
    assert made == 'start: /[0-9]/ "\\\\d%json {" A # /\\d/\nA: /[A-Za-z0-9_\\/]/i | /\\d/u\n'
    start = build_matcher("grammar", grammar, tokens())
    assert takes(start, "1\\d%json {/") and not takes(start, "٣\\d%json {/")


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ('root ::= "a" b\nb ::= [0-9]+\n', "grammar: this is GBNF, and Lark is taken; write"),
        ('  ws-1 ::= " "', "or convert it: llguidance.gbnf_to_lark.gbnf_to_lark(text)"),
        ('\nstart: %json {"contains": {"const": 1}}', "grammar, line 2, %json at #/contains: cont"),
        ('start: %json {"a": ', "grammar, line 1: %json has no JSON"),
        ('start: %json {"enum": []}', "grammar"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(grammar: str, said: str) -> None:
    with pytest.raises(BadConfig) as caught:
        build_matcher("grammar", grammar, tokens())
    assert said in str(caught.value) and "\n" not in str(caught.value), caught.value


def test_a_text_with_the_signs_of_gbnf_is_none() -> None:
    grammar = 'start: "a ::= b"\n// x ::= y\n'
    assert takes(build_matcher("grammar", grammar, tokens()), "a ::= b")
