"""Transfer Q*: an aligned model's own continuations say what each next token is worth.

Each of the `k` best tokens of the target is continued by a baseline, a model that was aligned with
a reward (or the target itself), and the reward of the whole text is the token's value. The token
with the highest logit + weight * value is written. With `own`, the reward that the baseline was
aligned with, values are carried over to another reward (indirect transfer): each is weighed by
exp((reward - own) / 2).

Paper: Chakraborty et al., Transfer Q Star: Principled Decoding for LLM Alignment, arXiv:2405.20495
Guarantee: lossy: the reward decides beside the model, on purpose
Cost: target 1 and the baseline ahead, for each token
Needs: a reward, see `foretell methods`; a tokenizer; with `baseline`, a model of that name
Trains: nothing
Try: --method transfer-q --reward "keywords:words=return sum"
Differs:
- continuations are greedy, one a token: the mean over the baseline's texts, of which the released
code takes one drawn text, is then of one text as well, and the same for a seed
- tokens compare by log-probability, which chooses as the raw logit does
- above temperature 0 the token is drawn from the softmax of these sums, as in the released code
- no drafter is asked: what is looked ahead at is a tree already
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from foretell.core.context import Context
from foretell.core.refusals import refuse_options
from foretell.core.settings import Range
from foretell.core.types import Message, Steps
from foretell.errors import BadConfig
from foretell.guidance.mixing import check_partner, check_room
from foretell.rewards.base import Reward, needs_partial, needs_text, score_outputs
from foretell.speculation.strategy import Strategy
from foretell.strategies.rollouts import Path, write_by_value

if TYPE_CHECKING:
    from foretell.core.model import Model

FILTERED = "it chooses among its own k best tokens"
REFUSED = dict.fromkeys(("top_k", "top_p", "min_p", "typical_p"), FILTERED)
STEEP = 0.5  # of exp in indirect transfer, as in the released code
AHEAD, AHEAD_INDIRECT = 20, 5  # tokens, as there


@dataclass(frozen=True)
class TransferQ(Strategy):
    """Greedy decoding with weight=0 or k=1."""

    reward: Reward | None = None  # what texts are worth; there must be one
    own: Reward | None = None  # what the baseline was aligned with; None: the same reward
    baseline: str = ""  # name of the aligned model; "": the target
    k: Annotated[int, Range(1, 64)] = 10  # tokens that are tried
    # tokens after each; 0: 20, and 5 in indirect transfer
    ahead: Annotated[int, Range(0, 512)] = 0
    weight: Annotated[float, Range(0, 1000000.0)] = 1.0  # of the value beside the logit

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward is None:
            raise BadConfig("transfer-q: needs a reward; give one, as in reward=keywords:words=dog")

    @property
    def models(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.baseline,) if self.baseline else ()

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        for name in self.models:
            check_partner("transfer-q:baseline", models, name)
        return {}

    def run(self, ctx: Context) -> Steps:
        """Raises BadConfig or Unsupported, before anything runs, for what it cannot honour."""
        refuse_options("transfer-q", ctx.request.sampling, REFUSED)
        needs_text("transfer-q", ctx, self.reward, self.own)
        needs_partial("transfer-q", self.reward, self.own)
        for name in self.models:
            check_room(ctx, "transfer-q:baseline", name)
        reward, baseline_reward = self.reward, self.own
        assert reward is not None, "refused when it was made"

        def value_paths(paths: Sequence[Path]) -> Generator[Message, None, list[float]]:
            outputs = [[*ctx.output, *path.tokens] for path in paths]
            path_values = yield from score_outputs(ctx, reward, outputs)
            if baseline_reward is not None:
                baseline_values = yield from score_outputs(ctx, baseline_reward, outputs)
                path_values = [
                    transfer_value(*pair) for pair in zip(path_values, baseline_values, strict=True)
                ]
            return [self.weight * score for score in path_values]

        lookahead_tokens = self.ahead or (AHEAD if baseline_reward is None else AHEAD_INDIRECT)
        candidate_count = self.k if self.weight else 1
        return write_by_value(
            ctx, candidate_count, lookahead_tokens, value_paths, self.baseline or "target"
        )


def transfer_value(reward: float, baseline_value: float) -> float:
    """A value by the reward of a text that was written for another one."""
    if -math.inf in (reward, baseline_value):
        return -math.inf
    return math.exp(STEEP * (reward - baseline_value)) * reward
