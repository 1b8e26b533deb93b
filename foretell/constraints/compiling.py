"""Forms as llguidance takes them: their texts, what it makes of these, and what is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from foretell.constraints.schema.distinct import MARK, Atlas, DistinctMatcher, Reading, Vocabulary
from foretell.constraints.schema.lark import compiled_form
from foretell.constraints.schema.patterns import ascii_classes, rust_of_javascript
from foretell.constraints.schema.reading import Document
from foretell.constraints.schema.rewriting import OPTIONS, rewritten
from foretell.core.text import whole_text
from foretell.errors import BadConfig, first_line
from foretell.ops.parsing import DEEP

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Between the parts of a JSON text: without a limit a small model may write line ends for ever.
SPACE = r" {1,2}|\r?\n[ \t]{0,40}"
# Keywords by what llguidance says of their values.
SAID_OF = {
    "multipleOf": ("multipleOf",),
    "patternProperty": ("patternProperties",),
    "range": ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"),
    "circular references": ("$ref",),
    "minProperties": ("minProperties", "maxProperties"),
}


def source_of(name: str, value: Any) -> str:
    """A form as a text: a schema as JSON. Raises BadConfig."""
    if name != "json_schema":
        return whole_text(name, str(value))
    if value is True:
        return "{}"
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        source = json.dumps(schema, allow_nan=False)
        whole_text(name, json.dumps(schema, ensure_ascii=False))
    except RecursionError:
        raise BadConfig(f"json_schema: {DEEP}; simplify it") from None
    except (TypeError, ValueError) as error:
        raise BadConfig(f"json_schema: this is no JSON ({first_line(error)}); correct it") from None
    if schema is True:
        return "{}"
    if not isinstance(schema, Mapping):
        raise BadConfig.field("json_schema", schema, "an object: true, or a JSON schema")
    return source


def compilable(name: str, source: str) -> str:
    """A form, see `source_of`, in the words of the compiler. Raises BadConfig."""
    if name == "json_schema":
        return json.dumps(rewritten(json.loads(source)))
    return ascii_classes(source) if name == "regex" else compiled_form(source)


def grammar_of(name: str, words: str) -> str:
    """What `compilable` returned, for `LLMatcher`. Raises ValueError for a schema that is none."""
    from llguidance import LLMatcher

    if name == "regex":
        return str(LLMatcher.grammar_from_regex(words))
    if name == "grammar":
        return str(LLMatcher.grammar_from_lark(words))
    own = json.loads(words).get(OPTIONS) or {}
    defaults: Any = {} if "whitespace_flexible" in own else {"whitespace_pattern": SPACE}
    return str(LLMatcher.grammar_from_json_schema(words, defaults=defaults))


def matcher_of(name: str, source: str, tokens: LLTokenizer, words: str | None = None) -> LLMatcher:
    """What follows the texts of a form, see `source_of`. `words`: see `compilable`, where they are
    known. Raises BadConfig.
    """
    from llguidance import LLMatcher

    try:
        words = compilable(name, source) if words is None else words
        matcher = LLMatcher(tokens, grammar_of(name, words), log_level=0)
    except (TypeError, ValueError) as error:
        raise BadConfig(f"{name}: {first_line(error)}; change it") from None
    if not matcher.is_error():
        every = range(tokens.vocab_size) if MARK in words else ()
        pieces = [tokens.decode_bytes([token]) for token in every]
        return distinct(matcher, name, words, pieces, source)
    said = matcher.get_error()
    if name == "json_schema":
        raise BadConfig(_fault_of_schema(said, source, tokens))
    raise BadConfig(_fault(name, said))


def distinct(
    matcher: LLMatcher, name: str, words: str, pieces: Sequence[bytes], source: str = ""
) -> LLMatcher:
    """The same matcher, or one around it where a schema asks for items that differ. `pieces`: the
    bytes of its tokens; `source`: for the place in an error. Raises BadConfig.
    """
    if name != "json_schema" or MARK not in words:
        return matcher
    said = Document(json.loads(source)).said.get("uniqueItems") if source else None
    start = Reading(Atlas(json.loads(words), said[0][0] if said else "#").root)
    return DistinctMatcher(matcher, Vocabulary(pieces), start)  # type: ignore[return-value]


def _fault(name: str, said: str) -> str:
    """What is wrong with a regex or a grammar, as one line, from what llguidance says."""
    lines = said.splitlines()
    reason = next((line for line in lines if line.startswith("error: ")), lines[0])
    place = re.match(r"(?:at )?(\d+)\((\d+)\): ", reason)
    where = ""
    if place and name == "grammar":
        where = f", line {place[1]}, column {place[2]}"
    reason = reason.removeprefix("error: ").removeprefix(place[0] if place else "")
    return f"{name}{where}: {reason}; correct it"


def _fault_of_schema(said: str, source: str, tokens: LLTokenizer) -> str:
    """The same for a schema, with the place of the keyword that is meant."""
    lines = said.splitlines()
    reason, cure, place = lines[0], "change it", ""
    document = Document(json.loads(source))
    if reason.startswith("Unsatisfiable"):
        reason = f"no value has this form ({reason.partition(': ')[2]})"
    elif reason.startswith(("regex parse error", "lookarounds")):
        reason = next((line for line in lines if line.startswith("error: ")), reason)
        reason, cure = f"its regex is wrong: {reason.removeprefix('error: ')}", "correct it"
        place = next(_wrong_patterns(document, tokens), "")
    else:
        meant = next((keys for words, keys in SAID_OF.items() if words in reason), ())
        place = next((places[0][0] for key in meant if (places := document.said.get(key))), "")
    return f"json_schema{f' at {place}' if place else ''}: {reason}; {cure}"


def _wrong_patterns(document: Document, tokens: LLTokenizer) -> Iterator[str]:
    """The places of patterns that cannot be compiled."""
    from llguidance import LLMatcher

    said = document.said
    found = [(place, [pattern]) for place, pattern in said.get("pattern", ())]
    for place, patterns in [*found, *said.get("patternProperties", ())]:
        for pattern in patterns:
            one = json.dumps({"type": "string", "pattern": rust_of_javascript(pattern)})
            grammar = LLMatcher.grammar_from_json_schema(one)
            if LLMatcher(tokens, grammar, log_level=0).is_error():
                yield place
