"""Two models write in turn: the small one where the text is easy, the large one where it is not.

A token comes from the model that is active, by plain decoding. The entropy of each row that a token
came from, in bits and before any option, goes into a window of the last few. Where their mean
reaches `tau` the large model, the target, becomes active, below it the small one, the draft model;
but only `dwell` tokens or more after the last change. The model that takes over first takes in what
the other has written meanwhile. Which of them wrote a token is told with it (`Output.draft`). With
tau=-inf the large model writes everything, with tau=inf the small one.

Paper: Simonds, Entropy Adaptive Decoding: Dynamic Model Switching for Efficient Inference,
arXiv:2502.06833
Guarantee: lossy: what the small model writes is its own, and never looked at by the large one
Cost: target 1 at most, draft 1 at most
Needs: a draft model with the target's tokenizer
Trains: nothing
Differs:
- tau is to be found for each pair of models, the paper tries many; 1 bit is no more than a start
- it begins with the small model, with the large one where tau is 0 or less; the text's beginning
counts as a change
- a mean of exactly tau calls for the large model, where the paper allows either
- where the small model cannot go on (its context is full, or its vocabulary lacks a token of the
text) the large one does, however long ago the last change was
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Annotated

import torch

from foretell.core.context import Context
from foretell.core.settings import Range
from foretell.core.source import source_of
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Reply, Steps
from foretell.drafters.model.reader import DraftReader
from foretell.speculation.strategy import Strategy, verify_and_commit


@dataclass(frozen=True)
class EntropySwitch(Strategy):
    """`window` and `dwell` count tokens."""

    # bits, the mean entropy from which on the large model writes
    tau: Annotated[float, Range()] = 1.0
    window: Annotated[int, Range(1, 100_000)] = 5  # entropies that the mean is of
    # tokens that a model writes at least before the other does
    dwell: Annotated[int, Range(1, 100_000)] = 10

    models = ("draft",)

    def run(self, ctx: Context) -> Steps:
        source = source_of(ctx.request)
        state = yield from source.start(ctx)
        reader = DraftReader(ctx)
        entropies: deque[float] = deque(maxlen=self.window)
        small_writes = self.tau > 0
        since_change = 0
        while True:
            tree = TokenTree(ctx.tokens[-1])
            if small_writes and not can_write(reader, ctx):
                small_writes = False
                since_change = 0
            if small_writes:
                reply: Reply = yield Ask(tree, "draft", ctx.branch)
                entropies.append(row_entropy(reply.logits[0]))
                reply = replace(reply, logits=torch.stack(reader.resized_rows(reply)))
            else:
                reply = yield from source.read_rows(ctx, state, tree, ())
                entropies.append(row_entropy(reply.logits[0]))
            writer = "draft" if small_writes else "target"
            _, commit_result = yield from verify_and_commit(ctx, tree, reply, source=writer)
            if commit_result.reason:
                return
            since_change += 1
            is_easy = sum(entropies) / len(entropies) < self.tau
            if is_easy != small_writes and since_change >= self.dwell:
                small_writes = is_easy
                since_change = 0


def can_write(reader: DraftReader, ctx: Context) -> bool:
    """Whether the draft model can read the text and has room for it."""
    return len(ctx.tokens) <= reader.model.context and reader.can_read(ctx.tokens)


def row_entropy(row: torch.Tensor) -> float:
    """Entropy of a row of logits (V,), in bits."""
    return float(torch.special.entr(row.softmax(-1)).sum()) / math.log(2)
