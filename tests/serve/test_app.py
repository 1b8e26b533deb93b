"""The routes over a live server: completions, chats, streams and what they say of themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

import foretell
from foretell.core.tree import TokenTree
from foretell.serve import app
from foretell.serve.settings import Settings
from tests import tiny
from tests.serve.asked import TEXT, chat, completion, joined, refused, stream
from tests.serve.live import NAME, Live, running
from tests.serve.test_guard import bearer, keys

GREEDY = {"temperature": 0, "max_tokens": 12}


def offline(live: Live, prompt: Any = TEXT, method: str = "plain", **sampling: Any) -> Any:
    return live.lm.generate(prompt, method, **sampling)


def test_a_greedy_answer_is_the_offline_one(live: Live, client: httpx.Client) -> None:
    expected = offline(live, max_new_tokens=12)
    answer = completion(client, **GREEDY)
    assert answer["choices"] == [
        {"index": 0, "text": expected.text, "logprobs": None, "finish_reason": "length"}
    ]
    prompt = len(live.lm.encode(TEXT))
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 12,
        "total_tokens": prompt + 12,
    }
    assert answer["object"] == "text_completion" and answer["model"] == NAME


@pytest.mark.parametrize("form", ["text", "ids", "texts", "many ids"])
def test_a_prompt_has_four_forms(live: Live, client: httpx.Client, form: str) -> None:
    ids = live.lm.encode(TEXT)
    prompt = {"text": TEXT, "ids": ids, "texts": [TEXT, "a"], "many ids": [ids, [5]]}[form]
    choices = completion(client, prompt, **GREEDY)["choices"]
    assert [choice["index"] for choice in choices] == list(
        range(1 + ("many" in form or "texts" in form))
    )
    assert choices[0]["text"] == offline(live, max_new_tokens=12).text


def test_samples_have_the_seed_and_those_after_it(live: Live, client: httpx.Client) -> None:
    answer = completion(client, temperature=1, seed=7, n=3, max_tokens=10)
    for k, choice in enumerate(answer["choices"]):
        expected = offline(live, temperature=1.0, seed=7 + k, max_new_tokens=10)
        assert choice["text"] == expected.text
    assert answer["usage"]["completion_tokens"] == 30
    assert answer["usage"]["prompt_tokens"] == len(live.lm.encode(TEXT))


def test_without_a_seed_answers_differ(client: httpx.Client) -> None:
    texts = {completion(client, temperature=1)["choices"][0]["text"] for _ in range(3)}
    assert len(texts) > 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_streams_say_what_whole_answers_say(client: httpx.Client, path: str) -> None:
    fields = {"temperature": 1, "seed": 3, "n": 2, "max_tokens": 10}
    whole = (chat if "chat" in path else completion)(client, **fields)
    documents = stream(client, path, **fields, stream_options={"include_usage": True})
    for choice in whole["choices"]:
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert joined(documents, choice["index"]) == text
    assert documents[-1]["usage"] == whole["usage"] and documents[-1]["choices"] == []
    ends = [c["finish_reason"] for d in documents for c in d["choices"] if c["finish_reason"]]
    assert ends == ["length", "length"]
    told = [document["foretell"] for document in documents if "foretell" in document]
    assert [one["guarantee"] for one in told] == [whole["foretell"]["guarantee"]]


def test_a_chat_says_who_speaks_first(client: httpx.Client) -> None:
    documents = stream(client, "/v1/chat/completions", **GREEDY)
    assert documents[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(document["object"] == "chat.completion.chunk" for document in documents)
    assert joined(documents) == chat(client, **GREEDY)["choices"][0]["message"]["content"]


def test_a_chat_without_a_template_is_a_plain_text(live: Live, client: httpx.Client) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    answer = client.post("/v1/chat/completions", json={"messages": messages, **GREEDY}).json()
    text = "system:\nBe brief.\n\nuser:\nhi\n\nassistant:\n"
    assert answer["choices"][0]["message"]["content"] == offline(live, text, max_new_tokens=12).text


def test_an_answer_in_a_chat_may_fill_the_context(live: Live, client: httpx.Client) -> None:
    answer = chat(client, temperature=0, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == tiny.CONTEXT
    assert completion(client, temperature=0, ignore_eos=True)["usage"]["completion_tokens"] == 16


def test_rows_and_warpers_go_with_any_method(live: Live, client: httpx.Client) -> None:
    fields = {"guidance": "cfg:g=2,negative=300 5", "processor": "momentum:alpha=0.3+rpg"}
    wanted = offline(live, max_new_tokens=12, **fields).text
    assert wanted != offline(live, max_new_tokens=12).text
    for method in ("plain", "suffix", "token-recycling:nodes=4"):
        answer = completion(client, **GREEDY, method=method, **fields)
        assert answer["choices"][0]["text"] == wanted


def test_a_method_that_finds_several_texts_tells_all(live: Live, client: httpx.Client) -> None:
    """Without a temperature, since beam search draws nothing."""
    fields = {"method": "beam:width=3", "max_tokens": 6, "n": 2}
    answer = completion(client, **fields)
    told = answer["foretell"]["samples"]
    found = offline(live, method="beam:width=3", max_new_tokens=6).samples
    assert told[0] == told[1] and len(told) == 2
    assert [one["text"] for one in told[0]] == [one.text for one in found]
    assert [one["score"] for one in told[0]] == pytest.approx([one.score for one in found])
    assert told[0][0]["text"] == answer["choices"][0]["text"]
    refused = client.post(
        "/v1/completions", json={"prompt": TEXT, "method": "beam", "temperature": 0.7}
    )
    assert refused.status_code == 400 and "nothing is drawn" in refused.text


def test_an_answer_tells_how_it_came_about(client: httpx.Client) -> None:
    told = completion(client, **GREEDY, method="token-recycling:nodes=4")["foretell"]
    assert told["method"] == "token-recycling" and told["guarantee"] == "exact"
    assert told["computed_by"] == "torch" and told["steps"] > 0
    assert 1 <= told["tokens_per_step"] <= 12 / told["steps"] + 1e-3
    assert 0 <= told["accepted"] <= told["drafted"] > 0
    plain = completion(client, **GREEDY, speculation="off")["foretell"]
    assert plain["method"] == "plain" and plain["drafted"] == 0
    assert plain["forwards"] >= plain["steps"] and "samples" not in plain
    guided = completion(client, **GREEDY, guidance="cfg:g=2")["foretell"]
    assert guided["guarantee"].startswith("lossy") and guided["forwards"] > guided["steps"]
    lossy = completion(client, **GREEDY, method="suffix:rule=typical")["foretell"]
    assert lossy["guarantee"].startswith("lossy")


def test_a_traced_stream_shows_each_step(live: Live, client: httpx.Client) -> None:
    documents = stream(client, **GREEDY, method="token-recycling:nodes=4", trace=True)
    told = [document["foretell"] for document in documents]
    tokens = sum(len(one["parts"]) for one in told)
    assert tokens == 12 == sum(len(one["sources"]) for one in told)
    trees = [one["tree"] for one in told if one["tree"]]
    assert trees
    for tree in trees:
        assert tree["parents"][0] == -1
        count = len(tree["tokens"])
        assert count == len(tree["parents"]) == len(tree["sources"]) > 1
        assert all(0 < node < count for node in tree["accepted"])
    assert told[-1]["steps"] > 0


def test_log_probabilities_of_a_completion(live: Live, client: httpx.Client) -> None:
    expected = offline(live, max_new_tokens=12, logprobs=2).logprobs
    told = completion(client, **GREEDY, logprobs=2)["choices"][0]["logprobs"]
    assert told["token_logprobs"] == pytest.approx([one["logprob"] for one in expected])
    for best, one in zip(told["top_logprobs"], expected, strict=True):
        assert max(best.values()) == pytest.approx(one["top"][0]["logprob"])
    assert len(told["tokens"]) == len(told["text_offset"]) == 12


def test_log_probabilities_of_a_stream_are_those_of_the_whole(client: httpx.Client) -> None:
    whole = completion(client, **GREEDY, logprobs=1)["choices"][0]["logprobs"]
    documents = stream(client, **GREEDY, logprobs=1)
    for name, values in whole.items():
        parts = [choice["logprobs"][name] for d in documents for choice in d["choices"]]
        found = [value for part in parts for value in part]
        if name != "top_logprobs":
            assert found == pytest.approx(values) if name == "token_logprobs" else found == values
        assert len(found) == len(values)
    in_chat = chat(client, **GREEDY, logprobs=True, top_logprobs=1)["choices"][0]["logprobs"]
    documents = stream(client, "/v1/chat/completions", **GREEDY, logprobs=True, top_logprobs=1)
    parts = [c["logprobs"] or {"content": []} for d in documents for c in d["choices"]]
    found = [entry for part in parts for entry in part["content"]]
    assert [entry["token"] for entry in found] == [e["token"] for e in in_chat["content"]]


def test_bytes_of_tokens_add_up_to_the_text(client: httpx.Client) -> None:
    choice = chat(client, temperature=0, max_tokens=40, logprobs=True)["choices"][0]
    said = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    assert said.decode("utf-8", errors="replace") == choice["message"]["content"]


def test_echo_scores_the_prompt(live: Live, client: httpx.Client) -> None:
    ids = live.lm.encode(TEXT)
    answer = completion(client, TEXT, echo=True, logprobs=1, max_tokens=1, temperature=0)
    choice = answer["choices"][0]
    expected = offline(live, max_new_tokens=1)
    assert choice["text"] == TEXT + expected.text
    told = choice["logprobs"]
    target = live.lm.models["target"]
    rows = target.score(ids[:1], TokenTree(ids[0]).chain(ids[1:])).log_softmax(-1)
    values = [float(row[token]) for row, token in zip(rows, ids[1:], strict=False)]
    assert told["token_logprobs"][0] is None
    assert told["token_logprobs"][1 : len(ids)] == pytest.approx(values, abs=1e-4)
    assert len(told["token_logprobs"]) == len(ids) + 1
    assert "".join(told["tokens"][: len(ids)]) == TEXT
    offsets = told["text_offset"]
    assert offsets == sorted(offsets) and offsets[len(ids)] == len(TEXT)
    whole = completion(client, TEXT, echo=True, logprobs=1, max_tokens=0, temperature=0)
    assert whole["choices"][0]["text"] == TEXT
    assert len(whole["choices"][0]["logprobs"]["tokens"]) == len(ids)
    streamed = stream(client, echo=True, logprobs=1, max_tokens=1, temperature=0)
    assert joined(streamed) == choice["text"]


def test_echo_of_a_prompt_of_one_token(client: httpx.Client) -> None:
    told = completion(client, [5], echo=True, logprobs=0, max_tokens=0)["choices"][0]["logprobs"]
    assert told["token_logprobs"] == [None]


def test_models_and_versions(live: Live, client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == [NAME]
    assert listed[0]["max_model_len"] == tiny.CONTEXT
    assert client.get(f"/v1/models/{NAME}").json() == listed[0]
    missing = client.get("/v1/models/other")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"
    assert refused(client, status=404, model="other")["param"] == "model"
    assert client.get("/version").json() == {"version": foretell.__version__}
    assert client.get("/health").json()["status"] == "ok"


def test_status_is_for_people_who_watch(client: httpx.Client) -> None:
    completion(client, **GREEDY)
    told = client.get("/foretell/status").json()
    assert told["model"] == NAME and told["generation_tokens"] >= 12
    guarantees = {one["name"]: one["guarantee"] for one in told["methods"]}
    assert guarantees["plain"] == guarantees["suffix"] == "exact"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"surprise": 1}, "surprise"),
        ("/v1/completions", {"best_of": 2}, "best_of"),
        ("/v1/completions", {"suffix": "x"}, "suffix"),
        ("/v1/chat/completions", {"tools": [{"type": "function"}]}, "tools"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "x", "content": ""}]}, "messages.0.role"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages.0.content"),
        ("/v1/completions", {"temperature": "1"}, "temperature"),
        ("/v1/completions", {"temperature": 3}, "temperature"),
        ("/v1/completions", {"top_p": 0}, "top_p"),
        ("/v1/completions", {"n": 0}, "n"),
        ("/v1/completions", {"logprobs": 21}, "logprobs"),
        ("/v1/completions", {"prompt": [10**6]}, "prompt"),
        ("/v1/completions", {"prompt": [1] * tiny.CONTEXT}, "prompt"),
        ("/v1/completions", {"logit_bias": {"x": 1}}, "logit_bias"),
        ("/v1/completions", {"logit_bias": {"100000": 1}}, "logit_bias"),
        ("/v1/completions", {"stop_token_ids": [100000]}, "stop_token_ids"),
        ("/v1/completions", {"min_tokens": 99}, "min_tokens"),
        ("/v1/completions", {"method": "sufix"}, "method"),
        ("/v1/completions", {"method": "rest:path=/etc/passwd"}, "method"),
        ("/v1/completions", {"method": "cascade:inner=(rest:path=passwd)"}, "method"),
        ("/v1/completions", {"method": "input-guided:source=@/etc/passwd"}, "method"),
        ("/v1/completions", {"method": "ngram:n=10001"}, "method"),
        ("/v1/completions", {"method": "ngram:n=x"}, "method"),
        ("/v1/completions", {"method": "draft"}, "method"),
        ("/v1/completions", {"method": "suffix", "speculation": "off"}, "speculation"),
        ("/v1/completions", {"guidance": "cgf"}, "guidance"),
        ("/v1/completions", {"guidance": "cfg:g=x"}, "guidance"),
        ("/v1/completions", {"guidance": "cfg:negative=@/etc/passwd"}, "guidance"),
        ("/v1/completions", {"guidance": "lol:amateur=./folder"}, "guidance"),
        ("/v1/completions", {"processor": "momentum:k=0"}, "processor"),
        ("/v1/completions", {"processor": "momentum+nothing"}, "processor"),
        ("/v1/completions", {"processor": ""}, "processor"),
        ("/v1/completions", {"constraint": "monitor"}, "constraint"),
        ("/v1/completions", {"stream_options": {}}, "stream_options"),
        ("/v1/completions", {"trace": True}, "trace"),
        ("/v1/completions", {"n": 128, "prompt": ["a", "b"]}, "n"),
        ("/v1/completions", {"structured_outputs": {}}, "structured_outputs.regex"),
        ("/v1/completions", {"response_format": {"type": "json_schema"}},
         "response_format.json_schema"),
        ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", {"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(
    client: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    error = refused(client, path, **fields)
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error"
    assert param.split(".")[0].split("_")[0] in error["message"] and "\n" not in error["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 50_000, b'{"prompt": "a"} x', b"1" * 5000]
)
def test_a_body_that_is_no_object(client: httpx.Client, body: bytes) -> None:
    answer = client.post(
        "/v1/completions", content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_what_changes_nothing_is_taken(client: httpx.Client) -> None:
    chat(client, **GREEDY, tools=[], store=False, service_tier="auto", user="me", top_k=-1)
    messages = [{"role": "user", "content": "a"},
                {"role": "assistant", "content": "b", "refusal": None, "tool_calls": None},
                {"role": "user", "content": "c"}]  # fmt: skip
    answer = client.post("/v1/chat/completions", json={"messages": messages, **GREEDY})
    assert answer.status_code == 200


def test_other_paths_and_verbs(client: httpx.Client) -> None:
    assert client.get("/nowhere").json()["error"]["type"] == "invalid_request_error"
    assert client.get("/v1/completions").status_code == 405
    assert client.get("/openapi.json").json()["info"]["title"] == "foretell"


def test_files_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "index.html").write_text("<p>hello")
    (tmp_path / "main.js").write_text("let a = 1;")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "style.css").write_text("p {}")
    monkeypatch.setattr(app, "PAGE", tmp_path)
    with running(settings=Settings(keys=keys())) as live, live.client() as client:
        for path, kind in (("/", "html"), ("/index.html", "html"), ("/main.js", "javascript"),
                           ("/more/style.css", "css")):  # fmt: skip
            answer = client.get(path)
            assert answer.status_code == 200 and kind in answer.headers["content-type"]
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        for path in ("/none.js", "/more", "/../pyproject.toml", "/%2e%2e/app.py"):
            assert client.get(path).status_code == 404, path
        assert client.get("/v1/completions", headers=bearer()).status_code == 405
