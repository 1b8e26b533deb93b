"""Who sees whom among the nodes of a tree: the masks of tree attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

LONG = 64  # pending tokens above which a mask is not worth remembering


def visibility_mask(parents: tuple[int, ...]) -> torch.Tensor:
    """Bool (N, N): (i, j) says that j is i or an ancestor of i. Parent -1 is the text itself."""
    mask = torch.eye(len(parents), dtype=torch.bool).numpy()
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node, :node] = mask[parent, :node]
    return torch.from_numpy(mask)


ancestors = lru_cache(maxsize=512)(visibility_mask)  # the same, remembered


def seen_by(parents: Sequence[int], pending: int) -> torch.Tensor:
    """The visibility mask where the first `pending` nodes are a chain; not to be written to."""
    mask = ancestors if pending < LONG else visibility_mask
    return mask(tuple(parents))
