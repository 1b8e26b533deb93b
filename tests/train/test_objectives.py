"""Losses of laws against plain sums, and what their gradients are."""

from __future__ import annotations

import math

import pytest
import torch

from foretell.errors import BadConfig
from foretell.train.objectives import (
    CHUNK,
    OBJECTIVES,
    furthest_behind,
    lag_behind,
    objective_named,
    row_loss,
)

ROWS, VOCAB, WIDTH = 7, 5, 6


def numbers() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(ROWS, VOCAB, generator=draw, dtype=torch.float64)
    laws = torch.randn(ROWS, VOCAB, generator=draw, dtype=torch.float64).softmax(-1)
    labels = torch.tensor([0, 1, 2, 3, 4, -1, 2])
    return logits, laws, labels


def plainly(name: str, q: list[float], p: list[float], label: int) -> float:
    if name == "kl":
        return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    if name == "tv":
        return sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
    if name == "ce":
        return 0.0 if label < 0 else -math.log(q[label])
    entropy = -sum(b * math.log(b) for b in q) if q.index(max(q)) == label else 0.0
    return plainly("ce", q, p, label) + entropy


@pytest.mark.parametrize("name", ["kl", "tv", "ce", "certainty"])
def test_a_loss_is_its_formula(name: str) -> None:
    logits, laws, labels = numbers()
    got = objective_named(name)(logits, laws, labels)
    for row in range(ROWS):
        q = logits[row].softmax(-1).tolist()
        want = plainly(name, q, laws[row].tolist(), int(labels[row]))
        assert float(got[row]) == pytest.approx(want, abs=1e-12)


def gradient(name: str, rows: slice = slice(None)) -> torch.Tensor:
    logits, laws, labels = numbers()
    logits.requires_grad_()
    objective_named(name)(logits[rows], laws[rows], labels[rows]).sum().backward()
    assert logits.grad is not None
    return logits.grad[rows]


def test_the_gradient_of_the_normalised_advantage_is_total_variations_over_the_deviation() -> None:
    ratio = gradient("tvd++") / gradient("tv")
    assert torch.allclose(ratio, ratio[0, 0].expand_as(ratio), atol=1e-9)
    logits, laws, _ = numbers()
    q = logits.softmax(-1)
    reward = (laws > q).double()
    mean = (q * reward).sum(-1).mean()
    deviation = (q * (reward - mean) ** 2).sum(-1).mean().sqrt()
    assert float(ratio[0, 0]) == pytest.approx(float(1 / deviation), rel=1e-9)


def test_certainty_moves_nothing_but_the_text_where_the_head_is_wrong() -> None:
    logits, _, labels = numbers()
    wrong = logits.argmax(-1) != labels
    assert wrong.any() and not wrong.all()
    gap = (gradient("certainty") - gradient("ce")).abs().amax(-1)
    assert not gap[wrong].any() and (gap[~wrong] > 1e-6).all()


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_in_parts_it_is_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(5)
    states = torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, generator=draw, dtype=torch.float64)
    _, laws, labels = numbers()
    want = objective_named(name)(states @ weight.T, laws, labels).sum()
    (by_hand,) = torch.autograd.grad(want, states)
    sizes = (CHUNK,) if name == "tvd++" else (CHUNK, 3, 1)  # its deviation is that of a part
    for size in sizes:
        monkeypatch.setattr("foretell.train.objectives.CHUNK", size)
        got = 2 * row_loss(states, weight, laws, labels, objective_named(name))
        (ours,) = torch.autograd.grad(got, states)
        assert float(got.detach()) == pytest.approx(2 * float(want.detach()), rel=1e-5)
        assert torch.allclose(ours, 2 * by_hand, atol=1e-5)


def test_an_unknown_one_is_told() -> None:
    with pytest.raises(BadConfig, match="objective='mse'"):
        objective_named("mse")


def test_how_far_a_head_lags_behind_a_reference_is_a_difference_of_divergences() -> None:
    draw = torch.Generator().manual_seed(5)
    rows = CHUNK + 3
    ours, theirs = (torch.randn(rows, WIDTH, generator=draw) for _ in range(2))
    weight = torch.randn(VOCAB, WIDTH, generator=draw)
    laws = torch.randn(rows, VOCAB, generator=draw).softmax(-1)
    got = lag_behind(ours, theirs, weight, laws)
    for row in (0, 1, CHUNK - 1, CHUNK, rows - 1):
        p = laws[row].tolist()
        both = [
            plainly("kl", (states[row] @ weight.T).softmax(-1).tolist(), p, 0)
            for states in (ours, theirs)
        ]
        assert float(got[row]) == pytest.approx(both[0] - both[1], abs=1e-4)


def test_the_share_that_is_furthest_behind_is_kept() -> None:
    lags = torch.tensor([0.3, -1.0, 2.0, 0.1, 0.5])
    assert furthest_behind(lags, 0.4).tolist() == [2, 4]
    assert furthest_behind(lags, 1.0).tolist() == [0, 1, 2, 3, 4]
    assert furthest_behind(lags, 0.01).tolist() == [2]
