"""Prompts whose contexts are read apart: what users write, and what they are told."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import foretell
from foretell import Contexts
from foretell.errors import BadConfig, ForetellError, PromptTooLong, Unsupported
from foretell.kv.encoded.ape import Ape
from tests import tiny

LM = tiny.lm()
DOCS = ["def add(a, b):\n    return a + b\n", "def sub(a, b):\n    return a - b\n"]
QUESTION = "The quick brown fox"


def ids(text: str) -> list[int]:
    return LM.encode(text, special=False)


def test_contexts_stand_between_the_prefix_and_the_question() -> None:
    answer = LM.generate(Contexts(DOCS, QUESTION, "Read."), "plain", max_new_tokens=12)
    whole = [*LM.encode("Read."), *ids(DOCS[0]), *ids(DOCS[1]), *ids(QUESTION)]
    kv = Ape(0.9, 0.9, len(LM.encode("Read.")), (len(ids(DOCS[0])), len(ids(DOCS[1]))))
    want = LM.generate(whole, "plain", max_new_tokens=12, kv=kv)
    assert answer.tokens == want.tokens
    assert answer.stats.prompt_tokens == len(whole)
    assert answer.tokens != LM.generate(whole, "plain", max_new_tokens=12).tokens


@pytest.mark.parametrize("method", ["suffix", "ngram", "draft", "token-recycling"])
def test_drafts_leave_the_text_as_it_is(method: str) -> None:
    prompt = Contexts(DOCS, QUESTION, "Read.")
    plain = LM.generate(prompt, "plain", max_new_tokens=24)
    assert LM.generate(prompt, method, max_new_tokens=24).tokens == plain.tokens


def test_contexts_that_no_sequence_could_hold_are_read() -> None:
    docs = [f"{doc}{i}" * 3 for i, doc in enumerate(DOCS * 4)]
    assert sum(len(ids(doc)) for doc in docs) > 2 * tiny.CONTEXT
    prompt = Contexts(docs, QUESTION, "Read.")
    plain = LM.generate(prompt, "plain", max_new_tokens=16)
    assert len(plain.tokens) == 16
    for method in ("suffix", "draft", "auto"):
        assert LM.generate(prompt, method, max_new_tokens=16).tokens == plain.tokens


def test_one_context_with_nothing_adapted_is_a_sequence() -> None:
    prompt = Contexts(DOCS[:1], QUESTION, "Read.")
    kv = "ape:temperature=1,scale=1"
    apart = LM.generate(prompt, "plain", max_new_tokens=16, kv=kv)
    whole = [*LM.encode("Read."), *ids(DOCS[0]), *ids(QUESTION)]
    assert apart.tokens == LM.generate(whole, "plain", max_new_tokens=16).tokens


def test_many_prompts_samples_and_streams() -> None:
    prompt = Contexts(DOCS, QUESTION)
    alone = LM.generate(prompt, "plain", max_new_tokens=8)
    both = LM.generate([prompt, QUESTION], "plain", max_new_tokens=8)
    assert both[0].tokens == alone.tokens
    assert both[1].tokens == LM.generate(QUESTION, "plain", max_new_tokens=8).tokens
    samples = LM.generate(prompt, "plain", max_new_tokens=8, n=2).samples
    assert [one.tokens for one in samples] == [alone.tokens] * 2
    pieces = list(LM.stream(prompt, "plain", max_new_tokens=8))
    assert [token for piece in pieces for token in piece.tokens] == alone.tokens
    broken = LM.generate([Contexts(DOCS, ""), QUESTION], "plain", max_new_tokens=8)
    assert isinstance(broken[0].error, BadConfig) and broken[1].tokens == both[1].tokens


def test_in_a_chat_they_stand_before_what_the_last_message_says() -> None:
    template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = template
    lm = foretell.wrap(tiny.llama(), tokenizer)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    found, kv = lm.read_prompt(Contexts(DOCS, chat, "Texts:\n"))
    before = ids("<system>Be brief.\n<user>Texts:\n")
    assert found == [*before, *ids(DOCS[0]), *ids(DOCS[1]), *ids("Why?\n<assistant>")]
    assert (kv.prefix, kv.sizes) == (len(before), (len(ids(DOCS[0])), len(ids(DOCS[1]))))
    assert lm.generate(Contexts(DOCS, chat), max_new_tokens=4).tokens


BAD: list[tuple[Any, dict[str, Any], type[ForetellError], str]] = [
    (Contexts([], QUESTION), {}, BadConfig, "contexts: must be a list of at least one text"),
    (Contexts("text", QUESTION), {}, BadConfig, "contexts: must be a list"),
    (Contexts(["a", ""], QUESTION), {}, BadConfig, "context 2: it is empty"),
    (Contexts(DOCS, ""), {}, BadConfig, "question: it is empty"),
    (Contexts(DOCS, None), {}, BadConfig, "question: it is empty"),  # type: ignore[arg-type]
    (Contexts(DOCS, QUESTION, []), {}, BadConfig, "prefix: it is empty"),
    (Contexts(DOCS, [{"role": "user", "content": "?"}]), {}, BadConfig, "chat template"),
    (Contexts(DOCS, QUESTION), {"kv": "snapkv"}, BadConfig, "kv=snapkv: contexts that are read"),
    (Contexts(DOCS, QUESTION), {"kv": "ape:scale=0"}, BadConfig, "ape:scale=0"),
    (Contexts([DOCS[0] * 9, "a"], QUESTION), {}, PromptTooLong, "cut the longest context in two"),
    ([1, 2, 3], {"kv": "ape"}, BadConfig, "kv=ape: it reads contexts, and the prompt has none"),
    (Contexts(DOCS, QUESTION), {"method": "superposed"}, BadConfig, "superposed cannot run under"),
]


@pytest.mark.parametrize(("prompt", "options", "error", "message"), BAD)
def test_what_cannot_be_meant_is_one_line(
    prompt: Any, options: dict[str, Any], error: type[ForetellError], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        LM.generate(prompt, **{"method": "plain", **options}, max_new_tokens=2)
    assert "\n" not in str(raised.value)


def test_a_model_without_rotary_positions_is_refused() -> None:
    lm = foretell.wrap(tiny.gpt2(), tiny.tokenizer())
    with pytest.raises(Unsupported, match="kv=ape"):
        lm.generate(Contexts(DOCS, QUESTION), "plain", max_new_tokens=2)
