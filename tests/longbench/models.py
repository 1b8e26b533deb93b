"""A tiny model with a context that tasks fit into."""

from __future__ import annotations

from functools import cache

import foretell
from tests import tiny

CONTEXT = 2048


@cache
def lm() -> foretell.LM:
    return foretell.wrap(
        tiny.llama(max_position_embeddings=CONTEXT), tiny.tokenizer(), None, "tiny"
    )


def counted(text: str) -> int:
    return len(lm().encode(text, special=False)) if text else 0
