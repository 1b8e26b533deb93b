"""The model that is served: one LM under a name, with what answers say about it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from foretell import registry
from foretell.cards import card, weakest_guarantee
from foretell.core.tokenizer_bytes import piece_bytes
from foretell.models.gguf.vocabulary import Vocabulary
from foretell.spec import split_methods
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
        """The name of what computes the target's forwards."""
        return self.lm.models["target"].usual_backend

    def describe_method(
        self, method: str, reward: Any = None, part_specs: Mapping[str, str | None] | None = None
    ) -> tuple[str, str]:
        """Returns the name of a method, `auto` resolved, and what it guarantees with `part_specs`
        beside it, of each kind (kv, guidance, processor, constraint). `reward`: what it chooses by,
        which some methods cannot be made without.
        """
        name, strategy = self.lm.resolve(method, reward)
        claim = strategy_guarantee(name, strategy)
        for kind, spec in (part_specs or {}).items():
            for method_part in split_methods(spec, kind) if spec else ():
                claim = weaker_guarantee(claim, card(method_part.partition(":")[0], kind).guarantee)
        return name, claim

    @cached_property
    def methods(self) -> list[dict[str, str]]:
        """The methods that a request may name, each with what it guarantees: those that fill
        canvases, or those that write from left to right.
        """
        fills_canvas = "canvas" in self.lm.models["target"].caps
        denoisers = registry.method_names("diffusion")
        method_names = [name for name in registry.methods() if (name in denoisers) == fills_canvas]
        method_cards = [card(name) for name in method_names]
        return [
            {
                "name": method_card.name,
                "guarantee": method_card.guarantee,
                "summary": method_card.summary,
            }
            for method_card in method_cards
        ]

    # --- tokens as texts

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for, which may be a part of a character."""
        return self._token_bytes(token)

    def token_text(self, token: int) -> str:
        """The text of a token; bytes that are no UTF-8 are replaced."""
        return self._token_bytes(token).decode("utf-8", errors="replace")

    def is_special(self, token: int) -> bool:
        """Whether a token stands for something else than letters, such as a turn's beginning."""
        tokenizer: Any = self.lm.tokenizer
        if isinstance(tokenizer, Vocabulary):
            return tokenizer.is_special(token)
        return tokenizer is not None and token in self._added_texts

    def _bytes_of(self, token: int) -> bytes:
        tokenizer: Any = self.lm.tokenizer
        if tokenizer is None:
            return b""
        if isinstance(tokenizer, Vocabulary):
            return tokenizer.token_bytes(token)
        if token in self._added_texts:
            return self._added_texts[token].encode()
        piece: Any = tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # a row of the model that is no token
            return b""
        return piece_bytes(str(piece), self._byte_level)

    @cached_property
    def _added_texts(self) -> dict[int, str]:
        """Tokens that are found before all others, as texts: some tokenizers have thousands, and
        write those of spaces in another way elsewhere.
        """
        tokenizer: Any = self.lm.tokenizer
        return {token: str(added) for token, added in tokenizer.added_tokens_decoder.items()}

    @cached_property
    def _byte_level(self) -> bool:
        """Whether the tokenizer writes every byte as a character of its own."""
        backend: Any = getattr(self.lm.tokenizer, "backend_tokenizer", None)
        return backend is not None and "ByteLevel" in repr(backend.decoder)


def strategy_guarantee(name: str, strategy: Strategy) -> str:
    """The guarantee of a method's tokens, its rule included."""
    rule = strategy.rule if isinstance(strategy, Speculative) else None
    return _method_guarantee(
        name, None if rule is None else type(rule).__module__.rpartition(".")[2]
    )


@cache
def _method_guarantee(name: str, rule: str | None) -> str:
    """The weaker one of a method's guarantee and its rule's. Cards are files, slow to read."""
    claim = weakest_guarantee(name)
    if rule is None:
        return claim
    return weaker_guarantee(claim, card(rule.replace("_", "-"), "rule").guarantee)


def weaker_guarantee(first_guarantee: str, second_guarantee: str) -> str:
    """Returns the one of two guarantees that promises less, of equal ones the first."""
    order = ("exact", "greedy", "bounded", "lossy")
    return max(
        (first_guarantee, second_guarantee),
        key=lambda guarantee: order.index(guarantee.split(":")[0]),
    )
