"""Adaptive decoding: where the next token is unsure, a short look ahead decides among the best.

Greedy decoding, but where a row's entropy is `theta` nats or more. There each of the `width` best
tokens is continued greedily by `ahead` tokens, and the token goes on whose continuation has the
highest mean log-probability, its own included. The rows that were looked at are kept: the tokens
after the chosen one are taken over as far as greedy decoding would take them, without a forward.

Paper: He et al., Towards Better Code Generation: Adaptive Decoding with Uncertainty Guidance,
arXiv:2506.08980
Guarantee: lossy: where the model is unsure another token than the likeliest may be taken
Cost: target 1
Needs: nothing
Trains: nothing
Differs:
- theta is to be found for each model; 1 nat is no more than a start, and the paper fits it on
solutions of programming tasks
- a continuation that ends is scored as it stands; the released code goes on adding to its sum
without counting the tokens
- the entropy is of the row with penalties, bans and forms, before any temperature
- continuations end where the text ends, not where a benchmark's programs do
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from foretell.core.context import Context
from foretell.core.refusals import refuse_options
from foretell.core.request import RowSource
from foretell.core.settings import Range
from foretell.core.source import source_of
from foretell.core.tree import TokenTree
from foretell.core.types import Commit, Kept, Message, Steps
from foretell.speculation.strategy import Strategy
from foretell.strategies.rollouts import (
    Path,
    begin_paths,
    continue_greedily,
    grow_paths,
    likeliest_tokens,
    rows_by_target,
)

GREEDY = "it decides by probabilities, nothing is drawn"
REFUSED = dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "typical_p"), GREEDY)


@dataclass(frozen=True)
class Adadec(Strategy):
    """Adaptive decoding; greedy decoding with theta=inf."""

    theta: Annotated[float, Range()] = 1.0  # nats, the entropy from which on it looks ahead
    width: Annotated[int, Range(1, 64)] = 3  # tokens that are tried
    ahead: Annotated[int, Range(1, 256)] = 5  # tokens after each

    draws = False

    def run(self, ctx: Context) -> Steps:
        """Raises BadConfig, before anything runs, for an option that cannot be honoured."""
        refuse_options("adadec", ctx.request.sampling, REFUSED)
        return self._run_steps(ctx)

    def _run_steps(self, ctx: Context) -> Steps:
        source = source_of(ctx.request)
        state = yield from source.start(ctx)
        while True:
            tree = TokenTree(ctx.tokens[-1])
            reply = yield from source.read_rows(ctx, state, tree, ())
            row = reply.logits[0]
            known_rows: list[torch.Tensor] = []  # rows after the tokens that are taken over
            while True:
                if self.is_unsure(ctx, row) and ctx.depth > 0:
                    best_path = yield from self.choose_path(ctx, source, state, row)
                    token, known_rows = best_path.tokens[0], best_path.rows
                else:
                    token = best_token(ctx, row)
                commit_result: Kept = yield Commit([token], row[None], ctx.branch, ["target"])
                if commit_result.reason:
                    return
                if not known_rows:
                    break
                row, *known_rows = known_rows

    def is_unsure(self, ctx: Context, row: torch.Tensor) -> bool:
        scores = ctx.sampler.scores(row, ctx.output)
        return float(torch.special.entr(scores.softmax(-1)).sum()) >= self.theta

    def choose_path(
        self, ctx: Context, source: RowSource, state: Any, row: torch.Tensor
    ) -> Generator[Message, Any, Path]:
        """The best of the paths after `row`; they grow side by side, one forward a level."""
        tree = TokenTree(ctx.tokens[-1])
        paths = begin_paths(ctx, tree, likeliest_tokens(ctx, row, self.width))
        if len(paths) > 1:
            rows_of = rows_by_target(ctx, source, state)
            yield from grow_paths(ctx, tree, paths, self.ahead, continue_greedily(ctx), rows_of)
        return max(paths, key=lambda path: path.mean)


def best_token(ctx: Context, row: torch.Tensor) -> int:
    """Returns the token that greedy decoding takes."""
    return ctx.sampler.best_token(ctx.sampler.scores(row, ctx.output), row)
