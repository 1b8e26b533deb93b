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
from foretell.kv.evict.layer_skipping import PIECE, Run, check_layers, join_forwards, piece_of

if TYPE_CHECKING:
    from foretell.core.model import Model

READ = "encoder"  # who computed a forward that only takes note of tokens


class Encoder(Protocol):
    """The maker of rows that stand for contexts, see encoders.py."""

    hidden: int  # E, the width of a row

    def row_count(self, n: int) -> int: ...

    def row_places(self, n: int) -> torch.Tensor: ...

    def encode_rows(self, tokens: Sequence[int]) -> torch.Tensor: ...

    def check_size(self, name: str, size: int) -> str: ...


class Compressing(KV):
    """The base of such a policy's settings, which has these fields."""

    kind: ClassVar[str]  # of compressors
    folder: str  # of the compressor
    prefix: int  # first tokens, which precede all contexts
    sizes: tuple[int, ...]  # tokens of each context; what follows them is the question

    def with_contexts(self, prefix: int, context_sizes: tuple[int, ...]) -> Compressing:
        """These settings for a prompt with contexts of these sizes after the prefix."""
        settings: Any = self
        changed_settings: Compressing = replace(settings, prefix=prefix, sizes=context_sizes)
        return changed_settings

    def build_policy(self, target: Model) -> Given:
        if not self.sizes:
            raise BadConfig(
                f"kv={self.kind}: it reads contexts, and the prompt has none; give some "
                "(contexts, or --context FILE), or leave kv out"
            )
        self.check_target(target)
        check_layers(self.kind, target)
        from foretell.kv.encoded.encoders import compressor_of  # and with it transformers' models

        encoder: Encoder = compressor_of(target, f"kv={self.kind}", self.kind, self.folder)
        for number, size in enumerate(self.sizes, 1):
            if size_fault := encoder.check_size(f"kv={self.kind}", size):
                raise BadConfig(f"context {number}: {size_fault}")
        return Given(encoder, self.prefix, self.sizes, target.vocab)


@dataclass
class Given(CachePolicy):
    """Reads contexts as the rows that an encoder makes of them.

    A context is encoded with its last token. `read_tokens`: what is committed of it before;
    `fresh`: how much of that the cache holds rows of no meaning for.
    """

    encoder: Encoder
    prefix: int
    sizes: tuple[int, ...]
    width: int  # of a row of logits
    read_tokens: tuple[int, ...] = ()
    fresh: int = 0

    def __post_init__(self) -> None:
        self.ends = tuple(accumulate(self.sizes, initial=self.prefix))
        self.spared = sum(size - self.encoder.row_count(size) for size in self.sizes)

    def begin_text(self, prompt: int) -> None:
        super().begin_text(prompt)
        self.read_tokens, self.fresh = (), 0

    def room_left(self, length: int) -> int:
        if self.prompt <= self.ends[-1]:  # too short a text to have these contexts
            return NEVER
        return min(
            (context_end - length for context_end in self.ends if context_end > length),
            default=NEVER,
        )

    def in_context(self, length: int) -> bool:
        """Whether the token at this place of the text is one of a context."""
        return self.prompt > self.ends[-1] and self.prefix <= length < self.ends[-1]

    def context_size(self, length: int) -> int:
        """Tokens of the context that has the token at this place of the text."""
        return next(n for n, end in zip(self.sizes, self.ends[1:], strict=True) if length < end)

    def runs_layers(self, job: Any) -> bool:
        return self.in_context(job.cache.length)

    def run_layers(self, job: Any, taps: Sequence[int], run: Run) -> Computed:
        cache = job.cache
        context_tokens = [*self.read_tokens, *job.tokens]
        node_count = len(job.tokens)
        if len(context_tokens) < self.context_size(cache.length):
            tensor_options = {"dtype": cache.dtype, "device": cache.device}
            zero_states = dict.fromkeys(
                taps, torch.zeros(node_count, self.encoder.hidden, **tensor_options)
            )
            return Computed(torch.zeros(0, self.width, **tensor_options), zero_states, READ, 0)
        encoded_rows = self.encoder.encode_rows(context_tokens)
        first_row = cache.base
        cache.reserve(first_row + max(node_count, len(encoded_rows)))
        layers = range(len(cache.layout))
        forward_parts = []
        for part_start in range(0, len(encoded_rows), PIECE):
            row_part = encoded_rows[part_start : part_start + PIECE]
            row_positions = range(first_row + part_start, first_row + part_start + len(row_part))
            forward_parts.append(
                run([piece_of(job, first_row + part_start, row_positions, row_part, layers)], taps)
            )
        # Who reads hidden states finds for a token that of the row which stands for it.
        node_rows = self.encoder.row_places(len(context_tokens))[-node_count:]
        node_states = {
            tap: torch.cat([row_part.hidden[tap] for row_part in forward_parts])[node_rows]
            for tap in taps
        }
        return join_forwards(forward_parts, node_states)

    def keep_nodes(self, cache: Any, nodes: Sequence[int]) -> None:
        if nodes and self.in_context(cache.length):
            self.read_tokens = (*self.read_tokens, *(cache.tokens[node] for node in nodes))
            self.fresh = len(nodes)
            cache.changes_at = cache.length + self.fresh  # its rows have no meaning

    def change_rows(self, cache: Any) -> None:
        """Leaves the rows of a context that is complete, in place of those of its tokens."""
        if not self.fresh:
            return
        row_count = 0
        if cache.length in self.ends:
            row_count = self.encoder.row_count(len(self.read_tokens))
            self.read_tokens = ()
        cache.base += row_count - self.fresh
        cache.offset = cache.length - cache.base
        self.fresh = 0
