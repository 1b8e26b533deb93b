"""Every field of a body: those of OpenAI are known, and a fault is said of the field it is in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args, get_origin

import httpx
import pytest
from openai.types import chat, completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from foretell import wrap
from foretell.serve import schemas
from foretell.serve.errors import ApiError
from foretell.serve.schemas import ChatRequest, CompletionRequest, Fields, Message, StreamOptions
from foretell.serve.translate import translate_request
from tests import tiny
from tests.serve.asked import TEXT, completion, refused
from tests.serve.live import Live, running

KINDS: list[type[Fields]] = [ChatRequest, CompletionRequest]
WRONG: list[Any] = [{"x": {}}, [[{}]], [{}], [None], [1.5], ["a", 1], [1, "a"], 1.5, "", object()]
MESSAGES = [
    chat.ChatCompletionAssistantMessageParam,
    chat.ChatCompletionDeveloperMessageParam,
    chat.ChatCompletionSystemMessageParam,
    chat.ChatCompletionToolMessageParam,
    chat.ChatCompletionUserMessageParam,
]


def keys(kind: Any) -> set[str]:
    return {*kind.__required_keys__, *kind.__optional_keys__}


def names(kind: type[Fields]) -> set[str]:
    return {field.alias or name for name, field in kind.model_fields.items()}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (chat_create_params.CompletionCreateParamsNonStreaming, ChatRequest),
        (completion_create_params.CompletionCreateParamsNonStreaming, CompletionRequest),
        (chat.ChatCompletionStreamOptionsParam, StreamOptions),
        *((one, Message) for one in MESSAGES),
    ],
)
def test_every_field_of_openai_is_honoured_or_refused_by_name(
    theirs: Any, ours: type[Fields]
) -> None:
    """By the types of OpenAI's package: a field that is new there fails here."""
    unknown = keys(theirs) - names(ours) - {*ours.without}
    assert not unknown, f"{theirs.__name__}: {sorted(unknown)}"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_refused_by_name_says_so(kind: type[Any]) -> None:
    for name in kind.without:
        with pytest.raises(ApiError) as caught:
            schemas.parse_request(kind, {**body(kind), name: ["something"]})
        assert caught.value.param == name and caught.value.code == "unsupported_parameter"


def body(kind: type[Fields]) -> dict[str, Any]:
    if kind is ChatRequest:
        return {"messages": [{"role": "user", "content": "hi"}]}
    return {"prompt": TEXT}


def objects(annotation: Any) -> Iterator[type[Fields]]:
    """The kinds of objects in a field."""
    if isinstance(annotation, type) and issubclass(annotation, Fields):
        yield annotation
    for part in get_args(annotation):
        if get_origin(annotation) is not None or part is not annotation:
            yield from objects(part)


def places(kind: type[Fields], before: str = "") -> Iterator[tuple[str, Any]]:
    """Every field, those of objects in it included: its path, and what makes a body of a value."""
    for name, field in kind.model_fields.items():
        path = f"{before}{field.alias or name}"
        yield path, field.annotation
        for below in objects(field.annotation):
            many = path in ("messages", "messages.0.content")
            yield from places(below, f"{path}.0." if many else f"{path}.")


def put(document: Any, path: str, value: Any) -> dict[str, Any]:
    first, _, rest = path.partition(".")
    at: Any = int(first) if first.isdecimal() else first
    if isinstance(at, int):
        return [put({}, rest, value)] if rest else [value]  # type: ignore[return-value]
    inner = document.get(at, {}) if isinstance(document, dict) else {}
    inner = inner[0] if isinstance(inner, list) and inner else inner
    return {**document, at: put(inner, rest, value) if rest else value}


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_type_is_said_of_its_field(kind: type[Fields]) -> None:
    bare = lambda path: ".".join(part for part in path.split(".") if not part.isdecimal())  # noqa: E731
    known = {bare(path) for path, _ in places(kind)}
    count = 0
    for path, _ in places(kind):
        for value in WRONG:
            try:
                schemas.parse_request(kind, put(body(kind), path, value))  # type: ignore[type-var]
            except ApiError as error:
                count += 1
                param = str(error.param)
                plain, wanted = bare(param), bare(path)
                unknown = error.code in ("unknown_field", "unsupported_parameter")
                if unknown or error.code == "missing_required_parameter":
                    plain = plain.rpartition(".")[0] or plain
                shown = (path, value, param, error.message)
                related = plain.startswith(wanted) or wanted.startswith(plain)
                assert related, shown
                assert plain in known or unknown, shown
                assert error.message.startswith(f"{param}: ") and "\n" not in error.message, shown
                assert not re.search(r"constrained|\[|function|union|tag", error.message), shown
    assert count > 8 * len(known)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"stop": [5]}, "stop.0", "string"),
        ({"stop": ""}, "stop", "at least 1 character"),
        ({"prompt": [1, "a"]}, "prompt.1", "integer"),
        ({"prompt": ["a", 1]}, "prompt.1", "string"),
        ({"prompt": [[1], [-1]]}, "prompt.1.0", "greater than or equal to 0"),
        ({"prompt": []}, "prompt", "at least 1 item"),
        ({"prompt": [[]]}, "prompt.0", "at least 1 item"),
        ({"prompt": 5}, "prompt", "string"),
        ({"prompt": ["a"] * 1025}, "prompt", "at most 1024 items"),
        ({"prompt": ["a"] * 200}, "prompt", "200 prompts with 1 choices"),
        ({"prompt": ["a"] * 200, "n": 2}, "prompt", "200 prompts with 2 choices"),
        ({"prompt": ["a", "b"], "n": 100}, "n", "2 prompts with 100 choices"),
        ({"logit_bias": {"7": "much"}}, "logit_bias", "number"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "dictionary"),
        ({"structured_outputs": {"choice": [5]}}, "structured_outputs.choice.0", "string"),
        ({"x" * 5000: 1}, "x" * 64, "unknown field"),
    ],
)
def test_faults_are_told_as_they_are(
    client: httpx.Client, fields: dict[str, Any], param: str, said: str
) -> None:
    error = refused(client, **fields)
    assert error["param"] == param and said in error["message"], error


def test_a_prompt_of_many_ids_is_one_prompt(live: Live, client: httpx.Client) -> None:
    context = live.lm.models["target"].context
    error = refused(client, prompt=[7] * (context + 1025))
    assert error["param"] == "prompt" and error["code"] == "context_length_exceeded"
    assert f"it has {context + 1025} tokens" in error["message"]
    assert completion(client, [7] * 40, max_tokens=1)["usage"]["prompt_tokens"] == 40


NAMED = (
    "{% for m in messages %}{{ m.role }}"
    "{% if m.role == 'user' and m.name %} ({{ m.name }}){% endif %}: {{ m.content }}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"


@pytest.mark.parametrize("template", [NAMED, PLAIN, ""])
def test_a_name_is_honoured_or_refused(template: str) -> None:
    lm = tiny.lm()
    assert lm.tokenizer is not None
    lm.tokenizer.chat_template = template or None
    said = [{"role": "user", "content": "hi", "name": "Ann"}, {"role": "assistant", "content": "a"}]
    named = [said[0], {**said[1], "name": "Bob"}]

    def ids(messages: list[dict[str, str]]) -> list[int]:
        return translate_request(
            schemas.parse_request(ChatRequest, {"messages": messages}), lm
        ).prompts[0]

    if template == NAMED:
        assert "(Ann)" in lm.decode(ids(said)) and ids(said) != ids(said[1:])
    with pytest.raises(ApiError) as caught:
        ids(named)
    assert caught.value.param == "messages.1.name"
    assert caught.value.code == "unsupported_value" and "template" in caught.value.message


def test_what_needs_a_tokenizer_is_refused_by_name_without_one() -> None:
    lm = wrap(tiny.llama())
    with running(lm) as live, live.client() as client:
        assert completion(client, [5, 6], max_tokens=2, logprobs=1)["choices"]
        echoed = completion(client, [5, 6], max_tokens=1, logprobs=1, echo=True)["choices"][0]
        assert echoed["logprobs"]["text_offset"] == [0, 0, 0]
        for fields, param in (
            ({"prompt": "hi"}, "prompt"),
            ({"prompt": [5], "response_format": {"type": "json_object"}}, "response_format"),
            ({"prompt": [5], "structured_outputs": {"regex": "a"}}, "structured_outputs"),
            ({"prompt": [5], "stop": "a"}, "stop"),
        ):
            for streamed in (False, True):
                error = refused(client, **fields, stream=streamed)
                assert error["param"] == param and "tokenizer" in error["message"], error
