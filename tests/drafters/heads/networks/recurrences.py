"""Recurrent heads as they draft, node by node: what a rollout in training is held against."""

from __future__ import annotations

from typing import Any

import torch

from foretell.drafters.heads.networks.base import Head, Nodes, TargetShape, Texts
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
LENGTH = 8
NEAR = 1e-5  # norms and rotations compute in float32


def made(kind: str, **options: Any) -> Head:
    """A head whose weights are all of some size."""
    torch.manual_seed(3)
    head = build_head(kind, SHAPE, options).double().eval()
    with torch.no_grad():
        for weight in head.parameters():
            weight += 0.2 * torch.randn_like(weight)
    return head


def texts(head: Head, rows: int = 2) -> Texts:
    """Random ones of LENGTH tokens; the same state stands in every room of the features."""
    draw = torch.Generator().manual_seed(7)

    def numbers() -> torch.Tensor:
        return torch.randn(rows, LENGTH, SHAPE.hidden, generator=draw, dtype=torch.float64)

    ids = torch.randint(SHAPE.vocab, (rows, LENGTH), generator=draw)
    return Texts(ids, numbers(), numbers().repeat(1, 1, len(head.taps)), numbers())


class Rows:
    """Keys and values of a path by plain lists, of layers that are called in turn."""

    def __init__(self, layers: int):
        self.keys: list[list[torch.Tensor]] = [[] for _ in range(layers)]
        self.values: list[list[torch.Tensor]] = [[] for _ in range(layers)]
        self.calls = 0

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys = self.keys[self.calls % len(self.keys)]
        values = self.values[self.calls % len(self.keys)]
        self.calls += 1
        outs = []
        for row in range(q.shape[1]):
            keys.append(k[:, row])
            values.append(v[:, row])
            heads = []
            for h in range(len(q)):
                shared = h * len(k) // len(q)
                scores = torch.stack([key[shared] @ q[h, row] for key in keys])
                weights = (scores * q.shape[-1] ** -0.5).softmax(0)
                heads.append(weights @ torch.stack([value[shared] for value in values]))
            outs.append(torch.stack(heads))
        return torch.stack(outs)


def stepwise(head: Head, batch: Texts, row: int, anchor: int, depths: int) -> list[torch.Tensor]:
    """What is drafted after token `anchor` of a text, one node after the other.

    Beside each drafted node stands another one of the same level, with another token.
    """
    rows = Rows(head.layers)
    start = slice(0, anchor + 1)
    text = torch.zeros(anchor + 1, dtype=torch.bool)
    nodes = Nodes(
        batch.embedded[row, start], batch.features[row, start], text, torch.arange(anchor + 1)
    )
    states, handed_on = head.step(nodes, rows)
    found, left = [states[-1]], handed_on[-1]
    for depth in range(1, depths):
        token = batch.embedded[row, anchor + depth]
        nodes = Nodes(
            torch.stack([token, -token]),
            torch.stack([left, left]),
            torch.ones(2, dtype=torch.bool),
            torch.full((2,), anchor + depth),
        )
        states, handed_on = head.step(nodes, rows)
        found.append(states[0])
        left = handed_on[0]
    return found


@torch.no_grad()
def difference(head: Head, depths: int = 3) -> float:
    """The largest one between training and drafting, over all anchors and depths."""
    batch = texts(head)
    trained = [drafted.states for drafted in head.unroll_depths(batch, depths)]
    assert len(trained) == depths
    gaps = [
        float((trained[depth][row, anchor] - states).abs().max())
        for row in range(len(batch.ids))
        for anchor in range(LENGTH - depths + 1)
        for depth, states in enumerate(stepwise(head, batch, row, anchor, depths))
    ]
    return max(gaps)


@torch.no_grad()
def leak(head: Head, depths: int = 3) -> float:
    """How much a token changes what is drafted in front of it."""
    batch = texts(head)
    place = LENGTH - 3
    before = [drafted.states for drafted in head.unroll_depths(batch, depths)]
    batch.embedded[:, place] += 1
    batch.features[:, place + 1 :] += 1
    after = [drafted.states for drafted in head.unroll_depths(batch, depths)]
    gaps = [
        float((a - b)[:, : place - depth].abs().max())
        for depth, (a, b) in enumerate(zip(before, after, strict=True))
    ]
    return max(gaps)
