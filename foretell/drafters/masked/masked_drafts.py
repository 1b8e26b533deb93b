"""What a model that fills canvases says of the tokens after a text, for drafters."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from foretell.core.masked_text import MASKED, make_look
from foretell.core.tokenizer_bytes import are_related
from foretell.diffusion.planner import View
from foretell.errors import Unsupported
from foretell.ops.logits import resize_row

if TYPE_CHECKING:
    from foretell.core.context import Context
    from foretell.core.types import Message, Reply


class MaskReader:
    """A denoiser as one request reads it, and how much of the text its cache rows know.

    Raises Unsupported for a model that fills no masks, or whose tokens are not the target's.
    """

    def __init__(self, ctx: Context, method: str, name: str = "draft"):
        """`method`: who reads it."""
        self.name = name
        self.model: Any = ctx.models[name]
        if getattr(self.model, "mask_id", None) is None or "canvas" not in self.model.caps:
            need = "a draft model that fills masks"
            cure = "load one with draft=, or use the method draft for one that writes"
            raise Unsupported.missing_capability(method, self.model.name, need, cure)
        if not are_related(self.model.tokenizer, ctx.models["target"].tokenizer):
            need = "the target's vocabulary, and it has another"
            cure = "load one that was made of the target's family with draft="
            raise Unsupported.missing_capability(method, self.model.name, need, cure)
        self.vocab = ctx.models["target"].vocab
        self.checked = 0  # tokens of the text that are in its vocabulary
        self.read = 0  # tokens of the text whose rows were computed as what they are

    def can_read(self, tokens: Sequence[int]) -> bool:
        """Whether all of the text is in its vocabulary, so that its masks can be filled."""
        if any(token >= self.model.vocab for token in tokens[self.checked :]):
            return False
        self.checked = len(tokens)
        return True

    def mask_room(self, ctx: Context) -> int:
        """How many masks it takes after the text."""
        return int(self.model.context) - len(ctx.tokens)

    def mask_rows(
        self, ctx: Context, count: int, recompute_all: bool = True
    ) -> Generator[Message, Any, torch.Tensor]:
        """Runs one forward over the text and `count` masks; returns the masks' rows (count, V) of
        the target's vocabulary. Its own mask is impossible.

        `recompute_all`: all rows are computed; else those of the text that it has read stay as they
        were when other masks, or none, stood after them.
        """
        first_mask = len(ctx.tokens)
        canvas = [*ctx.tokens, *[MASKED] * count]
        known_count = 0 if recompute_all else self.read
        view = View(
            range(first_mask, len(canvas)), range(known_count, len(canvas)) if known_count else None
        )
        view = view.with_shifted_rows(self.model.shift)
        reply: Reply = yield make_look(
            ctx.tokens[-1], canvas, view.requested, view.computed, None, ctx.branch, self.name
        )
        self.read = first_mask
        logits = reply.logits.clone()
        logits[:, self.model.mask_id] = -torch.inf
        return torch.stack([resize_row(row, self.vocab) for row in logits])
