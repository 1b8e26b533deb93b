"""Runs fewer and fewer layers the further the answer has come.

The prompt goes through all layers. The token written at place t then goes through b(t) of them, a
number that falls linearly from `most` to `least` over `horizon` tokens and stays there: the first
`warm` layers, and the last b(t) - `warm`; what lies between is left out. Each token's layers are
among those of the tokens before it, so that all keys that a layer needs are there, and nothing is
computed again. Requests at the same place share their forwards. Neither a draft nor a verification
is involved: the text is that of the smaller models.

Paper: Del Corro, Del Giorno, Agarwal, Yu, Awadallah, Mukherjee, SkipDecode: Autoregressive Skip
Decoding with Batching and Caching for Efficient LLM Inference, arXiv:2307.02628
Guarantee: lossy: after the first token layers are left out, more and more of them; with most and
least as large as the model has layers it is plain decoding bit for bit
Cost: target 1
Needs: a model whose layers can be run one by one
Trains: nothing; the target, on the task with the same schedule, or its answers fall apart
Differs:
- the answer's first token comes from the whole model, which reads all of the prompt
- without a horizon the schedule runs to the request's max_new_tokens
- the bounds are shares of the model's layers, since the paper's tables are of its own two models
- a request has its own place, so that in a batch of different ages several forwards are run; the
paper pads to one place
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from foretell.core.context import Context
from foretell.core.refusals import refuse_source
from foretell.core.settings import Range
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Reply, Steps
from foretell.errors import BadConfig
from foretell.speculation.strategy import Strategy, verify_and_commit


@dataclass(frozen=True)
class Skipdecode(Strategy):
    """Shares of the model's layers, and counts."""

    # share of the layers that the first token written goes through
    most: Annotated[float, Range(0, 1, open_low=True)] = 1.0
    least: Annotated[float, Range(0, open_low=True)] = 0.5  # share of them that the last one does
    warm: Annotated[int, Range(0, 4096)] = 1  # first layers, which all tokens go through
    # tokens over which the number falls; 0: the request's max_new_tokens
    horizon: Annotated[int, Range(0, 1 << 30)] = 0

    needs = ("layers",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least > self.most:
            raise BadConfig.field("skipdecode:least", self.least, f"at most most={self.most}")

    def layers_at(self, position: int, horizon: int, layer_count: int) -> int:
        """How many of the layers the token written at this place (0 first) goes through."""
        most_layers = max(1, round(self.most * layer_count))
        fewest_layers = max(1, round(self.least * layer_count))
        progress = min(position / max(1, horizon - 1), 1.0)
        return round(most_layers - (most_layers - fewest_layers) * progress)

    def pick_layers(self, active_count: int, layer_count: int) -> tuple[int, ...] | None:
        """Which layers these are, ascending; None: all."""
        if active_count == layer_count:
            return None
        first_layers = min(self.warm, active_count)
        return *range(first_layers), *range(
            layer_count - (active_count - first_layers), layer_count
        )

    def run(self, ctx: Context) -> Steps:
        """Raises BadConfig, before anything runs, for a request with rows from elsewhere."""
        refuse_source("skipdecode", ctx.request)
        return self._run_steps(ctx)

    def _run_steps(self, ctx: Context) -> Steps:
        layer_count = len(ctx.models["target"].layout)
        horizon = self.horizon or ctx.limit - len(ctx.tokens)
        active_layers: tuple[int, ...] | None = None  # all: the prompt
        while True:
            tree = TokenTree(ctx.tokens[-1])
            lasting = active_layers is not None
            reply: Reply = yield Ask(tree, branch=ctx.branch, layers=active_layers, lasting=lasting)
            _, commit_result = yield from verify_and_commit(ctx, tree, reply)
            if commit_result.reason:
                return
            active_layers = self.pick_layers(
                self.layers_at(len(ctx.output) - 1, horizon, layer_count), layer_count
            )
