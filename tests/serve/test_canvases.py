"""A model that fills canvases after the server: what is finished, what stands where, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from foretell.api import defaults
from foretell.api.lm import LM
from foretell.models.diffusion.canvas import Denoiser
from tests import tiny
from tests.serve.asked import TEXT, chat, completion, joined, refused, stream
from tests.serve.live import Live, running, until

GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    words: Any = tiny.tokenizer()
    model = Denoiser(tiny.llama(), "tiny", mask_id=len(words) - 9)
    with running(LM(model, words, eos=(0,))) as server:
        yield server


@pytest.fixture
def client(live: Live) -> Iterator[httpx.Client]:
    with live.client() as client:
        yield client


def offline(live: Live, **options: Any) -> Any:
    return live.lm.generate(TEXT, max_new_tokens=12, ignore_eos=True, **options)


def test_answers_are_those_of_python(live: Live, client: httpx.Client) -> None:
    answer = completion(client, **GREEDY, logprobs=2)
    wanted = offline(live, logprobs=2)
    (choice,) = answer["choices"]
    assert choice["text"] == wanted.text and choice["finish_reason"] == "length"
    told = choice["logprobs"]["token_logprobs"]
    assert told == pytest.approx([entry["logprob"] for entry in wanted.logprobs])
    about = answer["foretell"]
    assert about["method"] == "threshold" and about["guarantee"].startswith("lossy")
    calls = wanted.stats.calls["target"]
    assert (about["forwards"], about["rows"]) == (calls, wanted.stats.rows["target"])
    assert about["rows"] == calls * (len(live.lm.encode(TEXT)) + 12)


def test_a_stream_has_the_finished_beginning(live: Live, client: httpx.Client) -> None:
    fields = {**GREEDY, "method": "confidence:block=4"}
    documents = stream(client, **fields)
    assert joined(documents) == offline(live, method="confidence:block=4").text
    assert all("placed" not in document.get("foretell", {}) for document in documents)
    assert all(d["choices"][0]["text"] or d["choices"][0]["finish_reason"] for d in documents)


def test_a_traced_stream_tells_what_stands_where(live: Live, client: httpx.Client) -> None:
    fields = {**GREEDY, "method": "remdm:block=12,count=3"}
    documents = stream(client, **fields, trace=True)
    told = [d["foretell"] for d in documents if "placed" in d.get("foretell", {})]
    assert told[0]["length"] == 12 and told[0]["placed"] == []
    canvas: list[str | None] = [None] * 12
    back = 0
    for one in told:
        for position, text in one["placed"]:
            back += text is None
            canvas[position] = text
    tokens = offline(live, method="remdm:block=12,count=3").tokens
    assert canvas == [live.service.served.token_text(token) for token in tokens] and back >= 2
    assert joined(documents) == joined(stream(client, **fields))


def test_without_speculation_a_token_takes_a_forward(client: httpx.Client) -> None:
    about = completion(client, **GREEDY, speculation="off")["foretell"]
    assert (about["method"], about["forwards"]) == ("confidence", 12)


def test_a_chat_has_no_canvas_as_long_as_the_context(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(defaults, "CANVAS_TOKENS", 9)
    answer = chat(client, temperature=0, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 9


def test_the_status_lists_what_the_model_can_run(client: httpx.Client) -> None:
    status = client.get("/foretell/status").json()
    names = {method["name"] for method in status["methods"]}
    assert status["plain"] == "confidence" and status["method"] == "threshold"
    assert {"threshold", "freedave"} <= names and not {"plain", "suffix"} & names


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"),
        ({"bad_words": ["fox"]}, "bad_words"),
        ({"processor": "momentum"}, "processor"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        ({"guidance": "cfg:g=2,negative=5 9"}, "guidance"),
        ({"kv": "snapkv"}, "kv"),
        ({"kv": "window", "method": "freedave"}, None),
        ({"reward": "keywords:words=dog"}, None),
        ({"prompt": [5, len(tiny.tokenizer()) - 9, 6]}, "prompt"),
        ({"method": "plain"}, "method"),
        ({"method": "best-of", "reward": "keywords:words=dog"}, "temperature"),
        ({"method": "best-of", "reward": "keywords:words=dog", "temperature": 0.8}, "method"),
        ({"echo": True, "logprobs": 1}, "echo"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_what_cannot_be_honoured_is_refused(
    client: httpx.Client, fields: dict[str, Any], param: str | None, streamed: bool
) -> None:
    error = refused(client, **{"max_tokens": 8, "temperature": 0, "stream": streamed} | fields)
    assert error["param"] == param or param is None
    assert "\n" not in error["message"]


def test_who_leaves_leaves_nothing_behind(live: Live, client: httpx.Client) -> None:
    fields = {"prompt": TEXT, "max_tokens": 90, "method": "freedave:block=0", "ignore_eos": True}
    body = {**fields, "stream": True, "trace": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    until(lambda: not live.lm.engine.live)
    assert live.lm.engine.status()["cache_bytes"] == 0 and live.lm.check_integrity() == []
