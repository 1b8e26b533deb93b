"""Users of what stands beside a cache's rows, and what is expected of them by plain loops.

    Evictor    keeps the first and the latest rows, every few tokens: ordinary attention
    Sparse     reads every second of the older rows: attention of its own
    Rounded    reads rows in few digits: attention of its own

What is expected comes from the rule that a token sees, never from a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.cache.policy import CachePolicy
from foretell.core.context import Context
from foretell.core.drafter import Drafter
from foretell.core.model import Model
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.engine.scheduler import FairPlan, Planned
from foretell.ops.attention import Attention
from foretell.testing.toy import Toy
from tests import laws

EVERY = 6  # tokens between two evictions
SINKS = 2  # first rows that stay
RECENT = 3  # latest rows that stay
NEAR = 4  # positions back that are read in any case


class Evictor(CachePolicy):
    """Keeps the first SINKS rows and the latest RECENT ones, whenever EVERY tokens have come."""

    def room_left(self, length: int) -> int:
        return EVERY - length % EVERY

    def change_rows(self, cache: Cache) -> None:
        cache.compact_rows(left_over(list(range(cache.base))))


def left_over(rows: list[int]) -> list[int]:
    return rows if len(rows) <= SINKS + RECENT else rows[:SINKS] + rows[-RECENT:]


class Sparse(CachePolicy):
    """Of rows NEAR positions back and further, those at even positions only."""

    plain = False

    def attend_job(self, job: Job, asked: Attention) -> torch.Tensor:
        here = torch.tensor(job.positions)[:, None]
        there = torch.tensor([*job.cache.row_positions(), *job.scratch_positions])[None, :]
        hidden = (here - there >= NEAR) & (there % 2 == 1)
        added = torch.where(hidden, -torch.inf, 0.0).to(asked.q.dtype)
        mask = added if asked.mask is None else added + asked.mask
        return replace(asked, mask=mask).full_output()


class Rounded(CachePolicy):
    """All rows, in steps of an eighth."""

    plain = False

    def attend_job(self, job: Job, asked: Attention) -> torch.Tensor:
        keys, values = (asked.keys * 8).round() / 8, (asked.values * 8).round() / 8
        return replace(asked, keys=keys, values=values).full_output()


# --- what a token sees, (number of tokens) -> for each of them the positions it sees

Sight = Callable[[int], list[list[int]]]


def evicted_sight(count: int) -> list[list[int]]:
    sight = []
    rows: list[int] = []
    for position in range(count):
        sight.append([*rows, position])
        rows.append(position)
        if (position + 1) % EVERY == 0:
            rows = left_over(rows)
    return sight


def sparse_sight(count: int) -> list[list[int]]:
    sight = []
    for here in range(count):
        sight.append([j for j in range(here + 1) if here - j < NEAR or j % 2 == 0])
    return sight


class EvictedToy(Toy):
    """A toy whose rows are those that an Evictor leaves; asked of `row` only, never run."""

    def row(self, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
        seen = evicted_sight(len(tokens))[-1]
        if self.window is not None:
            seen = [j for j in seen if len(tokens) - 1 - j < self.window]
        return super().row(tokens[seen], positions[seen])


@torch.inference_mode()
def stock_rows(
    hf: PreTrainedModel, tokens: Sequence[int], sight: Sight, window: int | None = None
) -> torch.Tensor:
    """Rows (n, V) by transformers' own forward, under a mask that is written here."""
    count = len(tokens)
    mask = torch.full((count, count), -torch.inf, dtype=hf.dtype)
    for here, seen in enumerate(sight(count)):
        near = [j for j in seen if window is None or here - j < window]
        mask[here, near] = 0.0
    kinds = set(getattr(hf.config, "layer_types", None) or ["full_attention"])
    masks: Any = mask[None, None]
    if "sliding_attention" in kinds:
        masks = dict.fromkeys(kinds, masks)
    out = hf(torch.tensor([list(tokens)]), attention_mask=masks, use_cache=False)
    rows: torch.Tensor = out.logits[0]
    return rows


def stock_greedy(
    hf: PreTrainedModel, prompt: Sequence[int], count: int, sight: Sight, window: int | None = None
) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(stock_rows(hf, tokens, sight, window)[-1].argmax()))
    return tokens[len(prompt) :]


# --- drafting that is right as often as wanted


@dataclass(frozen=True)
class Guess(Drafter):
    """Proposes the `text` that will come, wrong at every node whose depth is `wrong`.

    `wide`: each node has a sibling before it, which makes trees whose paths must be moved.
    """

    text: tuple[int, ...] = ()  # prompt and what follows
    length: int = 5
    wrong: int = 0  # 0: none
    wide: bool = False
    vocab: int = 8

    def propose(self, ctx: Context, state: Any, budget: int) -> TokenTree:
        tree = TokenTree(ctx.tokens[-1])
        here = len(ctx.tokens)
        node = 0
        for depth in range(1, min(self.length, ctx.depth) + 1):
            if here + depth > len(self.text):
                break
            token = self.text[here + depth - 1]
            if self.wide:
                tree.add(node, (token + 2) % self.vocab)
            node = tree.add(node, (token + 1) % self.vocab if depth == self.wrong else token)
        return tree


def by_chunks(size: int) -> Callable[..., Planned]:
    """A scheduler by which texts go in by so many tokens at a time."""
    fair = FairPlan()

    def plan(waiting: Any, costs: Mapping[Any, Any]) -> Planned:
        return [(entry, min(size, tokens)) for entry, tokens in fair(waiting, costs)]

    return plan


def run(
    models: Mapping[str, Model], *requests: Request, chunk: int = 512, preempt: int = 0
) -> list[Live]:
    """All in one engine; `preempt`: twice, after so many steps, rows are given up."""
    engine = Engine(models, plan=by_chunks(chunk))
    lives = [engine.add(request) for request in requests]
    steps = 0
    while engine.live:
        engine.step()
        steps += 1
        for live in list(engine.live):
            if steps in (preempt, 2 * preempt):
                assert engine.preempt_request(live)
    laws.finish(engine, *lives)
    return lives
