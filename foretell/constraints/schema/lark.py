"""A grammar in Lark, read as far as its parts have other meanings with the compiler: JSON schemas
in it are said in its words, and classes of letters mean ASCII.
"""

from __future__ import annotations

import json
import re

from foretell.constraints.schema.distinct import MARK
from foretell.constraints.schema.patterns import limit_to_ascii
from foretell.constraints.schema.reading import NotHeld
from foretell.constraints.schema.rewriting import rewrite_schema
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


def compile_lark(grammar: str) -> str:
    """Rewrites a grammar for the compiler. Raises BadConfig."""
    if GBNF.search(grammar):
        raise BadConfig(
            "grammar: this is GBNF, and Lark is taken; write `start: ...` for `root ::= ...`, "
            "or convert it: llguidance.gbnf_to_lark.gbnf_to_lark(text)"
        )
    output_parts: list[str] = []
    position = 0
    while part := PARTS.search(grammar, position):
        output_parts.append(grammar[position : part.start()])
        position = part.end()
        if part["regex"] and "u" not in part["flags"]:
            output_parts.append(f"/{limit_to_ascii(part['regex'][1:-1])}/{part['flags']}")
        elif part["schema"]:
            schema, position = _rewrite_embedded(grammar, position)
            output_parts.append(f"{part[0]}{json.dumps(schema)}")
        else:
            output_parts.append(part[0])
    return "".join([*output_parts, grammar[position:]])


def _rewrite_embedded(grammar: str, position: int) -> tuple[object, int]:
    line_number = grammar.count("\n", 0, position) + 1
    try:
        schema, schema_end = json.JSONDecoder().raw_decode(grammar, position)
        rewritten_schema = rewrite_schema(schema)
        if MARK in json.dumps(rewritten_schema):
            raise NotHeld("#", "uniqueItems is not supported within a grammar")
        return rewritten_schema, schema_end
    except BadConfig as error:
        message = str(error).removeprefix("json_schema")
        raise BadConfig(f"grammar, line {line_number}, %json{message}") from None
    except (ValueError, RecursionError) as error:
        raise BadConfig(
            f"grammar, line {line_number}: %json has no JSON: {error}; correct it"
        ) from None
