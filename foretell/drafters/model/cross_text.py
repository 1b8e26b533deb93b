"""A draft model with another tokenizer drafts text, which is divided into the target's tokens.

The draft model keeps the request's text in its own tokens and continues it by its best tokens.
What they say is divided by the target's tokenizer, together with the text's last `window` tokens,
and proposed as a chain. The proposal is a function of the text, so verification samples the target
and follows: exact however the texts were divided, and the tokens are those of the same seed
without drafts.

Paper: Timor et al., Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies (string-level exact match), arXiv:2502.05202
Guarantee: exact
Cost: target 1, draft length
Needs: a draft model, and both tokenizers, whose tokens must be pieces of the text
Trains: nothing
Differs:
- texts are bytes, never decoded and cleaned: special tokens keep their names, spaces their number
- only whole characters are proposed; one that the text has begun must be completed by the draft
- where the target's tokens would be divided otherwise with what follows them, that is divided alone
- the draft model's last tokens are divided anew with each step, and are not committed before
- a draft ends with a special token that the target lacks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.errors import BadConfig
from foretell.models.translated import Translated
from foretell.ops.logits import likeliest


@dataclass(frozen=True)
class CrossText(Drafter):
    """Both are counts."""

    length: int = 5  # the draft model's tokens in a draft
    window: int = 10  # tokens before the draft that are divided together with it

    models = ("draft",)

    def __post_init__(self) -> None:
        if not 1 <= self.length <= 256:
            raise BadConfig.field("cross-text:length", self.length, "between 1 and 256")
        if not 1 <= self.window <= 256:
            raise BadConfig.field("cross-text:window", self.window, "between 1 and 256")

    def start(self, ctx: Context) -> Translated:
        return Translated(ctx, window=self.window)

    def steps(self, ctx: Context, translated: Translated, budget: int) -> Drafting:
        tree = TokenTree(ctx.tokens[-1])
        translated.update(ctx.tokens)
        length = min(self.length, translated.room(ctx))
        if budget < 2 or not length:
            return tree
        own, node = yield from translated.tree()
        drafted: list[int] = []
        chances: list[float] = []  # of all up to each token
        for _ in range(length):
            reply = yield Ask(own, "draft", translated.branch, rows=[node])
            row = reply.logits[0]
            token, chance = likeliest(row)
            drafted.append(token)
            chances.append(chance * (chances[-1] if chances else 1.0))
            if translated.theirs.piece(token) is None:
                break
            node = own.add(node, token)
        ends = self._ends(translated, drafted)
        node = place = 0
        for token in translated.proposal(ctx.tokens, drafted)[: min(budget - 1, ctx.depth)]:
            place += len(translated.ours.piece(token) or b"")
            value = next((c for end, c in zip(ends, chances, strict=True) if end >= place), None)
            node = tree.add(node, token, value=value or chances[-1], source="cross-text")
            if ctx.ends(tree, node):
                break
        return tree

    @staticmethod
    def _ends(translated: Translated, drafted: Sequence[int]) -> list[int]:
        """How many bytes behind the text each drafted token ends."""
        ends = []
        end = -len(translated.pending)
        for token in drafted:
            end += len(translated.theirs.piece(token) or b"")
            ends.append(end)
        return ends
