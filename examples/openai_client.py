"""OpenAI's own client against `foretell serve`.

    pip install openai
    foretell serve --model smollm2          # in another terminal
    python examples/openai_client.py

OPENAI_BASE_URL and OPENAI_API_KEY say where the server is and who asks.
"""

from __future__ import annotations

import json
import os
import sys

import openai

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "large": {"type": "boolean"},
    },
    "required": ["name", "large"],
    "additionalProperties": False,
}


def chat(client: openai.OpenAI, model: str) -> None:
    """A whole answer, and what drafts brought in."""
    answer = client.chat.completions.create(
        model=model, messages=CAPITAL, max_completion_tokens=32, temperature=0
    )
    print("chat:", answer.choices[0].message.content)
    print("tokens:", answer.usage.total_tokens, "how:", answer.foretell)


def stream(client: openai.OpenAI, model: str) -> None:
    """An answer as it is made."""
    print("stream: ", end="")
    chunks = client.chat.completions.create(
        model=model,
        messages=CAPITAL,
        max_completion_tokens=32,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in chunks:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print("\nusage:", chunk.usage.prompt_tokens, "+", chunk.usage.completion_tokens)


def logprobs(client: openai.OpenAI, model: str) -> None:
    """How likely each token was, and what else was likely."""
    answer = client.chat.completions.create(
        model=model,
        messages=CAPITAL,
        max_completion_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    for entry in answer.choices[0].logprobs.content:
        others = ", ".join(f"{other.token!r} {other.logprob:.2f}" for other in entry.top_logprobs)
        print(f"logprobs: {entry.token!r} {entry.logprob:.2f} of {others}")


def structured(client: openai.OpenAI, model: str) -> None:
    """An answer of a given form, whatever drafts."""
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Describe Paris as JSON."}],
        max_completion_tokens=200,
        temperature=0.7,
        seed=1,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "city", "schema": CITY, "strict": True},
        },
    )
    choice = answer.choices[0]
    if choice.finish_reason == "length":  # JSON that is cut off is none
        print("structured: cut off:", choice.message.content)
        return
    city = json.loads(choice.message.content)
    print("structured:", city["name"], "is large:", city["large"])


def samples(client: openai.OpenAI, model: str) -> None:
    """Several answers, and the same ones again with the same seed."""
    texts = []
    for _ in range(2):
        answer = client.chat.completions.create(
            model=model,
            messages=CAPITAL,
            max_completion_tokens=16,
            temperature=0.9,
            n=3,
            seed=7,
        )
        texts.append([choice.message.content for choice in answer.choices])
    print("samples:", len(texts[0]), "the same again:", texts[0] == texts[1])


def mistake(client: openai.OpenAI, model: str) -> None:
    """What a wrong value is answered with."""
    try:
        client.chat.completions.create(model=model, messages=CAPITAL, temperature=3)
    except openai.BadRequestError as error:
        print("mistake:", error.body["message"])


def main() -> None:
    url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    client = openai.OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    try:
        model = client.models.list().data[0].id
    except openai.APIConnectionError:
        sys.exit(f"error: no server at {url}: start one with foretell serve")
    for example in (chat, stream, logprobs, structured, samples, mistake):
        example(client, model)


if __name__ == "__main__":
    main()
