"""A forward by the loop over layers, of a decoder or of what is seen through it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch

from foretell.cache.job import Job, join_entry_states
from foretell.core.model import STEP
from foretell.models.decoder.loop import Loop, use_attention


class Layered(Protocol):
    """A model that `run_layers` takes: a Decoder with a loop, or a view of one."""

    loop: Loop | None
    fused: bool
    row_size: int
    dtype: torch.dtype

    def embedded(self, ids: torch.Tensor) -> torch.Tensor: ...

    def layers_to_run(self, layers: Sequence[Any] | None) -> Sequence[Any]: ...

    def head_rows(self, h: torch.Tensor) -> torch.Tensor: ...


def run_layers(
    model: Layered,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    row_indices: torch.Tensor,
    first_job: Job,
    taps: Sequence[int],
    loop: Loop | None = None,
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Computes what Model.run promises, by the loop over layers; `loop`: another than the model's
    own.
    """
    loop = loop or model.loop
    assert loop is not None
    jobs = STEP.get()
    tapped_states: dict[int, torch.Tensor] = {}
    with nullcontext() if model.fused else use_attention(loop.config):
        entry_states = join_entry_states(
            jobs,
            lambda tokens: model.embedded(torch.tensor(tokens).to(token_ids)),
            lambda states, places: loop.placed(states, torch.tensor(places).to(positions)),
        )
        states = (
            loop.placed(model.embedded(token_ids), positions[0])
            if entry_states is None
            else entry_states[None].to(model.dtype)
        )
        states = loop.run(
            states, positions, model.layers_to_run(first_job.layers), taps, tapped_states
        )[0]
    if not len(row_indices):
        return states.new_zeros(0, model.row_size), tapped_states
    takes_all = all(job.rows == [*range(len(job.tokens))] for job in jobs)
    return model.head_rows(states if takes_all else states[row_indices]), tapped_states
