"""Holds older tokens in blocks outside the cache, and reads the few that a query asks for.

The first tokens and the last ones are always read; of the blocks in between those whose
representatives give the largest products with the query, as if all stood at one distance. So no
position is beyond the model's context, and a text may be longer than that. Blocks lie in RAM, or in
a file inside `dir` that is removed with the cache.

Paper: Xiao et al., InfLLM: Training-Free Long-Context Extrapolation for LLMs with an Efficient
Context Memory, arXiv:2402.04617
Guarantee: lossy: queries leave rows out, and far ones lose their order; with drafts the text is the
one without them
Cost: target 1
Needs: rotary positions, and cache rows of every layer, of all of the text
Trains: nothing
Differs:
- a span of a prompt reads the blocks that the mean query of the span before it asks for, so that
pieces of a prompt may be of any size; the published code asks with the span's own mean
- the last `alone` tokens of a prompt choose each by itself, as all do that follow
- heads that share a key head choose a token's representatives by their mean
- tokens leave in whole blocks; those that wait, at most `block` or `every`, are read at their
distances, beyond `local` too
- blocks near the model give way by when they were read, not by what attention they got
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch

from foretell.core.settings import Range
from foretell.kv.base import KV
from foretell.kv.select.blocks import Remembering, check_settings, parts_of

if TYPE_CHECKING:
    from foretell.core.model import Model


@dataclass(frozen=True)
class Infllm(KV):
    """Counts of tokens and of blocks."""

    initial: Annotated[int, Range(0)] = 128  # first tokens, which are always read
    local: Annotated[int, Range(1)] = 4096  # last tokens, which are always read
    block: Annotated[int, Range(1)] = 128  # tokens of a block
    blocks: Annotated[int, Range(1)] = 16  # blocks that a query reads
    representatives: Annotated[int, Range(1)] = 4  # tokens that a block is found by
    every: Annotated[int, Range(1)] = 512  # tokens of a prompt that read the same blocks
    # last tokens of a prompt, which choose their blocks by themselves
    alone: Annotated[int, Range(1)] = 64
    # blocks of a layer that stay near the model, where others lie elsewhere
    cached: Annotated[int, Range(1)] = 32
    dir: str = ""  # a folder for a file of blocks; without one they lie in RAM

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self)

    def build_policy(self, target: Model) -> InfllmPolicy:
        return InfllmPolicy(kv=self, **parts_of(self, target))


class InfllmPolicy(Remembering):
    def digest_queries(self, queries: torch.Tensor) -> torch.Tensor:
        return queries.sum(1, keepdim=True)

    def probe_query(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """The mean query of the span, but for its length, which changes no order."""
        return queries.sum(1, keepdim=True)
