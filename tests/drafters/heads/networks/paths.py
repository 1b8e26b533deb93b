"""Heads as they draft, by plain lists: what a rollout in training is held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from foretell.drafters.heads.networks.base import Head, TargetShape, Texts
from foretell.drafters.heads.networks.folder import build_head

SHAPE = TargetShape(
    hidden=32,
    layers=6,
    vocab=50,
    heads=4,
    kv_heads=2,
    width=8,
    intermediate=48,
    theta=10_000.0,
    eps=1e-5,
)
LENGTH = 9


def made(kind: str, **options: Any) -> Head:
    """A head whose weights are all of some size."""
    torch.manual_seed(3)
    head = build_head(kind, SHAPE, options).double().eval()
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return head


def texts(head: Head, rows: int = 2) -> Texts:
    """Random ones of LENGTH tokens."""
    draw = torch.Generator().manual_seed(7)

    def numbers(width: int) -> torch.Tensor:
        return torch.randn(rows, LENGTH, width, generator=draw, dtype=torch.float64)

    ids = torch.randint(50, (rows, LENGTH), generator=draw)
    return Texts(ids, numbers(32), numbers(32 * len(head.taps)), numbers(32))


@torch.no_grad()
def largest_gap(
    head: Head, batch: Texts, depths: int, stepwise: Callable[..., Sequence[torch.Tensor]]
) -> float:
    """The largest difference between training and drafting, over all anchors and depths.

    stepwise (head, batch, row, anchor, depths): what is drafted after token `anchor` of a text.
    """
    trained = [drafted.states for drafted in head.unroll_depths(batch, depths)]
    gaps = [
        float((trained[depth][row, anchor] - states).abs().max())
        for row in range(len(batch.ids))
        for anchor in range(LENGTH - depths + 1)
        for depth, states in enumerate(stepwise(head, batch, row, anchor, depths))
    ]
    return max(gaps)


class Rows:
    """The keys and values of the layers of a path; row i of a layer sees the rows `seen` of it.

    None: those up to itself. It is called for one layer after the other.
    """

    def __init__(self, layers: int = 1, seen: Sequence[Sequence[int]] | None = None) -> None:
        self.keys: list[list[torch.Tensor]] = [[] for _ in range(layers)]
        self.values: list[list[torch.Tensor]] = [[] for _ in range(layers)]
        self.seen = seen
        self.calls = 0

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        layer = self.calls % len(self.keys)
        self.calls += 1
        keys, values = self.keys[layer], self.values[layer]
        first = len(keys)
        keys += k.unbind(1)
        values += v.unbind(1)
        outs = []
        for row in range(q.shape[1]):
            here = range(first + row + 1) if self.seen is None else self.seen[first + row]
            heads = []
            for h in range(len(q)):
                shared = h * len(k) // len(q)
                scores = torch.stack([keys[i][shared] @ q[h, row] for i in here])
                weights = (scores * q.shape[-1] ** -0.5).softmax(0)
                heads.append(weights @ torch.stack([values[i][shared] for i in here]))
            outs.append(torch.stack(heads))
        return torch.stack(outs)
