"""Explores the most uncertain position where deciding it would settle others.

A round commits all proposals of at least the probability `tau`, of the current block and, under a
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
filters and biases are in the probability that it is chosen by
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from foretell.core.masked_text import Sheet
from foretell.core.settings import OneOf, Range
from foretell.core.types import Steps
from foretell.diffusion.loop import (
    Denoising,
    Proposals,
    committed_prefix,
    drop_others,
    look_at_sheets,
    open_sheet,
    rank_positions,
)
from foretell.diffusion.planner import Planner, planner_of
from foretell.errors import BadConfig

if TYPE_CHECKING:
    from foretell.core.context import Context

EXPLORE = ("branch", "commit")


@dataclass(frozen=True)
class Ete(Denoising):
    """Settings of exploration; `values` 1 and `ahead` 0 is `threshold`."""

    block: int = -1  # positions filled before later ones; 0: all; -1: the model's, else 32
    tau: Annotated[float, Range(0, 1)] = 0.9  # probability of a token
    values: Annotated[int, Range(1, 64)] = 4  # that are tried
    # blocks beyond the current one whose sure tokens are committed
    ahead: Annotated[int, Range(0)] = 2
    least: Annotated[int, Range(1)] = 2  # sure tokens below which a round explores
    mass: Annotated[float, Range(0, 1)] = 0.8  # that the tried values hold at least
    weight: float = 1.0  # of the share of positions that become sure, beside ln p of the value
    explore: Annotated[str, OneOf(EXPLORE)] = "branch"  # or commit

    @property
    def canvases(self) -> int:
        return self.values + 1 if self.values > 1 and self.explore == "branch" else 1

    def check_request(self, ctx: Context, planner: Planner) -> None:
        if not planner.steady or (self.ahead and type(planner) is not Planner):
            raise BadConfig(
                f"ete looks ahead of the block, whose rows kv={planner.name} does not compute; "
                "leave kv out, or take ahead=0 with kv=dual or prefix"
            )

    def run_rounds(self, ctx: Context) -> Steps:
        sheet = open_sheet(ctx)
        planner = planner_of(ctx)
        planner.start_canvas(sheet)
        home_branch = 0
        proposals: Proposals | None = None
        reason = yield from committed_prefix(ctx, sheet, sheet.end)
        while reason is None:
            block = sheet.block(self.block)
            if proposals is None:
                view = planner.plan_view(sheet, block, self.open_positions(sheet, block))
                _, (proposals,) = yield from look_at_sheets(ctx, [sheet], [view], home_branch)
            candidates = self.commit_sure(sheet, proposals, block)
            tried_sheets = [tried_sheet for tried_sheet, _ in candidates]
            proposals = None
            if tried_sheets and self.open_positions(tried_sheets[0], block):
                views = [
                    planner.plan_view(tried_sheet, block, self.open_positions(tried_sheet, block))
                    for tried_sheet in tried_sheets
                ]
                branches, tried_proposals = yield from look_at_sheets(
                    ctx, tried_sheets, views, home_branch
                )
                best_index = self.best_canvas(
                    [probability for _, probability in candidates], tried_proposals, block
                )
                sheet, home_branch, proposals = (
                    tried_sheets[best_index],
                    branches[best_index],
                    tried_proposals[best_index],
                )
                yield from drop_others(branches, home_branch)
            elif tried_sheets:
                sheet = tried_sheets[0]
            sheet.rounds += 1
            reason = yield from committed_prefix(ctx, sheet, sheet.end)

    def open_positions(self, sheet: Sheet, block: tuple[int, int]) -> list[int]:
        """The masked positions of the block and of the next ones."""
        end = block[1] + self.ahead * sheet.size_of(self.block)
        return [position for position in sheet.masked if block[0] <= position < end]

    def commit_sure(
        self, sheet: Sheet, proposals: Proposals, block: tuple[int, int]
    ) -> list[tuple[Sheet, float]]:
        """Commits what is sure. Where that is little: copies that are to be tried, each with
        another token at one position, and the probability of that by the distribution it would be
        drawn from.
        """
        sure_indices = self.sure_indices(proposals, block)
        tried_index = None
        if len(sure_indices) < self.least and self.values > 1:
            tried_index = self.most_uncertain(proposals, block, sure_indices)
        if tried_index is None and not sure_indices:
            sure_indices = rank_positions(proposals.token_probs())[:1]
        if tried_index is not None and self.explore == "commit":
            sure_indices, tried_index = [*sure_indices, tried_index], None
        for index in sure_indices:
            proposals.commit(sheet, index)
        if tried_index is None:
            return []
        likeliest = proposals.law_at(tried_index).topk(min(self.values, proposals.p.shape[1]))
        copies = []
        for probability, token in zip(
            likeliest.values.tolist(), likeliest.indices.tolist(), strict=True
        ):
            if probability > 0:
                copies.append((sheet.copy(), probability))
                proposals.commit(copies[-1][0], tried_index, token)
        return copies

    def sure_indices(self, proposals: Proposals, block: tuple[int, int]) -> list[int]:
        """Numbers of the proposals that are sure enough, the surest first."""
        probabilities = proposals.token_probs()
        strict_bound = self.tau + (1 - self.tau) / 2
        bounds = [
            self.tau if position < block[1] else strict_bound for position in proposals.places
        ]
        return [
            index
            for index in rank_positions(probabilities)
            if probabilities[index] >= bounds[index]
        ]

    def most_uncertain(
        self, proposals: Proposals, block: tuple[int, int], sure_indices: Sequence[int]
    ) -> int | None:
        """The position of the block, by number, with the most entropy of those whose likeliest
        values hold the mass. None: there is none.
        """
        top_mass = proposals.p.topk(min(self.values, proposals.p.shape[1]), -1).values.sum(-1)
        entropies = proposals.token_entropies()
        for index in rank_positions(entropies):
            is_open = proposals.places[index] < block[1] and index not in sure_indices
            if is_open and float(top_mass[index]) >= self.mass:
                return index
        return None

    def best_canvas(
        self,
        probabilities: Sequence[float],
        tried_proposals: Sequence[Proposals],
        block: tuple[int, int],
    ) -> int:
        """The canvas with the likeliest token and the most sure positions, of equal ones that with
        the least entropy left. `probabilities`: of the tokens that were tried.
        """
        block_size = block[1] - block[0]
        scores = []
        for probability, proposals in zip(probabilities, tried_proposals, strict=True):
            sure_share = len(self.sure_indices(proposals, block)) / block_size
            scores.append(
                (
                    math.log(probability) + self.weight * sure_share,
                    -float(proposals.token_entropies().sum()),
                )
            )
        return max(range(len(tried_proposals)), key=lambda index: scores[index])
