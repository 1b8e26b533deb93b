"""What may be asked: the bodies of requests, field by field, as OpenAI names them.

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


def _side(value: Any) -> str:
    """For which side of a union a value is meant: what is wrong with it is said of that one."""
    first = value[0] if isinstance(value, list) and value else None
    sides = {int: "ids", list: "many ids"}
    return sides.get(type(first), "list" if isinstance(value, list) else "one")


# Token ids are no texts, and a list of either is one of prompts.
Prompt = Annotated[
    Annotated[str, Tag("one")]
    | Annotated[list[str], Field(min_length=1, max_length=1024, fail_fast=True), Tag("list")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[list[Ids], Field(max_length=1024, fail_fast=True), Tag("many ids")],
    Discriminator(_side),
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
    def _without(cls, body: Any) -> Any:
        if not isinstance(body, Mapping):
            return body
        for name, harmless in cls.without.items():
            value = body.get(name)
            if value is not None and not any(value is one or value == one for one in harmless):
                raise ApiError(
                    f"{name}: not supported by this server; leave it out",
                    name,
                    "unsupported_parameter",
                )
        named = {field.alias or name for name, field in cls.model_fields.items()}
        read = {name: value for name, value in body.items() if name in named}
        unknown = [name for name in body if name not in named and name not in cls.without]
        return read | {name: body[name] for name in unknown[:1]}  # one is enough to refuse it


class StreamOptions(Fields):
    """What else a stream tells."""

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
    def _whole(self) -> ResponseFormat:
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
    def _one(self) -> StructuredOutputs:
        given = (self.json_, self.regex, self.grammar, self.choice)
        if sum(value is not None for value in given) != 1:
            raise ValueError("regex: give exactly one of json, regex, grammar and choice")
        return self


class Request(Fields):
    """What both kinds of completions have in common."""

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
    rows: Words | None = None
    kv: Words | None = None
    # Texts that are read apart, each behind the prefix, and before what is asked.
    contexts: Annotated[list[Passage], Field(min_length=1, max_length=4096)] | None = None
    prefix: Passage | None = None
    expand: Annotated[list[Count], Field(max_length=4096)] | None = None
    reward: Words | None = None
    budget: Words | None = None
    warp: Annotated[str, Field(min_length=1, max_length=200)] | None = None
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
    def _agree(self) -> Request:
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
    """`POST /v1/completions`."""

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
    """`POST /v1/chat/completions`."""

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


def document(text: bytes, name: str = "the body", code: str = "invalid_json") -> Any:
    """The value of a JSON text in UTF-8. Raises ApiError with this code, of what has this name."""
    try:
        return json.loads(text.decode(), parse_constant=_refused)
    except UnicodeDecodeError as error:
        why = f"is not UTF-8 text (byte 0x{text[error.start]:02x})"
    except json.JSONDecodeError as error:
        why = f"is no JSON: {error.msg} at character {error.pos + 1}"
    except RecursionError:
        why = "is no JSON: it is nested too deeply"
    except ValueError as error:  # an enormous number, NaN
        why = f"is no JSON: {str(error).partition(';')[0]}"
    raise ApiError(f"{name} {why}", None, code)


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _names(kind: type[Fields]) -> Iterator[str]:
    """Of the fields of all objects below this one."""
    yield from kind.without
    yield from (field.alias or name for name, field in kind.model_fields.items())
    for below in kind.__subclasses__():
        yield from _names(below)


def parse(kind: type[R], body: Any) -> R:
    """The request of a body that JSON made. Raises ApiError, which names the field at fault."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise of_pydantic(error) from None


def of_pydantic(error: ValidationError) -> ApiError:
    """What is wrong with the fields of a body."""
    return of_faults(error.errors(include_url=False, include_context=False))


def of_faults(faults: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first of pydantic's faults; a field that is not known may be a slip in another's name.

    The place is told by names of fields and indices; pydantic's has words of its own.
    """
    fault = max(faults, key=lambda one: one["type"] == "extra_forbidden")
    names = {*_names(Fields)}
    *path, last = fault["loc"] or ("",)
    kind = str(fault["type"])
    known = [part for part in path if isinstance(part, int) or part in names]
    if isinstance(last, int) or last in names or kind == "extra_forbidden":
        known.append(last)
    place = [str(part)[:LONGEST_NAME] for part in known]
    param = ".".join(place) or None
    where = f"{param}: " if param else ""
    if kind == "extra_forbidden":
        return ApiError(f"{where}unknown field", param, "unknown_field")
    if kind == "missing":
        return ApiError(f"{where}is missing", param, "missing_required_parameter")
    if kind in ("model_attributes_type", "model_type", "dict_type") and not place:
        said = "the body must be a JSON object, sent as Content-Type: application/json"
        return ApiError(said, None, "invalid_json")
    message = str(fault["msg"]).removeprefix("Value error, ")
    if kind == "value_error":  # a sentence of ours, which begins with the field
        name, _, message = message.partition(": ")
        param = ".".join([*place, name])
        where = f"{param}: "
    return ApiError(f"{where}{message[:1].lower()}{message[1:]}", param, "invalid_value")
