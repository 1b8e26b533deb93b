"""A draft model as a drafter of one request sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from foretell.core.tokenizer_bytes import are_related
from foretell.errors import Unsupported
from foretell.ops.logits import resize_row

if TYPE_CHECKING:
    from foretell.core.context import Context
    from foretell.core.types import Reply


class DraftReader:
    """Whether a draft model can read the request's text, and its rows in the target's vocabulary.

    Relatives pad their vocabularies to different sizes: a text may be beyond the smaller one.
    Raises Unsupported for a model that is no relative, whose tokens mean something else.
    """

    def __init__(self, ctx: Context, name: str = "draft"):
        self.name = name
        self.model = ctx.models[name]
        if not are_related(self.model.tokenizer, ctx.models["target"].tokenizer):
            raise Unsupported.missing_capability(
                ctx.request.name,
                self.model.name,
                "the target's tokenizer, and it has another",
                "use cross-text or cross-vocab, which translate",
            )
        self.vocab = ctx.models["target"].vocab
        self.known = 0  # tokens of the text that are sure to be in the draft model's vocabulary

    def can_read(self, tokens: Sequence[int]) -> bool:
        """Whether all of the text is in the draft model's vocabulary."""
        if any(token >= self.model.vocab for token in tokens[self.known :]):
            return False
        self.known = len(tokens)
        return True

    def max_depth(self, ctx: Context) -> int:
        """How deep a tree may be that the draft model has room for."""
        return min(ctx.depth, self.model.context - len(ctx.tokens))

    def resized_rows(self, reply: Reply) -> list[torch.Tensor]:
        """The rows of its reply, each (V,) of the target's vocabulary: what is not in its own is
        impossible.
        """
        return [resize_row(row, self.vocab) for row in reply.logits]
