"""What the lab found: means over places, as tables, as JSON and as a chart."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import foretell
from foretell.bench.report.plot import bar_chart
from foretell.lab.settings import Settings

SCHEMA = "foretell.measure.lab/1"
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
    """The mean of numbers at places, some of which are themselves means of draws."""

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
        squared_spread = max(0.0, self.squares / self.count - self.value**2)
        return math.sqrt(squared_spread / (self.count - 1))


@dataclass(frozen=True)
class Key:
    """A key of means. `k`: tokens drafted, for chains one below the other."""

    temperature: float
    set: str | None  # None: all sets together
    drafts: str
    rule: str
    k: int


@dataclass
class Report:
    """The means of a lab. `means`: the acceptance of one level, and of a CHAIN the number of
    accepted tokens; `places`: how many there were; `skipped`: places where the draft model had no
    distribution, which are not among them.
    """

    settings: Settings
    target: str
    draft: str
    places: int = 0
    skipped: int = 0
    means: dict[Key, Mean] = field(default_factory=dict)

    def note_value(self, key: Key, value: float, variance: float | None = None) -> None:
        """Counts a number for its set and for all sets together."""
        for mean_key in (key, dataclasses.replace(key, set=None)):
            self.means.setdefault(mean_key, Mean()).add(value, variance)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report JSON-ready, schema foretell.measure.lab/1."""
        return {
            "schema": SCHEMA,
            "version": foretell.__version__,
            "target": self.target,
            "draft": self.draft,
            "settings": dataclasses.asdict(self.settings),
            "places": self.places,
            "skipped": self.skipped,
            "rows": [self._json_row(key, mean) for key, mean in self._level_means()],
            "chains": [self._json_row(key, mean) for key, mean in self._chain_means()],
        }

    @staticmethod
    def _json_row(key: Key, mean: Mean) -> dict[str, Any]:
        json_row = dataclasses.asdict(key)
        if key.drafts == CHAIN:
            json_row |= {"accepted": mean.value}
        else:
            json_row |= {"acceptance": mean.value, "draws_error": mean.draws_error}
        return json_row | {"error": mean.error, "places": mean.count}

    def _level_means(self) -> list[tuple[Key, Mean]]:
        return [(key, mean) for key, mean in self.means.items() if key.drafts != CHAIN]

    def _chain_means(self) -> list[tuple[Key, Mean]]:
        return [(key, mean) for key, mean in self.means.items() if key.drafts == CHAIN]

    def tables(self) -> list[tuple[str, list[list[str]]]]:
        """Returns tables for a terminal: titles and lines, the head first, of all sets together."""
        titled_tables = []
        for temperature in self.settings.temperatures:
            level_rows = [
                (mean_key, row_mean)
                for mean_key, row_mean in self._level_means()
                if mean_key.temperature == temperature
            ]
            title = f"chance that one of k tokens is accepted, temperature {temperature:g}"
            columns = [f"k={mean_key}" for mean_key in range(1, self.settings.k + 1)]
            titled_tables.append((title, _table_lines(["drafts", "rule", *columns], level_rows)))
            level_rows = [
                (mean_key, row_mean)
                for mean_key, row_mean in self._chain_means()
                if mean_key.temperature == temperature
            ]
            title = f"accepted tokens of a drawn chain, temperature {temperature:g}"
            columns = [str(length) for length in range(1, self.settings.length + 1)]
            titled_tables.append((title, _table_lines(["drafts", "rule", *columns], level_rows)))
        return titled_tables

    def svg(self) -> str:
        """Draws the acceptance of each pair, all sets together: a bar for some k."""
        shown_counts = list(range(1, self.settings.k + 1))
        if len(shown_counts) > SHOWN:
            shown_counts = sorted(
                {
                    round(1 + bar_index * (len(shown_counts) - 1) / (SHOWN - 1))
                    for bar_index in range(SHOWN)
                }
            )
        values: dict[str, list[float | None]] = {}
        for key, mean in self._level_means():
            if key.set is not None:
                continue
            group_name = f"{DRAFTS[key.drafts]}, {key.rule}"
            if len(self.settings.temperatures) > 1:
                group_name += f", temperature {key.temperature:g}"
            group_bars = values.setdefault(group_name, [None] * len(shown_counts))
            if key.k in shown_counts:
                group_bars[shown_counts.index(key.k)] = mean.value
        return bar_chart(
            f"{self.target} with drafts of {self.draft}: {self.places:,} places",
            list(values),
            [f"k={k}" for k in shown_counts],
            list(values.values()),
            "chance that one of k drafted tokens is accepted",
        )


def _table_lines(header_line: list[str], keyed_means: list[tuple[Key, Mean]]) -> list[list[str]]:
    """Writes a line for each pair of drafting and rule, a cell for each k."""
    lines: dict[tuple[str, str], list[str]] = {}
    for key, mean in keyed_means:
        if key.set is None:
            line = lines.setdefault((key.drafts, key.rule), [DRAFTS[key.drafts], key.rule])
            # A place has one drawn chain: what it leaves open shows in how places differ.
            error = mean.error if key.drafts == CHAIN else mean.draws_error
            has_error = error is not None and math.isfinite(error)
            line.append(f"{mean.value:.3f} ±{error:.3f}" if has_error else f"{mean.value:.3f}")
    return [header_line, *lines.values()]
