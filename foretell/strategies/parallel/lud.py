"""Rows that stand for tokens not yet written say the next ones, as long as the model is sure.

After the text's last token stand up to k - 1 rows with one trained embedding, PAD. In the same
forward the last token says what follows it, and row i what follows i tokens further on. The first
is always taken; then each row's token while its probability is at least `beta` and it does not
repeat the token before it. Nobody verifies them: their own rows are computed by the next forward,
and the PADs' are thrown away. With beta above 1 there are no PADs, and it is plain decoding token
by token. With verified=yes the rows stand below every node and draft the next step's chain, which
the model verifies: then the text is the model's own.

Paper: Sun, Zhang, Lin, Zhang, Zhang, Wang, Chen, Song, Zhang, Gai, Xiong, Decoding at the Speed of
Thought: Harnessing Parallel Decoding of Lexical Units for LLMs, arXiv:2405.15208
Guarantee: lossy: tokens of which the model was sure before it had read those before them stay in
the text; with verified=yes, or beta above 1, none do
Cost: target 1
Needs: a model whose layers can be entered with given states; a PAD row that it was tuned with
Trains: a LoRA on the model and the PAD row, by `foretell train lud`
Try: --model FOLDER/model --method lud:head=FOLDER/head
Differs:
- a token is drawn from its row's distribution where the request draws; the sure one is that
distribution's likeliest
- the probability is that of the processed logits before temperature and filters
- the paper's code is not there: the threshold of 0.9 and k=4 are inferred from its abstract
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch

from foretell.core.context import Context
from foretell.core.model import Model
from foretell.core.refusals import refuse_source
from foretell.core.settings import Range
from foretell.core.tree import TokenTree
from foretell.core.types import Steps
from foretell.drafters.heads.attach import attach_head
from foretell.drafters.heads.extra_rows import Beside, read_beside
from foretell.speculation.strategy import Strategy, verify_and_commit
from foretell.strategies.parallel.speaking import (
    choose_spoken,
    commit_spoken,
    count_rows_below,
    draft_chain,
)


@dataclass(frozen=True)
class Lud(Strategy):
    """The authors train and decode at 0.9."""

    head: str = ""  # folder of the PAD row; without one, the one that ships for the model
    k: Annotated[int, Range(1, 16)] = 4  # tokens a step at most
    # least probability of a row's token; above 1: plain decoding
    beta: Annotated[float, Range(0, 2)] = 0.9
    verified: bool = False  # whether the rows' tokens are drafts, which the model verifies

    needs = ("layers",)

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        return attach_head(models["target"], "lud", "lud", self.head)

    def run(self, ctx: Context) -> Steps:
        """Raises BadConfig, before anything runs, for a request with rows from elsewhere."""
        refuse_source("lud", ctx.request)
        return self._run_verified(ctx) if self.verified else self._run_trusted(ctx)

    def count_pads(self, ctx: Context) -> int:
        """PADs below a node at most."""
        pad: Any = ctx.models["head"]
        return 0 if self.beta > 1 else min(self.k - 1, pad.deepest)

    def make_rows(self, ctx: Context, tree: TokenTree, counts: Sequence[int]) -> Beside:
        pad: Any = ctx.models["head"]

        def vectors(states: torch.Tensor | None) -> torch.Tensor:
            tokens = [tree.tokens[node] for node in extra_rows.nodes]
            entering: torch.Tensor = pad.entering(extra_rows.places, tokens, states)
            return entering

        extra_rows = Beside(counts, vectors, pad.entry)
        return extra_rows

    def _run_trusted(self, ctx: Context) -> Steps:
        while True:
            tree = TokenTree(ctx.tokens[-1])
            pad_count = max(0, min(self.count_pads(ctx), ctx.depth))
            reply, rows_below_nodes = yield from read_beside(
                ctx, tree, self.make_rows(ctx, tree, [pad_count])
            )
            tokens, taken_rows = choose_spoken(
                ctx, [reply.logits[0], *rows_below_nodes[0]], partial(self.choose_token, ctx)
            )
            commit_result = yield from commit_spoken(ctx, reply, tokens, taken_rows, "lud")
            if commit_result.reason:
                return

    def choose_token(
        self, ctx: Context, row: torch.Tensor, spoken_tokens: Sequence[int]
    ) -> int | None:
        """The token of a row (V,) after what this step said; None: it is not sure enough."""
        text = [*ctx.output, *spoken_tokens]
        if spoken_tokens and not self.is_sure(ctx.sampler.scores(row, text), spoken_tokens[-1]):
            return None
        return ctx.rng.sample(ctx.sampler.law(row, text), "target", len(text))

    def _run_verified(self, ctx: Context) -> Steps:
        drafted_tokens: list[int] = []
        while True:
            tree = draft_chain(ctx, drafted_tokens, "lud")
            counts = count_rows_below(ctx, tree, self.count_pads(ctx))
            reply, rows_below_nodes = yield from read_beside(
                ctx, tree, self.make_rows(ctx, tree, counts)
            )
            outcome, commit_result = yield from verify_and_commit(ctx, tree, reply)
            if commit_result.reason:
                return
            drafted_tokens = []
            for row in rows_below_nodes[outcome.path[-1] if outcome.path else 0]:
                if not self.is_sure(row, drafted_tokens[-1] if drafted_tokens else ctx.tokens[-1]):
                    break
                drafted_tokens.append(int(row.argmax()))

    def is_sure(self, scores: torch.Tensor, previous_token: int) -> bool:
        """Whether the best token of logits (V,) is likely enough, and not the one before again."""
        best_token = scores.softmax(-1).max(-1)
        return float(best_token.values) >= self.beta and int(best_token.indices) != previous_token
