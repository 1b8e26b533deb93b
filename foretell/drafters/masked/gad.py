"""Fills in a whole block after the text with one forward of a drafter that was trained for it.

After the last token stand `k` masked ones. The drafter, an encoder-decoder with the target's
tokens and an encoder of its own, reads the request's source, the text and the masks, which see each
other, and says at once what each of them hides. These tokens, the best of
each place, are the draft. With `rule=relaxed` the target takes what is nearly as good as its own
token; by default it takes its own alone.

Paper: Ge, Xia, Sun, Chen, Wei, Lossless Acceleration for Seq2seq Generation with Aggressive
Decoding, arXiv:2205.10350 (generalized aggressive decoding); Xia, Ge, Wang, Chen, Wei, Sui,
Speculative Decoding: Exploiting Speculative Execution for Accelerating Seq2seq Generation,
arXiv:2203.16487
Guarantee: exact
Cost: target 1, draft 1
Needs: a draft model that fills in masked blocks
Trains: the draft model (`foretell train gad`)
Try: --model MODEL --draft FOLDER --method gad --compare
Differs:
- the text before the block is read as a decoder reads it, each token by those before it, so that
the drafter keeps its rows; the paper's reads text and block in both directions, anew in each step
- a draft ends with the first token that ends the text
- how much of a block is verified is limited by the policy
- penalties and bans of the request hold in drafts, each after the drafts before it
- the paper's acceptance is a rule of its own, `relaxed`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting
from foretell.core.settings import Range
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.drafters.model.reader import DraftReader
from foretell.errors import Unsupported
from foretell.ops.logits import likeliest_token


@dataclass(frozen=True)
class Gad(Drafter):
    """A count of tokens."""

    k: Annotated[int, Range(1, 1024)] = 25  # masked tokens of a block

    models = ("draft",)

    def start(self, ctx: Context) -> DraftReader:
        """Raises Unsupported for a draft model that knows no mask."""
        reader = DraftReader(ctx)
        if getattr(reader.model, "mask_token", None) is None:
            raise Unsupported.missing_capability(
                ctx.request.name,
                reader.model.name,
                "a mask token that it fills in (mask_token_id)",
                "train a drafter with `foretell train gad`",
            )
        return reader

    def steps(self, ctx: Context, reader: DraftReader, budget: int) -> Drafting:
        tree = TokenTree(ctx.tokens[-1])
        mask_count = min(self.k, budget - 1, reader.max_depth(ctx))
        if mask_count < 1 or not reader.can_read(ctx.tokens):
            return tree
        mask_token: int = reader.model.mask_token  # type: ignore[attr-defined]
        block = TokenTree(tree.tokens[0]).chain([mask_token] * mask_count)
        reply = yield Ask(block, "draft", ctx.branch, rows=range(1, mask_count + 1))
        node = 0
        for row in reader.resized_rows(reply):
            scores = ctx.sampler.scores(row, [*ctx.output, *tree.tokens_to(node)])
            token, probability = likeliest_token(scores)
            if not probability > 0:  # nothing is possible here
                break
            node = tree.add(node, token, value=tree.values[node] * probability, source="gad")
            if ctx.ends(tree, node):
                break
        return tree
