"""Explores the most uncertain position where deciding it would settle others.

A round commits all proposals of at least the chance `tau`, of the current block and, under a
stricter bound, of the next `ahead` ones. Where fewer than `least` are that sure, the next round
explores: the most uncertain position of the block is tried with its `values` likeliest tokens, each
on a canvas of its own in one forward, and the one stays that makes the most other positions sure.

`explore=commit` draws the token of that position and commits it, without trying.

Paper: Fu et al., From Bits to Rounds: Parallel Decoding with Exploration for Diffusion Language
Models, arXiv:2511.21103
Guarantee: lossy: tokens that are committed together are drawn apart from each other
Cost: target 1
Needs: a model that fills canvases
Trains: nothing
Differs:
- the paper's rule of exploration was not at hand: how a position and its token are chosen is our
reading, and `explore=commit` is the other one
- a token ahead of the block is not taken back
- the token that is explored is chosen, not drawn, among those that sampling leaves; temperature,
filters and biases are in the chance that it is chosen by
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretell.core.masked_text import Sheet
from foretell.core.types import Steps
from foretell.diffusion.loop import (
    Denoising,
    Proposals,
    begun,
    committed_prefix,
    looks,
    ranked,
    stay,
)
from foretell.diffusion.planner import Planner, planner_of
from foretell.errors import BadConfig

if TYPE_CHECKING:
    from foretell.core.context import Context

EXPLORE = ("branch", "commit")


@dataclass(frozen=True)
class Ete(Denoising):
    """With `values` 1 and `ahead` 0 it is `threshold`."""

    block: int = -1  # positions filled before later ones; 0: all; -1: the model's, else 32
    tau: float = 0.9  # chance of a token
    values: int = 4  # that are tried
    ahead: int = 2  # blocks beyond the current one whose sure tokens are committed
    least: int = 2  # sure tokens below which a round explores
    mass: float = 0.8  # that the tried values hold at least
    weight: float = 1.0  # of the share of positions that become sure, beside ln p of the value
    explore: str = "branch"  # or commit

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, low, high in (("tau", 0, 1), ("mass", 0, 1)):
            if not low <= getattr(self, name) <= high:
                raise BadConfig.field(f"ete:{name}", getattr(self, name), "between 0 and 1")
        if not 1 <= self.values <= 64:
            raise BadConfig.field("ete:values", self.values, "from 1 to 64")
        if self.ahead < 0 or self.least < 1:
            given = f"ahead={self.ahead}, least={self.least}"
            raise BadConfig.field("ete", given, "at least 0 and 1")
        if self.explore not in EXPLORE:
            raise BadConfig.field("ete:explore", self.explore, " or ".join(EXPLORE))

    @property
    def canvases(self) -> int:
        return self.values + 1 if self.values > 1 and self.explore == "branch" else 1

    def check(self, ctx: Context, planner: Planner) -> None:
        if not planner.steady or (self.ahead and type(planner) is not Planner):
            raise BadConfig(
                f"ete looks ahead of the block, whose rows kv={planner.name} does not compute; "
                "leave kv out, or take ahead=0 with kv=dual or prefix"
            )

    def rounds(self, ctx: Context) -> Steps:
        sheet = begun(ctx)
        planner = planner_of(ctx)
        planner.start(sheet)
        home = 0
        found: Proposals | None = None
        reason = yield from committed_prefix(ctx, sheet, sheet.end)
        while reason is None:
            block = sheet.block(self.block)
            if found is None:
                view = planner.plan(sheet, block, self.open(sheet, block))
                _, (found,) = yield from looks(ctx, [sheet], [view], home)
            made = self.filled(sheet, found, block)
            tried = [one for one, _ in made]
            found = None
            if tried and self.open(tried[0], block):
                views = [planner.plan(one, block, self.open(one, block)) for one in tried]
                branches, said = yield from looks(ctx, tried, views, home)
                best = self.best([chance for _, chance in made], said, block)
                sheet, home, found = tried[best], branches[best], said[best]
                yield from stay(branches, home)
            elif tried:
                sheet = tried[0]
            sheet.rounds += 1
            reason = yield from committed_prefix(ctx, sheet, sheet.end)

    def open(self, sheet: Sheet, block: tuple[int, int]) -> list[int]:
        """The masked positions of the block and of the next ones."""
        end = block[1] + self.ahead * sheet.size_of(self.block)
        return [place for place in sheet.masked if block[0] <= place < end]

    def filled(
        self, sheet: Sheet, found: Proposals, block: tuple[int, int]
    ) -> list[tuple[Sheet, float]]:
        """Commits what is sure. Where that is little: copies that are to be tried, each with
        another token at one position, and the chance of that by the law it would be drawn from.
        """
        sure = self.sure(found, block)
        place = None
        if len(sure) < self.least and self.values > 1:
            place = self.uncertain(found, block, sure)
        if place is None and not sure:
            sure = ranked(found.chances())[:1]
        if place is not None and self.explore == "commit":
            sure, place = [*sure, place], None
        for number in sure:
            found.commit(sheet, number)
        if place is None:
            return []
        best = found.law(place).topk(min(self.values, found.p.shape[1]))
        copies = []
        for chance, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            if chance > 0:
                copies.append((sheet.copy(), chance))
                found.commit(copies[-1][0], place, token)
        return copies

    def sure(self, found: Proposals, block: tuple[int, int]) -> list[int]:
        """Numbers of the proposals that are sure enough, the surest first."""
        chances = found.chances()
        strict = self.tau + (1 - self.tau) / 2
        bounds = [self.tau if place < block[1] else strict for place in found.places]
        return [n for n in ranked(chances) if chances[n] >= bounds[n]]

    def uncertain(
        self, found: Proposals, block: tuple[int, int], sure: Sequence[int]
    ) -> int | None:
        """The position of the block, by number, with the most entropy of those whose likeliest
        values hold the mass. None: there is none.
        """
        held = found.p.topk(min(self.values, found.p.shape[1]), -1).values.sum(-1)
        entropies = found.entropies()
        for number in ranked(entropies):
            inside = found.places[number] < block[1] and number not in sure
            if inside and float(held[number]) >= self.mass:
                return number
        return None

    def best(
        self, chances: Sequence[float], said: Sequence[Proposals], block: tuple[int, int]
    ) -> int:
        """The canvas with the likeliest token and the most sure positions, of equal ones that with
        the least entropy left. `chances`: of the tokens that were tried.
        """
        size = block[1] - block[0]
        scores = []
        for chance, found in zip(chances, said, strict=True):
            share = len(self.sure(found, block)) / size
            scores.append((math.log(chance) + self.weight * share, -float(found.entropies().sum())))
        return max(range(len(said)), key=lambda number: scores[number])
