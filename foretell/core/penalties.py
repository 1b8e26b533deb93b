"""Processors of rows beside transformers' repetition penalty: the output alone decides them.

Each is asked like a processor of transformers, ids (1, L) and scores (1, V) -> scores (1, V), and
leaves what it is given as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Counted:
    """Takes `presence` off every token of the output, and `frequency` for each time it is there."""

    prompt: int  # tokens of the text that are no output
    presence: float
    frequency: float

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        output = ids[0, self.prompt :]
        tokens, counts = output.unique(return_counts=True)  # type: ignore[no-untyped-call]
        scores = scores.clone()
        scores[0, tokens] -= self.presence + self.frequency * counts.to(scores.dtype)
        return scores


class Biased:
    """Adds to the scores of some tokens."""

    def __init__(self, biases: Mapping[int, float]):
        self.tokens = list(biases)
        self.biases = list(biases.values())

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        biases = scores.new_tensor([self.biases])
        return scores.index_add(1, ids.new_tensor(self.tokens), biases)


class Held:
    """Forbids the tokens that end a text before it has a number of tokens."""

    def __init__(self, min_length: int, ends: Collection[int]):
        self.least = min_length  # tokens, the prompt's among them
        self.ends = sorted(ends)

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] >= self.least:
            return scores
        return scores.index_fill(1, ids.new_tensor(self.ends), -math.inf)


class Copying:
    """A processor of the user's, which may write what it is given."""

    def __init__(self, processor: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]):
        self.processor = processor

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.processor(ids, scores.clone())
