"""Contenders that take invented times, and small settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import foretell
from foretell.bench.peers import Run
from foretell.bench.settings import Settings
from tests import tiny

PROMPTS = ["def add(a, b):", "The quick brown fox"]
SMALL = Settings(
    models=("tiny",),
    dtypes=("float32",),
    methods=("ngram:n=2,k=3,nodes=3",),
    max_new_tokens=6,
    rounds=2,
)


class Fake:
    """Takes `seconds` a token on its own clock; notes what it is asked for."""

    about = "invented"

    def __init__(
        self,
        name: str,
        seconds: float,
        log: list[tuple[str, Any]],
        tokens: Sequence[int] = (5, 6, 7, 8),
    ):
        self.name = name
        self.seconds = seconds
        self.log = log
        self.tokens = list(tokens)

    def forget(self) -> None:
        self.log.append((self.name, "forget"))

    def run(
        self, batch: list[list[int]], max_new_tokens: int, temperature: float, seed: int
    ) -> list[Run]:
        self.log.append((self.name, batch[0][0]))
        times = [1.0 + self.seconds * i for i in range(len(self.tokens))]
        return [Run(self.tokens, times, [1] * len(self.tokens)) for _ in batch]


class Broken(Fake):
    def run(
        self, batch: list[list[int]], max_new_tokens: int, temperature: float, seed: int
    ) -> list[Run]:
        super().run(batch, max_new_tokens, temperature, seed)
        raise ArithmeticError("overflow\nat length")


def load(model: str, dtype: str) -> foretell.LM:
    return tiny.lm()
