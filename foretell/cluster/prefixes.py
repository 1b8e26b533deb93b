"""Which requests begin alike, and which replica each of them goes to.

A request's key is a hash of who asks and of how its prompt begins, so that no prompt leaves the
process that read it. Every router puts the replicas in the same order for a key without asking
anybody (rendezvous hashing): where one comes or goes, only the requests that it gets or had move.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

PREFIX = 256  # characters, or token ids, of a prompt that decide where it goes


def prefix_key(body: bytes, tenant: bytes = b"", prefix: int = PREFIX) -> str:
    """The key of an OpenAI request; "" for a body that has no prompt, which may go anywhere.

    `tenant`: who asks; tenants share no rows, so the same prompts of two of them may lie apart.
    """
    try:
        prompt_start = _prompt_start(json.loads(body), prefix)
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return ""  # whoever answers it says what is wrong with it
    if prompt_start is None:
        return ""
    text = json.dumps(prompt_start).encode()
    return hashlib.blake2b(text, key=tenant_key(tenant), digest_size=16).hexdigest()


def tenant_key(tenant: bytes) -> bytes:
    """A key of the hash, which takes 64 bytes at most."""
    return hashlib.blake2b(tenant, digest_size=32).digest()


def _prompt_start(request: Any, prefix: int) -> Any:
    """How a request's prompt begins, or None where it has none.

    A chat is known by its first message, which is mostly the application's own; of several prompts
    the first one decides.
    """
    model = request.get("model")
    messages = request.get("messages")
    if messages:
        first_message = messages[0]
        return [model, first_message["role"], _content_text(first_message["content"])[:prefix]]
    prompt = request.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    return None if not prompt else [model, prompt[:prefix]]


def _content_text(content: Any) -> str:
    """The text of a message's content, which may stand in parts."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return str(content)


def preferred_order(key: str, names: Iterable[str]) -> list[str]:
    """The names in the order in which a key prefers them: by the hash of key and name."""

    def weight(name: str) -> bytes:
        return hashlib.blake2b(f"{key}/{name}".encode(), digest_size=8).digest()

    return sorted(names, key=weight)
