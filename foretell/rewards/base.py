"""Rewards: what a text is worth as an answer to a prompt, in one number, the higher the better.

A reward reads texts, not tokens, so any tokenizer serves, and it may be slow: strategies ask it
in a `Call`. One that is judged by a model takes steps of its own instead. A reward that is no
number drops the text it was asked about.
"""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretell.core.settings import Settings
from foretell.core.types import Call, Message
from foretell.errors import BadConfig, Unsupported
from foretell.registry import load_method

if TYPE_CHECKING:
    from foretell.core.context import Context


class Reward(Settings):
    """The base: a frozen dataclass of hyper-parameters."""

    kind = "reward"
    partial = True  # whether it says something of texts that are not finished

    @property
    def spec_name(self) -> str:
        """The reward's name in specs."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(self).__name__).lower()

    def check(self, ctx: Context) -> None:
        """Raises, before anything runs, where the request lacks something that the reward needs."""

    def scores(self, prompt: str, texts: Sequence[str]) -> list[float]:
        """Scores each text; NaN where it cannot tell. All texts answer the prompt."""
        raise NotImplementedError

    def steps(
        self, ctx: Context, prompt: str, texts: Sequence[str]
    ) -> Generator[Message, Any, list[float]]:
        """Scores each text by steps, for a reward that asks models, on quiet branches that it opens
        and drops.
        """
        text_scores: list[float] = yield Call(lambda: self.scores(prompt, texts))
        return text_scores


def score_outputs(
    ctx: Context, reward: Reward, outputs: Sequence[Sequence[int]]
) -> Generator[Message, Any, list[float]]:
    """Returns the rewards of these outputs after the prompt; -inf for those that have none."""
    decode_tokens = ctx.request.text
    assert decode_tokens is not None, "refused before by `needs_text`"
    prompt = decode_tokens(list(ctx.request.prompt))
    texts = [ctx.sampler.detokenizer(decode_tokens).push(output, final=True) for output in outputs]
    text_scores = yield from reward.steps(ctx, prompt, texts)
    if len(text_scores) != len(texts):
        raise BadConfig(
            f"reward {reward.spec_name!r} gave {len(text_scores)} numbers for {len(texts)} texts"
        )
    return [-math.inf if math.isnan(score) else float(score) for score in text_scores]


def agreement_reward() -> Reward:
    """Returns the reward for what a text has in common with the others that are compared."""
    bleu_reward: Reward = load_method("bleu", "reward")()
    return bleu_reward


def needs_text(method: str, ctx: Context, *rewards: Reward | None) -> None:
    """Raises Unsupported where no tokenizer can make a text, and whatever the rewards' `check`
    raises.
    """
    if ctx.request.text is None:
        raise Unsupported.missing_capability(
            method,
            ctx.models["target"].name,
            "a tokenizer, since rewards read texts",
            "load the model from a folder that has one",
        )
    for reward in rewards:
        if reward is not None:
            reward.check(ctx)


def needs_partial(method: str, *rewards: Reward | None) -> None:
    """Raises BadConfig for a reward that says nothing of texts that are not finished."""
    for reward in rewards:
        if reward is not None and not reward.partial:
            raise BadConfig(
                f"{method} asks what unfinished texts are worth, and the reward {reward.spec_name} "
                "reads whole ones alone; take best-of or pg-td with it, or another reward"
            )


@dataclass(frozen=True)
class Mean(Reward):
    """The weighted mean of several rewards, so that numbers from 0 to 1 stay such."""

    parts: tuple[Reward, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        for weight in self.weights:
            if not 0 < weight <= 1e6:
                raise BadConfig.field("weight", weight, "above 0, and at most 1000000")

    @property
    def spec_name(self) -> str:
        return "+".join(part.spec_name for part in self.parts)

    @property
    def partial(self) -> bool:  # type: ignore[override]
        return all(part.partial for part in self.parts)

    def check(self, ctx: Context) -> None:
        for part in self.parts:
            part.check(ctx)

    def scores(self, prompt: str, texts: Sequence[str]) -> list[float]:
        return self.weigh_scores([part.scores(prompt, texts) for part in self.parts])

    def steps(
        self, ctx: Context, prompt: str, texts: Sequence[str]
    ) -> Generator[Message, Any, list[float]]:
        part_scores = []
        for part in self.parts:
            part_scores.append((yield from part.steps(ctx, prompt, texts)))
        return self.weigh_scores(part_scores)

    def weigh_scores(self, part_scores: Sequence[Sequence[float]]) -> list[float]:
        weight_sum = sum(self.weights)
        score_rows = zip(*part_scores, strict=True)
        return [
            sum(weight * score for weight, score in zip(self.weights, text_scores, strict=True))
            / weight_sum
            for text_scores in score_rows
        ]
