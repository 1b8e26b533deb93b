"""DeAL: a reward looks ahead before each token is chosen.

Each of the `k` best tokens is continued greedily by `ahead` tokens, and a reward says what the text
is worth up to there. The token with the highest ln p + weight * reward is written, and nothing of
what was looked ahead at: so the text keeps to a wish (words that must stand in it, a length) which
no prompt brings a model to obey. Tokens that were looked at share one tree, and its levels one
forward each.

Paper: Huang et al., DeAL: Decoding-time Alignment for Large Language Models, arXiv:2402.06147
Guarantee: lossy: the reward decides beside the model, on purpose
Cost: target ahead, for each token
Needs: a reward, see `foretell methods`; a tokenizer
Trains: nothing
Try: --method deal --reward "keywords:words=return sum"
Differs:
- k, ahead and weight are ours, the paper names none
- one text is written, where the paper may keep several beams; the log-probability of what is
written already is then the same for all candidates, and left out
- a prompt that asks for the same wish goes with it: write it into the prompt
- above temperature 0 the token is drawn from the softmax of these sums
- no drafter is asked: what is looked ahead at is a tree already
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Annotated

from foretell.core.context import Context
from foretell.core.refusals import refuse_options
from foretell.core.settings import Range
from foretell.core.types import Message, Steps
from foretell.errors import BadConfig
from foretell.rewards.base import Reward, needs_partial, needs_text, score_outputs
from foretell.speculation.strategy import Strategy
from foretell.strategies.rollouts import Path, write_by_value

FILTERED = "it chooses among its own k best tokens"
REFUSED = dict.fromkeys(("top_k", "top_p", "min_p", "typical_p"), FILTERED)


@dataclass(frozen=True)
class Deal(Strategy):
    """Greedy decoding with weight=0 or k=1."""

    reward: Reward | None = None  # what texts are worth; there must be one
    k: Annotated[int, Range(1, 64)] = 5  # tokens that are tried
    ahead: Annotated[int, Range(1, 512)] = 32  # tokens after each
    weight: Annotated[float, Range(0, 1000000.0)] = 1.0  # of the reward beside the log-probability

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward is None:
            raise BadConfig("deal: needs a reward; give one, as in reward=keywords:words=dog")

    def run(self, ctx: Context) -> Steps:
        """Raises BadConfig or Unsupported, before anything runs, for what it cannot honour."""
        refuse_options("deal", ctx.request.sampling, REFUSED)
        needs_text("deal", ctx, self.reward)
        needs_partial("deal", self.reward)
        reward = self.reward
        assert reward is not None, "refused when it was made"

        def value_paths(paths: Sequence[Path]) -> Generator[Message, None, list[float]]:
            outputs = [[*ctx.output, *path.tokens] for path in paths]
            scores = yield from score_outputs(ctx, reward, outputs)
            return [self.weight * score for score in scores]

        return write_by_value(ctx, self.k if self.weight else 1, self.ahead, value_paths)
