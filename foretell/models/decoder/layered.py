"""A forward by the loop over layers, of a decoder or of what is seen through it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch

from foretell.cache.job import Job, entering
from foretell.core.model import STEP
from foretell.models.decoder.loop import Loop, attending


class Layered(Protocol):
    """What `run_layers` needs: a Decoder with a loop, or a view of one."""

    loop: Loop | None
    fused: bool
    row_size: int
    dtype: torch.dtype

    def embedded(self, ids: torch.Tensor) -> torch.Tensor: ...

    def chosen(self, layers: Sequence[Any] | None) -> Sequence[Any]: ...

    def read(self, h: torch.Tensor) -> torch.Tensor: ...


def run_layers(
    model: Layered,
    ids: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    first: Job,
    taps: Sequence[int],
    loop: Loop | None = None,
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """What Model.run promises, by the loop over layers; `loop`: another than the model's own."""
    loop = loop or model.loop
    assert loop is not None
    jobs = STEP.get()
    hidden: dict[int, torch.Tensor] = {}
    with nullcontext() if model.fused else attending(loop.config):
        states = entering(jobs, lambda tokens: model.embedded(torch.tensor(tokens).to(ids)))
        h = model.embedded(ids) if states is None else states[None].to(model.dtype)
        h = loop.run(h, positions, model.chosen(first.layers), taps, hidden)[0]
    if not len(rows):
        return h.new_zeros(0, model.row_size), hidden
    every = all(job.rows == [*range(len(job.tokens))] for job in jobs)
    return model.read(h if every else h[rows]), hidden
