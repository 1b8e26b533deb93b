"""Uniform noise becomes the next k tokens in one forward: each row of noise says its own token.

After the text's last token stand k rows, made of one uniform number each, at the places of the
next k tokens. The tuned model says at each the token that its number stands for, as if the tokens
had been drawn one by one with these numbers: row i knows the noise of the rows before it, and by
that their tokens. Nobody verifies them; their own rows are computed by the next forward, and those
of noise are thrown away. With verified=yes the rows stand below every node and draft the next
step's chain, which the model verifies. Their noise is then that by which verification will draw, so
that a row that is right is accepted whatever is drawn (shared=no: other noise, as if that were not
known).

Paper: K-Forcing: Joint Next-K-Token Decoding via Push-Forward Language Modeling
Guarantee: lossy: k tokens at once come of noise, not of the model's distributions one by one; with
verified=yes the text is the model's own
Cost: target 1
Needs: a model whose layers can be entered with given states; rows that it was tuned with
Trains: a LoRA on the model and the network of the rows, by `foretell train k-forcing`
Try: --model FOLDER/model --method k-forcing:head=FOLDER/head
Differs:
- verification is ours; a draft is dropped where its first row says another token than was drawn
- the paper's frequency penalty (0.3 for k=2, 0.5 for more) is the request's, which is 0
- the model is tuned by a LoRA, and held to its distributions
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch

from foretell.core.context import Context
from foretell.core.model import Model
from foretell.core.refusals import refuse_options, refuse_source
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
    noise_at,
)

UNTRAINED = "its rows were tuned for laws of a temperature alone"
REFUSED = dict.fromkeys(("top_k", "top_p", "min_p", "typical_p"), UNTRAINED)


@dataclass(frozen=True)
class KForcing(Strategy):
    """The paper takes k of 1, 2 and 4."""

    head: str = ""  # folder of the rows' network; without one, the one that ships for the model
    k: Annotated[int, Range(1, 16)] = 4  # tokens a step, at most as many as it was tuned for
    verified: bool = False  # whether they are drafts, which the model verifies
    shared: bool = True  # verified: whether the rows' noise is that by which tokens are drawn

    needs = ("layers",)

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        return attach_head(models["target"], "k-forcing", "k-forcing", self.head)

    def run(self, ctx: Context) -> Steps:
        """Raises BadConfig, before anything runs, for what cannot be honoured."""
        refuse_source("k-forcing", ctx.request)
        if self.verified:
            return self._run_verified(ctx)
        refuse_options("k-forcing", ctx.request.sampling, REFUSED)
        return self._run_trusted(ctx)

    def make_rows(self, ctx: Context, tree: TokenTree, counts: Sequence[int]) -> Beside:
        """Rows of the noise of their own places, below these nodes."""
        rows: Any = ctx.models["head"]
        index = 0 if self.shared else 1

        def vectors(states: torch.Tensor | None) -> torch.Tensor:
            noise = [
                noise_at(ctx, len(ctx.output) + tree.depths[node] + place, index)
                for node, place in zip(extra_rows.nodes, extra_rows.places, strict=True)
            ]
            entering: torch.Tensor = rows.noise_vectors(noise, ctx.request.sampling.temperature)
            return entering

        extra_rows = Beside(counts, vectors)
        return extra_rows

    def _run_trusted(self, ctx: Context) -> Steps:
        rows: Any = ctx.models["head"]
        while True:
            tree = TokenTree(ctx.tokens[-1])
            row_count = max(1, min(self.k, rows.deepest, ctx.depth + 1))
            reply, rows_spoken = yield from read_beside(
                ctx, tree, self.make_rows(ctx, tree, [row_count])
            )
            tokens, taken_rows = choose_spoken(
                ctx, list(rows_spoken[0]), partial(self.choose_token, ctx)
            )
            commit_result = yield from commit_spoken(
                ctx, reply, tokens, taken_rows, "k-forcing", "k-forcing"
            )
            if commit_result.reason:
                return

    def choose_token(self, ctx: Context, row: torch.Tensor, spoken_tokens: Sequence[int]) -> int:
        """The best token of a row (V,): its noise has decided already which one that is."""
        scores = ctx.sampler.scores(row, [*ctx.output, *spoken_tokens])
        return ctx.sampler.best_token(scores, row)

    def _run_verified(self, ctx: Context) -> Steps:
        rows: Any = ctx.models["head"]
        row_count = min(self.k, rows.deepest)
        drafted_tokens: list[int] = []
        while True:
            tree = draft_chain(ctx, drafted_tokens, "k-forcing")
            # The first of a node's rows says what the node says: it tells whether others hold.
            counts = [
                rows_left + 1 if rows_left else 0
                for rows_left in count_rows_below(ctx, tree, row_count - 1)
            ]
            reply, rows_spoken = yield from read_beside(
                ctx, tree, self.make_rows(ctx, tree, counts)
            )
            outcome, commit_result = yield from verify_and_commit(ctx, tree, reply)
            if commit_result.reason:
                return
            row_tokens = rows_spoken[outcome.path[-1] if outcome.path else 0].argmax(-1).tolist()
            drafted_tokens = row_tokens[1:] if row_tokens[:1] == commit_result.tokens[-1:] else []
