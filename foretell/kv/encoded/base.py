"""Contexts of a prompt whose cache rows come from given states in place of their tokens.

    prompt   prefix | n tokens of a context | ... | question
    rows     prefix | m rows, given         | ... | question

A prompt has all of its tokens, so that drafters, draft models and constraints read the text as it
is. The target reads a context as the rows that an encoder makes of it, which enter its first layer
at positions of their own: those of the tokens but the rows' are spared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from foretell.core.model import Computed
from foretell.errors import BadConfig
from foretell.kv.base import KV, NEVER, CachePolicy
from foretell.kv.evict.layer_skipping import PIECE, Run, check_layers, piece_of, together

if TYPE_CHECKING:
    from foretell.core.model import Model

READ = "encoder"  # who computed a forward that only takes note of tokens


class Encoder(Protocol):
    """What makes rows of contexts, see encoders.py."""

    hidden: int  # E, the width of a row

    def count(self, n: int) -> int: ...

    def places(self, n: int) -> torch.Tensor: ...

    def rows(self, tokens: Sequence[int]) -> torch.Tensor: ...

    def check(self, name: str, size: int) -> str: ...


class Compressing(KV):
    """The base of such a policy's settings, which has these fields."""

    kind: ClassVar[str]  # of compressors
    folder: str  # of the compressor
    prefix: int  # first tokens, which precede all contexts
    sizes: tuple[int, ...]  # tokens of each context; what follows them is the question

    def __post_init__(self) -> None:
        if self.prefix < 0:
            raise BadConfig.field(f"{self.kind}:prefix", self.prefix, "at least 0 tokens")
        if any(size < 1 for size in self.sizes):
            raise BadConfig.field(f"{self.kind}:sizes", self.sizes, "at least 1 token each")

    def reading(self, prefix: int, sizes: tuple[int, ...]) -> Compressing:
        """The same for a prompt with these contexts."""
        own: Any = self
        changed: Compressing = replace(own, prefix=prefix, sizes=sizes)
        return changed

    def policy(self, target: Model) -> Given:
        if not self.sizes:
            raise BadConfig(
                f"kv={self.kind}: it reads contexts, and the prompt has none; give some "
                "(contexts, or --context FILE), or leave kv out"
            )
        self.fits(target)
        check_layers(self.kind, target)
        from foretell.kv.encoded.encoders import compressor_of  # and with it transformers' models

        encoder: Encoder = compressor_of(target, f"kv={self.kind}", self.kind, self.folder)
        for number, size in enumerate(self.sizes, 1):
            if wrong := encoder.check(f"kv={self.kind}", size):
                raise BadConfig(f"context {number}: {wrong}")
        return Given(encoder, self.prefix, self.sizes, target.vocab)


@dataclass
class Given(CachePolicy):
    """Reads contexts as the rows that an encoder makes of them.

    A context is encoded with its last token. `read`: what is committed of it before; `fresh`: how
    much of that the cache holds rows of no meaning for.
    """

    encoder: Encoder
    prefix: int
    sizes: tuple[int, ...]
    width: int  # of a row of logits
    read: tuple[int, ...] = ()
    fresh: int = 0

    def __post_init__(self) -> None:
        self.ends = tuple(accumulate(self.sizes, initial=self.prefix))
        self.spared = sum(size - self.encoder.count(size) for size in self.sizes)

    def begin(self, prompt: int) -> None:
        super().begin(prompt)
        self.read, self.fresh = (), 0

    def room(self, length: int) -> int:
        if self.prompt <= self.ends[-1]:  # too short a text to have these contexts
            return NEVER
        return min((end - length for end in self.ends if end > length), default=NEVER)

    def inside(self, length: int) -> bool:
        """Whether the token behind so many is one of a context."""
        return self.prompt > self.ends[-1] and self.prefix <= length < self.ends[-1]

    def size(self, length: int) -> int:
        """Of the context that has the token behind so many."""
        return next(n for n, end in zip(self.sizes, self.ends[1:], strict=True) if length < end)

    def skips(self, job: Any) -> bool:
        return self.inside(job.cache.length)

    def through(self, job: Any, taps: Sequence[int], run: Run) -> Computed:
        cache = job.cache
        tokens = [*self.read, *job.tokens]
        count = len(job.tokens)
        if len(tokens) < self.size(cache.length):
            like = {"dtype": cache.dtype, "device": cache.device}
            none = dict.fromkeys(taps, torch.zeros(count, self.encoder.hidden, **like))
            return Computed(torch.zeros(0, self.width, **like), none, READ, 0)
        rows = self.encoder.rows(tokens)
        start = cache.base
        cache.reserve(start + max(count, len(rows)))
        layers = range(len(cache.layout))
        parts = []
        for low in range(0, len(rows), PIECE):
            part = rows[low : low + PIECE]
            places = range(start + low, start + low + len(part))
            parts.append(run([piece_of(job, start + low, places, part, layers)], taps))
        # Who reads hidden states finds for a token that of the row which stands for it.
        own = self.encoder.places(len(tokens))[-count:]
        hidden = {tap: torch.cat([part.hidden[tap] for part in parts])[own] for tap in taps}
        return together(parts, hidden)

    def keep(self, cache: Any, nodes: Sequence[int]) -> None:
        if nodes and self.inside(cache.length):
            self.read = (*self.read, *(cache.tokens[node] for node in nodes))
            self.fresh = len(nodes)
            cache.changes_at = cache.length + self.fresh  # its rows have no meaning

    def change(self, cache: Any) -> None:
        """Leaves the rows of a context that is complete, in place of those of its tokens."""
        if not self.fresh:
            return
        given = 0
        if cache.length in self.ends:
            given = self.encoder.count(len(self.read))
            self.read = ()
        cache.base += given - self.fresh
        cache.offset = cache.length - cache.base
        self.fresh = 0
