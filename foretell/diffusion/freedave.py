"""Drafts with the denoiser's own proposals, and verifies several steps in one forward.

Every forward proposes a token for each masked position. Static decoding commits the surest one and
looks again. Here a chain of `drafts` canvases is made of the proposals, the surest token first, one
token more in each; the first is the static next state and always right. One forward looks at all of
them, each on a branch of its own. A draft is right where it is the static next state of the one
before it, by what was seen there; the last right one is the new state, and its proposals are there
already. So the text is that of static decoding under the same cache, in fewer forwards.

`plus` begins the chain with all proposals of chance `tau`, as `threshold` does, and takes a draft
whose tokens all agree with the next state of one before it.

Paper: Wu and Zhang, Free Draft-and-Verification: Toward Lossless Parallel Decoding for Diffusion
Large Language Models, arXiv:2510.00294
Guarantee: lossy: as its base is; the text is that of `confidence`, token by token (not with `plus`)
Cost: target 1
Needs: a model that fills canvases
Trains: nothing
Differs:
- the canvases lie packed in one forward, each with a cache of its own, in place of a batch or a
tree mask
- caches whose plan depends on the steps before (`dkv`, `window`) are refused: static decoding would
not see the same rows
- the forwards are the fewest of those that go on from the farthest right draft; the paper calls
them the fewest there can be, but to stop before it can bring better proposals, which no forward
tells beforehand (on 900 toy canvases of 8 tokens that would save a forward in 60)
- `eager` drafts beyond the block, an earlier block always first, and needs all rows computed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from foretell.core.masked_text import MASKED, Sheet
from foretell.core.settings import Range
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


@dataclass(frozen=True)
class Freedave(Denoising):
    """Settings of drafts; `drafts` 1 makes the forwards of static decoding."""

    block: int = -1  # positions filled before later ones; 0: all; -1: the model's, else 32
    drafts: Annotated[int, Range(1, 64)] = 4  # canvases of a forward
    plus: bool = False  # FreeDave++
    tau: Annotated[float, Range(0, 1)] = 0.95  # probability of a token, of plus
    eager: bool = False  # whether drafts go beyond the block

    @property
    def canvases(self) -> int:
        return self.drafts + 1 if self.drafts > 1 else 1

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
            drafts = self.draft_chain(sheet, proposals, block)
            open_drafts = [draft for draft in drafts if self.open_positions(draft, block)]
            views = [
                planner.plan_view(draft, block, self.open_positions(draft, block))
                for draft in open_drafts
            ]
            branches: list[int] = []
            draft_proposals: list[Proposals] = []
            if open_drafts:
                branches, draft_proposals = yield from look_at_sheets(
                    ctx, open_drafts, views, home_branch
                )
            last_right = self.last_right_draft(drafts, draft_proposals, block)
            sheet = drafts[last_right]
            proposals = draft_proposals[last_right] if last_right < len(draft_proposals) else None
            home_branch = branches[last_right] if last_right < len(branches) else home_branch
            yield from drop_others(branches, home_branch)
            sheet.rounds += 1
            reason = yield from committed_prefix(ctx, sheet, sheet.end)

    def check_request(self, ctx: Context, planner: Planner) -> None:
        if not planner.steady:
            raise BadConfig(
                f"freedave cannot run under kv={planner.name}: what static decoding computes there "
                "depends on its steps; use kv=dual or prefix, or leave kv out"
            )
        if self.eager and type(planner) is not Planner:
            raise BadConfig(
                "freedave:eager looks beyond a block, whose rows are not computed under "
                f"kv={planner.name}; leave one of them out"
            )

    def open_positions(self, sheet: Sheet, block: tuple[int, int]) -> list[int]:
        """The masked positions that the next drafts may fill."""
        return [
            position for position in sheet.masked if self.eager or block[0] <= position < block[1]
        ]

    def commit_order(self, sheet: Sheet, proposals: Proposals) -> list[int]:
        """Numbers of the proposals as they are committed: an earlier block first, then the surest.

        Of equal probabilities the earlier position.
        """
        ranking = rank_positions(proposals.token_probs())
        block_size = sheet.size_of(self.block)
        if self.eager and block_size:
            ranking.sort(key=lambda index: sheet.block_number(proposals.places[index], block_size))
        return ranking

    def step_indices(self, sheet: Sheet, proposals: Proposals) -> list[int]:
        """Numbers of the proposals that one step commits."""
        ranking = self.commit_order(sheet, proposals)
        if not self.plus:
            return ranking[:1]
        probabilities = proposals.token_probs()
        return [ranking[0], *(index for index in ranking[1:] if probabilities[index] >= self.tau)]

    def draft_chain(
        self, sheet: Sheet, proposals: Proposals, block: tuple[int, int]
    ) -> list[Sheet]:
        """The drafts: the next state, and one token more in each that follows."""
        first_indices = self.step_indices(sheet, proposals)
        later_indices = [
            index for index in self.commit_order(sheet, proposals) if index not in first_indices
        ]
        drafts = [fill_copy(sheet, proposals, first_indices)]
        for index in later_indices[: self.drafts - 1]:
            drafts.append(fill_copy(sheet, proposals, [*first_indices, index]))
            first_indices = [*first_indices, index]
        return drafts

    def last_right_draft(
        self, drafts: Sequence[Sheet], draft_proposals: Sequence[Proposals], block: tuple[int, int]
    ) -> int:
        """The last draft that static decoding goes through, or, of plus, agrees with."""
        last_right = 0
        while last_right < len(draft_proposals):
            state = fill_copy(
                drafts[last_right],
                draft_proposals[last_right],
                self.step_indices(drafts[last_right], draft_proposals[last_right]),
            )
            matching_drafts = [
                draft_index
                for draft_index in range(last_right + 1, len(drafts))
                if self.matches_state(drafts[draft_index], state)
            ]
            if not matching_drafts:
                break
            last_right = matching_drafts[-1]
        return last_right

    def matches_state(self, draft: Sheet, state: Sheet) -> bool:
        """Whether a draft is this state, or, of plus, a part of it."""
        if not self.plus:
            return draft.canvas == state.canvas
        return all(
            token in (MASKED, state_token)
            for token, state_token in zip(draft.canvas, state.canvas, strict=True)
        )


def fill_copy(sheet: Sheet, proposals: Proposals, indices: Sequence[int]) -> Sheet:
    """A copy of a canvas with these proposals committed."""
    filled_copy = sheet.copy()
    for index in indices:
        proposals.commit(filled_copy, index)
    return filled_copy
