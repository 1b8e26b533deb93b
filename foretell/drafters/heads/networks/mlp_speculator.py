"""The network of the MLP speculator: a state that takes in one drafted token after the other.

Source: Wertheimer et al., "Accelerating Production LLMs with Combined Token/Embedding Speculators"
(arXiv 2404.19124), section 2.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from foretell.drafters.heads.networks.base import HeadConfig
from foretell.drafters.heads.networks.layers import WIDE, Attend, Norm
from foretell.drafters.heads.networks.recurrent import Recurrent
from foretell.drafters.heads.networks.taking import take_norm
from foretell.errors import BadConfig

STEPS = 3  # over which the text's part of a state falls to a half
EPS = 1e-6  # of norms in published heads


def unit_length(x: torch.Tensor, eps: float | None = None) -> torch.Tensor:
    """x / rms(x), in float32."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)


class Shifted(nn.Module):
    """x / rms(x) * weight + bias."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return unit_length(x, EPS) * self.weight + self.bias


class Stages(nn.Module):
    """The steps of a published head, each with a table of tokens, a projection of the state before
    it and a norm. `tied`: the steps share them, and so do the projections of all but the first.
    """

    def __init__(self, rows: int, hidden: int, inner: int, steps: int, tied: bool):
        super().__init__()
        table_count, projection_count = (1, min(steps, 2)) if tied else (steps, steps)
        self.tables = nn.ModuleList(nn.Embedding(rows, inner) for _ in range(table_count))
        self.projections = nn.ModuleList(
            nn.Linear(inner if i else hidden, inner, bias=False) for i in range(projection_count)
        )
        self.norms = nn.ModuleList(Shifted(inner) for _ in range(table_count))

    @staticmethod
    def at(parts: nn.ModuleList, depth: int) -> Any:
        return parts[min(depth, len(parts) - 1)]


class MlpSpeculator(Recurrent):
    """state = gelu(norm(project(state) + scale * token)), of which the output matrix reads.

    Without `own_matrix` tokens are the target's embeddings and the output matrix is the target's,
    each through a matrix, and the weights of all steps are one, the first projection aside. With
    it, the head is as published: it has tables of tokens and output matrices of its own.
    """

    kind = "mlp-speculator"
    options: ClassVar[dict[str, Any]] = {
        "own_matrix": 0,  # rows of its own tables and output matrices; 0: it has none
        # Of a head that has some:
        "inner": 0,  # numbers of a state; 0: as many as the target's have
        "steps": STEPS,
        "tied": True,  # whether the steps share their weights
        "scaled": True,  # whether the target's state is brought to length first
    }
    depths = STEPS
    decay = 1.0
    reads_normed = True

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        shape = config.target.layer_shape()
        width = shape.hidden
        rows = self.own_rows()
        self.stages: Stages | None = None
        if rows:
            self._build_published(rows)
            return
        self.first = nn.Linear(width, width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.read = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.inner = nn.LayerNorm(width, shape.eps)
        self.norm = Norm(width, shape.eps)
        for linear in (self.first, self.project, self.read, self.out):
            nn.init.normal_(linear.weight, std=width**-0.5)
        self.scale = token_scale(STEPS)

    def _build_published(self, rows: int) -> None:
        vocab = self.config.target.vocab
        if rows != vocab:  # its tables are asked by the target's tokens
            raise BadConfig.field("mlp-speculator:own_matrix", rows, f"0 or {vocab}")
        steps, tied = self.whole_option("steps", 1, 64), bool(self.option("tied"))
        inner_width = self.whole_option("inner", 0, WIDE * self.hidden) or self.hidden
        self.depths = self.deepest = steps
        self.room = max(2, inner_width // self.hidden + 1)  # a state and its depth
        self.stages = Stages(rows, self.hidden, inner_width, steps, tied)
        output_matrices = [
            nn.Linear(inner_width, rows, bias=False) for _ in range(1 if tied else steps)
        ]
        self.matrix = output_matrices[0] if tied else nn.ModuleList(output_matrices)
        self.scale = token_scale(steps) * math.sqrt(inner_width)

    @torch.no_grad()
    def take_weights(self, target: Any) -> None:
        if self.stages is None:
            take_norm(self.norm, target.loop.norm)

    def text_vectors(
        self, states: torch.Tensor, embedded: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        if self.stages is None:
            return unit_length(states) / math.sqrt(2)
        return unit_length(states, EPS) / math.sqrt(2) if self.option("scaled") else states

    def token_rows(
        self, embedded: torch.Tensor, ids: torch.Tensor | None, depth: int
    ) -> torch.Tensor:
        if self.stages is None:
            return self.read(unit_length(embedded))  # type: ignore[no-any-return]
        assert ids is not None, "its tables are asked by ids"
        return self.stages.at(self.stages.tables, depth)(ids)  # type: ignore[no-any-return]

    def draft_rows(
        self, vectors: torch.Tensor, embedded: torch.Tensor, depth: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.stages is None:
            project, norm = self.project if depth else self.first, self.inner
        else:
            project = self.stages.at(self.stages.projections, depth)
            norm = self.stages.at(self.stages.norms, depth)
        scaled_tokens = self.scale * embedded
        state = F.gelu(norm(project(vectors[..., : project.in_features]) + scaled_tokens))
        if self.stages is not None:
            return state, state
        output_states: torch.Tensor = self.norm(self.out(state))
        return output_states, state


def token_scale(steps: int) -> float:
    """The factor of a token of variance 1 beside a state, so that after so many steps the text's
    part is still a half.
    """
    kept_share: float = 0.5 ** (0.5 / steps)
    return math.sqrt((1 - kept_share**2) / 2) / kept_share
