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
from typing import TYPE_CHECKING

from foretell.core.masked_text import MASKED, Sheet
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


@dataclass(frozen=True)
class Freedave(Denoising):
    """With `drafts` 1 it makes the forwards of static decoding."""

    block: int = -1  # positions filled before later ones; 0: all; -1: the model's, else 32
    drafts: int = 4  # canvases of a forward
    plus: bool = False  # FreeDave++
    tau: float = 0.95  # chance of a token, of plus
    eager: bool = False  # whether drafts go beyond the block

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.drafts <= 64:
            raise BadConfig.field("freedave:drafts", self.drafts, "from 1 to 64")
        if not 0 <= self.tau <= 1:
            raise BadConfig.field("freedave:tau", self.tau, "between 0 and 1")

    @property
    def canvases(self) -> int:
        return self.drafts + 1 if self.drafts > 1 else 1

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
            drafts = self.chain(sheet, found, block)
            seen = [draft for draft in drafts if self.open(draft, block)]
            views = [planner.plan(draft, block, self.open(draft, block)) for draft in seen]
            branches: list[int] = []
            said: list[Proposals] = []
            if seen:
                branches, said = yield from looks(ctx, seen, views, home)
            last = self.right(drafts, said, block)
            sheet = drafts[last]
            found = said[last] if last < len(said) else None
            home = branches[last] if last < len(branches) else home
            yield from stay(branches, home)
            sheet.rounds += 1
            reason = yield from committed_prefix(ctx, sheet, sheet.end)

    def check(self, ctx: Context, planner: Planner) -> None:
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

    def open(self, sheet: Sheet, block: tuple[int, int]) -> list[int]:
        """The masked positions that the next drafts may fill."""
        return [place for place in sheet.masked if self.eager or block[0] <= place < block[1]]

    def order(self, sheet: Sheet, found: Proposals) -> list[int]:
        """Numbers of the proposals as they are committed: an earlier block first, then the surest.

        Of equal chances the earlier position.
        """
        order = ranked(found.chances())
        size = sheet.size_of(self.block)
        if self.eager and size:
            order.sort(key=lambda n: sheet.block_number(found.places[n], size))
        return order

    def step(self, sheet: Sheet, found: Proposals) -> list[int]:
        """Numbers of the proposals that one step commits."""
        order = self.order(sheet, found)
        if not self.plus:
            return order[:1]
        chances = found.chances()
        return [order[0], *(n for n in order[1:] if chances[n] >= self.tau)]

    def chain(self, sheet: Sheet, found: Proposals, block: tuple[int, int]) -> list[Sheet]:
        """The drafts: the next state, and one token more in each that follows."""
        first = self.step(sheet, found)
        later = [number for number in self.order(sheet, found) if number not in first]
        drafts = [filled(sheet, found, first)]
        for number in later[: self.drafts - 1]:
            drafts.append(filled(sheet, found, [*first, number]))
            first = [*first, number]
        return drafts

    def right(
        self, drafts: Sequence[Sheet], said: Sequence[Proposals], block: tuple[int, int]
    ) -> int:
        """The last draft that static decoding goes through, or, of plus, agrees with."""
        last = 0
        while last < len(said):
            state = filled(drafts[last], said[last], self.step(drafts[last], said[last]))
            further = [j for j in range(last + 1, len(drafts)) if self.agrees(drafts[j], state)]
            if not further:
                break
            last = further[-1]
        return last

    def agrees(self, draft: Sheet, state: Sheet) -> bool:
        """Whether a draft is this state, or, of plus, a part of it."""
        if not self.plus:
            return draft.canvas == state.canvas
        return all(
            token in (MASKED, own) for token, own in zip(draft.canvas, state.canvas, strict=True)
        )


def filled(sheet: Sheet, found: Proposals, numbers: Sequence[int]) -> Sheet:
    """A copy of a canvas with these proposals committed."""
    made = sheet.copy()
    for number in numbers:
        found.commit(made, number)
    return made
