"""What the lab measures."""

from __future__ import annotations

import math
from dataclasses import dataclass

from foretell.errors import BadConfig

RANGES = {
    "k": (1, 8),
    "length": (1, 64),
    "positions": (1, 4096),
    "limit": (1, 1 << 20),
    "draws": (2, 1 << 20),
}


@dataclass(frozen=True)
class Settings:
    """The settings of a lab. Raises BadConfig for a value outside its range.

    `k`: tokens drafted at a place at most; `length`: of chains; `positions`: places in each text;
    `limit`: prompts of a set; `draws`: of what has no closed form, at each place.
    """

    temperatures: tuple[float, ...] = (1.0,)
    k: int = 4
    length: int = 4
    positions: int = 8
    limit: int = 2
    draws: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        for name, (lowest, highest) in RANGES.items():
            if not lowest <= getattr(self, name) <= highest:
                raise BadConfig.field(name, getattr(self, name), f"between {lowest} and {highest}")
        if not self.temperatures:
            raise BadConfig("temperature is empty: name one at least")
        for temperature in self.temperatures:
            if not 0 < temperature <= 100 or not math.isfinite(temperature):
                expected = "above 0 and at most 100; at 0 every rule is the walk"
                raise BadConfig.field("temperature", temperature, expected)
        if len(set(self.temperatures)) < len(self.temperatures):
            raise BadConfig.field("temperature", self.temperatures, "different numbers")
