"""The target's first layers and a small trained layer draft, until a token is not sure enough.

What leaves the target's first layers goes through attention alone, a norm and the target's output
matrix, which gives the next token. A draft ends after the first token whose probability is below
`eta`, which is verified with the others. The first layers run once for a token: their rows stay in
the target's cache, and verification enters the next layer with the states that left them. So a step
of g drafted tokens computes all layers for g + 1 tokens, as the verification of any draft does, and
the small layer for g. Tokens are the head's best, whatever the sampling.

Paper: Liu et al., Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting,
arXiv:2404.18911
Guarantee: exact
Cost: target 1, layers length+1 at most, head length at most
Needs: a model whose layers can be run one by one; a head made for it
Trains: `foretell train head --kind kangaroo`
Try: --model MODEL --method kangaroo:head=FOLDER --compare
Differs:
- of the output matrix the rows of the commonest tokens alone are computed for drafts
- sampled texts are verified as well; the paper's are greedy
- the exit is layer 2 whatever the target's size, unless the head was made for another; the paper
takes 2 for 7B and 3 for 13B
- where a cache has lost the draft's rows (its request was paused), or another drafter or a
constraint has added nodes, verification runs all layers
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Annotated

import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafting
from foretell.core.settings import Range
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Reply
from foretell.drafters.heads.base import HeadDrafter
from foretell.drafters.heads.head_tree import HeadReader


@dataclass(frozen=True)
class Kangaroo(HeadDrafter):
    """A threshold and a count."""

    head: str = ""  # folder of the head; without one, the head that ships for the target
    # a draft ends after a token of less probability; above 1: one token
    eta: Annotated[float, Range(0, 2)] = 0.6
    length: Annotated[int, Range(1, 64)] = 6  # tokens drafted at most

    needs = ("layers",)

    def steps(self, ctx: Context, reader: HeadReader, budget: int) -> Drafting:
        tree = TokenTree(ctx.tokens[-1])
        early_layers = Early(ctx, reader.model.feeds[0])
        node = 0
        for _ in range(min(reader.max_depth(ctx, self.length), budget - 1)):
            states = yield from early_layers.exit_states(tree)
            reply = yield Ask(tree, reader.name, ctx.branch, rows=[node], features=states)
            best_token = reply.logits[0].softmax(-1).max(-1)
            probability, token = float(best_token.values), reader.tokens[int(best_token.indices)]
            value = tree.values[node] * probability
            node = tree.add(node, token, value=value, source="kangaroo")
            if ctx.ends(tree, node) or probability < self.eta:
                break
        if node:  # the last token's rows, without which all layers would run anew
            yield from early_layers.exit_states(tree)
        return tree


class Early:
    """The target's layers below `exit_layer` over a tree that grows, each node once."""

    def __init__(self, ctx: Context, exit_layer: int):
        self.branch = ctx.branch
        self.exit_layer = exit_layer
        self.left: dict[int, torch.Tensor] = {}  # what left them, by node

    def exit_states(self, tree: TokenTree) -> Generator[Ask, Reply, torch.Tensor]:
        """(N, E) of all nodes."""
        reply = yield Ask(
            tree,
            branch=self.branch,
            rows=[],
            taps=(self.exit_layer,),
            layers=tuple(range(self.exit_layer)),
        )
        self.left |= zip(reply.new, reply.hidden[self.exit_layer], strict=True)
        return torch.stack([self.left[node] for node in range(len(tree))])
