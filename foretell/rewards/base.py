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

from foretell.core.types import Call, Message
from foretell.errors import BadConfig, Unsupported
from foretell.registry import load

if TYPE_CHECKING:
    from foretell.core.context import Context


class Reward:
    """The base: a frozen dataclass of hyper-parameters."""

    kind = "reward"
    partial = True  # whether it says something of texts that are not finished

    @property
    def called(self) -> str:
        """As specs call it."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(self).__name__).lower()

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
        raise BadConfig(
            f"reward {reward.called!r} gave {len(found)} numbers for {len(texts)} texts"
        )
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


def needs_partial(method: str, *rewards: Reward | None) -> None:
    """Raises BadConfig for a reward that says nothing of texts that are not finished."""
    for reward in rewards:
        if reward is not None and not reward.partial:
            raise BadConfig(
                f"{method} asks what unfinished texts are worth, and the reward {reward.called} "
                "reads whole ones alone; take best-of or pg-td with it, or another reward"
            )


@dataclass(frozen=True)
class Mean(Reward):
    """What several rewards say, weighed, so that numbers from 0 to 1 stay such."""

    parts: tuple[Reward, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        for weight in self.weights:
            if not 0 < weight <= 1e6:
                raise BadConfig.field("weight", weight, "above 0, and at most 1000000")

    @property
    def called(self) -> str:
        return "+".join(part.called for part in self.parts)

    @property
    def partial(self) -> bool:  # type: ignore[override]
        return all(part.partial for part in self.parts)

    def check(self, ctx: Context) -> None:
        for part in self.parts:
            part.check(ctx)

    def scores(self, prompt: str, texts: Sequence[str]) -> list[float]:
        return self.weighed([part.scores(prompt, texts) for part in self.parts])

    def steps(
        self, ctx: Context, prompt: str, texts: Sequence[str]
    ) -> Generator[Message, Any, list[float]]:
        found = []
        for part in self.parts:
            found.append((yield from part.steps(ctx, prompt, texts)))
        return self.weighed(found)

    def weighed(self, found: Sequence[Sequence[float]]) -> list[float]:
        total = sum(self.weights)
        rows = zip(*found, strict=True)
        return [sum(w * v for w, v in zip(self.weights, row, strict=True)) / total for row in rows]
