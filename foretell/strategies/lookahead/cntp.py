"""Cautious next token prediction: where a token is unsure, several ways on are tried.

Ordinary sampling, but where a token's law has much entropy up to `most` continuations are drawn,
each to the next punctuation mark, the more the larger the entropy. That of the lowest perplexity is
taken whole. So where the model is sure it costs nothing, and where it is not it looks before it
leaps. The continuations of one place lie in one tree, and are computed one forward a token for all.

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
from typing import Any

import torch

from foretell.core.context import Context
from foretell.core.request import RowSource
from foretell.core.source import source_of
from foretell.core.tree import TokenTree
from foretell.core.types import Commit, Kept, Message, Steps
from foretell.errors import BadConfig
from foretell.rewards.base import needs_text
from foretell.speculation.strategy import Strategy
from foretell.strategies.rollouts import Path, begun, by_target, grow

MARKS = (".", ",", "\n", "?", "!", ":", ";", ")", "]", "}")


@dataclass(frozen=True)
class Cntp(Strategy):
    """With most=1 it is plain sampling."""

    most: int = 10  # continuations
    low: float = 0.01  # nats up to which one is enough
    high: float = 1.5  # nats from which on there are the most
    longest: int = 64  # tokens of a continuation

    drawn_at = 1.0

    def __post_init__(self) -> None:
        for name, upper in (("most", 64), ("longest", 512)):
            value = getattr(self, name)
            if not 1 <= value <= upper:
                raise BadConfig.field(f"cntp:{name}", value, f"between 1 and {upper}")
        if not 0 <= self.low < self.high:
            raise BadConfig(f"cntp:low={self.low}: must be at least 0 and below high={self.high}")

    def run(self, ctx: Context) -> Steps:
        """Raises Unsupported, before anything runs, where no punctuation mark is known."""
        needs_text("cntp", ctx)
        return self._steps(ctx)

    def _steps(self, ctx: Context) -> Steps:
        source = source_of(ctx.request)
        state = yield from source.start(ctx)
        while True:
            tree = TokenTree(ctx.tokens[-1])
            reply = yield from source.read(ctx, state, tree, ())
            row = reply.logits[0]
            p = ctx.sampler.law(row, ctx.output)
            trials = self.trials(p)
            if trials < 2:
                token = ctx.rng.sample(p, "target", len(ctx.output))
                path = Path([token], 0.0, 0)
            else:
                path = yield from self.cautious(ctx, source, state, tree, p, trials)
            rows = torch.stack([row, *path.rows])
            kept: Kept = yield Commit(path.tokens, rows, ctx.branch, ["target"] * len(path.tokens))
            if kept.reason:
                return

    def trials(self, p: torch.Tensor) -> int:
        """How many continuations a law (V,) of the next token wants."""
        entropy = float(torch.special.entr(p).sum())
        share = min(1.0, max(0.0, (entropy - self.low) / (self.high - self.low)))
        return int(1 + (self.most - 1) * share)

    def cautious(
        self,
        ctx: Context,
        source: RowSource,
        state: Any,
        tree: TokenTree,
        p: torch.Tensor,
        trials: int,
    ) -> Generator[Message, Any, Path]:
        """The likeliest of so many continuations, in the mean of their tokens."""
        marks: frozenset[int] = ctx.shared(lambda: punctuation(ctx), "punctuation")
        start = len(ctx.output)

        def drawn(path: Path, row: torch.Tensor) -> tuple[int, float]:
            law = ctx.sampler.law(row, [*ctx.output, *path.tokens])
            place = start + len(path.tokens)
            token = ctx.rng.sample(law, "draft", place, path.number + 1)
            path.ended = token in marks
            return token, float(law[token].log())

        firsts = []
        for trial in range(trials):
            token = ctx.rng.sample(p, "draft", start, trial + 1)
            firsts.append((token, float(p[token].log())))
        paths = begun(ctx, tree, firsts)
        for path in paths:
            path.ended |= path.tokens[0] in marks
        rows_of = by_target(ctx, source, state)
        yield from grow(ctx, tree, paths, self.longest - 1, drawn, rows_of)
        return max(paths, key=lambda path: path.mean)


def punctuation(ctx: Context) -> frozenset[int]:
    """The tokens that end with a mark."""
    decode = ctx.request.text
    assert decode is not None, "refused before by `needs_text`"
    vocab = ctx.models["target"].vocab
    return frozenset(token for token in range(vocab) if decode([token]).endswith(MARKS))
