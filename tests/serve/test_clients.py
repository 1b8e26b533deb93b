"""The `openai` package, as users have it, against a live server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from foretell.serve.settings import Settings
from tests.serve.live import NAME, Live, running
from tests.serve.test_guard import OTHER, SECRET, keys

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def asker(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{live.url}/v1",
        api_key="none",
        http_client=openai.DefaultHttpxClient(trust_env=False),
    ) as client:
        yield client


def test_models(asker: openai.OpenAI) -> None:
    assert [model.id for model in asker.models.list()] == [NAME]
    assert asker.models.retrieve(NAME).owned_by == "foretell"


def test_a_chat(asker: openai.OpenAI) -> None:
    fields = {"model": NAME, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 8}
    answer = asker.chat.completions.create(
        **fields, logprobs=True, top_logprobs=2, n=2, seed=1, stop=["zzz"], user="me"
    )
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert answer.usage.completion_tokens == 16
    tokens = answer.choices[0].logprobs.content
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in tokens)
    assert answer.model_extra["foretell"]["guarantee"] == "exact"
    again = asker.chat.completions.create(**fields, extra_body={"speculation": "off"})
    assert again.choices[0].message.content == answer.choices[0].message.content
    follow_up = [*MESSAGES, answer.choices[0].message, *MESSAGES]
    assert asker.chat.completions.create(model=NAME, messages=follow_up, max_tokens=1).choices


def test_a_streamed_chat(asker: openai.OpenAI) -> None:
    fields = {"model": NAME, "messages": MESSAGES, "temperature": 0, "max_tokens": 8}
    whole = asker.chat.completions.create(**fields).choices[0].message.content
    chunks = list(
        asker.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    )
    said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert said == whole
    assert chunks[-1].usage.completion_tokens == 8 and not chunks[-1].choices


def test_the_streaming_helper(asker: openai.OpenAI) -> None:
    fields = {"model": NAME, "messages": MESSAGES, "temperature": 0, "max_tokens": 8}
    whole = asker.chat.completions.create(**fields).choices[0].message.content
    fields["stop"] = whole[3:5]
    with asker.chat.completions.stream(**fields) as stream:
        for _ in stream:
            pass
        said = stream.get_final_completion().choices[0].message.content
    assert said == whole[: whole.index(fields["stop"])]


def test_a_completion_and_its_stream(asker: openai.OpenAI) -> None:
    fields = {"model": NAME, "prompt": ["The quick", "a"], "temperature": 0, "max_tokens": 6}
    answer = asker.completions.create(**fields, logprobs=1, echo=True, logit_bias={"5": -100})
    assert answer.choices[0].text.startswith("The quick")
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    texts = ["", ""]
    for chunk in asker.completions.create(**fields, stream=True, echo=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    plain = asker.completions.create(**fields, echo=True)
    assert texts == [choice.text for choice in plain.choices]


def test_errors_are_those_that_the_client_knows(asker: openai.OpenAI) -> None:
    once = asker.with_options(max_retries=0)
    with pytest.raises(openai.BadRequestError) as refusal:
        once.chat.completions.create(model=NAME, messages=MESSAGES, extra_body={"surprise": 1})
    assert refusal.value.param == "surprise" and refusal.value.code == "unknown_field"
    with pytest.raises(openai.NotFoundError):
        once.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.APIStatusError) as late:
        asker.completions.create(model=NAME, prompt="a", extra_body={"timeout": 1e-6})
    assert late.value.status_code == 408


def test_keys_and_limits() -> None:
    settings = Settings(keys=keys(requests_per_minute=1))
    with running(settings=settings) as live:

        def ask(key: str) -> None:
            with openai.OpenAI(
                base_url=f"{live.url}/v1",
                api_key=key,
                http_client=openai.DefaultHttpxClient(trust_env=False),
                max_retries=0,
            ) as client:
                client.completions.create(model=NAME, prompt="a", max_tokens=1)

        with pytest.raises(openai.AuthenticationError):
            ask("sk-wrong")
        ask(SECRET)
        with pytest.raises(openai.RateLimitError):
            ask(SECRET)
        ask(OTHER)


def test_many_at_once_get_what_each_gets_alone(live: Live) -> None:
    prompts = ["The quick", "def add(a", "Gr", "漢字", "The dog", "emoji", "x", "jumps over"]

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{live.url}/v1",
            api_key="none",
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        ) as client:
            calls = [
                client.completions.create(model=NAME, prompt=prompt, max_tokens=12, temperature=0)
                for prompt in prompts
            ]
            return [answer.choices[0].text for answer in await asyncio.gather(*calls)]

    alone = [live.lm.generate(prompt, "plain", max_new_tokens=12).text for prompt in prompts]
    assert asyncio.run(ask()) == alone
