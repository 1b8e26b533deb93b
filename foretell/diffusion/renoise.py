"""Keeps the tokens that are sure, draws all others evenly, and decides anew in every step.

A canvas begins as tokens drawn evenly from the vocabulary. Every step proposes a token for each
position, by a temperature that falls from `t_max` to `t_min`. In order of entropy proposals are
accepted while the sum of their entropies less the largest one is at most `gamma`; at all other
positions another token is drawn evenly. No token is final before the canvas is: what was accepted
may be other noise in the next step. The model reads its own last proposals beside the canvas.

A canvas is done when its likeliest tokens were the same in `stable` steps before and the mean
entropy is below `sure`, or after `steps` steps. These likeliest tokens are its text, and the next
canvas begins after them.

Paper: Google, DiffusionGemma, as transformers generates with it
(`models/diffusion_gemma/generation_diffusion_gemma.py`); the bound: Ben-Hamu et al., Accelerated
Sampling from Masked Diffusion Models via Entropy Bounded Unmasking, arXiv:2505.24857
Guarantee: lossy: tokens that are accepted together are drawn apart from each other
Cost: target 1
Needs: a model that fills canvases of uniform noise
Trains: nothing
Try: --model CANVAS_MODEL --method renoise
Differs:
- tokens are drawn by inverse transform, each by a key of its own, in place of `torch.multinomial`;
given the same tokens, accepted sets and texts are transformers'
- the request's temperature and filters shape what is drawn, beside the falling temperature; at
temperature 0 the best token is proposed
- the text is cut at its limit, where transformers returns whole canvases
- in a text with gaps the given tokens of a canvas stay, and the tokens after it are not read
- settings are these, whatever generation_config.json says
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import torch

from foretell.core.draws import draw_by_uniforms, draw_evenly
from foretell.core.masked_text import NOISE, Sheet, make_look
from foretell.core.settings import Range
from foretell.core.types import Message, Reply
from foretell.diffusion.loop import Denoising, Proposals
from foretell.errors import BadConfig
from foretell.ops.logits import best_token_ids

if TYPE_CHECKING:
    from foretell.core.context import Context
    from foretell.diffusion.planner import Planner


@dataclass
class Canvas:
    """The current canvas; `steps_left`: steps it still has, this one included."""

    block: tuple[int, int] | None = None
    steps_left: int = 0
    last_scores: torch.Tensor | None = None  # (n, V): logits of the last step, by its temperature
    recent_tokens: list[list[int]] = field(
        default_factory=list
    )  # likeliest tokens of the last steps
    accepted: list[int] = field(default_factory=list)  # positions, of the last step


@dataclass(frozen=True)
class Renoise(Denoising):
    """A block of 0 is the canvas that the model was taught."""

    block: Annotated[int, Range(0)] = 0  # positions of a canvas; 0: as many as the model was taught
    steps: Annotated[int, Range(1, 1 << 16)] = 48  # of a canvas at most
    gamma: Annotated[float, Range(0)] = 0.1  # nats
    t_max: Annotated[float, Range(1e-06, 1_000_000)] = 0.8  # temperature of the first step, nearly
    t_min: Annotated[float, Range(1e-06, 1_000_000)] = 0.4  # and the one that it falls to
    # steps before that must have had the same likeliest tokens
    stable: Annotated[int, Range(0, 1 << 16)] = 1
    sure: Annotated[float, Range(0)] = 0.005  # nats: a mean entropy below it ends a canvas

    needs = ("canvas", NOISE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.t_min > self.t_max:
            raise BadConfig.field("renoise:t_min", self.t_min, f"at most t_max ({self.t_max})")

    def start_state(self, ctx: Context, sheet: Sheet) -> Canvas:
        return Canvas()

    def propose_tokens(
        self, ctx: Context, sheet: Sheet, planner: Planner, state: Canvas
    ) -> Generator[Message, Any, Proposals]:
        """Proposes tokens for all positions of the canvas, after the text that is final."""
        model: Any = ctx.models["target"]
        start, end = sheet.block(self.block or model.canvas_length)
        start = max(start, len(ctx.tokens))  # given tokens that nothing open precedes are text
        if (start, end) != state.block:
            state.block, state.steps_left = (start, end), self.steps
            state.last_scores, state.recent_tokens = None, []
            for position in sheet.masked:
                if position < end:
                    sheet.shown[position] = draw_noise(ctx, sheet, position, sheet.rounds)
        positions = range(start, end)
        reply: Reply = yield make_look(
            ctx.tokens[-1],
            sheet.visible_tokens(end),
            positions,
            branch=ctx.branch,
            previous_rows=state.last_scores,
        )
        return Proposals(ctx, sheet, positions, reply.logits)

    def fill_positions(self, sheet: Sheet, proposals: Proposals, state: Canvas) -> None:
        temperature = self.t_min + (self.t_max - self.t_min) * (state.steps_left / self.steps)
        scores = proposals.scores / temperature
        entropies = torch.distributions.Categorical(logits=scores, validate_args=False).entropy()
        open_indices = [n for n, position in enumerate(proposals.places) if position in sheet.shown]
        best_tokens = best_token_ids(scores[open_indices])
        if -1 in best_tokens:
            index = open_indices[best_tokens.index(-1)]
            raise proposals.ctx.sampler.fault(scores[index], proposals.rows[index])
        is_stable = len(state.recent_tokens) == self.stable and all(
            earlier_tokens == best_tokens for earlier_tokens in state.recent_tokens
        )
        state.recent_tokens = (
            [*state.recent_tokens, best_tokens][-self.stable :] if self.stable else []
        )
        state.steps_left -= 1
        state.accepted = []
        if (is_stable and float(entropies.mean()) < self.sure) or not state.steps_left:
            for index, token in zip(open_indices, best_tokens, strict=True):
                proposals.commit(sheet, index, token)
            return
        chosen_indices = [
            open_indices[rank] for rank in bounded_positions(entropies[open_indices], self.gamma)
        ]
        drawn_tokens = self.draw_tokens(
            proposals, scores, chosen_indices, best_tokens, open_indices
        )
        state.accepted = [proposals.places[index] for index in chosen_indices]
        for index in open_indices:
            position = proposals.places[index]
            if index in drawn_tokens:
                sheet.shown[position] = drawn_tokens[index]
            else:
                sheet.shown[position] = draw_noise(proposals.ctx, sheet, position, sheet.rounds + 1)
        state.last_scores = scores

    @staticmethod
    def draw_tokens(
        proposals: Proposals,
        scores: torch.Tensor,
        chosen_indices: list[int],
        best_tokens: list[int],
        open_indices: list[int],
    ) -> dict[int, int]:
        """The proposed tokens of the chosen positions, by number."""
        sampler, door = proposals.ctx.sampler, proposals.ctx.rng
        if sampler.greedy:
            likeliest = dict(zip(open_indices, best_tokens, strict=True))
            return {index: likeliest[index] for index in chosen_indices}
        draw_keys = [
            ("target", proposals.places[index] - proposals.sheet.first, proposals.sheet.rounds)
            for index in chosen_indices
        ]
        token_probs = sampler.laws(scores[chosen_indices])
        draw_uniform = getattr(door, "uniform", None)
        if draw_uniform is None:
            drawn_tokens = [
                door.sample(probabilities, *draw_key)
                for probabilities, draw_key in zip(token_probs, draw_keys, strict=True)
            ]
        else:
            drawn_tokens = draw_by_uniforms(
                token_probs, [draw_uniform(*draw_key) for draw_key in draw_keys]
            )
        for index, token in zip(chosen_indices, drawn_tokens, strict=True):
            if token < 0:
                raise sampler.fault(scores[index], proposals.rows[index])
        return dict(zip(chosen_indices, drawn_tokens, strict=True))


def bounded_positions(entropies: torch.Tensor, gamma: float) -> list[int]:
    """Positions of the least entropies (n,) whose sum less the largest of them is at most
    `gamma`.
    """
    ascending = entropies.sort(stable=True)
    count = int((ascending.values.cumsum(0) - ascending.values <= gamma).sum())
    positions: list[int] = ascending.indices[:count].tolist()
    return positions


def draw_noise(ctx: Context, sheet: Sheet, position: int, index: int) -> int:
    """Draws a token for a position evenly from the vocabulary."""
    vocab_size = ctx.models["target"].vocab
    return draw_evenly(ctx.rng, vocab_size, "draft", position - sheet.first, index)
