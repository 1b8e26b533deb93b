"""Forms as llguidance takes them: their texts, what it makes of these, and what is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from foretell.constraints.schema.distinct import MARK, Atlas, DistinctMatcher, Reading, Vocabulary
from foretell.constraints.schema.lark import compile_lark
from foretell.constraints.schema.patterns import limit_to_ascii, rust_of_javascript
from foretell.constraints.schema.reading import Document
from foretell.constraints.schema.rewriting import OPTIONS, rewrite_schema
from foretell.core.text import whole_text
from foretell.errors import BadConfig, first_message_line
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


def form_text(name: str, value: Any) -> str:
    """Writes a form as a text: a schema as JSON. Raises BadConfig."""
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
        raise BadConfig(
            f"json_schema: this is no JSON ({first_message_line(error)}); correct it"
        ) from None
    if schema is True:
        return "{}"
    if not isinstance(schema, Mapping):
        raise BadConfig.field("json_schema", schema, "an object: true, or a JSON schema")
    return source


def compiler_form(name: str, source: str) -> str:
    """Writes a form, see `form_text`, in the words of the compiler. Raises BadConfig."""
    if name == "json_schema":
        return json.dumps(rewrite_schema(json.loads(source)))
    return limit_to_ascii(source) if name == "regex" else compile_lark(source)


def build_grammar(name: str, compiler_text: str) -> str:
    """Makes the grammar for `LLMatcher` of what `compiler_form` returned. Raises ValueError for a
    schema that is none.
    """
    from llguidance import LLMatcher

    if name == "regex":
        return str(LLMatcher.grammar_from_regex(compiler_text))
    if name == "grammar":
        return str(LLMatcher.grammar_from_lark(compiler_text))
    schema_options = json.loads(compiler_text).get(OPTIONS) or {}
    grammar_defaults: Any = (
        {} if "whitespace_flexible" in schema_options else {"whitespace_pattern": SPACE}
    )
    return str(LLMatcher.grammar_from_json_schema(compiler_text, defaults=grammar_defaults))


def build_matcher(
    name: str, source: str, tokens: LLTokenizer, compiler_text: str | None = None
) -> LLMatcher:
    """Makes the matcher of a form, see `form_text`. `compiler_text`: its `compiler_form`, where
    that is known. Raises BadConfig.
    """
    from llguidance import LLMatcher

    try:
        compiler_text = compiler_form(name, source) if compiler_text is None else compiler_text
        matcher = LLMatcher(tokens, build_grammar(name, compiler_text), log_level=0)
    except (TypeError, ValueError) as error:
        raise BadConfig(f"{name}: {first_message_line(error)}; change it") from None
    if not matcher.is_error():
        all_tokens = range(tokens.vocab_size) if MARK in compiler_text else ()
        token_bytes = [tokens.decode_bytes([token]) for token in all_tokens]
        return add_distinctness(matcher, name, compiler_text, token_bytes, source)
    error_text = matcher.get_error()
    if name == "json_schema":
        raise BadConfig(_schema_fault(error_text, source, tokens))
    raise BadConfig(_form_fault(name, error_text))


def add_distinctness(
    matcher: LLMatcher,
    name: str,
    compiler_text: str,
    token_bytes: Sequence[bytes],
    source: str = "",
) -> LLMatcher:
    """Returns the matcher, or one around it where a schema asks for items that differ.
    `token_bytes`: the bytes of its tokens; `source`: the form, for the place in an error. Raises
    BadConfig.
    """
    if name != "json_schema" or MARK not in compiler_text:
        return matcher
    unique_places = Document(json.loads(source)).keywords.get("uniqueItems") if source else None
    start_reading = Reading(
        Atlas(json.loads(compiler_text), unique_places[0][0] if unique_places else "#").root
    )
    vocabulary = Vocabulary(token_bytes)
    return DistinctMatcher(matcher, vocabulary, start_reading)  # type: ignore[return-value]


def _form_fault(name: str, error_text: str) -> str:
    """Says in one line what is wrong with a regex or a grammar, from llguidance's error text."""
    error_lines = error_text.splitlines()
    reason = next((line for line in error_lines if line.startswith("error: ")), error_lines[0])
    location = re.match(r"(?:at )?(\d+)\((\d+)\): ", reason)
    location_text = ""
    if location and name == "grammar":
        location_text = f", line {location[1]}, column {location[2]}"
    reason = reason.removeprefix("error: ").removeprefix(location[0] if location else "")
    return f"{name}{location_text}: {reason}; correct it"


def _schema_fault(error_text: str, source: str, tokens: LLTokenizer) -> str:
    """Says in one line what is wrong with a schema, with the place of the keyword that is meant."""
    error_lines = error_text.splitlines()
    reason, cure, location = error_lines[0], "change it", ""
    document = Document(json.loads(source))
    if reason.startswith("Unsatisfiable"):
        reason = f"no value has this form ({reason.partition(': ')[2]})"
    elif reason.startswith(("regex parse error", "lookarounds")):
        reason = next((line for line in error_lines if line.startswith("error: ")), reason)
        reason, cure = f"its regex is wrong: {reason.removeprefix('error: ')}", "correct it"
        location = next(_wrong_patterns(document, tokens), "")
    else:
        meant_keywords = next((keys for words, keys in SAID_OF.items() if words in reason), ())
        location = next(
            (places[0][0] for key in meant_keywords if (places := document.keywords.get(key))), ""
        )
    return f"json_schema{f' at {location}' if location else ''}: {reason}; {cure}"


def _wrong_patterns(document: Document, tokens: LLTokenizer) -> Iterator[str]:
    """The places of patterns that cannot be compiled."""
    from llguidance import LLMatcher

    keyword_places = document.keywords
    pattern_places = [
        (location, [pattern]) for location, pattern in keyword_places.get("pattern", ())
    ]
    for location, patterns in [*pattern_places, *keyword_places.get("patternProperties", ())]:
        for pattern in patterns:
            pattern_schema = json.dumps({"type": "string", "pattern": rust_of_javascript(pattern)})
            grammar = LLMatcher.grammar_from_json_schema(pattern_schema)
            if LLMatcher(tokens, grammar, log_level=0).is_error():
                yield location
