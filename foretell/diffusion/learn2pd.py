"""Commits what a small trained filter says is final, and cuts the canvas at its end.

A filter of some 2,000 numbers reads the chances of the likeliest tokens of the whole block, and
says of each position whether its token is what the final text has there; where it is surer than
`tau`, the token is committed. The surest token is committed in any case. It was taught by an oracle
that knows the final text: see diffusion/block_filter.py.

With `crop` the canvas becomes shorter as soon as an end is foreseen: behind an end that was
committed, or one that is proposed with at least the chance `tau_end` where nothing else stands
behind it.

Paper: Bao et al., Learning to Parallel: Accelerating Diffusion Large Language Models via Adaptive
Parallel Decoding, arXiv:2509.25188
Guarantee: lossy: tokens that are committed together are drawn apart from each other
Cost: target 1
Needs: a model that fills canvases
Trains: a filter, foretell train filter
Try: --model dlm-lists --method learn2pd:filter=FILE
Differs:
- the published code cuts at the surest proposed end, however unsure it is, and may cut tokens off
that are committed; here an end has to be sure, and nothing committed is cut off but further ends
- where rows outside the block are not computed (kv=dual), ends are foreseen in the block alone
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from foretell.core.masked_text import Sheet
from foretell.core.types import Message, Reply
from foretell.diffusion.block_filter import MAKE, BlockFilter, load
from foretell.diffusion.loop import OWN, Denoising, Proposals, asked, ranked
from foretell.diffusion.planner import Planner, View
from foretell.errors import BadConfig

if TYPE_CHECKING:
    from collections.abc import Generator

    from foretell.core.context import Context


@dataclass(frozen=True)
class Learn2Pd(Denoising):
    """Blocks are those that the filter was made for. With `tau` 1 it commits one token a step."""

    block: int = -1  # positions filled before later ones, the filter's length; -1: that length
    filter: str = ""  # a file
    tau: float = 0.96  # of the filter's own sureness
    crop: bool = True  # whether the canvas is cut at its end
    tau_end: float = 0.9  # chance of an end that is only proposed

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tau", "tau_end"):
            if not 0 <= getattr(self, name) <= 1:
                raise BadConfig.field(f"learn2pd:{name}", getattr(self, name), "between 0 and 1")

    def check(self, ctx: Context, planner: Planner) -> None:
        self.made(ctx)

    def start(self, ctx: Context, sheet: Sheet) -> Any:
        return self.made(ctx)

    def made(self, ctx: Context) -> BlockFilter:
        """The filter. Raises BadConfig or BadFile where it is none, or another model's."""
        if not self.filter:
            raise BadConfig(f"learn2pd:filter: names no file, and none ships; {MAKE}")
        made = load(Path(self.filter), ctx.models["target"])
        if self.block not in (OWN, made.block):
            raise BadConfig.field(
                "learn2pd:block", self.block, f"{made.block}, as {self.filter} was made for"
            )
        return made

    def looked(
        self, ctx: Context, sheet: Sheet, planner: Planner, state: Any
    ) -> Generator[Message, Any, Proposals]:
        """Of all positions of the block, and of the masks behind it."""
        start, end = sheet.block(state.block)
        beyond = [place for place in sheet.masked if place >= end] if self.crop else []
        view = planner.plan(sheet, (start, end), [*range(start, end), *beyond])
        if view.computed is not None:
            known = set(view.computed)
            view = View([p for p in view.wanted if p in known], view.computed, view.attended)
        reply: Reply = yield asked(ctx, sheet, view)
        return Proposals(ctx, sheet, view.wanted, reply.logits)

    def fill(self, sheet: Sheet, found: Proposals, state: Any) -> None:
        block = sheet.block(state.block)
        super().fill(sheet, found, state)
        if self.crop:
            self.cut(sheet, found, block)

    def choose(self, sheet: Sheet, found: Proposals, state: Any) -> Sequence[int]:
        start, end = sheet.block(state.block)
        masked = set(sheet.masked)
        open_ = [n for n, p in enumerate(found.places) if start <= p < end and p in masked]
        sure = sureness(state, found, start, end)
        order = [open_[n] for n in ranked(found.chances()[open_])]
        passed = [n for n in order[1:] if sure[found.places[n] - start] > self.tau]
        return [order[0], *passed]

    def cut(self, sheet: Sheet, found: Proposals, block: tuple[int, int]) -> None:
        """Cuts the canvas behind an end."""
        stops = found.ctx.sampler.stops
        places = range(sheet.first, sheet.end)
        ends = [p for p in places if sheet.canvas[p] in stops and p not in sheet.given]
        if not ends:
            chances = found.chances()
            ends = [
                place
                for number, place in enumerate(found.places)
                if place in set(sheet.masked)
                and chances[number] >= self.tau_end
                and found.token(number) in stops
            ]
        for place in ends:
            behind = sheet.canvas[place + 1 :]
            if all(token < 0 or token in stops for token in behind):
                del sheet.canvas[place + 1 :]
                sheet.known = {p: about for p, about in sheet.known.items() if p <= place}
                return


@torch.inference_mode()
def sureness(made: BlockFilter, found: Proposals, start: int, end: int) -> torch.Tensor:
    """What a filter says of each position of a block (end - start,), between 0 and 1."""
    return made(features(found, start, end)).sigmoid()


def features(found: Proposals, start: int, end: int) -> torch.Tensor:
    """Chances of the likeliest tokens of a block's positions (end - start,)."""
    inside = [n for n, place in enumerate(found.places) if start <= place < end]
    return found.p[inside].amax(-1).float().cpu()  # where filters are
