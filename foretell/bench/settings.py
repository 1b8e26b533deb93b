"""What a bench measures."""

from __future__ import annotations

from dataclasses import dataclass

from foretell.bench import peers
from foretell.core.types import Sampling
from foretell.errors import BadConfig


@dataclass(frozen=True)
class Settings:
    """Settings of a bench. Raises BadConfig or UnknownMethod for a value outside its range.

    `draft`: None, or a smaller relative of every model; `peers`: as foretell.bench.peers names
    them; `warm_up`: prompts of the round that does not count, 0: all; `contexts`: lengths in tokens
    of the prompts that are made besides, of all sets together; `device`: the one asked for, kept so
    that a run is not continued on another one; `tasks`: sorts of a suite's tasks, `budget`: what
    each answer of a suite may take, as core.spending reads it; `processors` and `rewards`: specs,
    which some suites take.
    """

    models: tuple[str, ...] = ("demo",)
    draft: str | None = None
    dtypes: tuple[str, ...] = ("auto",)
    methods: tuple[str, ...] = ("plain", "auto")
    peers: tuple[str, ...] = ()
    max_new_tokens: int = 96
    temperatures: tuple[float, ...] = (0.0,)
    seed: int = 0
    rounds: int = 3
    warm_up: int = 0
    requests: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = ()
    device: str | None = None
    tasks: tuple[str, ...] = ()
    budget: str = ""
    processors: tuple[str, ...] = ()
    rewards: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field_name in ("models", "dtypes", "methods", "temperatures", "requests"):
            values = getattr(self, field_name)
            if not values or len(set(values)) != len(values):
                raise BadConfig.field(field_name, values, "at least one, each named once")
        if self.max_new_tokens < 2:
            allowed_range = "at least 2: what is timed follows the first"
            raise BadConfig.field("max_new_tokens", self.max_new_tokens, allowed_range)
        if self.rounds < 1:
            raise BadConfig.field("rounds", self.rounds, "at least 1")
        if self.warm_up < 0:
            raise BadConfig.field("warm_up", self.warm_up, "at least 0, which is all of them")
        if len(set(self.tasks)) < len(self.tasks):
            raise BadConfig.field("tasks", self.tasks, "each named once")
        for field_name in ("requests", "contexts"):
            smallest_value = min(getattr(self, field_name), default=1)
            if smallest_value < 1:
                raise BadConfig.field(field_name, smallest_value, "at least 1")
        if len(set(self.contexts)) < len(self.contexts):
            raise BadConfig.field("contexts", self.contexts, "each named once")
        for temperature in self.temperatures:
            Sampling(temperature=temperature, seed=self.seed)
        for field_name in self.peers:
            peers.check_peer(field_name)

    @property
    def specs(self) -> list[str]:
        """Our methods, plain decoding first, since its tokens are what others are compared with."""
        return ["plain", *(spec for spec in self.methods if spec != "plain")]
