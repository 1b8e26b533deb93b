"""Requests of the tests, and what plain Python says they must be answered with."""

from __future__ import annotations

import json
from typing import Any

import httpx

TEXT = "The quick brown fox jumps over"


def completion(client: httpx.Client, prompt: Any = TEXT, **fields: Any) -> dict[str, Any]:
    """The answer of `/v1/completions`, which must be one."""
    answer = client.post("/v1/completions", json={"prompt": prompt, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat(client: httpx.Client, content: str = "hi", **fields: Any) -> dict[str, Any]:
    """The same of `/v1/chat/completions`."""
    messages = [{"role": "user", "content": content}]
    answer = client.post("/v1/chat/completions", json={"messages": messages, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(
    client: httpx.Client, path: str = "/v1/completions", status: int = 400, **fields: Any
) -> dict[str, Any]:
    """The error of a request, which must be refused."""
    if path.endswith("chat/completions"):
        fields = {"messages": [{"role": "user", "content": "hi"}], **fields}
    else:
        fields = {"prompt": TEXT, **fields}
    answer = client.post(path, json=fields)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def stream(
    client: httpx.Client, path: str = "/v1/completions", **fields: Any
) -> list[dict[str, Any]]:
    """The documents of a stream, which must end as one."""
    if path.endswith("chat/completions"):
        fields = {"messages": [{"role": "user", "content": "hi"}], **fields}
    else:
        fields = {"prompt": TEXT, **fields}
    answer = client.post(path, json={**fields, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def joined(documents: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice of a stream."""
    parts = []
    for document in documents:
        for choice in document["choices"]:
            if choice["index"] == index:
                text = choice["text"] if "text" in choice else choice["delta"].get("content")
                parts.append(text or "")
    return "".join(parts)
