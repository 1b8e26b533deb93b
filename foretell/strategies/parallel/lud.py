"""Rows that stand for tokens not yet written say the next ones, as long as the model is sure.

Behind the text's last token stand up to k - 1 rows with one trained embedding, PAD. In the same
forward the last token says what follows it, and row i what follows i tokens further on. The first
is always taken; then each row's token while its chance is at least `beta` and it does not repeat
the token before it. Nobody verifies them: their own rows are computed by the next forward, and the
PADs' are thrown away. With beta above 1 there are no PADs, and it is plain decoding token by token.
With verified=yes the rows stand below every node and draft the next step's chain, which the model
verifies: then the text is the model's own.

Paper: Sun, Zhang, Lin, Zhang, Zhang, Wang, Chen, Song, Zhang, Gai, Xiong, Decoding at the Speed of
Thought: Harnessing Parallel Decoding of Lexical Units for LLMs, arXiv:2405.15208
Guarantee: lossy: tokens of which the model was sure before it had read those before them stay in
the text; with verified=yes, or beta above 1, none do
Cost: target 1
Needs: a model whose layers can be entered with given states; a PAD row that it was tuned with
Trains: a LoRA on the model and the PAD row, by `foretell train lud`
Try: --model FOLDER/model --method lud:head=FOLDER/head
Differs:
- a token is drawn from its row's law where the request draws; the sure one is that law's likeliest
- the chance is that of the processed logits before temperature and filters
- the paper's code is not there: the threshold of 0.9 and k=4 are inferred from its abstract
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from foretell.core.context import Context
from foretell.core.model import Model
from foretell.core.refusals import refuse_source
from foretell.core.tree import TokenTree
from foretell.core.types import Steps
from foretell.drafters.heads.attach import attach_head
from foretell.drafters.heads.extra_rows import Beside, read_beside
from foretell.errors import BadConfig
from foretell.speculation.strategy import Strategy, settle
from foretell.strategies.parallel.speaking import chained, commit_spoken, rows_below, spoken


@dataclass(frozen=True)
class Lud(Strategy):
    """The authors train and decode at 0.9."""

    head: str = ""  # folder of the PAD row; without one, the one that ships for the model
    k: int = 4  # tokens a step at most
    beta: float = 0.9  # least chance of a row's token; above 1: plain decoding
    verified: bool = False  # whether the rows' tokens are drafts, which the model verifies

    needs = ("layers",)

    def __post_init__(self) -> None:
        if not 1 <= self.k <= 16:
            raise BadConfig.field("lud:k", self.k, "between 1 and 16")
        if not 0 <= self.beta <= 2:
            raise BadConfig.field("lud:beta", self.beta, "between 0 and 2; above 1 nothing is sure")

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        return attach_head(models["target"], "lud", "lud", self.head)

    def run(self, ctx: Context) -> Steps:
        """Raises BadConfig, before anything runs, for a request with rows from elsewhere."""
        refuse_source("lud", ctx.request)
        return self._verified(ctx) if self.verified else self._trusted(ctx)

    def count(self, ctx: Context) -> int:
        """PADs below a node at most."""
        pad: Any = ctx.models["head"]
        return 0 if self.beta > 1 else min(self.k - 1, pad.deepest)

    def beside(self, ctx: Context, tree: TokenTree, counts: Sequence[int]) -> Beside:
        pad: Any = ctx.models["head"]

        def vectors(states: torch.Tensor | None) -> torch.Tensor:
            tokens = [tree.tokens[node] for node in made.nodes]
            entering: torch.Tensor = pad.entering(made.places, tokens, states)
            return entering

        made = Beside(counts, vectors, pad.entry)
        return made

    def _trusted(self, ctx: Context) -> Steps:
        while True:
            tree = TokenTree(ctx.tokens[-1])
            count = max(0, min(self.count(ctx), ctx.depth))
            reply, below = yield from read_beside(ctx, tree, self.beside(ctx, tree, [count]))
            tokens, taken = spoken(ctx, [reply.logits[0], *below[0]], partial(self.choose, ctx))
            kept = yield from commit_spoken(ctx, reply, tokens, taken, "lud")
            if kept.reason:
                return

    def choose(self, ctx: Context, row: torch.Tensor, said: Sequence[int]) -> int | None:
        """The token of a row (V,) behind what this step said; None: it is not sure enough."""
        text = [*ctx.output, *said]
        if said and not self.sure(ctx.sampler.scores(row, text), said[-1]):
            return None
        return ctx.rng.sample(ctx.sampler.law(row, text), "target", len(text))

    def _verified(self, ctx: Context) -> Steps:
        drafted: list[int] = []
        while True:
            tree = chained(ctx, drafted, "lud")
            counts = rows_below(ctx, tree, self.count(ctx))
            reply, below = yield from read_beside(ctx, tree, self.beside(ctx, tree, counts))
            outcome, kept = yield from settle(ctx, tree, reply)
            if kept.reason:
                return
            drafted = []
            for row in below[outcome.path[-1] if outcome.path else 0]:
                if not self.sure(row, drafted[-1] if drafted else ctx.tokens[-1]):
                    break
                drafted.append(int(row.argmax()))

    def sure(self, scores: torch.Tensor, before: int) -> bool:
        """Whether the best token of logits (V,) is likely enough, and not the one before again."""
        best = scores.softmax(-1).max(-1)
        return float(best.values) >= self.beta and int(best.indices) != before
