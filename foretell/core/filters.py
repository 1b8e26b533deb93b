"""Filters of distributions that keep the best tokens, without sorting all of a row."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation import logits_process as hf

from foretell.native import rows as native
from foretell.ops.logits import reads_in_library


class TopP:
    """The fewest tokens whose probabilities reach `share`: those that transformers' warper keeps.

    The C library finds them where no rounding could decide otherwise; else, and elsewhere, all
    tokens are sorted.
    """

    def __init__(self, share: float):
        self.share = share
        self.by_sorting = hf.TopPLogitsWarper(share)

    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        """Scores (N, V), of which those that are left out become -inf."""
        if len(scores) == 1 and reads_in_library(scores):
            nucleus_ids = native.nucleus_logits(scores[0], self.share)
            if nucleus_ids is not None:
                return nucleus_ids[None]
        sorted_out: torch.Tensor = self.by_sorting(ids, scores)
        return sorted_out
