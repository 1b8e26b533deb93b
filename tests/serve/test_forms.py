"""JSON and other forms of answers over HTTP, with drafts and without (complaints 16 to 19)."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from foretell.api.arguments import FIELDS
from tests.serve.asked import chat, completion, joined, refused, stream

pytestmark = pytest.mark.skipif("regex" not in FIELDS, reason="sampling has no forms yet")
METHODS = ("plain", "token-recycling:nodes=6")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yes"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def one_of_them(text: str) -> bool:
    document = json.loads(text)
    return document["a"] in ("x", "yes") and isinstance(document["b"], bool)


NAMED = {"name": "n", "schema": SCHEMA}
FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": NAMED}},
        one_of_them,
    ),
    "json": ({"structured_outputs": {"json": SCHEMA}}, one_of_them),
    "json as text": ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, one_of_them),
    "regex": (
        {"structured_outputs": {"regex": "(ab|cd){2,4}!"}},
        re.compile("(ab|cd){2,4}!").fullmatch,
    ),
    "choice": ({"structured_outputs": {"choice": ["no (never)", "a|b"]}},
               ("no (never)", "a|b").__contains__),
    "grammar": ({"structured_outputs": {"grammar": 'start: "up" | "down"'}},
                ("up", "down").__contains__),
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("form", FORMS)
def test_a_form_holds(client: httpx.Client, form: str, method: str) -> None:
    fields, holds = FORMS[form]
    asked = {**fields, "method": method, "max_tokens": 90, "temperature": 1, "seed": 3}
    choice = completion(client, **asked)["choices"][0]
    assert choice["finish_reason"] == "stop" and holds(choice["text"]), choice
    assert joined(stream(client, **asked)) == choice["text"]
    said = chat(client, **asked)["choices"][0]["message"]["content"]
    assert holds(said), said


def test_a_form_is_the_same_with_drafts(client: httpx.Client) -> None:
    fields, _ = FORMS["json"]
    texts = []
    for method in METHODS:
        answer = completion(client, **fields, method=method, max_tokens=60, temperature=0)
        texts.append(answer["choices"][0]["text"])
    assert texts[0] == texts[1]


def test_an_object_of_any_kind_is_one_however_short(client: httpx.Client) -> None:
    for most in (3, 40):
        answer = chat(client, response_format={"type": "json_object"}, max_tokens=most, seed=1)
        assert isinstance(json.loads(answer["choices"][0]["message"]["content"]), dict)
        assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "[ab"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "x y z"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"type": "nope"}}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"contains": {"type": "null"}}}}, "structured_outputs"),
        ({"structured_outputs": {"json": '{"enum": ["\\ud83d"]}'}}, "structured_outputs"),
        ({"structured_outputs": {"json": '{"enum": [NaN]}'}}, "structured_outputs"),
        ({"structured_outputs": {"json": '[' * 200 + ']' * 200}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "structured_outputs"),
        (
            {"response_format": {"type": "json_schema",
                                 "json_schema": {"name": "n", "schema": {"type": 3}}}},
            "response_format",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
    ],
)  # fmt: skip
def test_a_form_that_is_none_is_refused(client: httpx.Client, fields: Any, param: str) -> None:
    for streamed in (False, True):
        assert refused(client, **fields, stream=streamed)["param"] == param
