"""Files of requests for the tests, and what results hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SHARED = "The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 2


def asked(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def completion(custom_id: str, prompt: Any, **body: Any) -> dict[str, Any]:
    return asked(custom_id, prompt=prompt, **body)


def chat(custom_id: str, text: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": SHARED}, {"role": "user", "content": text}]
    return asked(custom_id, "/v1/chat/completions", messages=messages, **body)


def write(path: Path, *lines: Any) -> Path:
    """Objects as JSON, texts and bytes as they are, one a line."""
    encoded = []
    for line in lines:
        text = line if isinstance(line, str | bytes) else json.dumps(line)
        encoded.append(text if isinstance(text, bytes) else text.encode())
    path.write_bytes(b"\n".join(encoded) + b"\n")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """Of a file of results, every line."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
