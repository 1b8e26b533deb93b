"""What a model is to the engine: `forward(jobs)`, one packed forest of every request's new nodes.

All jobs lie in one row of T tokens, without padding. A model computes what is local to a token as
it likes; attention is here: each job's keys and values go to its own cache, and its nodes see that
cache's rows under the job's mask. What a model can do is asked of `caps`: `tree` (branching jobs),
`layers` (hidden states, subsets, entry in the middle).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar

import torch

from foretell.core.cache import Cache, Job, Layout
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Reply

STEP: ContextVar[Sequence[Job]] = ContextVar("foretell_step")  # the jobs of the running forward


def forest_attention(
    layer: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Packed q (H, T, D), k, v (KV, T, D) of the running step -> (T, H, D), each job over its own
    rows.
    """
    scale, jobs = q.shape[-1] ** -0.5 if scale is None else scale, STEP.get()
    if len(jobs) == 1:
        return jobs[0].attend(layer, q, k, v, scale, window, softcap, sinks)
    outs, low = [], 0
    for job in jobs:
        part = slice(low, low := low + len(job.tokens))
        outs.append(
            job.attend(layer, q[:, part], k[:, part], v[:, part], scale, window, softcap, sinks)
        )
    return torch.cat(outs)


class Model:
    """The base of every adapter, which sets these fields and overrides `run`."""

    name: str
    vocab: int
    context: int  # longest sequence, in tokens
    layout: Layout
    dtype: torch.dtype
    device: torch.device
    caps: frozenset[str] = frozenset({"tree", "rows"})
    calls, width = 0, 0  # forwards so far; tokens that the last one computed
    asked = 0  # threads to compute with; 0: as many as torch has

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        first: Job,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """ids, positions (1, T), rows (R,) -> logits (R, V), hidden[i] (T, E) of each tap i.
        `first`: a job of STEP.
        """
        raise NotImplementedError

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """What enters layer 0 for these tokens, (n, E). Models with the capability `layers` have
        it.
        """
        raise NotImplementedError

    def cache(self) -> Cache:
        return Cache(self.layout, self.dtype, self.device)

    def forward(self, jobs: Sequence[Job], taps: Sequence[int] = ()) -> list[Reply]:
        """One packed forward; the jobs have the same `layers`, and all or none of them `states`. A
        Reply each.
        """
        ids = torch.tensor([[t for job in jobs for t in job.tokens]], device=self.device)
        positions = torch.tensor([[p for job in jobs for p in job.positions]], device=self.device)
        rows, low = [], 0
        for job in jobs:
            rows += [low + r for r in job.rows]
            low += len(job.tokens)
        token = STEP.set(jobs)
        try:
            logits, hidden = self.run(
                ids, positions, torch.tensor(rows, device=self.device), jobs[0], taps
            )
        finally:
            STEP.reset(token)
        self.calls, self.width = self.calls + 1, ids.shape[1]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        replies, row, low = [], 0, 0
        for job in jobs:
            job.cache.finish()
            mine = {i: h[low : low + len(job.tokens)] for i, h in hidden.items()}
            replies.append(
                Reply(logits[row : row + len(job.rows)], mine, [r + job.first for r in job.rows])
            )
            row, low = row + len(job.rows), low + len(job.tokens)
        return replies

    @torch.inference_mode()
    def score(self, tokens: Sequence[int], tree: TokenTree | None = None) -> torch.Tensor:
        """Rows (N, V) of a tree below `tokens`, from an empty cache: the reference for audits and
        tests.
        """
        job, _ = self.cache().prepare(Ask(tree or TokenTree(tokens[-1])), tokens, len(tokens))
        return self.forward([job])[0].logits
