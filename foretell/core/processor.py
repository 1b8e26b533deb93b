"""Logits processors: what changes a row of logits by the text before it.

A processor is a function of the path, like every option of sampling, so it holds inside drafts as
it does in plain decoding. What it has found out about a text grows with the text: a `Track` stands
after the one it was asked about last, and goes to the next by going back to where they part.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretell.core.settings import Settings
from foretell.ops.common_prefix import shared_prefix_length

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class About:
    """Facts about a text, besides its tokens, that a processor may use.

    `prompt`: how many of these are the prompt's; `ends`: tokens that end it; `text` decodes some,
    None: there is no tokenizer.
    """

    prompt: int = 0
    ends: Collection[int] = ()
    text: Callable[[Sequence[int]], str] | None = None


class Processor(Settings):
    """The base: a frozen dataclass of hyper-parameters."""

    kind = "processor"

    @property
    def off(self) -> bool:
        """Whether it changes nothing, so that it need not be asked."""
        return False

    def start_track(self, about: About) -> Track:
        """Returns the processor of a branch. Raises BadConfig where its text cannot be followed."""
        raise NotImplementedError


Warper = Processor  # as it was called before, for one release


class Track:
    """A processor's place in the text of one branch; transformers call it as one of theirs.

    What a class overrides are `take_token`, `forget_behind` and `warp_scores`. Threads may share
    it: a lane drafts while the target verifies.
    """

    def __init__(self) -> None:
        self.path: list[int] = []  # prompt and output, as far as it has read
        self._lock = threading.Lock()

    def take_token(self, token: int) -> None:
        """The path, of which `token` is the last already, has become longer."""
        raise NotImplementedError

    def forget_behind(self, length: int) -> None:
        """Forgets what was found out after the first `length` tokens."""
        raise NotImplementedError

    def warp_scores(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores (V,) of the token after the path; the given ones, unchanged, are not written."""
        raise NotImplementedError

    def follow(self, text: list[int]) -> None:
        """Goes to another text: back, then on."""
        kept = shared_prefix_length(self.path, text)
        if kept < len(self.path):
            self.forget_behind(kept)
            del self.path[kept:]
        for token in text[kept:]:
            self.path.append(token)
            self.take_token(token)

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """ids (1, L), scores (1, V) -> scores (1, V)."""
        with self._lock:
            self.follow(ids[0].tolist())
            return self.warp_scores(scores[0])[None]

    def __deepcopy__(self, memo: dict[int, Any]) -> Track:
        """Itself: what it answers is a function of the text alone."""
        return self
