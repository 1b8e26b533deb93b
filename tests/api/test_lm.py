"""Every public argument of generate and stream: the right result or one clear error, and nothing
else lost.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import foretell
from foretell import LM, ForetellError, Output, registry
from foretell.core.sampling_options import ANSWER_TOKENS
from foretell.drafters.lookup.ngram import Ngram
from foretell.drafters.model.draft import Draft
from foretell.errors import (
    BadConfig,
    BadModel,
    DeadlineExceeded,
    PromptTooLong,
    RequestFailed,
    UnknownMethod,
    Unsupported,
)
from foretell.guidance.cfg import Cfg
from foretell.processors.momentum import Momentum
from foretell.processors.rpg import Rpg
from tests import tiny
from tests.gate import Gate

METHODS = ["plain", "ngram", "token-recycling", "draft", "draft:drafts=3"]
CODE = "def add(a, b):\n    return a"
PROSE = "The quick brown fox jumps over"
SHARED = tiny.lm()


def sized(method: str) -> str:
    """With a given number of nodes: one that is chosen by measured time may draft other tokens of
    the same text.
    """
    return method if method == "plain" else f"{method}{',' if ':' in method else ':'}nodes=6"


@pytest.fixture
def lm() -> LM:
    """An engine nobody used before."""
    return tiny.lm()


def one(prompt: Any = CODE, method: Any = "plain", **options: Any) -> Output:
    out = SHARED.generate(prompt, method, **{"max_new_tokens": 12, **options})
    assert isinstance(out, Output) and not SHARED.engine.live
    return out


def same(a: Output, b: Output) -> bool:
    return (a.text, a.tokens, a.finish_reason) == (b.text, b.tokens, b.finish_reason)


class Raises:
    """A user's processor with a bug that shows at the third token."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] >= self.length:
            raise ZeroDivisionError("oh")
        return scores


# --- prompts


def test_a_prompt_can_be_text_ids_or_an_array() -> None:
    ids = tiny.tokenizer()(CODE)["input_ids"]
    expected = one(CODE)
    for prompt in (ids, tuple(ids), torch.tensor(ids), np.array(ids)):
        assert same(one(prompt), expected)
    for kind in (np.int64, np.int32, np.uint16, torch.tensor):
        assert same(one([kind(token) for token in ids]), expected)
    expected = SHARED.generate([CODE, ids], "plain", max_new_tokens=12)
    for rows in ([np.array(ids)] * 2, torch.tensor([ids] * 2), [torch.tensor(ids), tuple(ids)]):
        outs = SHARED.generate(rows, "plain", max_new_tokens=12)
        assert all(same(out, alone) for out, alone in zip(outs, expected, strict=True))


def test_numbers_of_numpy_are_numbers_everywhere() -> None:
    plain = one(max_new_tokens=9, seed=3, stop_token_ids=[5, 6], bad_words=[[7, 8]])
    three = np.int64(3)
    ids = np.array([5, 6])
    assert same(
        one(max_new_tokens=np.int32(9), seed=three, stop_token_ids=ids, bad_words=[[*ids + 2]]),
        plain,
    )
    assert same(
        one(stop_token_ids=three, logit_bias={three: 1.0}),
        one(stop_token_ids=3, logit_bias={3: 1.0}),
    )


def test_bytes_are_no_token_ids() -> None:
    for prompt in (b"abc", bytearray(b"abc"), memoryview(b"abc")):
        with pytest.raises(BadConfig, match="a prompt is text, not bytes: decode it"):
            one(prompt)
        outs = SHARED.generate([prompt, CODE], "plain", max_new_tokens=12)
        assert isinstance(outs[0].error, BadConfig) and same(outs[1], one())


def test_no_prompts_are_no_answers(lm: LM) -> None:
    for nothing in ([], ()):
        assert lm.generate(nothing, "plain") == [] and list(lm.stream(nothing)) == []
    assert lm.generate([], ["plain"][:0], temperature=[]) == []
    with pytest.raises(UnknownMethod):
        lm.generate([], temprature=1)


def test_a_text_that_is_no_unicode_is_refused_alone() -> None:
    outs = SHARED.generate([CODE, "\ud800"], "plain", max_new_tokens=12)
    assert same(outs[0], one()) and isinstance(outs[1].error, BadConfig)
    assert "half a character" in str(outs[1].error) and "\n" not in str(outs[1].error)


def test_an_empty_text_is_the_first_token() -> None:
    assert same(one(""), one([tiny.tokenizer().bos_token_id]))


def test_one_token_is_enough() -> None:
    for method in METHODS:
        assert same(one([5], method), one([5]))


@pytest.mark.parametrize(
    "prompt",
    [None, 5, 1.5, [True, 1], [0.5], [-1], [99999], {"role": "user"}, object(), np.array([], int)],
)
def test_what_is_no_prompt_is_said_to_be_none(prompt: Any) -> None:
    with pytest.raises(BadConfig, match="prompt"):
        one(prompt)


def test_messages_need_a_template_and_their_fields(lm: LM) -> None:
    with pytest.raises(BadConfig, match="chat template"):
        lm.generate([{"role": "user", "content": "hi"}])
    assert lm.tokenizer is not None
    lm.tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"
    )
    try:
        out = lm.generate([{"role": "user", "content": "hi"}], "plain", max_new_tokens=5)
        assert same(out, one(lm.encode("user: hi"), max_new_tokens=5))
        with pytest.raises(BadConfig, match="`role` and `content`"):
            lm.generate([{"role": "user"}])
    finally:
        lm.tokenizer.chat_template = None


def test_a_bare_text_for_a_chat_model_is_warned_of_once() -> None:
    lm = foretell.wrap(tiny.llama(), copy.copy(tiny.tokenizer()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lm.generate("def", "plain", max_new_tokens=1)  # it has no template yet
        assert caught == [] and lm.tokenizer is not None
        lm.tokenizer.chat_template = "{{ messages[0]['content'] }}"
        turn = [{"role": "user", "content": "def"}]
        for prompt in (turn, lm.encode("def"), foretell.Contexts(["a", "b"], turn)):
            lm.generate(prompt, "plain", max_new_tokens=1)
        assert caught == []
        for _ in range(2):
            lm.generate(["def", "x"], "plain", max_new_tokens=1)
            list(lm.stream("def", "plain", max_new_tokens=1))
    (told,) = caught
    assert issubclass(told.category, foretell.ForetellWarning) and told.filename == __file__
    assert '[{"role": "user", "content": text}]' in str(told.message)


def test_an_lm_says_in_a_line_what_it_is() -> None:
    assert repr(SHARED) == (
        "<foretell.LM tiny: llama in float32 by torch, 128 tokens of context; "
        "draft tiny (draft): llama in float32 by torch, 128 tokens of context>"
    )


def test_what_a_method_brings_is_loaded_once_and_may_be_loaded_beforehand() -> None:
    loaded = []

    @dataclasses.dataclass(frozen=True)
    class Bringing(Ngram):
        def bring(self, models: Any) -> Any:
            loaded.append(self.n)
            return {"head": models["target"]}

    lm = tiny.lm()
    lm.bring(Bringing(n=3))
    assert loaded == [3]
    want = lm.generate("the dog the dog", "plain", max_new_tokens=8).tokens
    for n in (3, 3, 2):
        assert lm.generate("the dog the dog", Bringing(n=n), max_new_tokens=8).tokens == want
    assert loaded == [3, 2]
    with pytest.raises(UnknownMethod):
        lm.bring("nothing")


def test_what_was_written_by_a_deadline_is_not_lost() -> None:
    length = len(SHARED.encode(CODE))

    def slow(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        time.sleep(1.1 if ids.shape[1] == length + 3 else 0)
        return scores

    with pytest.raises(DeadlineExceeded) as caught:
        SHARED.generate(CODE, "plain", logits_processors=[slow], timeout=1.0, max_new_tokens=100)
    output = caught.value.output
    assert isinstance(output, Output) and output.error is caught.value
    assert output.tokens == one(CODE, max_new_tokens=100).tokens[: len(output.tokens)]
    assert output.finish_reason == "error"


def test_an_answer_is_a_whole_one_unless_it_is_said_otherwise() -> None:
    lm = foretell.wrap(tiny.llama(max_position_embeddings=700))
    for more in ({}, {"min_new_tokens": 400}):
        out = lm.generate([5, 6, 7], "plain", ignore_eos=True, **more)
        assert len(out.tokens) == ANSWER_TOKENS == 512 and out.finish_reason == "length"


def test_a_chat_that_the_template_refuses_is_refused_alone(lm: LM) -> None:
    assert lm.tokenizer is not None
    lm.tokenizer.chat_template = (
        "{% if messages[0]['role'] != 'user' %}{{ raise_exception('roles must\nalternate') }}"
        "{% endif %}{{ messages[0]['content'].title() }}"
    )
    good, bad = {"role": "user", "content": "hi"}, {"role": "system", "content": "hi"}
    odd = {"role": "user", "content": 5}  # which the template itself trips over
    try:
        outs = lm.generate([[good], [bad], [odd], [good]], "plain", max_new_tokens=5)
        for wrong, why in ((outs[1], "roles must"), (outs[2], "title")):
            assert isinstance(wrong.error, BadConfig) and wrong.finish_reason == "error"
            assert "chat template refuses these messages" in str(wrong.error)
            assert why in str(wrong.error) and "\n" not in str(wrong.error)
        assert same(outs[0], one(lm.encode("Hi"), max_new_tokens=5)) and same(outs[3], outs[0])
        pieces = list(lm.stream([[bad], [good]], "plain", max_new_tokens=5))
        assert pieces[0].prompt == 0 and isinstance(pieces[0].error, BadConfig)
        assert "".join(piece.text for piece in pieces) == outs[0].text
        with pytest.raises(BadConfig, match="roles must"):
            lm.generate([bad])
    finally:
        lm.tokenizer.chat_template = None


def test_a_prompt_longer_than_the_context_is_refused_alone() -> None:
    with pytest.raises(PromptTooLong, match="shorten"):
        one([3] * tiny.CONTEXT)
    outs = SHARED.generate([CODE, [3] * 500, PROSE], "plain", max_new_tokens=12)
    assert (
        isinstance(outs[1].error, PromptTooLong)
        and outs[1].finish_reason == "error"
        and outs[1].tokens == []
    )
    assert same(outs[0], one(CODE)) and same(outs[2], one(PROSE))
    pieces = list(SHARED.stream([CODE, [3] * 500], "plain", max_new_tokens=12))
    assert [p.finish_reason for p in pieces if p.prompt == 1] == ["error"]
    assert "".join(p.text for p in pieces if p.prompt == 0) == outs[0].text


def test_the_context_ends_the_text() -> None:
    for method in METHODS:
        out = one([3] * (tiny.CONTEXT - 5), method, max_new_tokens=50, ignore_eos=True)
        assert len(out.tokens) == 5 and out.finish_reason == "length"


def test_without_a_tokenizer_ids_still_work() -> None:
    bare = tiny.foretell.wrap(tiny.llama())
    ids = tiny.tokenizer()(CODE)["input_ids"]
    assert bare.generate(ids, "ngram", max_new_tokens=12).tokens == one(ids).tokens
    with pytest.raises(BadModel, match="tokenizer"):
        bare.generate(CODE)
    with pytest.raises(BadConfig, match="stop_token_ids"):
        bare.generate(ids, stop="x")


# --- lengths and ends


@pytest.mark.parametrize("method", METHODS)
def test_no_token_and_one_token(method: str) -> None:
    none = one(method=method, max_new_tokens=0)
    assert (none.text, none.tokens, none.finish_reason) == ("", [], "length")
    assert [p.finish_reason for p in SHARED.stream(CODE, method, max_new_tokens=0)] == ["length"]
    assert one(method=method, max_new_tokens=1).tokens == one(max_new_tokens=12).tokens[:1]


@pytest.mark.parametrize("method", METHODS)
def test_an_end_as_first_draft_token(method: str) -> None:
    """The prompt says that the end follows, so drafters propose it; the target's word counts."""
    ids = [7, 0, 7, 0, 7, 0, 7]
    plain = one(ids, ignore_eos=True, max_new_tokens=12)
    stop = plain.tokens[0]
    out = one([7, stop] * 3 + [7], method, logit_bias={stop: 1000.0}, stop_token_ids=[stop])
    assert out.tokens == [stop] and out.finish_reason == "stop" and out.text == ""
    ended = one(ids, method, logit_bias={0: 1000.0})
    assert ended.tokens == [0] and ended.finish_reason == "stop" and len(ended.draft) == 1


@pytest.mark.parametrize("method", METHODS)
def test_a_stop_string_over_several_tokens(method: str) -> None:
    whole = one(max_new_tokens=40, ignore_eos=True)
    start = next(i for i in range(3, len(whole.text) - 4) if "\ufffd" not in whole.text[i : i + 4])
    stop = whole.text[start : start + 4]
    first = whole.text.find(stop)
    out = one(method=method, stop=stop, max_new_tokens=40, ignore_eos=True)
    assert out.text == whole.text[:first] and out.finish_reason == "stop"
    assert (
        "".join(
            p.text
            for p in SHARED.stream(CODE, method, stop=[stop], max_new_tokens=40, ignore_eos=True)
        )
        == out.text
    )


def test_a_least_number_of_tokens_holds_the_end_back() -> None:
    biased: dict[str, Any] = {"logit_bias": {0: 1000.0}}
    for method in METHODS:
        assert len(one(method=method, **biased).tokens) == 1
        assert len(one(method=method, min_new_tokens=6, **biased).tokens) == 7
        assert 0 not in one(method=method, **biased, ignore_eos=True, bad_words=[[0]]).tokens


class Dictated:
    """A processor that leaves one token possible at each place: a text's, and then its end."""

    def __init__(self, text: str):
        self.tokens = [*SHARED.encode(text), 0]
        self.start = len(SHARED.encode(CODE))

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = min(ids.shape[1] - self.start, len(self.tokens) - 1)
        return torch.full_like(scores, -math.inf).index_fill(
            1, torch.tensor([self.tokens[place]]), 1.0
        )


@pytest.mark.parametrize("method", [*METHODS, "beam:width=2", "best-of:n=2"])
def test_a_least_number_of_tokens_holds_stop_strings_back(method: str) -> None:
    """A stop string ends the text where a later token completes it, wherever it began."""
    said = Dictated("a \U0001f98a b, a \U0001f98a b, a \U0001f98a b.")
    tokens = said.tokens[:-1]
    stop = "\U0001f98a b"
    options: dict[str, Any] = {"logits_processors": [said], "stop": stop, "max_new_tokens": 40}
    options |= {"temperature": 1.0, "reward": "length:target=9"} if "best" in method else {}
    cuts = set()
    for least in (*range(0, len(tokens), 1 if method == "plain" else 4), len(tokens)):
        early = len(SHARED.decode(tokens[:least]).rstrip("\ufffd"))
        whole = SHARED.decode(tokens)
        cut = whole.find(stop, max(0, early + 1 - len(stop)))
        expected = whole if cut < 0 else whole[:cut]
        out = one(method=method, min_new_tokens=least, **options)
        assert out.text == expected, least
        parts = SHARED.stream(CODE, method, min_new_tokens=least, **options)
        assert "".join(part.text for part in parts) == expected
        cuts.add(cut)
    assert len(cuts) == 4
    batch = SHARED.generate([CODE] * 2, method, min_new_tokens=[0, len(tokens)], **options)
    assert [out.text for out in batch] == ["a ", whole]


# --- streaming


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_pieces_are_the_whole(method: str, temperature: float) -> None:
    """The random model writes invalid UTF-8 all the time."""
    options: dict[str, Any] = {
        "temperature": temperature,
        "max_new_tokens": 60,
        "seed": 4,
        "ignore_eos": True,
    }
    lm, other = tiny.lm(), tiny.lm()
    method = sized(method)
    pieces, out = (
        list(lm.stream(PROSE, method, **options)),
        other.generate(PROSE, method, **options),
    )
    assert "".join(p.text for p in pieces) == out.text
    assert [t for p in pieces for t in p.tokens] == out.tokens
    assert [s for p in pieces for s in p.draft] == out.draft and len(out.draft) == len(out.tokens)
    assert all(
        len(p.parts) == len(p.tokens) and p.text.startswith("".join(p.parts)) for p in pieces
    )
    assert [p.finish_reason for p in pieces if p.finish_reason] == [out.finish_reason]


def test_a_character_in_two_tokens_is_held_back(lm: LM) -> None:
    """Forces the tokens of an emoji, one after the other."""
    halves = tiny.tokenizer()("\N{PILE OF POO}")["input_ids"]
    assert len(halves) > 1
    length = len(tiny.tokenizer()(CODE)["input_ids"])

    def force(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[0, halves[(ids.shape[1] - length) % len(halves)]] = 1e4
        return scores

    pieces = lm.stream(CODE, "plain", max_new_tokens=2 * len(halves), logits_processors=force)
    texts = [p.text for p in pieces if p.text]
    assert texts == ["\N{PILE OF POO}"] * 2


def test_a_stream_closed_early_leaves_the_engine_usable(lm: LM) -> None:
    unread = lm.stream(CODE)
    del unread
    assert not lm.engine.live
    gate = Gate(wait_at=4)
    stream = lm.stream(
        [CODE, PROSE], "ngram", max_new_tokens=40, ignore_eos=True, logits_processors=[gate]
    )
    next(stream)
    gate.reached.wait()
    assert len(lm.engine.live) == 2
    gate.open()
    stream.close()
    assert not lm.engine.live and not lm.driver._calls
    assert same(lm.generate(CODE, "ngram", max_new_tokens=12), one())


def test_a_stream_closed_at_an_error_leaves_the_engine_empty(lm: LM) -> None:
    stream = lm.stream([CODE, [3] * 500, PROSE], "plain", max_new_tokens=100, ignore_eos=True)
    while not next(stream).error:
        pass
    stream.close()
    assert not lm.engine.live and not lm.driver._calls
    broken = Raises(0)
    processors = [[broken], None]
    stream = lm.stream(
        [CODE, PROSE], "plain", max_new_tokens=100, ignore_eos=True, logits_processors=processors
    )
    while not next(stream).error:
        pass
    stream.close()
    assert not lm.engine.live and not lm.driver._calls
    assert same(lm.generate(CODE, "ngram", max_new_tokens=12), one())


def test_two_streams_and_a_call_between_them(lm: LM) -> None:
    expected = [one(CODE, max_new_tokens=20), one(PROSE, max_new_tokens=20)]
    streams = [lm.stream(p, "plain", max_new_tokens=20) for p in (CODE, PROSE)]
    texts = [next(streams[0]).text, next(streams[1]).text]
    assert same(lm.generate(CODE, "ngram", max_new_tokens=12), one())
    for i, stream in enumerate(streams):
        texts[i] += "".join(p.text for p in stream)
    assert texts == [out.text for out in expected]


def test_streaming_gives_one_sample() -> None:
    with pytest.raises(BadConfig, match="n: streaming"):
        SHARED.stream(CODE, n=2)


# --- wrong arguments: said before anything runs, in one line


WRONG: list[dict[str, Any]] = [
    {"max_new_tokens": -1},
    {"max_new_tokens": 1.5},
    {"max_new_tokens": "8"},
    {"max_new_tokens": True},
    {"max_new_tokens": None},
    {"min_new_tokens": -1},
    {"min_new_tokens": 13},
    {"temperature": -0.1},
    {"temperature": math.nan},
    {"temperature": math.inf},
    {"temperature": "hot"},
    {"temperature": None},
    {"top_k": -1},
    {"top_k": 1.0},
    {"top_p": 0},
    {"top_p": 1.01},
    {"top_p": math.nan},
    {"min_p": -0.1},
    {"min_p": 2},
    {"typical_p": 0},
    {"typical_p": math.nan},
    {"repetition_penalty": 0},
    {"repetition_penalty": -1},
    {"repetition_penalty": math.nan},
    {"presence_penalty": math.nan},
    {"presence_penalty": 1000},
    {"frequency_penalty": "x"},
    {"no_repeat_ngram_size": -2},
    {"seed": 1.5},
    {"seed": "x"},
    {"n": 0},
    {"n": -1},
    {"n": 2.0},
    {"logprobs": -1},
    {"logprobs": True},
    {"stop": 5},
    {"stop": ""},
    {"stop": [""]},
    {"stop": [3]},
    {"stop_token_ids": ["x"]},
    {"stop_token_ids": 10**6},
    {"stop_token_ids": -1},
    {"stop_token_ids": 1.5},
    {"logit_bias": 3},
    {"logit_bias": [1, 2]},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {1: "y"}},
    {"logit_bias": {1: math.nan}},
    {"logit_bias": {1: math.inf}},
    {"logit_bias": {10**6: 1}},
    {"bad_words": 5},
    {"bad_words": [5]},
    {"bad_words": [[]]},
    {"bad_words": [""]},
    {"bad_words": [[10**6]]},
    {"guidance": 3},
    {"guidance": ""},
    {"guidance": "momentum"},
    {"processor": 3},
    {"processor": ""},
    {"processor": ["momentum", 3]},
    {"processor": "cfg"},
    {"logits_processors": 3},
    {"logits_processors": ["x"]},
]


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_a_wrong_argument_is_named(options: dict[str, Any]) -> None:
    (name,) = options
    for call in (SHARED.generate, SHARED.stream):
        with pytest.raises(BadConfig, match=name) as raised:
            call(CODE, "plain", **{"max_new_tokens": 12, **options})
        assert "\n" not in str(raised.value) and raised.value.exit_code == 2
    assert not SHARED.engine.live


@pytest.mark.parametrize("argument", ["max_tokens", "temprature", "stop_strings", "nonsense"])
def test_an_unknown_argument_names_the_nearest(argument: str) -> None:
    with pytest.raises(UnknownMethod, match=f"unknown argument '{argument}'; did you mean"):
        one(**{argument: 1})


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("token-recyling", "did you mean token-recycling"),
        ("n-gram", "did you mean ngram"),
        ("", "unknown method ''; `foretell methods` lists all"),
        ("ngram:k=x", "ngram:k='x'"),
        ("ngram:kk=3", "did you mean k"),
        ("ngram:k", "name=value"),
        ("ngram:k=-1", "ngram:k=-1"),
        ("ngram:nodes=-1", "nodes"),
        ("ngram:rule=wolk", "did you mean walk"),
        (5, "method=5"),
        (None, "method=None"),
        (Draft, "method="),
    ],
)
def test_an_unknown_method_names_the_nearest(method: Any, said: str) -> None:
    with pytest.raises(BadConfig, match=said):
        one(method=method)


def test_a_missing_draft_model_is_said_before_the_first_forward() -> None:
    bare = tiny.lm(draft=False)
    with pytest.raises(Unsupported, match="draft"):
        bare.generate(CODE, "draft")
    assert bare.models["target"].calls == 0


def test_a_rule_that_does_not_suit_fails_its_request_alone(lm: LM) -> None:
    outs = lm.generate(
        [CODE, PROSE], ["draft:drafts=3,rule=block", "plain"], temperature=1.0, max_new_tokens=12
    )
    assert isinstance(outs[0].error, BadConfig) and "block" in str(outs[0].error).lower()
    assert same(outs[1], one(PROSE, temperature=1.0))


# --- many prompts


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": [0.0, 1.0]},
        {"method": ["plain"] * 4},
        {"max_new_tokens": [1]},
        {"stop": [["a"], ["b"]]},
        {"logit_bias": [{1: 1.0}]},
    ],
    ids=str,
)
def test_a_list_of_wrong_length_is_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(BadConfig, match=f"{name}: . values for 3 prompts"):
        SHARED.generate([CODE, PROSE, "x"], **options)


def test_a_prompt_that_its_method_refuses_takes_no_other_along() -> None:
    methods = ["plain", "extract:start=nowhere,stop=x"]
    lm = tiny.lm(draft=False)
    first, second = lm.generate([CODE, PROSE], methods, max_new_tokens=4)
    assert first.error is None and len(first.tokens) == 4
    assert second.finish_reason == "error" and "has no start='nowhere'" in str(second.error)
    with pytest.raises(BadConfig, match="has no start='nowhere'"):
        lm.generate([CODE, PROSE], methods[1])


def test_a_batch_of_everything_is_each_alone() -> None:
    prompts = [CODE, PROSE, [3, 4, 5, 3, 4], "return a + b\n" * 3, "x"]
    columns: dict[str, list[Any]] = {
        "method": [sized(method) for method in METHODS],
        "temperature": [0.0, 1.0, 0.7, 1.0, 1.3],
        "max_new_tokens": [1, 30, 17, 25, 0],
        "top_p": [1.0, 0.9, 1.0, 0.8, 1.0],
        "top_k": [0, 0, 20, 0, 0],
        "repetition_penalty": [1.0, 1.2, 1.0, 1.1, 1.0],
        "seed": [0, 1, 2, 3, 4],
        "logprobs": [None, 2, None, 0, None],
        "stop_token_ids": [[], [5], [6, 7], [], []],
        "bad_words": [[], [[3, 4], "the"], [], ["a"], []],
        "stop": [[], ["a"], [], ["zz"], []],
        "logit_bias": [{}, {3: 1.0}, {4: -2.0}, None, {}],
        "ignore_eos": [True, False, True, False, True],
    }
    outs = tiny.lm().generate(prompts, **columns)
    for i, out in enumerate(outs):
        alone = tiny.lm().generate(
            prompts[i], **{name: values[i] for name, values in columns.items()}
        )
        assert same(out, alone) and out.draft == alone.draft, prompts[i]
        assert out.error is None
        if alone.logprobs:
            for mine, theirs in zip(out.logprobs, alone.logprobs, strict=True):
                assert mine["logprob"] == pytest.approx(theirs["logprob"], abs=1e-4)


def test_one_value_of_a_nested_argument_is_for_all() -> None:
    outs = SHARED.generate(
        [CODE, PROSE], "plain", max_new_tokens=12, stop=["a", "b"], bad_words=[[3], [4]]
    )
    for out, prompt in zip(outs, (CODE, PROSE), strict=True):
        assert same(out, one(prompt, stop=["a", "b"], bad_words=[[3], [4]]))


def test_a_processor_that_raises_fails_its_request_alone(lm: LM) -> None:
    length = len(tiny.tokenizer()(CODE)["input_ids"])
    broken = Raises(length + 2)
    for method in METHODS:
        outs = lm.generate(
            [PROSE, CODE, PROSE],
            method,
            max_new_tokens=12,
            logits_processors=[None, [broken], None],
        )
        assert isinstance(outs[1].error, RequestFailed) and "ZeroDivisionError: oh" in str(
            outs[1].error
        )
        assert isinstance(outs[1].error.__cause__, ZeroDivisionError)
        assert outs[1].finish_reason == "error" and outs[1].to_dict()["error"] == str(outs[1].error)
        assert outs[1].tokens == one(CODE).tokens[: len(outs[1].tokens)]
        assert same(outs[0], one(PROSE)) and same(outs[2], outs[0])
        with pytest.raises(RequestFailed):
            lm.generate(CODE, method, max_new_tokens=12, logits_processors=broken)
        with pytest.raises(RequestFailed):
            list(lm.stream(CODE, method, max_new_tokens=12, logits_processors=broken))
        pieces = list(
            lm.stream([CODE, PROSE], method, max_new_tokens=12, logits_processors=[[broken], None])
        )
        assert any(isinstance(p.error, RequestFailed) for p in pieces if p.prompt == 0)
        assert "".join(p.text for p in pieces if p.prompt == 1) == one(PROSE).text
        assert not lm.engine.live


def test_options_that_leave_no_token_fail_the_request(lm: LM) -> None:
    nothing = dict.fromkeys(range(len(tiny.tokenizer())), -math.inf)
    with pytest.raises(ForetellError, match="no token possible"):
        lm.generate(CODE, "plain", logit_bias=nothing, temperature=1.0)


# --- samples and logprobs


@pytest.mark.parametrize("method", METHODS)
def test_samples_are_those_of_the_following_seeds(method: str) -> None:
    out = tiny.lm().generate(CODE, method, n=3, seed=5, temperature=1.0, max_new_tokens=12)
    assert len(out.samples) == 3 and out.samples[0] is out
    for k, sample in enumerate(out.samples):
        assert same(
            sample, tiny.lm().generate(CODE, method, seed=5 + k, temperature=1.0, max_new_tokens=12)
        )
    outs = SHARED.generate([CODE, PROSE], "plain", n=[2, 1], temperature=1.0, max_new_tokens=3)
    assert [len(o.samples) for o in outs] == [2, 1]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_those_of_the_stock_model(method: str, temperature: float) -> None:
    """Of the unprocessed rows, whatever the options are."""
    lm = tiny.lm()
    out = lm.generate(
        CODE,
        method,
        temperature=temperature,
        logprobs=3,
        max_new_tokens=20,
        top_k=5,
        repetition_penalty=1.3,
    )
    ids = tiny.tokenizer()(CODE)["input_ids"]
    with torch.inference_mode():
        rows = (
            tiny.llama()(torch.tensor([ids + out.tokens]))
            .logits[0, len(ids) - 1 : -1]
            .log_softmax(-1)
        )
    assert len(out.logprobs) == len(out.tokens)
    for row, token, entry in zip(rows, out.tokens, out.logprobs, strict=True):
        assert entry["token"] == token and entry["logprob"] == pytest.approx(
            float(row[token]), abs=1e-4
        )
        best = row.topk(3)
        assert [t["token"] for t in entry["top"]] == best.indices.tolist()
        assert [t["logprob"] for t in entry["top"]] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_rows_and_warpers_are_arguments_like_others() -> None:
    """One value, or one a prompt; specs or objects."""
    prompts = [CODE, PROSE, CODE]
    rows = ["cfg:g=2", None, Cfg(g=2.0)]
    processor = [None, "momentum+rpg", (Momentum(), Rpg())]
    for method in ("plain", "suffix:nodes=4"):
        many = SHARED.generate(
            prompts, method, max_new_tokens=16, guidance=rows, processor=processor
        )
        for prompt, source, processors, got in zip(prompts, rows, processor, many, strict=True):
            alone = one(prompt, "plain", max_new_tokens=16, guidance=source, processor=processors)
            assert same(got, alone)
        assert not same(many[0], one(max_new_tokens=16))
    assert same(one(processor=Momentum()), one(processor="momentum"))
    assert same(one(guidance=None, processor=None), one())


def test_strategies_that_read_the_target_themselves_refuse_other_rows() -> None:
    for method in ("beam", "diverse-beam", "superposed", "skipdecode", "mirror"):
        with pytest.raises(BadConfig, match=f"{method} reads the target"):
            one(method=method, guidance="cfg:g=2")
    for method in ("adadec", "first-finish", "entropy-switch:tau=-inf", "pearl"):
        more = {"temperature": 1.0} if method == "first-finish" else {}
        assert len(one(method=method, guidance="cfg:g=2", ignore_eos=True, **more).tokens) == 12


def test_greedy_is_transformers_greedy() -> None:
    ids = tiny.tokenizer()(CODE)["input_ids"]
    with torch.inference_mode():
        stock = (
            tiny.llama()
            .generate(torch.tensor([ids]), do_sample=False, max_new_tokens=40)[0, len(ids) :]
            .tolist()
        )
    for method in METHODS:
        assert one(method=method, max_new_tokens=40).tokens == stock


def test_a_config_object_is_its_spec() -> None:
    a = tiny.lm().generate(CODE * 3, Ngram(n=2, k=4), max_new_tokens=30)
    b = tiny.lm().generate(CODE * 3, "ngram:n=2,k=4", max_new_tokens=30)
    assert same(a, b)
    assert same(a, one(CODE * 3, max_new_tokens=30))


def test_every_method_is_listed_with_a_card() -> None:
    assert (
        set(METHODS[:4])
        <= {card.name for card in tiny.foretell.methods()}
        == set(registry.methods())
    )


reals = st.floats(0.1, 2.0)
options_given = st.fixed_dictionaries(
    {},
    optional={
        "max_new_tokens": st.integers(0, 12),
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "top_k": st.integers(0, 400),
        "top_p": st.floats(0.05, 1.0),
        "min_p": st.floats(0, 0.5),
        "typical_p": st.floats(0.1, 1.0),
        "repetition_penalty": st.floats(0.7, 1.6),
        "presence_penalty": st.floats(-1, 1),
        "frequency_penalty": st.floats(-1, 1),
        "no_repeat_ngram_size": st.integers(0, 3),
        "logit_bias": st.dictionaries(st.integers(0, 329), st.floats(-5, 5), max_size=3),
        "bad_words": st.lists(st.lists(st.integers(0, 329), min_size=1, max_size=2), max_size=2),
        "stop": st.lists(st.text("aeo n", min_size=1, max_size=2), max_size=2),
        "stop_token_ids": st.lists(st.integers(0, 329), max_size=3),
        "ignore_eos": st.booleans(),
        "seed": st.integers(-5, 2**40),
        "logprobs": st.none() | st.integers(0, 400),
    },
)


@settings(max_examples=60)
@given(st.sampled_from([CODE, PROSE, "a" * 40, [5]]), options_given)
def test_any_valid_options_give_plain_tokens(prompt: Any, options: dict[str, Any]) -> None:
    """Model-free methods are plain decoding token by token, seed by seed, under every option at
    once.
    """
    plain = SHARED.generate(prompt, "plain", **{"max_new_tokens": 12, **options})
    outs = SHARED.generate(
        [prompt] * 2,
        ["ngram", "token-recycling"],
        **{
            **{name: [value] * 2 for name, value in options.items()},
            "max_new_tokens": options.get("max_new_tokens", 12),
        },
    )
    assert all(same(out, plain) for out in outs)
    assert (plain.logprobs is None) == (options.get("logprobs") is None)
