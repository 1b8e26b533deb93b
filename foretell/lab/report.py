"""What the lab found: means over places, as tables, as JSON and as a chart."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import foretell
from foretell.bench.report.plot import bars
from foretell.lab.settings import Settings

SCHEMA = "foretell.lab/1"
CHAIN = "chain"  # one token below the other
DRAFTS = {  # in words
    "independent": "independent draws",
    "unreplaced": "without replacement",
    "one drawn": "best and one drawn",
    "best": "best",
    CHAIN: "chain",
}
SHOWN = 4  # numbers of drafts in the chart


@dataclass
class Mean:
    """Of numbers at places, some of which are themselves means of draws."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    variance: float | None = None  # sum of the numbers' own; None: all are exact

    def add(self, value: float, variance: float | None = None) -> None:
        self.count += 1
        self.total += value
        self.squares += value * value
        if variance is not None:
            self.variance = (self.variance or 0.0) + variance

    @property
    def value(self) -> float:
        return self.total / self.count

    @property
    def draws_error(self) -> float | None:
        """The standard error that draws leave at these places; None: the mean is exact there."""
        return None if self.variance is None else math.sqrt(self.variance) / self.count

    @property
    def error(self) -> float:
        """The standard error as a mean of more places like these; infinite for one place."""
        if self.count < 2:
            return math.inf
        spread = max(0.0, self.squares / self.count - self.value**2)
        return math.sqrt(spread / (self.count - 1))


@dataclass(frozen=True)
class Key:
    """Whose mean it is. `k`: tokens drafted, for chains one below the other."""

    temperature: float
    set: str | None  # None: all sets together
    drafts: str
    rule: str
    k: int


@dataclass
class Report:
    """`means`: the acceptance of one level, and of a CHAIN the number of accepted tokens; `places`:
    how many there were; `skipped`: where the draft model had no law, which are not among them.
    """

    settings: Settings
    target: str
    draft: str
    places: int = 0
    skipped: int = 0
    means: dict[Key, Mean] = field(default_factory=dict)

    def note(self, key: Key, value: float, variance: float | None = None) -> None:
        """Counts a number for its set and for all sets together."""
        for one in (key, dataclasses.replace(key, set=None)):
            self.means.setdefault(one, Mean()).add(value, variance)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, schema foretell.lab/1."""
        return {
            "schema": SCHEMA,
            "version": foretell.__version__,
            "target": self.target,
            "draft": self.draft,
            "settings": dataclasses.asdict(self.settings),
            "places": self.places,
            "skipped": self.skipped,
            "rows": [self._row(key, mean) for key, mean in self._level()],
            "chains": [self._row(key, mean) for key, mean in self._chains()],
        }

    @staticmethod
    def _row(key: Key, mean: Mean) -> dict[str, Any]:
        row = dataclasses.asdict(key)
        if key.drafts == CHAIN:
            row |= {"accepted": mean.value}
        else:
            row |= {"acceptance": mean.value, "draws_error": mean.draws_error}
        return row | {"error": mean.error, "places": mean.count}

    def _level(self) -> list[tuple[Key, Mean]]:
        return [(key, mean) for key, mean in self.means.items() if key.drafts != CHAIN]

    def _chains(self) -> list[tuple[Key, Mean]]:
        return [(key, mean) for key, mean in self.means.items() if key.drafts == CHAIN]

    def tables(self) -> list[tuple[str, list[list[str]]]]:
        """For a terminal: titles and lines, the head first, of all sets together."""
        made = []
        for temperature in self.settings.temperatures:
            found = [(k, m) for k, m in self._level() if k.temperature == temperature]
            title = f"chance that one of k tokens is accepted, temperature {temperature:g}"
            columns = [f"k={k}" for k in range(1, self.settings.k + 1)]
            made.append((title, _lines(["drafts", "rule", *columns], found)))
            found = [(k, m) for k, m in self._chains() if k.temperature == temperature]
            title = f"accepted tokens of a drawn chain, temperature {temperature:g}"
            columns = [str(length) for length in range(1, self.settings.length + 1)]
            made.append((title, _lines(["drafts", "rule", *columns], found)))
        return made

    def svg(self) -> str:
        """The acceptance of each pair, all sets together: a bar for some k."""
        ks = list(range(1, self.settings.k + 1))
        if len(ks) > SHOWN:
            ks = sorted({round(1 + i * (len(ks) - 1) / (SHOWN - 1)) for i in range(SHOWN)})
        values: dict[str, list[float | None]] = {}
        for key, mean in self._level():
            if key.set is not None:
                continue
            group = f"{DRAFTS[key.drafts]}, {key.rule}"
            if len(self.settings.temperatures) > 1:
                group += f", temperature {key.temperature:g}"
            bars_here = values.setdefault(group, [None] * len(ks))
            if key.k in ks:
                bars_here[ks.index(key.k)] = mean.value
        return bars(
            f"{self.target} with drafts of {self.draft}: {self.places:,} places",
            list(values),
            [f"k={k}" for k in ks],
            list(values.values()),
            "chance that one of k drafted tokens is accepted",
        )


def _lines(head: list[str], found: list[tuple[Key, Mean]]) -> list[list[str]]:
    """A line for each pair of drafting and rule, a cell for each k."""
    lines: dict[tuple[str, str], list[str]] = {}
    for key, mean in found:
        if key.set is None:
            line = lines.setdefault((key.drafts, key.rule), [DRAFTS[key.drafts], key.rule])
            # A place has one drawn chain: what it leaves open shows in how places differ.
            error = mean.error if key.drafts == CHAIN else mean.draws_error
            known = error is not None and math.isfinite(error)
            line.append(f"{mean.value:.3f} ±{error:.3f}" if known else f"{mean.value:.3f}")
    return [head, *lines.values()]
