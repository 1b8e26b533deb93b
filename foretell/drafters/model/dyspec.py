"""A draft model's tree that grows where it is likeliest to be reached, however wide or deep.

A slot is a place for one more child of a node. Its value is the draft model's estimate that
verification comes to try that child: the probabilities on the way to the node, times what the
node's earlier children left of 1. The token of the best slot is drawn from the draft model's
distribution without the earlier children; then the node has a slot for the next child, and the new
child one for its first. Token by token the slot is the best of the whole tree, until there are
`size` nodes. By levels it is the best of one level, until none has a value of `threshold`, and then
the next level takes one draft forward. Which slot is next depends on values alone, which are known
before the token is drawn, so the order sways no distribution. At temperature 0 the likeliest tokens
take the place of draws, and a slot's value is its token's: the tree holds the likeliest
continuations.

Paper: Xiong, Zhang, Li, Wu, Zou, DySpec: Faster Speculative Decoding with Dynamic Token Tree
Structure, arXiv:2410.11744
Guarantee: exact
Cost: target 1, draft size at most
Needs: a draft model with the target's tokenizer (the vocabularies may be padded to different
sizes), and a target that takes trees
Trains: nothing; any draft model
Differs:
- token by token, the draft model is asked only when a node without a row has the best slot, and
then for the rows of all new nodes at once; the tree is the paper's
- by levels, a level that would exceed `size` takes its best slots; the paper's trees may exceed it
- the draft model has the request's sampling options, where the paper's has temperature 0.6 always
- at temperature 0 tokens are chosen, not drawn
- nodes stand in the order drawn; the order that makes masks sparse in blocks is left out
- nothing is drafted after a token that ends the text
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Annotated

import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting
from foretell.core.settings import Range
from foretell.core.tree import Law, TokenTree
from foretell.core.types import Ask
from foretell.drafters.model.reader import DraftReader


@dataclass(slots=True)
class Slot:
    """A place for one more child of `node`."""

    node: int
    value: float  # estimate that verification tries the child
    law: torch.Tensor  # (V,), of the child's token: earlier children have 0, the others sum to 1


class Slots:
    """The slots whose distribution is known, best first; of equal ones the oldest."""

    def __init__(self, greedy: bool):
        self.greedy = greedy
        self.heap: list[tuple[float, int, Slot]] = []
        self.count = 0

    @property
    def best_value(self) -> float:
        """The value of the best slot; below 0: there is none."""
        return -self.heap[0][0] if self.heap else -1.0

    def push_slot(self, slot: Slot) -> None:
        # A draw must not be known where it is decided whether to make it; a choice may be.
        value = slot.value * float(slot.law.max()) if self.greedy else slot.value
        self.count += 1
        heappush(self.heap, (-value, self.count, slot))

    def pop_slot(self) -> Slot:
        return heappop(self.heap)[2]


@dataclass(frozen=True)
class Dyspec(Drafter):
    """`size` is a count, `threshold` a probability."""

    size: Annotated[int, Range(1, 1024)] = 64  # nodes drafted at most
    levels: bool = True  # level by level, with a draft forward for each; else token by token
    # no child where a slot's value is below this; 0: 1 / nodes allowed by levels, else no limit
    threshold: Annotated[float, Range(0, 1, open_high=True)] = 0.0

    models = ("draft",)
    needs = ("tree",)
    draws = True

    def start(self, ctx: Context) -> DraftReader:
        return DraftReader(ctx)

    def steps(self, ctx: Context, reader: DraftReader, budget: int) -> Drafting:
        tree = TokenTree(ctx.tokens[-1])
        if not reader.can_read(ctx.tokens):
            return tree
        max_nodes = min(self.size, budget - 1)
        depth = reader.max_depth(ctx)
        min_value = self.threshold or (1 / max(1, max_nodes) if self.levels else 0.0)
        slots = Slots(ctx.sampler.greedy)
        unread_nodes = [0] if depth > 0 else []  # nodes that may have children, but have no row yet
        while len(tree) <= max_nodes:
            unread_nodes = [node for node in unread_nodes if tree.values[node] >= min_value]
            best_unread = max((tree.values[node] for node in unread_nodes), default=-1.0)
            if max(slots.best_value, best_unread) < min_value:
                break
            level_ends = slots.best_value < min_value
            if level_ends if self.levels else best_unread >= slots.best_value:
                reply = yield Ask(tree, "draft", ctx.branch, rows=unread_nodes)
                for node, row in zip(unread_nodes, reader.resized_rows(reply), strict=True):
                    law = self._law_below(ctx, tree, node, row)
                    slots.push_slot(Slot(node, tree.values[node], law))
                unread_nodes = []
                continue
            child = self._fill_slot(ctx, tree, slots)
            if tree.depths[child] < depth and not ctx.ends(tree, child):
                unread_nodes.append(child)
        return tree

    def _law_below(
        self, ctx: Context, tree: TokenTree, node: int, row: torch.Tensor
    ) -> torch.Tensor:
        """The draft model's distribution (V,) below `node`, of its row (V,)."""
        output = [*ctx.output, *tree.tokens_to(node)]
        if ctx.sampler.greedy:  # where the sampler's distribution has the best token only
            return ctx.sampler.scores(row, output).softmax(-1)
        return ctx.sampler.law(row, output)

    def _fill_slot(self, ctx: Context, tree: TokenTree, slots: Slots) -> int:
        """Adds the child of the best slot, and the slot after it; returns the child's node."""
        slot = slots.pop_slot()
        if ctx.sampler.greedy:
            token, law = int(slot.law.argmax()), None
        else:
            # The nodes so far number the draws of this step.
            token = ctx.rng.sample(slot.law, "draft", len(ctx.output), len(tree))
            law = Law(slot.law)
        value = slot.value * float(slot.law[token])
        child = tree.add(slot.node, token, law=law, value=value, source="dyspec")
        remaining = slot.law.clone()
        remaining[token] = 0
        remaining_mass = float(remaining.sum())
        if remaining_mass > 0:
            slots.push_slot(
                Slot(slot.node, slot.value * remaining_mass, remaining / remaining_mass)
            )
        return child
