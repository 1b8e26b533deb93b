"""The networks of EAGLE-1 and EAGLE-3: in training they compute what they compute in drafting."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from foretell.drafters.heads.networks.base import Head, Nodes, TargetShape, Texts
from foretell.drafters.heads.networks.eagle import OneLayer, TextAttention
from foretell.drafters.heads.networks.folder import build_head, head_kinds

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
KINDS = sorted(kind for kind, cls in head_kinds().items() if issubclass(cls, OneLayer))


def made(kind: str) -> Head:
    torch.manual_seed(3)
    head = build_head(kind, SHAPE).double().eval()
    with torch.no_grad():
        for weight in head.parameters():
            weight += 0.2 * torch.randn_like(weight)
    return head


def texts(head: Head, rows: int = 2) -> Texts:
    draw = torch.Generator().manual_seed(7)

    def numbers(width: int) -> torch.Tensor:
        return torch.randn(rows, LENGTH, width, generator=draw, dtype=torch.float64)

    ids = torch.randint(50, (rows, LENGTH), generator=draw)
    return Texts(ids, numbers(32), numbers(32 * len(head.taps)), numbers(32))


class Rows:
    """The keys and values of a text and of one path below it, by plain lists."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        outs = []
        for row in range(q.shape[1]):
            self.keys.append(k[:, row])
            self.values.append(v[:, row])
            heads = []
            for h in range(len(q)):
                shared = h * len(k) // len(q)
                scores = torch.stack([key[shared] @ q[h, row] for key in self.keys])
                weights = (scores * q.shape[-1] ** -0.5).softmax(0)
                values = torch.stack([value[shared] for value in self.values])
                heads.append(weights @ values)
            outs.append(torch.stack(heads))
        return torch.stack(outs)


def stepwise(head: Head, batch: Texts, row: int, anchor: int, depths: int) -> list[torch.Tensor]:
    """What is drafted after token `anchor` of a text, one node after the other."""
    rows = Rows()
    start = slice(0, anchor + 1)
    nodes = Nodes(
        batch.embedded[row, start],
        batch.features[row, start],
        torch.zeros(anchor + 1, dtype=torch.bool),
        torch.arange(anchor + 1),
    )
    states, handed_on = head.step(nodes, rows)
    found = [states[-1]]
    for depth in range(1, depths):
        nodes = Nodes(
            batch.embedded[row, anchor + depth, None],
            handed_on[-1:],
            torch.ones(1, dtype=torch.bool),
            torch.tensor([anchor + depth]),
        )
        states, handed_on = head.step(nodes, rows)
        found.append(states[-1])
    return found


def differences(head: Head, batch: Texts, depths: int) -> float:
    """The largest difference of a depth between training and drafting, over all anchors."""
    trained = [drafted.states for drafted in head.unroll_depths(batch, depths)]
    largest = 0.0
    for row in range(len(batch.ids)):
        for anchor in range(LENGTH - depths + 1):
            drafted = stepwise(head, batch, row, anchor, depths)
            for depth in range(depths):
                gap = (trained[depth][row, anchor] - drafted[depth]).abs().max()
                largest = max(largest, float(gap))
    return largest


@pytest.mark.parametrize("kind", KINDS)
def test_training_computes_what_drafting_does(kind: str) -> None:
    head = made(kind)
    with torch.no_grad():
        assert differences(head, texts(head), 4) < 1e-9


def seeing_all(
    self: TextAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Later steps see each other's rows, as in an ordinary causal pass."""
    self.keys, self.values = [k], [v]
    return RIGHT(TextAttention(), q, k, v)


RIGHT: Callable[..., torch.Tensor] = TextAttention.__call__


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slip", ["tokens", "attention", "positions"])
def test_slips_are_caught(kind: str, slip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head = made(kind)
    batch = texts(head)
    if slip == "tokens":
        right = Texts.shift_left
        monkeypatch.setattr(Texts, "shift_left", lambda self, t, by: right(self, t, max(0, by - 1)))
    elif slip == "attention":
        monkeypatch.setattr(TextAttention, "__call__", seeing_all)
    else:
        assert isinstance(head, OneLayer)
        rotation = head.rotation.forward
        head.rotation.forward = lambda at: rotation(torch.arange(at.shape[-1]))  # type: ignore[method-assign]
        trained = [drafted.states.detach() for drafted in head.unroll_depths(batch, 3)]
        head.rotation.forward = rotation  # type: ignore[method-assign]
        want = [drafted.states.detach() for drafted in head.unroll_depths(batch, 3)]
        gaps = [float((a - b).abs().max()) for a, b in zip(trained, want, strict=True)]
        assert gaps[0] < 1e-12 and gaps[2] > 1e-3
        return
    with torch.no_grad():
        assert differences(head, batch, 4) > 1e-3
