"""What masked diffusion learns by, against enumerations and loops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from foretell.train.diffusion.masking import (
    LEAST,
    Masked,
    Reader,
    block_mask,
    by_count,
    by_rate,
    certainty_loss,
    count_right,
    draw_masks,
    in_block,
    masked_loss,
    split_blocks,
)
from tests import tiny

MASK = 321


class Script:
    """A door of numbers whose draws are given."""

    def __init__(self, uniform: float = 0.0, count: int = 0, order: Any = None):
        self.uniform, self.count, self.order = uniform, count, order

    def integers(self, low: int, high: int) -> int:
        assert low <= self.count < high
        return self.count

    def permutation(self, places: np.ndarray) -> np.ndarray:
        return np.array(self.order)


@pytest.fixture
def reader() -> Reader:
    return Reader(tiny.llama(), MASK, shift=0)


def texts(rows: int = 3, n: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(1, 300, (rows, n))
    answers = torch.ones(rows, n, dtype=torch.bool)
    for row in range(rows):
        answers[row, : 1 + row] = False
    return ids, answers


def subsets(size: int) -> Iterator[tuple[int, ...]]:
    for count in range(1, size + 1):
        yield from itertools.combinations(range(size), count)


def test_both_ways_of_masking_have_the_same_expected_loss() -> None:
    """Any surprise of a token may depend on all that is masked: probabilities and weights of every
    set are the same, by an integral over rates and by the draws of counts.
    """
    size = 4
    rates = np.linspace(0, 1, 200_001)[1:]
    for chosen in subsets(size):
        k = len(chosen)
        chance = (rates**k * (1 - rates) ** (size - k)) / (rates * size)
        by_rates = float(chance.mean())
        by_counts = 1 / size / math.comb(size, k) / k
        assert by_rates == pytest.approx(by_counts, rel=1e-4)
    # and the functions are those probabilities and weights
    answers = np.array([False, True, True, False, True, True])
    seen = {}
    for count in range(1, size + 1):
        for order in itertools.permutations((1, 2, 4, 5)):
            places, weight = by_count(answers, Script(count=count, order=order))  # type: ignore[arg-type]
            key = tuple(places.nonzero()[0].tolist())
            assert weight == 1 / count == 1 / len(key)
            seen[key] = seen.get(key, 0) + 1 / size / math.factorial(size)
    assert len(seen) == 2**size - 1 and sum(seen.values()) == pytest.approx(1)
    for key, chance in seen.items():
        assert chance == pytest.approx(1 / size / math.comb(size, len(key)))


def test_rates_mask_answers_alone_and_weigh_by_the_rate() -> None:
    answers = np.array([False] * 4 + [True] * 400)
    shares = []
    for seed in range(300):
        places, weight = by_rate(answers, np.random.default_rng(seed))
        assert not places[:4].any()
        rate = 1 / (weight * 400)
        assert LEAST <= rate <= 1
        shares.append(rate)
        assert abs(places.sum() - 400 * rate) < 6 * math.sqrt(400 * rate * (1 - rate)) + 1
    assert np.mean(shares) == pytest.approx(0.5, abs=0.06)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("masks", ["rate", "count"])
def test_the_loss_is_that_of_a_loop_over_texts(reader: Reader, shift: int, masks: str) -> None:
    reader = Reader(reader.hf, MASK, shift)
    ids, answers = texts()
    masked = draw_masks(answers, [11, 12, 13], masks)
    found = masked_loss(reader, ids, masked)
    zeros = torch.zeros(1, 1, 7, 7)
    for row in range(3):
        canvas = [MASK if m else int(t) for t, m in zip(ids[row], masked.places[row], strict=True)]
        logits = reader.hf(input_ids=torch.tensor([canvas]), attention_mask=zeros).logits[0]
        logits[:, MASK] = -torch.inf
        total = torch.zeros(())
        for place in range(7):
            if masked.places[row, place]:
                total = total - logits[place - shift].log_softmax(-1)[ids[row, place]]
        assert torch.allclose(found[row], total * masked.weight[row], atol=1e-4)
    assert not masked.places[~answers].any()


@pytest.mark.parametrize("masks", ["rate", "count"])
def test_a_batch_is_the_mean_of_its_texts(reader: Reader, masks: str) -> None:
    """Published trainers that draw or count over a batch are right for one text only."""
    ids, answers = texts()
    whole = masked_loss(reader, ids, draw_masks(answers, [5, 6, 7], masks))
    alone = [
        masked_loss(reader, ids[i : i + 1], draw_masks(answers[i : i + 1], [5 + i], masks))
        for i in range(3)
    ]
    assert torch.allclose(whole, torch.cat(alone), atol=1e-4)
    masked = draw_masks(answers, [5, 6, 7], masks)
    quotas = Masked(masked.places, masked.weight.mean().expand(3))
    assert not torch.allclose(masked_loss(reader, ids, quotas), whole, atol=1e-3)


def test_the_mask_itself_is_never_told_and_learns_nothing(reader: Reader) -> None:
    ids, answers = texts()
    logits = reader.logits(ids, answers)
    assert (logits[:, MASK] == -torch.inf).all()
    nats = F.cross_entropy(logits, ids[answers])
    (found,) = torch.autograd.grad(nats, reader.hf.lm_head.weight)
    told = torch.arange(found.shape[0]) != MASK
    whole = reader.hf(torch.where(answers, MASK, ids), attention_mask=block_mask(7, 0)).logits[
        answers
    ]
    nats = F.cross_entropy(whole[:, told], ids[answers] - (ids[answers] > MASK).long())
    (without,) = torch.autograd.grad(nats, reader.hf.lm_head.weight)
    assert torch.allclose(found, without, atol=1e-6) and not found[MASK].any()


def test_positions_see_both_sides_or_their_block_and_those_before(reader: Reader) -> None:
    ids, answers = texts(1)
    for block in (0, 3):
        reader = Reader(reader.hf, MASK, 0, block)
        logits = reader.logits(ids, answers)
        other = ids.clone()
        other[0, 0] = 7  # given, and seen by all
        assert not torch.allclose(reader.logits(other, answers), logits)
        wanted = torch.zeros_like(answers)
        wanted[0, 1] = True
        masked = answers.clone()
        before = reader.logits(ids, masked, wanted)
        masked[0, 5] = False  # in the second block, to the right
        same = torch.allclose(reader.logits(ids, masked, wanted), before, atol=1e-5)
        assert same == bool(block)
    hidden = block_mask(5, 2)[0, 0] == -torch.inf
    assert hidden.int().tolist() == [
        [0, 0, 1, 1, 1],
        [0, 0, 1, 1, 1],
        [0, 0, 0, 0, 1],
        [0, 0, 0, 0, 1],
        [0, 0, 0, 0, 0],
    ]


def test_blocks_together_are_the_whole_answer() -> None:
    answers = np.array([False, False, False, True, True, True, True, True])
    total = np.zeros(8)
    blocks = []
    for seed in range(200):
        chosen, share = in_block(answers, 3, np.random.default_rng(seed))
        blocks.append(tuple(chosen.nonzero()[0].tolist()))
        total += chosen * share / chosen.sum() / 200  # the mean over the block, times its share
    assert set(blocks) == {(3, 4, 5), (6, 7)}
    assert total[3:] == pytest.approx(np.full(5, 1 / 5), abs=0.03)


def test_parts_of_a_block_are_complements() -> None:
    _, answers = texts(3, 14)
    seen = set()
    for seed in range(30):
        one, two, later = split_blocks(answers, [seed, seed + 100, seed + 200], 4)
        assert not (one & two).any() and not (later & (one | two)).any()
        assert not (one | two | later)[~answers].any()
        for row in range(3):
            inside = (one | two)[row].nonzero()[:, 0].tolist()
            start = 1 + row
            number = (inside[0] - start) // 4
            seen.add(number)
            end = min(14, start + 4 * (number + 1))
            assert inside == [*range(start + 4 * number, end)]
            assert later[row].nonzero()[:, 0].tolist() == [*range(end, 14)]
    assert seen == {0, 1, 2, 3}


class Table:
    """A model whose logits are one table (V,) for all positions, which gathers gradients."""

    def __init__(self, table: torch.Tensor):
        self.table = table

    def logits(
        self, ids: torch.Tensor, masked: torch.Tensor, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        wanted = masked if wanted is None else wanted
        return self.table[: int(wanted.sum())]


def test_certainty_is_asked_for_where_the_model_is_right_and_nowhere_else() -> None:
    """The entropy's gradient is zero in rows whose best token is wrong."""
    ids = torch.tensor([[2, 0, 1, 3]])
    one = torch.tensor([[False, True, True, True]])
    none = torch.zeros_like(one)
    torch.manual_seed(0)
    rows = torch.randn(3, 5)
    rows[0, 0] = 4.0  # right
    rows[1, 4] = 4.0  # wrong: the text has 1
    rows[2, 3] = 4.0  # right
    gradients = {}
    for beta in (0.0, 2.0):
        table = rows.clone().requires_grad_()
        loss = certainty_loss(Table(table), ids, (one, none, none), beta)  # type: ignore[arg-type]
        loss.sum().backward()
        gradients[beta] = table.grad
        nats = F.cross_entropy(rows, torch.tensor([0, 1, 3]))
        law = (rows[[0, 2]] / 0.5).softmax(-1)
        entropy = -(law * law.log()).sum(-1).mean()
        assert torch.allclose(loss[0], nats + beta * entropy, atol=1e-5)
    change = gradients[2.0] - gradients[0.0]
    assert torch.equal(change[1], torch.zeros(5))
    assert change[0].abs().max() > 1e-4 and change[2].abs().max() > 1e-4
    assert change[0, 0] < 0, "a step makes the right token likelier"


def test_certainty_reads_two_canvases_of_each_text(reader: Reader) -> None:
    """A part is masked with the later blocks, and reads the other part; each text has its mean."""
    ids, answers = texts(3, 12)
    seeds = [1, 2, 3]
    parts = split_blocks(answers, seeds, 4)
    whole = certainty_loss(reader, ids, parts, 2.0)
    for row in range(3):
        total = torch.zeros(())
        for part in parts[:2]:
            own = (part | parts[2])[row]
            logits = reader.logits(ids[row : row + 1], own[None])
            logits = logits[part[row][own]]
            if len(logits):
                total = total + F.cross_entropy(logits, ids[row][part[row]])
                right = logits.argmax(-1) == ids[row][part[row]]
                if right.any():
                    law = (logits[right] / 0.5).softmax(-1)
                    total = total - 2.0 * torch.xlogy(law, law).sum(-1).mean()
        assert torch.allclose(whole[row], total, atol=1e-3)
    whole.sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in reader.hf.parameters() if p.grad is not None)


def test_how_often_it_is_right_is_counted(reader: Reader) -> None:
    ids, answers = texts(3, 14)
    best = reader.logits(ids, answers).argmax(-1)
    told = ids.clone()
    told[answers] = best
    assert count_right(reader, told, answers, 1.0, [1, 2, 3]) == (len(best), len(best))
    right, count = count_right(reader, ids, answers, 0.5, [1, 2, 3])
    assert 0 <= right < count < len(best)
    assert count_right(reader, ids, answers, 0.0, [1, 2, 3]) == (0, 0)
