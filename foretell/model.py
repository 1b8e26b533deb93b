"""What a model is to the engine: `forward(jobs)`, one packed forest of every request's new nodes.

All jobs lie in one row of T tokens, without padding. A model computes what is local to a token as it likes; attention
over the packed row is here: each job's keys and values go to that job's own cache, and its nodes see that cache's rows
under the job's mask. What a model can do is asked of `caps`, never of its class: `tree` (branching jobs), `layers`
(hidden states, layer subsets, entry in the middle).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F

from foretell.cache import Cache, Job, Layout
from foretell.tree import TokenTree
from foretell.types import Ask, Reply

STEP: ContextVar[Sequence[Job]] = ContextVar("foretell_step")  # the jobs of the running forward


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float,
           softcap: float | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:  # fmt: skip
    """q (H, n, D) over k, v (KV, L, D), mask additive (n, L) or None -> (n, H, D)."""
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], mask, scale=scale, enable_gqa=len(q) != len(k))
        return out[0].transpose(0, 1)
    heads, new, width = q.shape
    scores = (q.reshape(len(k), -1, width) @ k.transpose(1, 2) * scale).view(heads, new, -1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        sink = sinks.reshape(-1, 1, 1).expand(-1, new, 1)
        p = torch.cat([scores, sink], -1).softmax(-1, dtype=torch.float32)[..., :-1].to(q.dtype)
    else:
        p = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    return (p.view(len(k), -1, p.shape[-1]) @ v).view(heads, new, -1).transpose(0, 1)


def forest_attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None,
                     window: int | None = None, softcap: float | None = None,
                     sinks: torch.Tensor | None = None) -> torch.Tensor:  # fmt: skip
    """Packed q (H, T, D), k, v (KV, T, D) of the running step -> (T, H, D), each job over its own rows."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    outs, low = [], 0
    for job in STEP.get():
        high = low + len(job.tokens)
        keys, values = job.write(layer, k[:, low:high], v[:, low:high])
        outs.append(attend(q[:, low:high], keys, values, job.mask(window, q.dtype), scale, softcap, sinks))
        low = high
    return outs[0] if len(outs) == 1 else torch.cat(outs)


class Model:
    """The base of every adapter, which sets these fields and overrides `run`."""

    name: str
    vocab: int
    context: int  # longest sequence, in tokens
    layout: Layout
    dtype: torch.dtype
    device: torch.device
    caps: frozenset[str] = frozenset({"tree"})
    calls = 0  # forwards so far

    def run(self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, first: Job,
            taps: Sequence[int]) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:  # fmt: skip
        """ids, positions (1, T), rows (R,) of the packed row -> logits (R, V) and hidden[i] (T, E) for each tap i.

        `first` is the first job, whose `layers` hold for all; `STEP` has all of them.
        """
        raise NotImplementedError

    def cache(self) -> Cache:
        return Cache(self.layout, self.dtype, self.device)

    def forward(self, jobs: Sequence[Job], taps: Sequence[int] = ()) -> list[Reply]:
        """One packed forward; the jobs have the same `layers`, and all or none of them `states`. A Reply each."""
        ids = torch.tensor([[t for job in jobs for t in job.tokens]], device=self.device)
        positions = torch.tensor([[p for job in jobs for p in job.positions]], device=self.device)
        rows, low = [], 0
        for job in jobs:
            rows += [low + r for r in job.rows]
            low += len(job.tokens)
        token = STEP.set(jobs)
        try:
            logits, hidden = self.run(ids, positions, torch.tensor(rows, device=self.device), jobs[0], taps)
        finally:
            STEP.reset(token)
        self.calls += 1
        logits = logits if logits.dtype == torch.float64 else logits.float()
        replies, row, low = [], 0, 0
        for job in jobs:
            job.cache.finish()
            mine = {i: h[low : low + len(job.tokens)] for i, h in hidden.items()}
            replies.append(Reply(logits[row : row + len(job.rows)], mine, [r + job.first for r in job.rows]))
            row, low = row + len(job.rows), low + len(job.tokens)
        return replies

    @torch.inference_mode()
    def score(self, tokens: Sequence[int], tree: TokenTree | None = None) -> torch.Tensor:
        """Rows (N, V) of a tree below `tokens`, from an empty cache: the reference for audits and tests."""
        job, _ = self.cache().prepare(Ask(tree or TokenTree(tokens[-1])), tokens, len(tokens))
        return self.forward([job])[0].logits

    @torch.inference_mode()
    def costs(self, sizes: Sequence[int], context: int = 256, runs: int = 5) -> dict[int, float]:
        """Median seconds of a forward of n tokens behind `context` rows, for each n of `sizes`, taken in turn."""
        base = [1] * (min(context, self.context - max(sizes) - 1) + 1)
        cache, times = self.cache(), {n: [0.0] * 0 for n in sizes}
        for run in range(-1, runs):
            for n in sizes:
                cache.branch = 0  # or the nodes of the tree before would count as known
                job, _ = cache.prepare(Ask(TokenTree(1).chain([1] * (n - 1))), base, len(base))
                start = time.perf_counter()
                self.forward([job])[0].logits.sum().item()
                if run >= 0:
                    times[n].append(time.perf_counter() - start)
        return {n: sorted(seconds)[len(seconds) // 2] for n, seconds in times.items()}
