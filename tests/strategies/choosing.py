"""What tests of strategies that choose among texts have in common: a toy's rows, and a reward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.rewards.base import Reward
from foretell.testing.toy import Toy
from tests import laws

VOCAB = 5
PROMPT = [0, 1, 2, 0, 1]


@dataclass(frozen=True)
class Count(Reward):
    """How often a letter stands in a text, less a little for its length; NaN for texts in `bad`."""

    letter: str = "b"
    bad: str = "~"

    def scores(self, prompt: str, texts: Sequence[str]) -> list[float]:
        return [self.score(text) for text in texts]

    def score(self, text: str) -> float:
        return math.nan if self.bad in text else text.count(self.letter) - 0.1 * len(text)


def words(tokens: Sequence[int]) -> str:
    """One word a token."""
    return " ".join(laws.spell(tokens))


def write(
    config: Any,
    sampling: Sampling,
    seed: int = 0,
    beside: Sequence[Any] = (),
    text: Any = laws.spell,
    **models: Any,
) -> Live:
    """One request, and others beside it."""
    target = Toy(VOCAB, seed, copy=1.0)
    engine = Engine({"target": target, **models})
    live = engine.add(Request(PROMPT, config, sampling, text=text))
    for number, other in enumerate(beside):
        engine.add(Request([2, 1, number], other, Sampling(max_new_tokens=7), text=laws.spell))
    list(engine.run())
    assert live.error is None, live.error
    return live


def logs(row: Sequence[float]) -> list[float]:
    total = math.log(sum(math.exp(x - max(row)) for x in row)) + max(row)
    return [x - total for x in row]


def law_after(toy: Toy, output: Sequence[int]) -> list[float]:
    """Log-probabilities of the token after the prompt and this output."""
    return logs(laws.row(toy, [*PROMPT, *output]))
