"""Blocks of feed-forward layers: the union is the whole, and the losses are what a loop says."""

from __future__ import annotations

import math

import pytest
import torch

from foretell.ops.expert_blocks import (
    AdaptiveWeight,
    active_blocks,
    all_blocks,
    block_sparsity,
    chunk_loss,
    consecutive_runs,
    locality_loss,
    route_blocks,
)

ROWS, E, BLOCKS, WIDTH = 5, 6, 7, 3


def drawn(seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Rows, logits of their routers, and weights."""
    torch.manual_seed(seed)
    size = (ROWS, E), (ROWS, BLOCKS), (BLOCKS * WIDTH, E), (E, BLOCKS * WIDTH)
    return tuple(torch.randn(shape, dtype=torch.float64) for shape in size)


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def test_scores_and_the_whole_layer_number_by_number() -> None:
    x, logits, up, down = drawn()
    scale = torch.linspace(0.5, 2, BLOCKS, dtype=torch.float64)
    scores = route_blocks(logits, scale, 1e-6)
    out = all_blocks(x, scores, up, down)
    for row in range(ROWS):
        positive = [max(0.0, float(value)) for value in logits[row]]
        size = math.sqrt(sum(p * p for p in positive) / BLOCKS + 1e-6)
        wanted = [0.0] * E
        for block in range(BLOCKS):
            score = positive[block] / size * float(scale[block])
            assert math.isclose(scores[row, block], score, rel_tol=1e-6, abs_tol=1e-12)
            assert (scores[row, block] == 0) == (logits[row, block] <= 0)  # zeros stay exact
            for j in range(block * WIDTH, (block + 1) * WIDTH):
                inner = score * silu(float(x[row] @ up[j]))
                for e in range(E):
                    wanted[e] += inner * float(down[e, j])
        assert out[row].tolist() == pytest.approx(wanted, rel=1e-6)


def test_the_union_is_the_whole() -> None:
    for seed in range(6):
        x, logits, up, down = drawn(seed)
        logits = logits - 1.2  # most blocks rest
        scores = route_blocks(logits, torch.ones(BLOCKS, dtype=torch.float64), 1e-6)
        out, count = active_blocks(x, scores, up, down)
        torch.testing.assert_close(out, all_blocks(x, scores, up, down))
        assert count == len({b for row in logits for b in range(BLOCKS) if row[b] > 0})
        alone, one = active_blocks(x[:1], scores[:1], up, down)
        assert one == int((logits[0] > 0).sum()) <= count
        torch.testing.assert_close(alone[0], out[0])
    # Weights of other blocks are not read; those of the union are.
    rest = (scores == 0).all(0)
    assert rest.any() and not rest.all()
    broken = up.clone()
    broken.unflatten(0, (BLOCKS, WIDTH))[rest] = torch.nan
    assert active_blocks(x, scores, broken, down)[0].isfinite().all()
    broken.unflatten(0, (BLOCKS, WIDTH))[~rest] = torch.nan
    assert active_blocks(x, scores, broken, down)[0].isnan().any()


def test_rows_that_need_nothing_are_0() -> None:
    x, logits, up, down = drawn()
    out, count = active_blocks(x, torch.zeros_like(logits), up, down)
    assert count == 0 and not out.any()
    batch, _ = active_blocks(
        x[None], route_blocks(logits, torch.ones(BLOCKS).double(), 1e-6)[None], up, down
    )
    assert batch.shape == (1, ROWS, E)


def test_runs_of_numbers() -> None:
    assert list(consecutive_runs([])) == []
    assert list(consecutive_runs([3])) == [(3, 4)]
    assert list(consecutive_runs([0, 1, 2, 5, 7, 8])) == [(0, 3), (5, 6), (7, 9)]


def test_the_losses_are_those_of_a_loop() -> None:
    torch.manual_seed(1)
    logits = torch.randn(2, 6, 4)
    terms = []
    for text in logits:
        for t in range(5):
            for b in range(4):
                a, c = 3 * float(text[t, b]), 3 * float(text[t + 1, b])
                goal, law = 1 / (1 + math.exp(-c)), 1 / (1 + math.exp(-a))
                terms.append(-goal * math.log(law) - (1 - goal) * math.log(1 - law))
    assert math.isclose(locality_loss(logits, 3.0), sum(terms) / len(terms), rel_tol=1e-4)
    unused = []
    for text in logits:
        for first in (0, 3):
            for b in range(4):
                chance = 1.0
                for t in range(first, first + 3):
                    positive = [max(0.0, float(v)) for v in text[t]]
                    chance *= 1 - positive[b] / (sum(positive) + 1e-5) + 1e-5
                unused.append(chance)
    assert math.isclose(chunk_loss(logits, 3), 1 - sum(unused) / len(unused), rel_tol=1e-4)


def test_both_sides_learn_and_the_losses_fall_with_what_they_are_for() -> None:
    logits = torch.randn(1, 8, 4, requires_grad=True)
    locality_loss(logits, 1.0).backward()
    assert logits.grad is not None and bool((logits.grad.abs().sum(-1) > 0).all())
    same = torch.tensor([4.0, -4, 4, -4]).expand(8, 4)
    turned = torch.stack([same[0] * (-1) ** t for t in range(8)])
    assert locality_loss(same, 1.0) < 0.2 < locality_loss(turned, 1.0)
    few = torch.tensor([1.0, -1, -1, -1]).expand(8, 4)
    each = 2 * torch.eye(4).repeat(2, 1) - 1  # as sparse by tokens, and another block each time
    assert chunk_loss(few, 8) < 0.3 and chunk_loss(each, 8) > 0.9
    assert block_sparsity(few > 0) == block_sparsity(each > 0) == 0.75
    assert block_sparsity(few > 0, 4) == 0.75 and block_sparsity(each > 0, 4) == 0
    assert block_sparsity(few[:7] > 0, 4) == 0.75  # a rest that is no whole group does not count


def test_the_weight_follows_its_loss() -> None:
    weight = AdaptiveWeight(0.1, 2)
    for loss in (1.0, 1.0):
        weight.note_loss(loss)
    assert weight.value == 0.1
    for loss in (0.5, 0.5):  # it falls to a half
        weight.note_loss(loss)
    assert weight.value == 0.1
    weight.note_loss(0.5)
    assert weight.value == pytest.approx(0.075)  # half the way
    weight.note_loss(0.5)
    assert weight.value == pytest.approx(0.05)  # and on: the loss stayed
    for _ in range(2):
        weight.note_loss(0.505)  # less than GROWTH
    for _ in range(2):
        weight.note_loss(50.0)
    assert weight.value == pytest.approx(0.05 * 1.025)
    twin = AdaptiveWeight(0.1, 2)
    twin.state = weight.state
    for each in (weight, twin):
        each.note_loss(50.0)
        each.note_loss(50.0)
        assert each.value == pytest.approx(0.4)  # MOST times its start
