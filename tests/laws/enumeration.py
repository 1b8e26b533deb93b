"""The law of a strategy's output, by every outcome of its draws."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from foretell.core.model import Model
from foretell.core.request import Request
from foretell.core.source import Source
from foretell.core.stores import Stores
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.speculation.strategy import Strategy
from foretell.testing.outcomes import Enumerator
from tests.laws.found import build
from tests.laws.world import DIRECT, SETTINGS, Setting, finish, world

WIDE = 24  # outcomes of two tokens above which three would take too long


@dataclass
class Law:
    """The enumerated law of a strategy's outputs, and what its drafts came to over all outcomes."""

    outputs: dict[tuple[int, ...], float] = field(default_factory=dict)
    outcomes: int = 0
    drafted: int = 0
    accepted: int = 0
    depth: int = 0  # of the deepest draft that was tested

    def distance(self, other: Mapping[tuple[int, ...], float]) -> float:
        """The largest difference of any output's probability."""
        keys = {*self.outputs, *other}
        return max(abs(self.outputs.get(k, 0.0) - other.get(k, 0.0)) for k in keys)


def warmed(strategy: Strategy, models: Mapping[str, Model], setting: Setting) -> Stores:
    """What the engine's shared stores hold after two texts; only a drafter that learns leaves
    anything there.
    """
    engine = Engine(models, setting.eos)
    vocab = models["target"].vocab
    lives = []
    for seed in range(2):
        sampling = Sampling(max_new_tokens=12, temperature=1.0, seed=seed)
        lives.append(engine.add(Request([t % vocab for t in (0, 1, 2, seed)], strategy, sampling)))
    finish(engine, *lives)
    return engine.stores


# What any drafter leaves for the policy of drafts, and what saves it time.
COMMON = ("beginnings", "chances", "pace", "promise", "worth")


def leaves_something(spec: str) -> bool:
    """Whether a drafter's texts leave in the stores what drafts of later texts are made of."""
    strategy = build(spec)
    stores = warmed(strategy, world(strategy), SETTINGS["plain"])
    return any(not name.startswith(COMMON) for _, _, name in stores)


def enumerate_law(
    strategy: Strategy,
    prompt: Sequence[int],
    setting: Setting,
    models: Mapping[str, Model],
    warm: bool = True,
    source: Source = DIRECT,
    prepare: Callable[[Engine], object] | None = None,
) -> Law:
    """Runs the engine once for every outcome of every draw.

    `prepare`: done to each engine first, to give it costs or other requests.
    """
    stores = warmed(strategy, models, setting) if warm else Stores()
    law = Law()

    def once(door: Enumerator) -> tuple[int, ...]:
        engine = Engine(models, setting.eos)
        engine.stores = copy.deepcopy(stores)
        if prepare is not None:
            prepare(engine)
        request = Request(
            prompt, strategy, setting.sampling, text=setting.text, rng=door, source=source
        )
        live = engine.add(request)
        finish(engine, live)
        law.drafted += live.ctx.stats.drafted
        law.depth = max(law.depth, len(live.ctx.stats.by_depth))
        law.accepted += live.ctx.stats.accepted
        return tuple(live.ctx.output)

    for weight, output in Enumerator.walk_outcomes(once):
        law.outcomes += 1
        law.outputs[output] = law.outputs.get(output, 0.0) + weight
    return law
