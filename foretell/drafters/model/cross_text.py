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
from typing import Annotated

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting
from foretell.core.settings import Range
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.models.translated import Translated
from foretell.ops.logits import likeliest_token


@dataclass(frozen=True)
class CrossText(Drafter):
    """Both are counts."""

    length: Annotated[int, Range(1, 256)] = 5  # the draft model's tokens in a draft
    # tokens before the draft that are divided together with it
    window: Annotated[int, Range(1, 256)] = 10

    models = ("draft",)

    def start(self, ctx: Context) -> Translated:
        return Translated(ctx, window=self.window)

    def steps(self, ctx: Context, translated: Translated, budget: int) -> Drafting:
        tree = TokenTree(ctx.tokens[-1])
        translated.read_text(ctx.tokens)
        length = min(self.length, translated.max_drafts(ctx))
        if budget < 2 or not length:
            return tree
        draft_tree, node = yield from translated.open_tree()
        draft_tokens: list[int] = []
        path_chances: list[float] = []  # of all up to each token
        for _ in range(length):
            reply = yield Ask(draft_tree, "draft", translated.branch, rows=[node])
            row = reply.logits[0]
            token, probability = likeliest_token(row)
            draft_tokens.append(token)
            path_chances.append(probability * (path_chances[-1] if path_chances else 1.0))
            if translated.model_words.piece(token) is None:
                break
            node = draft_tree.add(node, token)
        token_ends = self._byte_ends(translated, draft_tokens)
        node = byte_count = 0
        for token in translated.translate_back(ctx.tokens, draft_tokens)[
            : min(budget - 1, ctx.depth)
        ]:
            byte_count += len(translated.target_words.piece(token) or b"")
            value = next(
                (
                    path_chance
                    for token_end, path_chance in zip(token_ends, path_chances, strict=True)
                    if token_end >= byte_count
                ),
                None,
            )
            node = tree.add(node, token, value=value or path_chances[-1], source="cross-text")
            if ctx.ends(tree, node):
                break
        return tree

    @staticmethod
    def _byte_ends(translated: Translated, draft_tokens: Sequence[int]) -> list[int]:
        """How many bytes after the text each drafted token ends."""
        byte_ends = []
        byte_end = -len(translated.pending_bytes)
        for token in draft_tokens:
            byte_end += len(translated.model_words.piece(token) or b"")
            byte_ends.append(byte_end)
        return byte_ends
