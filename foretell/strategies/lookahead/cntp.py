"""Cautious next token prediction: where a token is unsure, several ways on are tried.

Ordinary sampling, but where a token's distribution has much entropy up to `most` continuations are
drawn, each to the next punctuation mark, the more the larger the entropy. That of the lowest
perplexity is taken whole. So where the model is sure it costs nothing, and where it is not it looks
before it leaps. The continuations of one place lie in one tree, and are computed one forward a
token for all.

Paper: Wang et al., Cautious Next Token Prediction, arXiv:2507.03038
Guarantee: lossy: of several continuations the likeliest is taken, not one at random
Cost: target 1
Needs: a tokenizer, to know punctuation marks
Trains: nothing
Differs:
- a continuation has at most `longest` tokens; the released code has no limit
- which tokens end a continuation is found by decoding every token: whatever ends with one of the
marks; the released code takes the first id of each mark
- no drafter is asked: trials are some tokens long, and share their forwards
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from foretell.core.context import Context
from foretell.core.request import RowSource
from foretell.core.settings import Range
from foretell.core.source import source_of
from foretell.core.tree import TokenTree
from foretell.core.types import Commit, Kept, Message, Steps
from foretell.errors import BadConfig
from foretell.rewards.base import needs_text
from foretell.speculation.strategy import Strategy
from foretell.strategies.rollouts import Path, begin_paths, grow_paths, rows_by_target

MARKS = (".", ",", "\n", "?", "!", ":", ";", ")", "]", "}")


@dataclass(frozen=True)
class Cntp(Strategy):
    """Cautious sampling; plain sampling with most=1."""

    most: Annotated[int, Range(1, 64)] = 10  # continuations
    low: float = 0.01  # nats up to which one is enough
    high: float = 1.5  # nats from which on there are the most
    longest: Annotated[int, Range(1, 512)] = 64  # tokens of a continuation

    drawn_at = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.low < self.high:
            raise BadConfig(f"cntp:low={self.low}: must be at least 0 and below high={self.high}")

    def run(self, ctx: Context) -> Steps:
        """Raises Unsupported, before anything runs, where no punctuation mark is known."""
        needs_text("cntp", ctx)
        return self._run_steps(ctx)

    def _run_steps(self, ctx: Context) -> Steps:
        source = source_of(ctx.request)
        state = yield from source.start(ctx)
        while True:
            tree = TokenTree(ctx.tokens[-1])
            reply = yield from source.read_rows(ctx, state, tree, ())
            row = reply.logits[0]
            token_probs = ctx.sampler.law(row, ctx.output)
            trial_count = self.count_trials(token_probs)
            if trial_count < 2:
                token = ctx.rng.sample(token_probs, "target", len(ctx.output))
                path = Path([token], 0.0, 0)
            else:
                path = yield from self.choose_cautiously(
                    ctx, source, state, tree, token_probs, trial_count
                )
            rows = torch.stack([row, *path.rows])
            commit_result: Kept = yield Commit(
                path.tokens, rows, ctx.branch, ["target"] * len(path.tokens)
            )
            if commit_result.reason:
                return

    def count_trials(self, token_probs: torch.Tensor) -> int:
        """How many continuations a distribution (V,) of the next token wants."""
        entropy = float(torch.special.entr(token_probs).sum())
        entropy_share = min(1.0, max(0.0, (entropy - self.low) / (self.high - self.low)))
        return int(1 + (self.most - 1) * entropy_share)

    def choose_cautiously(
        self,
        ctx: Context,
        source: RowSource,
        state: Any,
        tree: TokenTree,
        token_probs: torch.Tensor,
        trial_count: int,
    ) -> Generator[Message, Any, Path]:
        """The likeliest of so many continuations, in the mean of their tokens."""
        mark_tokens: frozenset[int] = ctx.shared(lambda: punctuation_tokens(ctx), "punctuation")
        output_length = len(ctx.output)

        def draw_next(path: Path, row: torch.Tensor) -> tuple[int, float]:
            path_probs = ctx.sampler.law(row, [*ctx.output, *path.tokens])
            position = output_length + len(path.tokens)
            token = ctx.rng.sample(path_probs, "draft", position, path.number + 1)
            path.ended = token in mark_tokens
            return token, float(path_probs[token].log())

        first_tokens = []
        for trial_index in range(trial_count):
            token = ctx.rng.sample(token_probs, "draft", output_length, trial_index + 1)
            first_tokens.append((token, float(token_probs[token].log())))
        paths = begin_paths(ctx, tree, first_tokens)
        for path in paths:
            path.ended |= path.tokens[0] in mark_tokens
        rows_of = rows_by_target(ctx, source, state)
        yield from grow_paths(ctx, tree, paths, self.longest - 1, draw_next, rows_of)
        return max(paths, key=lambda path: path.mean)


def punctuation_tokens(ctx: Context) -> frozenset[int]:
    """The tokens that end with a mark."""
    decode = ctx.request.text
    assert decode is not None, "refused before by `needs_text`"
    vocab_size = ctx.models["target"].vocab
    return frozenset(token for token in range(vocab_size) if decode([token]).endswith(MARKS))
