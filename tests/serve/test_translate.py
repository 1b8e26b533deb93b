"""Requests to calls: every field arrives, and what a server does not grant is refused."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from foretell import wrap
from foretell.api.lm import LM
from foretell.constraints.monitor import Monitor
from foretell.core.types import Sampling
from foretell.errors import ForetellError
from foretell.kv.encoded.ape import Ape
from foretell.registry import method_names
from foretell.serve.errors import ARGUMENTS, FIELDS_OF_ARGUMENTS, ApiError
from foretell.serve.schemas import ChatRequest, CompletionRequest, Request, parse_request
from foretell.serve.translate import Bounds, Call, translate_request
from tests import tiny
from tests.models.decoder.seq2seq import CONTEXT, seq2seq


@pytest.fixture(scope="module")
def lm() -> LM:
    return tiny.lm(draft=False)


def call(lm: LM, **fields: Any) -> Call:
    return translate_request(
        parse_request(CompletionRequest, {"prompt": "The quick", **fields}), lm, seed=5
    )


def test_defaults_are_those_of_openai(lm: LM) -> None:
    made = call(lm)
    assert made.method == "auto" and made.n == 1
    assert made.arguments == {
        "temperature": 1.0,
        "logprobs": None,
        "seed": [5],
        "max_new_tokens": [16],
    }


@pytest.mark.parametrize("name", method_names("strategy"))
def test_a_method_that_draws_nothing_needs_no_temperature(lm: LM, name: str) -> None:
    """It says so by `draws`, and refuses a temperature in its own words."""
    fields = {"reward": "length"} if name in ("a-star", "deal", "pg-td", "transfer-q") else {}
    method = {"spar": "spar:depth=0"}.get(name, name)
    usual = call(lm, method=method, **fields).arguments["temperature"]
    try:
        lm.generate("The quick", method, temperature=0.5, max_new_tokens=2, **fields)
        refused = False
    except ForetellError as error:
        refused = "cannot honour temperature" in str(error)
    assert usual == (0.0 if refused else 1.0)
    assert call(lm, method=method, temperature=0.5, **fields).arguments["temperature"] == 0.5


def test_every_field_of_sampling_arrives(lm: LM) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "typical_p": 0.8,
        "repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.4,
        "no_repeat_ngram_size": 3, "bad_words": ["no"], "stop": ["x", "y"],
        "stop_token_ids": [3], "ignore_eos": True, "min_tokens": 2, "processor": "momentum",
    }  # fmt: skip
    assert set(fields) == set(ARGUMENTS.values())
    made = call(lm, **fields, max_tokens=9, seed=4, n=2, logprobs=3, logit_bias={"7": 1.5})
    for argument, field in ARGUMENTS.items():
        value = fields[field]
        expected = tuple(value) if isinstance(value, list) else value
        assert made.arguments[argument] == expected
    assert made.arguments["seed"] == [4, 5] and made.arguments["max_new_tokens"] == [9, 9]
    assert made.arguments["logprobs"] == 3 and made.arguments["logit_bias"] == {7: 1.5}


def test_no_argument_of_sampling_is_forgotten() -> None:
    """A new one must be given a field here, or stand in this list of what HTTP cannot have."""
    known = {"max_new_tokens", "seed", "n", "logprobs", "logit_bias", *ARGUMENTS}
    forms = {"json_schema", "regex", "grammar"}
    names = {field.name for field in dataclasses.fields(Sampling)}
    others = {"logits_processors", "constraint"}  # holds objects; is made where it is allowed
    assert names - known - forms <= others
    assert known <= set(FIELDS_OF_ARGUMENTS) | {"n"}


def test_who_asks_and_how_urgently(lm: LM) -> None:
    request = parse_request(CompletionRequest, {"prompt": "a", "priority": 3, "timeout": 20})
    made = translate_request(request, lm, tenant="one", bounds=Bounds(timeout=10))
    assert made.arguments["tenant"] == "one" and made.arguments["priority"] == 3
    assert made.arguments["timeout"] == 10


def test_an_answer_never_leaves_the_context(lm: LM) -> None:
    prompt = len(lm.encode("The quick"))
    assert call(lm, max_tokens=10**6).arguments["max_new_tokens"] == [tiny.CONTEXT - prompt]


def test_the_prompt_of_an_encoder_decoder_is_its_source() -> None:
    sources = wrap(seq2seq("bart"), tiny.tokenizer(), name="bart")
    assert call(sources, max_tokens=10**6).arguments["max_new_tokens"] == [CONTEXT - 1]
    for fields, param, what in (
        ({"prompt": [5] * (CONTEXT + 1)}, "prompt", "the encoder of bart"),
        ({"prompt": [999]}, "prompt", "all of the vocabulary"),
        ({"echo": True, "logprobs": 1}, "echo", "in an encoder"),
    ):
        with pytest.raises(ApiError, match=what) as caught:
            call(sources, **fields)
        assert caught.value.param == param
    assert len(call(sources, echo=True).prompts) == 1


@pytest.mark.parametrize(
    ("fields", "method"),
    [
        ({}, "ngram:n=2"),
        ({"method": "suffix"}, "suffix"),
        ({"speculation": "off"}, "plain"),
        ({"speculation": "on"}, "ngram:n=2"),
        ({"method": "plain", "speculation": "off"}, "plain"),
    ],
)
def test_a_server_has_a_method_of_its_own(lm: LM, fields: Any, method: str) -> None:
    request = parse_request(CompletionRequest, {"prompt": "a", **fields})
    assert translate_request(request, lm, bounds=Bounds("ngram:n=2")).method == method
    if fields == {"speculation": "on"}:
        assert translate_request(request, lm, bounds=Bounds("plain")).method == "auto"


@pytest.mark.parametrize(
    ("bounds", "fields", "param"),
    [
        (Bounds(prompt_tokens=2), {"prompt": "The quick brown"}, "prompt"),
        (Bounds(answer_tokens=4), {"max_tokens": 5}, "max_tokens"),
    ],
)
def test_bounds_of_a_server(lm: LM, bounds: Bounds, fields: Any, param: str) -> None:
    request = parse_request(CompletionRequest, {"prompt": "a", **fields})
    with pytest.raises(ApiError) as refusal:
        translate_request(request, lm, bounds=bounds)
    assert refusal.value.param == param
    chat = parse_request(ChatRequest, {"messages": [{"role": "user", "content": "a"}]})
    assert translate_request(chat, lm, bounds=Bounds(answer_tokens=4)).arguments[
        "max_new_tokens"
    ] == [4]


@pytest.mark.parametrize(
    ("fields", "argument"),
    [
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
        (
            {"response_format": {"type": "json_schema",
                                 "json_schema": {"name": "x", "schema": {"type": "null"}}}},
            {"json_schema": {"type": "null"}},
        ),
        ({"structured_outputs": {"json": {"type": "null"}}}, {"json_schema": {"type": "null"}}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"grammar": "x"}}, {"grammar": "x"}),
    ],
)  # fmt: skip
def test_forms_become_arguments(lm: LM, fields: Any, argument: Any) -> None:
    given = call(lm, **fields).arguments
    assert {n: given[n] for n in ("json_schema", "regex", "grammar") if n in given} == argument


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "eagle3:head=runs"},
        {"method": "draft:rule=judge,weights=judge.safetensors"},
        {"method": "input-guided:source=@secret"},
        {"method": "conditional-beam:attribute=good.safetensors"},
        {"method": "mango:cue=@secret"},
        {"method": "best-of", "reward": "r3:encoder=contriever"},
        {"method": "best-of", "reward": "bleu:references=@secret"},
        {"method": "best-of:reward=(r3:encoder=contriever)"},
        {"guidance": "lol:amateur=./runs"},
        {"kv": "gear+offload:dir=rows"},
        {"kv": "double-sparsity:calibration=channels"},
        {"kv": "double-sparsity:calibration=channels.safetensors"},
        {"kv": "duo-attention:gates=gates"},
        {"method": "learn2pd:filter=own"},
        {"method": "extract:passage=(@secret)"},
    ],
)
def test_no_file_of_the_server_can_be_named(lm: LM, fields: dict[str, str]) -> None:
    with pytest.raises(ApiError, match="files of the server cannot be named") as caught:
        call(lm, **fields)
    assert caught.value.param == ("reward" if "reward" in fields else next(iter(fields)))


@pytest.mark.parametrize(
    "fields",
    [
        {"method": r"conditional-beam:pattern=\d+/\d+"},
        {"method": "best-of", "reward": "keywords:words=and/or a@b.org"},
        {"method": "extract:passage=(km/h, or m/s)"},
    ],
)
def test_a_text_may_have_a_slash(lm: LM, fields: dict[str, str]) -> None:
    assert call(lm, **fields).method == fields["method"]


def test_a_budget_goes_with_the_method(lm: LM) -> None:
    assert call(lm, budget="forwards=20").arguments["budget"] == "forwards=20"
    with pytest.raises(ApiError, match="forwards=2000,seconds=30") as caught:
        call(lm, budget="tokens=3")
    assert caught.value.param == "budget"


def test_programs_are_tested_only_by_the_servers_own_file(lm: LM, tmp_path: Path) -> None:
    path = tmp_path / "tests.jsonl"
    path.write_text('{"name": "a", "tests": ["assert f() == 1"]}', "utf-8")
    allowed = Bounds(tests=str(path))

    def made(bounds: Bounds, **fields: str) -> Any:
        body = {"prompt": "def", "method": "pg-td", "temperature": 0, **fields}
        return translate_request(
            parse_request(CompletionRequest, body), lm, bounds=bounds
        ).arguments["reward"]

    for spec, name in (("tests", ""), ("tests:name=a", "a")):
        reward = made(allowed, reward=spec)
        assert (reward.path, reward.name) == (str(path), name)
        with pytest.raises(ApiError, match=r"reward: tests: it runs programs; .* --allow-tests"):
            made(Bounds(), reward=spec)
    for spec in (f"tests:path={path}", "tests:seconds=99", "tests:name=a,memory=9999"):
        with pytest.raises(ApiError, match="a client may give name alone"):
            made(allowed, reward=spec)
    with pytest.raises(ApiError, match="no tests of the name 'b'") as caught:
        made(allowed, reward="tests:name=b")
    assert str(tmp_path) not in str(caught.value)
    for spec in ("bleu+tests", f"keywords:words=a+tests:path={path}", "tests:name=a+bleu"):
        with pytest.raises(ApiError, match="reward: tests: over HTTP it goes with no other reward"):
            made(allowed, reward=spec)
    for spec in ("bleu+r3:encoder=folder", "keywords:words=a/b+r3:encoder=folder"):
        with pytest.raises(ApiError, match="files of the server cannot be named"):
            made(allowed, reward=spec)
    for method in ("best-of:reward=tests", "best-of:reward=(tests:name=a)"):
        with pytest.raises(ApiError, match="give it in the field `reward`"):
            made(allowed, method=method, reward="length")


def test_a_choice_is_a_regular_expression_of_these_texts_alone(lm: LM) -> None:
    choices = ["a.b", "(c|d)", "e\\f", "g+ h*", "[i]{2}", "ü\n-#~/"]
    expression = call(lm, structured_outputs={"choice": choices}).arguments["regex"]
    for text in choices:
        assert re.fullmatch(expression, text)
    for text in ("axb", "c", "gg hh", "ii", ""):
        assert not re.fullmatch(expression, text)


def test_a_template_is_the_tokenizers(lm: LM) -> None:
    body = {"messages": [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]}
    request: Request = parse_request(ChatRequest, body)
    plain = translate_request(request, lm).prompts[0]
    assert lm.decode(plain) == "system:\na\n\nuser:\nb\n\nassistant:\n"
    other = tiny.lm(draft=False)
    tokenizer = other._text.tokenizer = __import__("copy").deepcopy(other.tokenizer)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert other.decode(translate_request(request, other).prompts[0]) == "<system>a<user>b"


MONITOR = {"constraint": "monitor:file=pkg/mod.py"}


def test_programs_are_started_where_the_server_allows_it(lm: LM, tmp_path: Path) -> None:
    """And on the folder that it has chosen."""
    request = parse_request(CompletionRequest, {"prompt": "The quick", **MONITOR})
    made = translate_request(request, lm, bounds=Bounds(monitor=str(tmp_path)))
    assert made.arguments["constraint"] == Monitor(root=str(tmp_path), file="pkg/mod.py")
    with pytest.raises(ApiError, match="constraint: this server starts no programs") as caught:
        call(lm, **MONITOR)
    assert caught.value.param == "constraint" and caught.value.code == "unsupported_value"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("monitor:server=sh -c true", "server: over HTTP only file can be chosen"),
        ("monitor:root=/etc", "root: over HTTP only file can be chosen"),
        ("monitor:prefix=@/etc/passwd", "prefix: over HTTP only file can be chosen"),
        ("monitor:file=../../x.py", "must be a path in root"),
        ("monitor:file=/etc/x.py", "must be a path in root"),
        ("other", "monitor is the only one"),
    ],
)
def test_nothing_else_of_a_monitor_can_be_chosen(lm: LM, spec: str, said: str) -> None:
    request = parse_request(CompletionRequest, {"prompt": "The quick", "constraint": spec})
    with pytest.raises(ApiError, match=said) as caught:
        translate_request(request, lm, bounds=Bounds(monitor="."))
    assert caught.value.param == "constraint"


def test_contexts_are_read_apart(lm: LM) -> None:
    documents = ["the lazy dog " * 12, "over the fox"]
    made = call(lm, contexts=documents, prefix="Read.", kv="ape:scale=0.8", n=2)
    question = lm.encode("The quick", special=False)
    contexts = [lm.encode(one, special=False) for one in documents]
    prefix = lm.encode("Read.")
    assert made.prompts == [[*prefix, *contexts[0], *contexts[1], *question]] * 2
    assert made.arguments["kv"] == Ape(0.9, 0.8, len(prefix), tuple(map(len, contexts)))
    assert made.arguments["max_new_tokens"] == [16, 16]
    many = call(lm, contexts=["the lazy dog " * 12] * 9, max_tokens=10_000)
    assert len(many.prompts[0]) > tiny.CONTEXT
    taken = len(many.prompts[0]) - 8 * len(contexts[0])
    assert many.arguments["max_new_tokens"] == [tiny.CONTEXT - taken]
    answer = lm.generate(many.prompts[0], "plain", max_new_tokens=4, kv=many.arguments["kv"])
    assert len(answer.tokens) == 4


def test_contexts_are_expanded(lm: LM) -> None:
    documents = ["the lazy dog " * 4, "over the fox"]
    made = call(lm, contexts=documents, expand=[2])
    long, short = (lm.encode(one, special=False) for one in documents)
    question = lm.encode("The quick", special=False)
    assert made.prompts == [[*lm.encode(""), *long, *short, *short, *question]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"contexts": []}, "contexts"),
        ({"contexts": ["a", ""]}, "contexts.1"),
        ({"contexts": ["a"], "prompt": ""}, "contexts"),
        ({"contexts": ["a"], "prompt": ["x", "y"]}, "contexts"),
        ({"contexts": ["a"], "echo": True}, "contexts"),
        ({"contexts": ["the lazy dog " * 60]}, "contexts"),
        ({"contexts": ["a"], "kv": "snapkv"}, "contexts"),
        ({"prefix": "Read."}, "prefix"),
        ({"expand": [1]}, "expand"),
        ({"contexts": ["a"], "expand": [2]}, "contexts"),
        ({"contexts": ["a"], "kv": "arc-encoder"}, "kv"),
        ({"contexts": ["a"], "kv": "arc-encoder:folder=a"}, "kv"),
        ({"contexts": ["a"], "kv": "lclm:folder=/a"}, "kv"),
    ],
)
def test_contexts_that_cannot_be_read(lm: LM, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as raised:
        call(lm, **fields)
    assert raised.value.param == param and "\n" not in str(raised.value)
