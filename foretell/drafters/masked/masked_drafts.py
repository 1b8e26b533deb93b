"""What a model that fills canvases says of the tokens behind a text, for drafters."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from foretell.core.masked_text import MASKED, look
from foretell.core.tokenizer_bytes import related
from foretell.diffusion.planner import View
from foretell.errors import Unsupported
from foretell.ops.logits import resized

if TYPE_CHECKING:
    from foretell.core.context import Context
    from foretell.core.types import Message, Reply


class MaskReader:
    """Of one request: a denoiser, and how much of the text its cache rows know.

    Raises Unsupported for a model that fills no masks, or whose tokens are not the target's.
    """

    def __init__(self, ctx: Context, method: str, name: str = "draft"):
        """`method`: who reads it."""
        self.name = name
        self.model: Any = ctx.models[name]
        if getattr(self.model, "mask_id", None) is None or "canvas" not in self.model.caps:
            need = "a draft model that fills masks"
            cure = "load one with draft=, or use the method draft for one that writes"
            raise Unsupported.missing(method, self.model.name, need, cure)
        if not related(self.model.tokenizer, ctx.models["target"].tokenizer):
            need = "the target's vocabulary, and it has another"
            cure = "load one that was made of the target's family with draft="
            raise Unsupported.missing(method, self.model.name, need, cure)
        self.vocab = ctx.models["target"].vocab
        self.checked = 0  # tokens of the text that are in its vocabulary
        self.read = 0  # tokens of the text whose rows were computed as what they are

    def can_read(self, tokens: Sequence[int]) -> bool:
        """Whether all of the text is in its vocabulary, so that its masks can be filled."""
        if any(token >= self.model.vocab for token in tokens[self.checked :]):
            return False
        self.checked = len(tokens)
        return True

    def room(self, ctx: Context) -> int:
        """How many masks it takes behind the text."""
        return int(self.model.context) - len(ctx.tokens)

    def rows(
        self, ctx: Context, count: int, whole: bool = True
    ) -> Generator[Message, Any, torch.Tensor]:
        """One forward over the text and `count` masks: what it says of these, (count, V) of the
        target's vocabulary. Its own mask is impossible.

        `whole`: all rows are computed; else those of the text that it has read stay as they were
        when other masks, or none, stood behind them.
        """
        first = len(ctx.tokens)
        canvas = [*ctx.tokens, *[MASKED] * count]
        known = 0 if whole else self.read
        view = View(range(first, len(canvas)), range(known, len(canvas)) if known else None)
        view = view.reaching(self.model.shift)
        reply: Reply = yield look(
            ctx.tokens[-1], canvas, view.wanted, view.computed, None, ctx.branch, self.name
        )
        self.read = first
        logits = reply.logits.clone()
        logits[:, self.model.mask_id] = -torch.inf
        return torch.stack([resized(row, self.vocab) for row in logits])
