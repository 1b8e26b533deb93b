"""A head that reads the target's states fills in a whole block of masked tokens in one pass.

The block is the text's last token and masks behind it. Its rows see each other and the text before
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
- it learns the target's laws (KL), from at most 128 blocks a text; the paper's learns tokens, from
512
- of the output matrix the rows of the commonest tokens alone are computed
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting
from foretell.core.model import Model
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.drafters.heads.attach import attach_head
from foretell.drafters.heads.head_tree import HeadReader
from foretell.errors import BadConfig

MASK = -1  # no token's id: a row of it is never taken for a token's


@dataclass(frozen=True)
class Dflash(Drafter):
    """A count."""

    head: str = ""  # folder of the head; without one, the head that ships for the target
    length: int = 7  # tokens drafted at most, of those that a block has

    models = ("head",)
    needs = ("taps",)

    def __post_init__(self) -> None:
        if not 1 <= self.length <= 64:
            raise BadConfig.field("dflash:length", self.length, "between 1 and 64")

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        return attach_head(models["target"], "dflash", "dflash", self.head)

    def start(self, ctx: Context) -> HeadReader:
        return HeadReader(ctx)

    def steps(self, ctx: Context, reader: HeadReader, budget: int) -> Drafting:
        tree = TokenTree(ctx.tokens[-1])
        masks = reader.model.block - 1
        length = min(self.length, masks, budget - 1, ctx.depth)
        # The whole block is asked for, as in training, however many of its tokens are wanted.
        if length < 1 or len(ctx.tokens) + masks > reader.model.context:
            return tree
        block = TokenTree(ctx.tokens[-1]).chain([MASK] * masks)
        wanted = range(1, length + 1)
        reply = yield Ask(block, reader.name, ctx.branch, rows=wanted)
        best = reply.logits.softmax(-1).max(-1)
        node = 0
        for chance, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            value = tree.values[node] * chance
            node = tree.add(node, reader.tokens[place], value=value, source="dflash")
            if ctx.ends(tree, node):
                break
        return tree
