"""Commits what a small trained filter says is final, and cuts the canvas at its end.

A filter of some 2,000 numbers reads the probabilities of the likeliest tokens of the whole block,
and says of each position whether its token is what the final text has there; where it is surer than
`tau`, the token is committed. The surest token is committed in any case. It was taught by an oracle
that knows the final text: see diffusion/block_filter.py.

With `crop` the canvas becomes shorter as soon as an end is foreseen: after an end that was
committed, or one that is proposed with at least the probability `tau_end` where nothing else stands
after it.

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
from typing import TYPE_CHECKING, Annotated, Any

import torch

from foretell.core.masked_text import Sheet
from foretell.core.settings import Range
from foretell.core.types import Message, Reply
from foretell.diffusion.block_filter import MAKE, BlockFilter, load_filter
from foretell.diffusion.loop import OWN, Denoising, Proposals, build_look, rank_positions
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
    tau: Annotated[float, Range(0, 1)] = 0.96  # of the filter's own sureness
    crop: bool = True  # whether the canvas is cut at its end
    tau_end: Annotated[float, Range(0, 1)] = 0.9  # probability of an end that is only proposed

    def check_request(self, ctx: Context, planner: Planner) -> None:
        self.find_filter(ctx)

    def start_state(self, ctx: Context, sheet: Sheet) -> Any:
        return self.find_filter(ctx)

    def find_filter(self, ctx: Context) -> BlockFilter:
        """The filter. Raises BadConfig or BadFile where it is none, or another model's."""
        if not self.filter:
            raise BadConfig(f"learn2pd:filter: names no file, and none ships; {MAKE}")
        block_filter = load_filter(Path(self.filter), ctx.models["target"])
        if self.block not in (OWN, block_filter.block):
            raise BadConfig.field(
                "learn2pd:block", self.block, f"{block_filter.block}, as {self.filter} was made for"
            )
        return block_filter

    def propose_tokens(
        self, ctx: Context, sheet: Sheet, planner: Planner, state: Any
    ) -> Generator[Message, Any, Proposals]:
        """Proposes tokens for all positions of the block, and for the masks after it."""
        start, end = sheet.block(state.block)
        later_masks = (
            [position for position in sheet.masked if position >= end] if self.crop else []
        )
        view = planner.plan_view(sheet, (start, end), [*range(start, end), *later_masks])
        if view.computed is not None:
            computed_positions = set(view.computed)
            view = View(
                [
                    wanted_position
                    for wanted_position in view.requested
                    if wanted_position in computed_positions
                ],
                view.computed,
                view.attended,
            )
        reply: Reply = yield build_look(ctx, sheet, view)
        return Proposals(ctx, sheet, view.requested, reply.logits)

    def fill_positions(self, sheet: Sheet, proposals: Proposals, state: Any) -> None:
        block = sheet.block(state.block)
        super().fill_positions(sheet, proposals, state)
        if self.crop:
            self.cut_canvas(sheet, proposals, block)

    def choose_positions(self, sheet: Sheet, proposals: Proposals, state: Any) -> Sequence[int]:
        start, end = sheet.block(state.block)
        masked_positions = set(sheet.masked)
        open_indices = [
            index
            for index, position in enumerate(proposals.places)
            if start <= position < end and position in masked_positions
        ]
        final_scores = score_block(state, proposals, start, end)
        ranking = [
            open_indices[index] for index in rank_positions(proposals.token_probs()[open_indices])
        ]
        passing = [
            index
            for index in ranking[1:]
            if final_scores[proposals.places[index] - start] > self.tau
        ]
        return [ranking[0], *passing]

    def cut_canvas(self, sheet: Sheet, proposals: Proposals, block: tuple[int, int]) -> None:
        """Cuts the canvas after an end."""
        stops = proposals.ctx.sampler.stops
        canvas_positions = range(sheet.first, sheet.end)
        end_positions = [
            known_position
            for known_position in canvas_positions
            if sheet.canvas[known_position] in stops and known_position not in sheet.given
        ]
        if not end_positions:
            probabilities = proposals.token_probs()
            end_positions = [
                position
                for index, position in enumerate(proposals.places)
                if position in set(sheet.masked)
                and probabilities[index] >= self.tau_end
                and proposals.token_at(index) in stops
            ]
        for position in end_positions:
            suffix = sheet.canvas[position + 1 :]
            if all(token < 0 or token in stops for token in suffix):
                del sheet.canvas[position + 1 :]
                sheet.known = {
                    known_position: entry
                    for known_position, entry in sheet.known.items()
                    if known_position <= position
                }
                return


@torch.inference_mode()
def score_block(
    block_filter: BlockFilter, proposals: Proposals, start: int, end: int
) -> torch.Tensor:
    """Scores of a filter for each position of a block (end - start,), between 0 and 1."""
    return block_filter(block_features(proposals, start, end)).sigmoid()


def block_features(proposals: Proposals, start: int, end: int) -> torch.Tensor:
    """Probabilities of the likeliest tokens of a block's positions (end - start,)."""
    block_indices = [
        index for index, position in enumerate(proposals.places) if start <= position < end
    ]
    return proposals.p[block_indices].amax(-1).float().cpu()  # where filters are
