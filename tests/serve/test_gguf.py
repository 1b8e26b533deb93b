"""A .gguf file that llama.cpp computes, after the server: its own tokenizer, and every field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("llama_cpp", reason="needs foretell[gguf]")
pytest.importorskip("gguf", reason="needs the package gguf, to write files")

import foretell
from foretell.serve.served import Served
from tests import tiny
from tests.serve.asked import chat, completion, joined, refused, stream
from tests.serve.live import Live, running

TEMPLATE = "{% for m in messages %}<|end|>{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
CHAT = "/v1/chat/completions"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    file = tiny.gguf(tiny.llama(), tmp_path_factory.mktemp("gguf") / "tiny.gguf", TEMPLATE)
    with running(foretell.load(file, backend="llama.cpp")) as live:
        yield live


@pytest.fixture
def asking(served: Live) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client


def test_tokens_stand_for_what_transformers_says(served: Live) -> None:
    ours = Served(served.lm, "ours")
    theirs = Served(tiny.lm(draft=False), "theirs")
    for token in range(len(tiny.tokenizer())):
        assert ours.token_bytes(token) == theirs.token_bytes(token), token
        assert ours.is_special(token) == theirs.is_special(token), token


@pytest.mark.parametrize("prompt", ["The quick", "<|end|>a", "\u4f60 \U0001f98a"])
def test_log_probabilities_are_told(served: Live, asking: httpx.Client, prompt: str) -> None:
    fields = {**GREEDY, "logprobs": 2}
    (choice,) = completion(asking, prompt, **fields)["choices"]
    assert len(choice["logprobs"]["tokens"]) == 6
    assert all(value <= 0 for value in choice["logprobs"]["token_logprobs"])
    documents = stream(asking, prompt=prompt, **fields)
    assert joined(documents) == choice["text"]
    (echoed,) = completion(asking, prompt, **fields, echo=True)["choices"]
    told, count = echoed["logprobs"], len(served.lm.encode(prompt))
    assert told["tokens"][count:] == choice["logprobs"]["tokens"]
    assert told["text_offset"][count] == len(prompt) and told["token_logprobs"][0] is None


def test_so_are_those_of_a_chat(asking: httpx.Client) -> None:
    fields = {**GREEDY, "logprobs": True, "top_logprobs": 2}
    (choice,) = chat(asking, **fields)["choices"]
    tokens = choice["logprobs"]["content"]
    assert len(tokens) == 6 and all(len(one["top_logprobs"]) == 2 for one in tokens)
    assert joined(stream(asking, CHAT, **fields)) == choice["message"]["content"]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("method", ["plain", "suffix", "auto"])
def test_forms_are_kept(asking: httpx.Client, method: str, streamed: bool) -> None:
    fields = {"method": method, "max_tokens": 60, "seed": 3}
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    form: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    def text(**form: Any) -> str:
        if streamed:
            return joined(stream(asking, CHAT, **fields, **form))
        return str(chat(asking, **fields, **form)["choices"][0]["message"]["content"])

    assert json.loads(text(response_format=form))["a"] in (1, 2)
    assert re.fullmatch("(ab|cd){2}", text(structured_outputs={"regex": "(ab|cd){2}"}))
    assert text(structured_outputs={"choice": ["yes", "no"]}) in ("yes", "no")


def test_a_trace_with_drafts_is_told(asking: httpx.Client) -> None:
    prompt = "a b c a b c a b"
    fields = {**GREEDY, "max_tokens": 24, "method": "ngram:nodes=4", "prompt": prompt}
    documents = stream(asking, **fields, trace=True)
    trees = [one["foretell"]["tree"] for one in documents if one.get("foretell", {}).get("tree")]
    assert trees and all(len(tree["tokens"]) == len(tree["parents"]) for tree in trees)
    assert joined(documents) == completion(asking, **fields)["choices"][0]["text"]


def test_what_needs_rows_of_its_own_is_refused_by_name(asking: httpx.Client) -> None:
    for fields, param in (({"contexts": ["one", "two"]}, "contexts"), ({"kv": "snapkv"}, "kv")):
        for path in ("/v1/completions", CHAT):
            assert refused(asking, path, **fields)["param"] == param


def test_stop_strings_wait_for_the_least_number_of_tokens(asking: httpx.Client) -> None:
    fields = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    whole = completion(asking, **fields)["choices"][0]["text"]
    stop = next(letter for letter in whole if letter.isascii())
    held = completion(asking, **fields, stop=stop, min_tokens=11)
    assert held["usage"]["completion_tokens"] == 12
