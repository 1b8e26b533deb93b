"""What users of other servers complained of, over HTTP. The numbers are those of their list."""

from __future__ import annotations

from collections import Counter
from typing import Any

import httpx
import pytest

from tests.serve.asked import TEXT, chat, completion, joined, stream
from tests.serve.live import Live

DRAFTED = "token-recycling:nodes=6"
METHODS = ("suffix", DRAFTED, "ngram:nodes=4", "auto")
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


def text(client: httpx.Client, **fields: Any) -> str:
    return completion(client, **fields)["choices"][0]["text"]


@pytest.mark.parametrize("method", METHODS)
def test_7_8_10_greedy_answers_are_the_same_with_drafts(client: httpx.Client, method: str) -> None:
    plain = completion(client, **GREEDY, method="plain")
    drafted = completion(client, **GREEDY, method=method)
    assert drafted["choices"] == plain["choices"]
    assert drafted["foretell"]["guarantee"] == "exact"


def test_5_6_each_request_may_go_without_drafts(client: httpx.Client) -> None:
    with_drafts = completion(client, **GREEDY, method=DRAFTED)
    without = completion(client, **GREEDY, speculation="off")
    assert with_drafts["foretell"]["drafted"] > 0 == without["foretell"]["drafted"]
    assert with_drafts["choices"] == without["choices"]


def test_11_temperature_is_not_ignored(client: httpx.Client) -> None:
    for method in (DRAFTED, "plain"):
        fields = {"max_tokens": 16, "method": method}
        hot = {text(client, **fields, temperature=1.5, seed=seed) for seed in range(4)}
        cold = {text(client, **fields, temperature=0, seed=seed) for seed in range(2)}
        assert len(hot) == 4 and len(cold) == 1


SAMPLINGS = [
    {"temperature": 1.2, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 5, "min_p": 0.05},
    {"temperature": 0.0, "frequency_penalty": 1.5},
    {"temperature": 0.0, "presence_penalty": 1.5, "repetition_penalty": 1.3},
    {"temperature": 1.0, "no_repeat_ngram_size": 2, "typical_p": 0.9},
    {"temperature": 0.0, "logit_bias": {"100": 5, "40": -100}, "bad_words": ["the"]},
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda sampling: "+".join(sampling))
def test_12_13_14_no_sampling_field_is_lost_with_drafts(
    live: Live, client: httpx.Client, sampling: dict[str, Any]
) -> None:
    fields = {"max_tokens": 24, "ignore_eos": True, "seed": 11}
    plain = text(client, **fields, **sampling, method="plain")
    assert text(client, **fields, **sampling, method=DRAFTED) == plain
    neutral = {"temperature": sampling["temperature"]}
    assert plain != text(client, **fields, **neutral, method="plain")  # the field does something
    ours = {**sampling, "logit_bias": {100: 5, 40: -100}} if "logit_bias" in sampling else sampling
    offline = live.lm.generate(TEXT, "plain", max_new_tokens=24, ignore_eos=True, seed=11, **ours)
    assert plain == offline.text


def test_13_penalties_count_tokens_not_steps(client: httpx.Client) -> None:
    fields = {**GREEDY, "max_tokens": 60, "logprobs": 0, "frequency_penalty": 2.0}
    counts = []
    for method in ("plain", DRAFTED):
        choice = completion(client, **fields, method=method)["choices"][0]
        counts.append(Counter(choice["logprobs"]["tokens"]).most_common(3))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("method", ["plain", DRAFTED])
def test_20_log_probabilities_are_there_and_true(
    live: Live, client: httpx.Client, method: str
) -> None:
    told = completion(client, **GREEDY, method=method, logprobs=3)["choices"][0]["logprobs"]
    expected = live.lm.generate(TEXT, "plain", max_new_tokens=24, ignore_eos=True, logprobs=3)
    values = [entry["logprob"] for entry in expected.logprobs]
    assert told["token_logprobs"] == pytest.approx(values, abs=1e-4)
    assert all(value < 0 for value in told["token_logprobs"])
    for value, best in zip(told["token_logprobs"], told["top_logprobs"], strict=True):
        assert 1 <= len(best) <= 4 and value == pytest.approx(max(best.values()), abs=1e-4)


@pytest.mark.parametrize("method", ["plain", DRAFTED])
def test_21_nothing_behind_a_stop_string_is_told(client: httpx.Client, method: str) -> None:
    whole = completion(client, **GREEDY, method="plain", logprobs=1)["choices"][0]
    stop = whole["text"][6:8]
    cut = whole["text"].index(stop)
    fields = {**GREEDY, "method": method, "stop": stop, "logprobs": 1}
    choice = completion(client, **fields)["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["text"] == whole["text"][:cut]
    told = choice["logprobs"]
    assert all(offset < cut for offset in told["text_offset"])
    kept = len(told["tokens"])
    assert told["tokens"] == whole["logprobs"]["tokens"][:kept]
    assert all(len(values) == kept for values in told.values())
    documents = stream(client, **fields)
    assert joined(documents) == choice["text"]
    streamed = [t for d in documents for c in d["choices"] for t in c["logprobs"]["tokens"]]
    assert streamed == told["tokens"]
    said = chat(client, **GREEDY, method=method)["choices"][0]["message"]["content"]
    stop = said[5:7]
    short = chat(client, **GREEDY, method=method, stop=[stop], logprobs=True)["choices"][0]
    assert short["message"]["content"] == said[: said.index(stop)]
    spelled = b"".join(bytes(t["bytes"]) for t in short["logprobs"]["content"])
    assert len(spelled.decode(errors="replace")) >= len(short["message"]["content"])


def test_22_no_text_is_lost_where_a_step_has_many_tokens(client: httpx.Client) -> None:
    documents = stream(client, **GREEDY, method=DRAFTED, trace=True)
    told = [document["foretell"] for document in documents]
    parts = [part for one in told for part in one["parts"]]
    assert joined(documents).startswith("".join(parts))
    assert len(parts) == 24
    assert joined(documents) == text(client, **GREEDY, method="plain")
    for document, one in zip(documents, told, strict=True):
        if one["tree"] is not None:
            # The tree is that of the newest step, and steps that came together share a chunk.
            accepted = len(one["tree"]["accepted"])
            drafted = sum(source != "target" for source in one["sources"])
            assert drafted >= accepted and len(one["parts"]) > accepted
            assert len(document["choices"]) == 1


def test_32_each_answer_and_the_metrics_tell_of_acceptance(client: httpx.Client) -> None:
    def counted(name: str) -> float:
        lines = client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))

    names = {
        "drafted": "spec_decode_num_draft_tokens_total",
        "accepted": "spec_decode_num_accepted_tokens_total",
    }
    before = {field: counted(name) for field, name in names.items()}
    told = completion(client, **GREEDY, method=DRAFTED)["foretell"]
    for field, name in names.items():
        assert counted(name) - before[field] == told[field]
    by_position = counted("spec_decode_num_accepted_tokens_per_pos_total")
    assert by_position == counted(names["accepted"])
    assert counted("spec_decode_num_drafts_total") > 0
