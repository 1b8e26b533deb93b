"""Keeps the tokens that are sure, draws all others evenly, and decides anew in every step.

A canvas begins as tokens drawn evenly from the vocabulary. Every step proposes a token for each
position, by a temperature that falls from `t_max` to `t_min`. In order of entropy proposals are
accepted while the sum of their entropies less the largest one is at most `gamma`; at all other
positions another token is drawn evenly. No token is final before the canvas is: what was accepted
may be other noise in the next step. The model reads its own last proposals beside the canvas.

A canvas is done when its likeliest tokens were the same in `stable` steps before and the mean
entropy is below `sure`, or after `steps` steps. These likeliest tokens are its text, and the next
canvas begins behind them.

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
- in a text with gaps the given tokens of a canvas stay, and the tokens behind it are not read
- settings are these, whatever generation_config.json says
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from foretell.core.draws import draws, evenly
from foretell.core.masked_text import NOISE, Sheet, look
from foretell.core.types import Message, Reply
from foretell.diffusion.loop import Denoising, Proposals
from foretell.errors import BadConfig
from foretell.ops.logits import firsts

if TYPE_CHECKING:
    from foretell.core.context import Context
    from foretell.diffusion.planner import Planner

RANGES = {
    "steps": (1, 1 << 16),
    "gamma": (0, float("inf")),
    "t_min": (1e-6, 1e6),
    "t_max": (1e-6, 1e6),
    "stable": (0, 1 << 16),
    "sure": (0, float("inf")),
}


@dataclass
class Canvas:
    """The current one; `left`: steps it still has, this one included."""

    block: tuple[int, int] | None = None
    left: int = 0
    said: torch.Tensor | None = None  # (n, V): logits of the last step, by its temperature
    best: list[list[int]] = field(default_factory=list)  # likeliest tokens of the last steps
    accepted: list[int] = field(default_factory=list)  # positions, of the last step


@dataclass(frozen=True)
class Renoise(Denoising):
    """A block of 0 is the canvas that the model was taught."""

    block: int = 0  # positions of a canvas; 0: as many as the model was taught
    steps: int = 48  # of a canvas at most
    gamma: float = 0.1  # nats
    t_max: float = 0.8  # temperature of the first step, nearly
    t_min: float = 0.4  # and the one that it falls to
    stable: int = 1  # steps before that must have had the same likeliest tokens
    sure: float = 0.005  # nats: a mean entropy below it ends a canvas

    needs = ("canvas", NOISE)

    def __post_init__(self) -> None:
        if self.block < 0:
            raise BadConfig.field("renoise:block", self.block, "a number of positions, or 0")
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise BadConfig.field(f"renoise:{name}", value, f"between {low} and {high}")
        if self.t_min > self.t_max:
            raise BadConfig.field("renoise:t_min", self.t_min, f"at most t_max ({self.t_max})")

    def start(self, ctx: Context, sheet: Sheet) -> Canvas:
        return Canvas()

    def looked(
        self, ctx: Context, sheet: Sheet, planner: Planner, state: Canvas
    ) -> Generator[Message, Any, Proposals]:
        """Of all positions of the canvas, behind the text that is final."""
        model: Any = ctx.models["target"]
        start, end = sheet.block(self.block or model.canvas_length)
        start = max(start, len(ctx.tokens))  # given tokens that nothing open precedes are text
        if (start, end) != state.block:
            state.block, state.left = (start, end), self.steps
            state.said, state.best = None, []
            for place in sheet.masked:
                if place < end:
                    sheet.shown[place] = noise(ctx, sheet, place, sheet.rounds)
        places = range(start, end)
        reply: Reply = yield look(
            ctx.tokens[-1], sheet.read(end), places, branch=ctx.branch, said=state.said
        )
        return Proposals(ctx, sheet, places, reply.logits)

    def fill(self, sheet: Sheet, found: Proposals, state: Canvas) -> None:
        heat = self.t_min + (self.t_max - self.t_min) * (state.left / self.steps)
        scores = found.scores / heat
        entropies = torch.distributions.Categorical(logits=scores, validate_args=False).entropy()
        open_ = [n for n, place in enumerate(found.places) if place in sheet.shown]
        best = firsts(scores[open_])
        if -1 in best:
            number = open_[best.index(-1)]
            raise found.ctx.sampler.fault(scores[number], found.rows[number])
        same = len(state.best) == self.stable and all(one == best for one in state.best)
        state.best = [*state.best, best][-self.stable :] if self.stable else []
        state.left -= 1
        state.accepted = []
        if (same and float(entropies.mean()) < self.sure) or not state.left:
            for number, token in zip(open_, best, strict=True):
                found.commit(sheet, number, token)
            return
        chosen = [open_[i] for i in bounded(entropies[open_], self.gamma)]
        tokens = self.drawn(found, scores, chosen, best, open_)
        state.accepted = [found.places[number] for number in chosen]
        for number in open_:
            place = found.places[number]
            if number in tokens:
                sheet.shown[place] = tokens[number]
            else:
                sheet.shown[place] = noise(found.ctx, sheet, place, sheet.rounds + 1)
        state.said = scores

    @staticmethod
    def drawn(
        found: Proposals, scores: torch.Tensor, chosen: list[int], best: list[int], open_: list[int]
    ) -> dict[int, int]:
        """The proposed tokens of the chosen positions, by number."""
        sampler, door = found.ctx.sampler, found.ctx.rng
        if sampler.greedy:
            likeliest = dict(zip(open_, best, strict=True))
            return {number: likeliest[number] for number in chosen}
        keys = [
            ("target", found.places[number] - found.sheet.first, found.sheet.rounds)
            for number in chosen
        ]
        laws = sampler.laws(scores[chosen])
        uniform = getattr(door, "uniform", None)
        if uniform is None:
            tokens = [door.sample(law, *key) for law, key in zip(laws, keys, strict=True)]
        else:
            tokens = draws(laws, [uniform(*key) for key in keys])
        for number, token in zip(chosen, tokens, strict=True):
            if token < 0:
                raise sampler.fault(scores[number], found.rows[number])
        return dict(zip(chosen, tokens, strict=True))


def bounded(entropies: torch.Tensor, gamma: float) -> list[int]:
    """Places of the least entropies (n,) whose sum less the largest of them is at most `gamma`."""
    least = entropies.sort(stable=True)
    count = int((least.values.cumsum(0) - least.values <= gamma).sum())
    places: list[int] = least.indices[:count].tolist()
    return places


def noise(ctx: Context, sheet: Sheet, place: int, index: int) -> int:
    """A token for a position, drawn evenly from the vocabulary."""
    vocab = ctx.models["target"].vocab
    return evenly(ctx.rng, vocab, "draft", place - sheet.first, index)
