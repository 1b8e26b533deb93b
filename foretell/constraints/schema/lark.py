"""A grammar in Lark, read as far as its parts have other meanings with the compiler: JSON schemas
in it are said in its words, and classes of letters mean ASCII.
"""

from __future__ import annotations

import json
import re

from foretell.constraints.schema.distinct import MARK
from foretell.constraints.schema.patterns import ascii_classes
from foretell.constraints.schema.reading import NotHeld
from foretell.constraints.schema.rewriting import rewritten
from foretell.errors import BadConfig

# Texts, comments, regexes with their flags, and what follows %json; all else stays as it is.
PARTS = re.compile(
    r"""(?P<text>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<comment>(?://|\#)[^\n]*)
    |(?P<regex>/(?:[^/\\\n]|\\.)+/)(?P<flags>[imslux]*)
    |(?P<schema>%json\s*)(?=\{)
    """,
    re.VERBOSE,
)
GBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


def compiled_form(grammar: str) -> str:
    """The grammar for the compiler. Raises BadConfig."""
    if GBNF.search(grammar):
        raise BadConfig(
            "grammar: this is GBNF, and Lark is taken; write `start: ...` for `root ::= ...`, "
            "or convert it: llguidance.gbnf_to_lark.gbnf_to_lark(text)"
        )
    made: list[str] = []
    place = 0
    while part := PARTS.search(grammar, place):
        made.append(grammar[place : part.start()])
        place = part.end()
        if part["regex"] and "u" not in part["flags"]:
            made.append(f"/{ascii_classes(part['regex'][1:-1])}/{part['flags']}")
        elif part["schema"]:
            schema, place = _schema(grammar, place)
            made.append(f"{part[0]}{json.dumps(schema)}")
        else:
            made.append(part[0])
    return "".join([*made, grammar[place:]])


def _schema(grammar: str, place: int) -> tuple[object, int]:
    line = grammar.count("\n", 0, place) + 1
    try:
        schema, end = json.JSONDecoder().raw_decode(grammar, place)
        made = rewritten(schema)
        if MARK in json.dumps(made):
            raise NotHeld("#", "uniqueItems is not supported within a grammar")
        return made, end
    except BadConfig as error:
        said = str(error).removeprefix("json_schema")
        raise BadConfig(f"grammar, line {line}, %json{said}") from None
    except (ValueError, RecursionError) as error:
        raise BadConfig(f"grammar, line {line}: %json has no JSON: {error}; correct it") from None
