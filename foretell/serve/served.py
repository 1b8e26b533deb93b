"""What is served: one LM under a name, with what answers say about it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from foretell import registry
from foretell.cards import card, guarantee
from foretell.core.tokenizer_bytes import bytes_of
from foretell.models.gguf.vocabulary import Vocabulary
from foretell.spec import pieces
from foretell.speculation.strategy import Speculative, Strategy

if TYPE_CHECKING:
    from foretell.api.lm import LM


class Served:
    """An LM and the name that clients call it by."""

    def __init__(self, lm: LM, name: str):
        self.lm = lm
        self.name = name
        self.since = int(time.time())
        self._token_bytes = cache(self._bytes_of)

    @property
    def computed_by(self) -> str:
        """Who computes the target's forwards."""
        return self.lm.models["target"].usual_executor

    def about(
        self, method: str, reward: Any = None, beside: Mapping[str, str | None] | None = None
    ) -> tuple[str, str]:
        """The name of a method, `auto` resolved, and what it guarantees with what goes `beside` it:
        of each kind (kv, rows, warp, constraint) a spec. `reward`: what it chooses by, which some
        methods cannot be made without.
        """
        name, strategy = self.lm.resolve(method, reward)
        claim = strategy_guarantee(name, strategy)
        for kind, spec in (beside or {}).items():
            for part in pieces(spec, kind) if spec else ():
                claim = weaker(claim, card(part.partition(":")[0], kind).guarantee)
        return name, claim

    @cached_property
    def methods(self) -> list[dict[str, str]]:
        """The methods that a request may name, each with what it guarantees: those that fill
        canvases, or those that write from left to right.
        """
        fills = "canvas" in self.lm.models["target"].caps
        denoisers = registry.names("diffusion")
        names = [name for name in registry.methods() if (name in denoisers) == fills]
        cards = [card(name) for name in names]
        return [
            {"name": one.name, "guarantee": one.guarantee, "summary": one.summary} for one in cards
        ]

    # --- tokens as texts

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for, which may be a part of a character."""
        return self._token_bytes(token)

    def token_text(self, token: int) -> str:
        """The same as a text."""
        return self._token_bytes(token).decode("utf-8", errors="replace")

    def is_special(self, token: int) -> bool:
        """Whether it stands for something else than letters, such as the beginning of a turn."""
        tokenizer: Any = self.lm.tokenizer
        if isinstance(tokenizer, Vocabulary):
            return tokenizer.is_special(token)
        return tokenizer is not None and token in tokenizer.added_tokens_decoder

    def _bytes_of(self, token: int) -> bytes:
        tokenizer: Any = self.lm.tokenizer
        if tokenizer is None:
            return b""
        if isinstance(tokenizer, Vocabulary):
            return tokenizer.token_bytes(token)
        piece: Any = tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # a row of the model that is no token
            return b""
        if token in tokenizer.added_tokens_decoder:
            return str(piece).encode()
        return bytes_of(str(piece), self._byte_level)

    @cached_property
    def _byte_level(self) -> bool:
        """Whether the tokenizer writes every byte as a character of its own."""
        backend: Any = getattr(self.lm.tokenizer, "backend_tokenizer", None)
        return backend is not None and "ByteLevel" in repr(backend.decoder)


def strategy_guarantee(name: str, strategy: Strategy) -> str:
    """What holds of the tokens of a method, its rule included."""
    rule = strategy.rule if isinstance(strategy, Speculative) else None
    return _claim(name, None if rule is None else type(rule).__module__.rpartition(".")[2])


@cache
def _claim(name: str, rule: str | None) -> str:
    """The weaker one of a method's guarantee and its rule's. Cards are files, slow to read."""
    claim = guarantee(name)
    if rule is None:
        return claim
    return weaker(claim, card(rule.replace("_", "-"), "rule").guarantee)


def weaker(first: str, second: str) -> str:
    """The one of two guarantees that promises less, of equal ones the first."""
    order = ("exact", "greedy", "bounded", "lossy")
    return max((first, second), key=lambda one: order.index(one.split(":")[0]))
