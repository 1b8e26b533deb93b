"""From the runs of a document to numbers: medians, ranges, ratios prompt by prompt."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from comparison.document import Document

BASE = "transformers"
Key = tuple[int, int, int]  # part, prompt, round: runs with the same one stood beside each other


@dataclass(frozen=True)
class Spread:
    """Median, 10th and 90th percentile."""

    median: float
    low: float
    high: float


@dataclass
class Cell:
    """One contender on one set.

    `ratios`: of its speed to others' on the same prompt in the same round, by name. `same`: answers
    with the tokens of our plain decoding in the same number format, of how many; None for peers.
    """

    speeds: dict[Key, float] = field(default_factory=dict)
    mats: list[float] = field(default_factory=list)
    digests: dict[Key, str] = field(default_factory=dict)
    ratios: dict[str, Spread | None] = field(default_factory=dict)
    same: tuple[int, int] | None = None

    @property
    def speed(self) -> Spread | None:
        return spread(value for value in self.speeds.values() if value > 0)

    @property
    def mat(self) -> float:
        return statistics.mean(self.mats)


def spread(values: Iterable[float]) -> Spread | None:
    """None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    tenth = len(ordered) // 10
    return Spread(statistics.median(ordered), ordered[tenth], ordered[-1 - tenth])


def geometric_mean(values: Sequence[float]) -> float:
    return statistics.geometric_mean(values)


@dataclass
class Figures:
    """All numbers of a document.

    `cells`: by set and contender. `best`, `best_plain`: by set and bits, the quickest peer there,
    with its drafts and of those without.
    """

    document: Document
    cells: dict[str, dict[str, Cell]]
    best: dict[tuple[str, int], str]
    best_plain: dict[tuple[str, int], str]

    @property
    def contenders(self) -> dict[str, dict[str, Any]]:
        described: dict[str, dict[str, Any]] = self.document["contenders"]
        return described

    def bits(self) -> list[int]:
        return sorted({about["bits"] for about in self.contenders.values()}, reverse=True)

    def of(self, bits: int) -> list[str]:
        """Contenders of a number format that have been measured, peers first."""
        measured = {name for cells in self.cells.values() for name in cells}
        found = [n for n, about in self.contenders.items() if about["bits"] == bits]
        return sorted((n for n in found if n in measured), key=self.is_ours)

    def is_ours(self, name: str) -> bool:
        return self.contenders[name]["method"] is not None

    def mean(self, name: str, other: str) -> float | None:
        """Geometric mean over all sets of median ratios; None where one is missing.

        `other`: a contender, or `best` or `best_plain` for the peer that is so on each set.
        """
        values = []
        for cells in self.cells.values():
            found = cells[name].ratios.get(other) if name in cells else None
            if found is None:
                return None
            values.append(found.median)
        return geometric_mean(values) if values else None

    def prefill(self) -> dict[str, Spread]:
        """Seconds of a long prompt by contender."""
        seconds = defaultdict(list)
        for part in self.document["parts"]:
            for name, _, value in part["prefill"]:
                seconds[name].append(value)
        found = {name: spread(values) for name, values in seconds.items()}
        return {name: value for name, value in found.items() if value is not None}

    def memory_rate(self) -> Spread | None:
        """Bytes/s that were read from memory beside the runs."""
        return spread(rate for part in self.document["parts"] for rate in part["memory_rate"])

    def by_part(self, section: str) -> dict[str, dict[str, Any]]:
        """A section that is keyed by a name; of several parts the last one counts."""
        found: dict[str, dict[str, Any]] = {}
        for part in self.document["parts"]:
            found |= part[section]
        return found


def figures(document: Document) -> Figures:
    cells: dict[str, dict[str, Cell]] = {}
    for number, part in enumerate(document["parts"]):
        for name, rows in part["runs"].items():
            of_set = cells.setdefault(name, {})
            for contender, prompt, turn, speed, mat, _, digest in rows:
                cell = of_set.setdefault(contender, Cell())
                key = (number, prompt, turn)
                cell.speeds[key] = speed
                cell.mats.append(mat)
                cell.digests[key] = digest
    made = Figures(document, cells, {}, {})
    for name, of_set in cells.items():
        for bits in made.bits():
            _compare(made, name, of_set, bits)
    return made


def _compare(made: Figures, name: str, of_set: Mapping[str, Cell], bits: int) -> None:
    """Fills in the ratios of one set's cells of one number format."""
    about = made.contenders
    here = [contender for contender in of_set if about[contender]["bits"] == bits]
    peers = [contender for contender in here if not made.is_ours(contender)]
    plain_peers = [contender for contender in peers if about[contender]["plain"]]
    best = _quickest(of_set, peers)
    best_plain = _quickest(of_set, plain_peers)
    if best is not None:
        made.best[name, bits] = best
    if best_plain is not None:
        made.best_plain[name, bits] = best_plain
    for contender in here:
        cell = of_set[contender]
        cell.ratios[BASE] = _ratio(cell, of_set.get(BASE))
        cell.ratios["best"] = _ratio(cell, of_set.get(best or ""))
        cell.ratios["best_plain"] = _ratio(cell, of_set.get(best_plain or ""))
        plain = _own_plain(about, here, contender)
        cell.ratios["plain"] = _ratio(cell, of_set.get(plain or ""))
        if plain is not None and plain != contender and made.is_ours(contender):
            cell.same = _same(cell, of_set[plain])


def _quickest(of_set: Mapping[str, Cell], names: Sequence[str]) -> str | None:
    speeds = {name: found.median for name in names if (found := of_set[name].speed)}
    return max(speeds, key=speeds.__getitem__, default=None)


def _own_plain(
    about: Mapping[str, Mapping[str, Any]], here: Sequence[str], contender: str
) -> str | None:
    """The plain contender that belongs to this one: of its process, or of its library's name."""
    for name in here:
        if about[name]["plain"]:
            if about[name]["method"] is not None:
                if about[name]["process"] == about[contender]["process"]:
                    return name
            elif contender == name or contender.startswith(f"{name} "):
                return name
    return None


def _ratio(cell: Cell, other: Cell | None) -> Spread | None:
    """Of speeds on the same prompt in the same round, where both are known."""
    if other is None:
        return None
    pairs = ((value, other.speeds.get(key, 0.0)) for key, value in cell.speeds.items())
    return spread(value / beside for value, beside in pairs if value > 0 and beside > 0)


def _same(cell: Cell, plain: Cell) -> tuple[int, int]:
    pairs = [(d, plain.digests.get(key)) for key, d in cell.digests.items()]
    compared = [(one, other) for one, other in pairs if other is not None]
    return sum(one == other for one, other in compared), len(compared)
