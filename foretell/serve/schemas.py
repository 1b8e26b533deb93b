"""Schemas of the bodies of requests, field by field, as OpenAI names them.

Values are read strictly ("1" is no number), unknown fields are refused by name, and fields that
OpenAI has but this server has not are refused unless their value changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from foretell.api.contexts import KIND
from foretell.core.renamed_options import rename_options
from foretell.errors import BadConfig
from foretell.serve.errors import ApiError

LONGEST_NAME = 64  # of an unknown field, as it is told
HUGE = 2**53  # whole numbers beyond it are no longer exact in every JSON reader
Count = Annotated[int, Field(ge=0, le=HUGE)]
Whole = Annotated[int, Field(ge=-HUGE, le=HUGE)]
Share = Annotated[float, Field(gt=0, le=1)]
Words = Annotated[str, Field(min_length=1, max_length=4096)]
Passage = Annotated[str, Field(min_length=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Best = Annotated[int, Field(ge=0, le=20)]
# Of many faults the first is told, and the others are not looked for.
Ids = Annotated[list[Count], Field(min_length=1, fail_fast=True)]
R = TypeVar("R", bound="Request")


def _union_side(value: Any) -> str:
    """Tells which side of a union a value is meant for: a fault is told of that side."""
    first_value = value[0] if isinstance(value, list) and value else None
    union_sides = {int: "ids", list: "many ids"}
    return union_sides.get(type(first_value), "list" if isinstance(value, list) else "one")


# Token ids are no texts, and a list of either is one of prompts.
Prompt = Annotated[
    Annotated[str, Tag("one")]
    | Annotated[list[str], Field(min_length=1, max_length=1024, fail_fast=True), Tag("list")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[list[Ids], Field(max_length=1024, fail_fast=True), Tag("many ids")],
    Discriminator(_union_side),
]


def _is_list(value: Any) -> str:
    return "list" if isinstance(value, list) else "one"


def _is_text(value: Any) -> str:
    return "text" if isinstance(value, str) else "other"


class Fields(BaseModel):
    """A JSON object whose fields are known."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    # Of each field that is not supported, the values that mean nothing.
    without: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        if not isinstance(body, Mapping):
            return body
        try:
            body = rename_options(body, cls.model_fields, "the field {}")
        except BadConfig as error:
            raise ApiError(str(error), None, "invalid_value") from None
        for field_name, harmless_values in cls.without.items():
            field_value = body.get(field_name)
            if field_value is not None and not any(
                field_value is harmless_value or field_value == harmless_value
                for harmless_value in harmless_values
            ):
                raise ApiError(
                    f"{field_name}: not supported by this server; leave it out",
                    field_name,
                    "unsupported_parameter",
                )
        known_names = {field.alias or field_name for field_name, field in cls.model_fields.items()}
        known_fields = {
            field_name: field_value
            for field_name, field_value in body.items()
            if field_name in known_names
        }
        unknown_names = [
            field_name
            for field_name in body
            if field_name not in known_names and field_name not in cls.without
        ]
        return known_fields | {
            field_name: body[field_name] for field_name in unknown_names[:1]
        }  # one is enough to refuse it


class StreamOptions(Fields):
    """Options of a stream."""

    without: ClassVar[Mapping[str, tuple[Any, ...]]] = {"include_obfuscation": (False,)}

    include_usage: bool = False


class Schema(Fields):
    """The `json_schema` of a response format."""

    name: Words
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema: goes with the type json_schema, and only with it")
        return self


class StructuredOutputs(Fields):
    """vLLM's way to ask for a form: exactly one of these."""

    json_: (
        Annotated[
            Annotated[str, Tag("text")] | Annotated[dict[str, Any], Tag("other")],
            Discriminator(_is_text),
        ]
        | None
    ) = Field(None, alias="json")
    regex: Words | None = None
    grammar: Annotated[str, Field(min_length=1, max_length=65536)] | None = None
    choice: Annotated[list[Words], Field(min_length=1, max_length=1024)] | None = None

    @model_validator(mode="after")
    def _check_single(self) -> StructuredOutputs:
        given_forms = (self.json_, self.regex, self.grammar, self.choice)
        if sum(value is not None for value in given_forms) != 1:
            raise ValueError("regex: give exactly one of json, regex, grammar and choice")
        return self


class Request(Fields):
    """The fields that both kinds of completions have in common."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Whole | None = None
    stop: (
        Annotated[
            Annotated[Words, Tag("one")]
            | Annotated[list[Words], Field(max_length=16), Tag("list")],
            Discriminator(_is_list),
        ]
        | None
    ) = None
    response_format: ResponseFormat | None = None
    # Who asks, and which prompts are alike: hints that change no answer, there as here.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Not OpenAI's.
    method: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    speculation: Literal["on", "off"] | None = None
    priority: Whole | None = None
    timeout: Annotated[float, Field(gt=0, le=86400)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=HUGE)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Share | None = None
    repetition_penalty: Annotated[float, Field(ge=0.001, le=100)] | None = None
    no_repeat_ngram_size: Count | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[list[Count], Field(max_length=256)] | None = None
    ignore_eos: bool | None = None
    bad_words: Annotated[list[Words], Field(max_length=256)] | None = None
    structured_outputs: StructuredOutputs | None = None
    guidance: Words | None = None
    kv: Words | None = None
    # Texts that are read apart, each after the prefix, and before what is asked.
    contexts: Annotated[list[Passage], Field(min_length=1, max_length=4096)] | None = None
    prefix: Passage | None = None
    expand: Annotated[list[Count], Field(max_length=4096)] | None = None
    reward: Words | None = None
    budget: Words | None = None
    processor: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    constraint: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    trace: bool | None = None

    @property
    def policy(self) -> str | None:
        """The cache policy that it comes under."""
        return KIND if self.kv is None and self.contexts is not None else self.kv

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _check_agreement(self) -> Request:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream")
        if self.trace and not self.stream:
            raise ValueError("trace: only with stream")
        if self.speculation == "off" and self.method not in (None, "auto", "plain"):
            raise ValueError("speculation: 'off' and a method contradict each other")
        if self.response_format is not None and self.structured_outputs is not None:
            raise ValueError("structured_outputs: not together with response_format")
        if self.prefix is not None and self.contexts is None:
            raise ValueError("prefix: only with contexts, which follow it")
        if self.expand is not None and self.contexts is None:
            raise ValueError("expand: only with contexts, whose numbers it has")
        return self


class CompletionRequest(Request):
    """The body of `POST /v1/completions`."""

    without: ClassVar[Mapping[str, tuple[Any, ...]]] = {"best_of": (1,), "suffix": ("",)}

    prompt: Prompt
    echo: bool | None = None
    logprobs: Best | None = None

    @model_validator(mode="after")
    def _one_question(self) -> CompletionRequest:
        if self.contexts is None:
            return self
        if not isinstance(self.prompt, str) and not isinstance(self.prompt[0], int):
            raise ValueError("contexts: with one prompt, the question; send several requests")
        if self.echo:
            raise ValueError("contexts: not together with echo")
        return self


class TextPart(Fields):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Fields):
    """A turn of a conversation."""

    without: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "tool_calls": ([],),
        "function_call": (),
        "refusal": (),
        "audio": (),
        "annotations": ([],),
        "tool_call_id": (),
    }

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, Tag("one")] | Annotated[list[TextPart], Field(min_length=1), Tag("list")],
        Discriminator(_is_list),
    ]
    name: str | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatRequest(Request):
    """The body of `POST /v1/chat/completions`."""

    without: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "best_of": (1,),
        "tools": ([],),
        "tool_choice": ("none",),
        "parallel_tool_calls": (),
        "functions": ([],),
        "function_call": ("none",),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": (),
        "verbosity": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "metadata": ({},),
        "web_search_options": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": (),
        "moderation": (),
    }

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Best | None = None

    @model_validator(mode="after")
    def _agree_in_chat(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs")
        if self.max_completion_tokens is not None and self.max_tokens is not None:
            raise ValueError("max_tokens: not together with max_completion_tokens")
        return self


def parse_json(text: bytes, name: str = "the body", code: str = "invalid_json") -> Any:
    """Parses a JSON text in UTF-8. Raises ApiError with this code, about what has this name."""
    try:
        return json.loads(text.decode(), parse_constant=_refuse_number)
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8 text (byte 0x{text[error.start]:02x})"
    except json.JSONDecodeError as error:
        reason = f"is no JSON: {error.msg} at character {error.pos + 1}"
    except RecursionError:
        reason = "is no JSON: it is nested too deeply"
    except ValueError as error:  # an enormous number, NaN
        reason = f"is no JSON: {str(error).partition(';')[0]}"
    raise ApiError(f"{name} {reason}", None, code)


def _refuse_number(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _field_names(kind: type[Fields]) -> Iterator[str]:
    """Yields the names of the fields of all objects below this one."""
    yield from kind.without
    yield from (field.alias or name for name, field in kind.model_fields.items())
    for subclass in kind.__subclasses__():
        yield from _field_names(subclass)


def parse_request(kind: type[R], body: Any) -> R:
    """Makes the request of a parsed body. Raises ApiError, which names the field at fault."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise of_pydantic(error) from None


def of_pydantic(error: ValidationError) -> ApiError:
    """The refusal for the faults that pydantic found in the fields of a body."""
    return of_faults(error.errors(include_url=False, include_context=False))


def of_faults(faults: Sequence[Mapping[str, Any]]) -> ApiError:
    """The refusal for the first of pydantic's faults; an unknown field may be a slip in another's
    name.

    The place is told by names of fields and indices; pydantic's has words of its own.
    """
    fault = max(faults, key=lambda candidate: candidate["type"] == "extra_forbidden")
    field_names = {*_field_names(Fields)}
    *path, last_part = fault["loc"] or ("",)
    fault_kind = str(fault["type"])
    known_parts = [part for part in path if isinstance(part, int) or part in field_names]
    if isinstance(last_part, int) or last_part in field_names or fault_kind == "extra_forbidden":
        known_parts.append(last_part)
    place_parts = [str(part)[:LONGEST_NAME] for part in known_parts]
    param = ".".join(place_parts) or None
    param_prefix = f"{param}: " if param else ""
    if fault_kind == "extra_forbidden":
        return ApiError(f"{param_prefix}unknown field", param, "unknown_field")
    if fault_kind == "missing":
        return ApiError(f"{param_prefix}is missing", param, "missing_required_parameter")
    if fault_kind in ("model_attributes_type", "model_type", "dict_type") and not place_parts:
        body_fault = "the body must be a JSON object, sent as Content-Type: application/json"
        return ApiError(body_fault, None, "invalid_json")
    message = str(fault["msg"]).removeprefix("Value error, ")
    if fault_kind == "value_error":  # a sentence of ours, which begins with the field
        name, _, message = message.partition(": ")
        param = ".".join([*place_parts, name])
        param_prefix = f"{param}: "
    return ApiError(f"{param_prefix}{message[:1].lower()}{message[1:]}", param, "invalid_value")
