"""A head that reads the target's states fills in a whole block of masked tokens in one pass.

The block is the text's last token and masks after it. Its rows see each other and the text before
them, of which they read keys and values that the head makes of the target's hidden states, the same
states for all of its layers. The row of a mask says what stands at its own place. So one forward of
the head, with no step from token to token, drafts a chain of the best token of every mask.

Paper: Chen et al., DFlash: Block Diffusion for Flash Speculative Decoding, arXiv:2602.06036
Guarantee: exact
Cost: target 1, head 1
Needs: hidden states of the target; a head made for it
Trains: `foretell train head --kind dflash`
Try: --model MODEL --method dflash:head=FOLDER --compare
Differs:
- a head has 2 layers and blocks of 8, and reads 3 of the target's states, unless it was made with
others; the paper's have 5 layers, blocks of 16 and 5 states
- what stands for a masked token is trained with the head; the paper takes an unused token's
- layers are the target's kind without norms of queries and keys, which the paper's have
- it learns the target's distributions (KL), from at most 128 blocks a text; the paper's learns
tokens, from 512
- of the output matrix the rows of the commonest tokens alone are computed
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from foretell.core.context import Context
from foretell.core.drafter import Drafting
from foretell.core.settings import Range
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.drafters.heads.base import HeadDrafter
from foretell.drafters.heads.head_tree import HeadReader

MASK = -1  # no token's id: a row of it is never taken for a token's


@dataclass(frozen=True)
class Dflash(HeadDrafter):
    """A count."""

    head: str = ""  # folder of the head; without one, the head that ships for the target
    length: Annotated[int, Range(1, 64)] = 7  # tokens drafted at most, of those that a block has

    needs = ("taps",)

    def steps(self, ctx: Context, reader: HeadReader, budget: int) -> Drafting:
        tree = TokenTree(ctx.tokens[-1])
        mask_count = reader.model.block - 1
        length = min(self.length, mask_count, budget - 1, ctx.depth)
        # The whole block is asked for, as in training, however many of its tokens are wanted.
        if length < 1 or len(ctx.tokens) + mask_count > reader.model.context:
            return tree
        block = TokenTree(ctx.tokens[-1]).chain([MASK] * mask_count)
        requested_rows = range(1, length + 1)
        reply = yield Ask(block, reader.name, ctx.branch, rows=requested_rows)
        best_tokens = reply.logits.softmax(-1).max(-1)
        node = 0
        for probability, token_index in zip(
            best_tokens.values.tolist(), best_tokens.indices.tolist(), strict=True
        ):
            value = tree.values[node] * probability
            node = tree.add(node, reader.tokens[token_index], value=value, source="dflash")
            if ctx.ends(tree, node):
                break
        return tree
