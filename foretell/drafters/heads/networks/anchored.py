"""Heads that are rows for the target itself: trained vectors that enter it beside a node.

Row i (from 0) stands i + 1 places after its node and speaks of the token after its own place. It
sees what the node sees, the node, and the rows before it. Such a head computes nothing by itself:
the target does, by drafters/heads/extra_rows.py when it drafts and by train/heads/anchored.py when
it learns.

Sources: Chen et al., "Hardware-Aware Parallel Prompt Decoding" (arXiv 2405.18628), section 3; Wu et
al., "Parallel Decoding via Hidden Transfer" (arXiv 2404.12022), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from foretell.core.model import Model
from foretell.drafters.heads.networks.base import Head, HeadConfig
from foretell.errors import BadConfig
from foretell.models.decoder.packed import weight_bytes

MOST = 16  # rows of a node


class Anchored(Head):
    """Row i enters layer `entry` of the target as vectors[i] + maps[i] h, where h is what enters
    this layer at its node; without maps it is the same below all nodes.
    """

    options: ClassVar[dict[str, Any]] = {"rows": 3}
    layers = 0
    depths = 3
    rate = 0.01  # of its learning, at first
    maps: nn.Parameter | None  # (P, E, E)

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        row_count = self.option("rows")
        if not isinstance(row_count, int) or not 1 <= row_count <= MOST:
            raise BadConfig.field(f"{config.kind}:rows", row_count, f"between 1 and {MOST}")
        self.deepest = row_count
        self.vectors = nn.Parameter(torch.zeros(row_count, config.target.hidden))
        self.maps = None

    @property
    def entry(self) -> int:
        """The layer of the target that the rows enter."""
        return 0

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def rows(self, row_places: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        """(n, E) that rows of these places (n,) enter with; `states` (n, E): h of their nodes,
        which maps read.
        """
        row_vectors = self.vectors[row_places]
        if self.maps is None:
            return row_vectors
        assert states is not None, "maps read the states of the nodes"
        mapped_states = torch.einsum("ne,pde->npd", states.to(row_vectors), self.maps)
        return row_vectors + mapped_states[torch.arange(len(row_places)), row_places]

    def noise_vectors(self, noise: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        """(n, E) that rows of noise (n,) enter with at temperatures (n,); few kinds are made so."""
        raise NotImplementedError


class Rows(Model):
    """Trained rows as drafters find them among a request's models. This model is never asked:
    `entering` gives what the target is to compute.
    """

    layout = ()

    def __init__(self, head: Anchored, target: Any):
        self.head = head.eval().requires_grad_(False)
        self.target = target
        self.name = f"{target.name} ({head.kind} rows)"
        self.vocab, self.context = target.vocab, target.context
        self.device, self.dtype = target.device, target.dtype
        head.to(self.device, torch.float32)

    @property
    def weight_bytes(self) -> int:  # type: ignore[override]
        return weight_bytes(self.head)

    @property
    def entry(self) -> int:
        return self.head.entry

    @property
    def deepest(self) -> int:
        """Rows of a node at most."""
        return self.head.deepest

    @property
    def ranks(self) -> Sequence[Sequence[float]]:
        """Shares, by row and rank, of its tokens that were the target's; empty: not measured."""
        return self.head.ranks

    def entering(
        self, row_places: Sequence[int], tokens: Sequence[int], states: torch.Tensor | None
    ) -> torch.Tensor:
        """(n, E) that rows of these places enter with, below nodes of these tokens (n,) and states
        (n, E); None: the rows enter layer 0.
        """
        if states is None and self.head.maps is not None:
            states = self.target.embed(tokens)
        with torch.inference_mode():
            return self.head.rows(torch.tensor(row_places, device=self.device), states)

    def noise_vectors(self, noise: Sequence[float], temperature: float) -> torch.Tensor:
        """(n, E) that rows of this noise (n,) enter layer 0 with, of a head that makes such."""
        noise_values = torch.tensor(noise, dtype=torch.float64, device=self.device)
        with torch.inference_mode():
            noise_rows: torch.Tensor = self.head.noise_vectors(
                noise_values, torch.full_like(noise_values, temperature)
            )
        return noise_rows
