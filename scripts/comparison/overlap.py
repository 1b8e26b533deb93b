"""When drafting beside the target pays: a simulation of rounds by measured times.

Give what one step of each model takes, how likely a drafted token is to hold, and where the draft
model computes; `predict` says how many tokens a second each method would write, and how many times
as fast as plain decoding that is. Every method is a generator of rounds, (seconds, tokens): what it
does in a round, with the times in place of the forwards. Tokens hold independently of one another,
which real texts only do on the mean: `scripts/overlap.py` compares with a measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, repeat

import numpy as np

from foretell.errors import BadConfig

ROUNDS = 20_000  # simulated of each method
BLOCK = 4096  # random numbers made at once
Rounds = Iterator[tuple[float, int]]  # (seconds, tokens written) of one round after the other
Holding = Callable[[int], int]  # of so many drafted tokens, how many hold before one does not


@dataclass(frozen=True)
class Times:
    """Seconds. Raises BadConfig for what no clock measures."""

    target: float  # a forward of the target for one token
    draft: float  # and one of the draft model
    target_token: float = 0.0  # each further token of the target's forward
    draft_token: float = 0.0  # and of the draft model's
    handover: float = 0.0  # of a round, between the lane and the engine
    # how many times as long a forward takes while the other model computes too: 1 where each has a
    # device of its own, 2 where they take turns on one
    slowdown: float = 1.0
    lane: str = "beside"  # or "inline": drafts and verifications one after the other

    def __post_init__(self) -> None:
        if self.lane not in ("beside", "inline"):
            raise BadConfig.field("lane", self.lane, "'beside' or 'inline'")
        for name in ("target", "draft"):
            if not getattr(self, name) > 0:
                raise BadConfig.field(name, getattr(self, name), "above 0 seconds")
        for name in ("target_token", "draft_token", "handover"):
            if not getattr(self, name) >= 0:
                raise BadConfig.field(name, getattr(self, name), "0 seconds or more")
        if not 1 <= self.slowdown <= 2:
            raise BadConfig.field("slowdown", self.slowdown, "between 1 and 2")

    def verifying(self, tokens: int) -> float:
        return self.target + (tokens - 1) * self.target_token

    def drafting(self, steps: int, width: int = 1) -> float:
        """So many steps after one another, each of `width` tokens."""
        return steps * (self.draft + (width - 1) * self.draft_token)

    def together(self, one: float, other: float) -> float:
        """Two things that take so long alone, side by side if the lane is: the shorter one slows
        the longer down while it lasts.
        """
        if self.lane == "inline":
            return one + other
        longer, shorter = max(one, other), min(one, other)
        return longer + (self.slowdown - 1) * shorter + self.handover


def plain(times: Times) -> Rounds:
    while True:
        yield times.verifying(1), 1


def draft(times: Times, holding: Holding, gamma: int) -> Rounds:
    """Ordinary speculation with a chain of gamma tokens."""
    seconds = times.drafting(gamma) + times.verifying(1 + gamma)
    while True:
        yield seconds, 1 + holding(gamma)


def pearl(times: Times, holding: Holding, gamma: int) -> Rounds:
    tail = 0
    while True:
        seconds = times.together(times.drafting(gamma), times.verifying(1 + tail))
        held = holding(tail + 1)
        if held == tail + 1:
            yield seconds, held
            tail = gamma - 1
        else:
            yield seconds, held + 1
            tail = 0


def mirror(
    times: Times, holding: Holding, gamma: int, kappa: int, early: float, hit: Callable[[], bool]
) -> Rounds:
    """`early`: the share of the target's forward before the guess; `hit`: whether the token after
    a window was guessed.
    """
    verifying = times.verifying(1 + gamma)
    branches = times.drafting(gamma, width=(1 + gamma) * kappa)
    ready = False
    while True:
        seconds = 0.0 if ready else times.drafting(gamma)
        seconds += early * verifying
        seconds += times.together((1 - early) * verifying, branches)
        yield seconds, 1 + holding(gamma)
        ready = hit()


def easyspec(
    times: Times, holding: Holding, gamma: int, group: int, attention: float, devices: int
) -> Rounds:
    """`attention`: its share of a draft step. Those of a group lie on so many devices."""
    side_by_side = min(group, devices)
    rough = times.draft * (1 - attention + attention / side_by_side)
    seconds = times.draft + (gamma - 1) * rough + times.verifying(1 + gamma)
    while True:
        yield seconds, 1 + holding(gamma)


def speed(rounds: Rounds, count: int = ROUNDS) -> float:
    """Tokens a second over so many rounds."""
    seconds = 0.0
    tokens = 0
    for taken, written in islice(rounds, count):
        seconds += taken
        tokens += written
    return tokens / seconds


@dataclass(frozen=True)
class Prediction:
    """What one method would give."""

    method: str
    tokens_per_second: float
    speedup: float  # over plain decoding


@dataclass(frozen=True)
class Case:
    """What is known of a pair of models. Raises BadConfig for what cannot be.

    `recall` and `rough_chance` are those of mirror and easyspec.
    """

    times: Times
    chance: float  # that a drafted token holds
    gamma: int = 4  # tokens drafted at once
    kappa: int = 2  # guesses of a slot
    early: float = 0.5  # share of the target's forward before the guess
    recall: float = 0.5  # probability that the token after a window was among its guesses
    rough_chance: float | None = None  # that a rough model's token holds; None: `chance`
    group: int = 4  # layers of a group
    attention: float = 0.4  # its share of a draft step
    devices: int = 1  # that a group's attentions lie on

    def __post_init__(self) -> None:
        shares = ("chance", "early", "recall", "attention")
        for name in shares if self.rough_chance is None else (*shares, "rough_chance"):
            if not 0 <= getattr(self, name) <= 1:
                raise BadConfig.field(name, getattr(self, name), "between 0 and 1")
        for name in ("gamma", "kappa", "group", "devices"):
            if getattr(self, name) < 1:
                raise BadConfig.field(name, getattr(self, name), "1 or more")


def predict(case: Case, seed: int = 0, rounds: int = ROUNDS) -> list[Prediction]:
    """Plain decoding, ordinary speculation and the three methods, the quickest first.

    The first token of an easyspec chain is the ordinary draft model's, and counted as the others.
    """
    times, gamma = case.times, case.gamma
    rough = case.chance if case.rough_chance is None else case.rough_chance
    luck = np.random.default_rng(seed)

    def holding(chance: float) -> Holding:
        runs = run_lengths(luck, chance)
        return lambda tokens: min(tokens, next(runs))

    hits = run_lengths(luck, case.recall)
    sure = holding(case.chance)
    methods = {
        "plain": plain(times),
        "draft": draft(times, sure, gamma),
        "pearl": pearl(times, sure, gamma),
        "mirror": mirror(times, sure, gamma, case.kappa, case.early, lambda: next(hits) > 0),
        "easyspec": easyspec(
            times, holding(rough), gamma, case.group, case.attention, case.devices
        ),
    }
    found = []
    for name, of_method in methods.items():
        tokens_per_second = speed(of_method, rounds)
        ratio = tokens_per_second * times.verifying(1)
        found.append(Prediction(name, tokens_per_second, ratio))
    return sorted(found, key=lambda prediction: -prediction.speedup)


def run_lengths(luck: np.random.Generator, chance: float) -> Iterator[int]:
    """How often in a row something of this probability happens, again and again."""
    if chance == 1:
        yield from repeat(1 << 30)
    while True:
        yield from (luck.geometric(1 - chance, BLOCK) - 1).tolist()


def table(predictions: list[Prediction]) -> str:
    """A line for each, for people."""
    lines = [f"{'method':<10}{'tokens/s':>10}{'speed-up':>10}"]
    for one in predictions:
        lines.append(f"{one.method:<10}{one.tokens_per_second:>10.1f}{one.speedup:>10.2f}")
    return "\n".join(lines)
