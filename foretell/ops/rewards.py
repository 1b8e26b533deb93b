"""Rewards: what a text is worth as an answer to a prompt, in one number, the higher the better.

A reward reads texts, not tokens, so any tokenizer serves, and it may be slow: strategies ask it
in a `Call`. One that is judged by a model takes steps of its own instead. A reward that is no
number drops the text it was asked about.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from foretell.core.types import Call, Message
from foretell.errors import BadConfig, Unsupported
from foretell.registry import load

if TYPE_CHECKING:
    from foretell.core.context import Context


class Reward:
    """The base: a frozen dataclass of hyper-parameters."""

    kind = "reward"
    partial = True  # whether it says something of texts that are not finished

    def check(self, ctx: Context) -> None:
        """Raises, before anything runs, for what it needs and the request has not."""

    def scores(self, prompt: str, texts: Sequence[str]) -> list[float]:
        """Of each text; NaN where it cannot tell. All texts answer the prompt."""
        raise NotImplementedError

    def steps(
        self, ctx: Context, prompt: str, texts: Sequence[str]
    ) -> Generator[Message, Any, list[float]]:
        """The same for one that asks models, on quiet branches that it opens and drops."""
        found: list[float] = yield Call(lambda: self.scores(prompt, texts))
        return found


def scored(
    ctx: Context, reward: Reward, outputs: Sequence[Sequence[int]]
) -> Generator[Message, Any, list[float]]:
    """The rewards of these outputs behind the prompt; -inf for those that have none."""
    decode = ctx.request.text
    assert decode is not None, "refused before by `needs_text`"
    prompt = decode(list(ctx.request.prompt))
    texts = [ctx.sampler.detokenizer(decode).push(output, final=True) for output in outputs]
    found = yield from reward.steps(ctx, prompt, texts)
    if len(found) != len(texts):
        name = type(reward).__name__.lower()
        raise BadConfig(f"reward {name!r} gave {len(found)} numbers for {len(texts)} texts")
    return [-math.inf if math.isnan(score) else float(score) for score in found]


def agreement() -> Reward:
    """What a text has in common with the others that are compared."""
    made: Reward = load("bleu", "reward")()
    return made


def needs_text(method: str, ctx: Context, *rewards: Reward | None) -> None:
    """Raises Unsupported where there is no tokenizer to make a text with, and what these raise."""
    if ctx.request.text is None:
        raise Unsupported.missing(
            method,
            ctx.models["target"].name,
            "a tokenizer, since rewards read texts",
            "load the model from a folder that has one",
        )
    for reward in rewards:
        if reward is not None:
            reward.check(ctx)


def needs_partial(method: str, reward: Reward | None) -> None:
    """Raises BadConfig for a reward that says nothing of texts that are not finished."""
    if reward is not None and not reward.partial:
        name = type(reward).__name__
        raise BadConfig(
            f"{method} asks what unfinished texts are worth, and the reward {name} reads whole "
            "ones alone; take best-of or pg-td with it, or another reward"
        )
