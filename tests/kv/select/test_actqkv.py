"""actqkv: what it does otherwise than infllm, against plain loops."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretell.errors import BadConfig
from foretell.kv.select import actqkv
from foretell.kv.select.actqkv import (
    Actqkv,
    ActqkvPolicy,
    entropy_share,
    share_blocks,
    update_statistics,
    weigh_rows,
)
from foretell.spec import build_cache_policy
from tests.kv.blocks import Block, Layer, Twin, differs, made
from tests.kv.driving import HEADS, LAYERS, TIMES, text_of

# What laws of all policies use, see tests/kv/policies.py.
SMALL_SPEC = (
    "actqkv:initial=1,local=6,block=3,blocks=2,least=1,representatives=2,every=4,alone=3,history=4"
)
LARGE_SPEC = "actqkv:local=400"

WHOLE = text_of(56, seed=8)
PROMPT = 40
SMALL = Actqkv(
    initial=2,
    local=5,
    block=2,
    blocks=5,
    least=1,
    representatives=2,
    every=5,
    alone=4,
    history=6,
    temperature=0.02,
    updates=2,
)
NOTHING = (0, None, None, [], [])


class Weighed(Twin):
    """`shares`: of the text that is being read; a state of a layer is (spans, mean, variance,
    entropies, shares).
    """

    def probe(self, layer: Layer) -> torch.Tensor:
        rows = [q.flatten() for q in layer.span]
        count = len(rows)
        mean = sum(rows[1:], rows[0]) / count
        variance = sum([(row - mean) ** 2 for row in rows[1:]], (rows[0] - mean) ** 2) / count
        known = layer.known = [*(layer.known or NOTHING)]
        if not known[0]:
            known[1], known[2] = mean, variance * count / (count - 1)
        else:
            n = min(known[0], self.kv.updates)
            apart = (mean - known[1]) ** 2 / (1 + 1 / n)
            known[2] = (known[2] * (n - 1 / count) + variance + apart) / (n + 1 - 1 / count)
            known[1] = (known[1] * n + mean) / (n + 1)
        known[0] += 1
        floor = known[2].mean() / 100
        weights = [float(((row - known[1]) ** 2 / (known[2] + floor)).mean()) for row in rows]
        total = sum(weights)
        mixed = sum(w / total * row for w, row in zip(weights, rows, strict=True))
        return mixed.view(HEADS, -1)  # type: ignore[union-attr]

    def score(self, q: torch.Tensor, block: Block) -> float:
        key = torch.cat([block.key[head // TIMES] for head in range(HEADS)])
        return float(torch.cosine_similarity(q.flatten(), key, 0))

    def count(self, number: int, layer: Layer) -> int:
        shares = layer.known[4] if layer.known else []
        return int(shares[number]) if shares else int(self.kv.blocks)

    def chose(self, number: int, layer: Layer, q: torch.Tensor) -> None:
        if len(layer.blocks) < 2:
            return
        layer.known = [*(layer.known or NOTHING)]
        scores = [math.exp(self.score(q, b) / self.kv.temperature) for b in layer.blocks]
        chances = [score / sum(scores) for score in scores]
        entropy = -sum(p * math.log(p) for p in chances) / math.log(len(chances))
        layer.known[3] = [*layer.known[3], entropy][-self.kv.history :]

    def change(self, text: tuple[int, ...], layers: list[Layer]) -> None:
        super().change(text, layers)
        known = [layer.known[3] if layer.known else [] for layer in layers]
        if all(len(one) == self.kv.history for one in known):
            left, shares = self.kv.blocks * LAYERS, []
            means = [sum(one) / len(one) for one in known]
            for number, mean in enumerate(means):
                share = round(left * mean / sum(means[number:]))
                share = max(self.kv.least, min(share, left - self.kv.least * (1 - number)))
                shares.append(share)
                left -= share
            for layer in layers:
                layer.known = [*layer.known[:4], shares]


@pytest.mark.parametrize(("depth", "wrong", "chunk"), [(0, False, 50), (4, True, 1), (3, True, 7)])
def test_it_is_the_loop(depth: int, wrong: bool, chunk: int) -> None:
    policy = made(ActqkvPolicy, SMALL)
    twin = Weighed(SMALL, PROMPT)
    assert differs(policy, twin, WHOLE, depth, wrong, chunk) < 1e-9
    shares = [layers[0].known[4] for layers in twin.states.values() if layers[0].known]
    assert any(len({*one}) == 2 for one in shares if one)


@pytest.mark.parametrize(
    ("name", "slip"),
    [
        ("weigh_rows", lambda rows, *_: torch.full((len(rows),), 1 / len(rows)).to(rows)),
        ("entropy_share", lambda scores: scores.softmax(-1).amax(-1)),
        ("update_statistics", lambda known, rows, _: update_statistics(None, rows, 1)),
        ("share_blocks", lambda means, total, *_: [total // len(means)] * len(means)),
    ],
)
def test_the_loop_catches_slips(monkeypatch: pytest.MonkeyPatch, name: str, slip: Any) -> None:
    monkeypatch.setattr(actqkv, name, slip)
    assert differs(made(ActqkvPolicy, SMALL), Weighed(SMALL, PROMPT), WHOLE, 3, True) > 1e-6


def test_equal_queries_give_the_mean() -> None:
    policy = made(ActqkvPolicy, SMALL)
    q = torch.randn(HEADS, 1, 8, dtype=torch.float64)
    assert torch.allclose(policy.probe_query(0, q.expand(-1, 6, -1)), q)
    assert torch.allclose(policy.probe_query(0, q.expand(-1, 3, -1)), q)


def test_queries_that_stand_out_count_more() -> None:
    rows = torch.randn(9, 6, dtype=torch.float64)
    rows[4] *= 10
    _, mean, variance = update_statistics(None, rows, 1000)
    weights = weigh_rows(rows, mean, variance)
    assert float(weights.sum()) == pytest.approx(1) and int(weights.argmax()) == 4


def test_one_row_and_equal_rows_have_no_variance() -> None:
    row = torch.ones(1, 5)
    assert weigh_rows(row, *update_statistics(None, row, 10)[1:]).tolist() == [1.0]


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=40), st.integers(1, 8), st.integers(0, 40),
    st.integers(0, 50),
)  # fmt: skip
def test_shares_stay_within_the_total(means: list[float], least: int, more: int, most: int) -> None:
    total = (least + more) * len(means)
    most = max(most, least) if most else 0
    shares = share_blocks(means, total, least, most)
    assert sum(shares) <= total and min(shares) >= least
    assert not most or max(shares) <= most
    if not most and sum(means) > 0 and means[-1] > 0:
        assert sum(shares) == total


def test_even_layers_share_alike_and_flat_ones_get_more() -> None:
    assert share_blocks([0.5] * 4, 40, 2, 0) == [10] * 4
    low, high = share_blocks([0.2, 0.6], 40, 2, 0)
    assert (low, high) == (10, 30)


def test_evenness_is_a_share_of_the_largest_entropy() -> None:
    scores = torch.tensor([[0.0] * 7, [90.0] + [0.0] * 6], dtype=torch.float64)
    flat, sharp = entropy_share(scores).tolist()
    assert flat == pytest.approx(1) and sharp == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("least=47", "actqkv:least=47: must be at most blocks=46"),
        ("most=5", "actqkv:most=5: must be 0, or at least least=32"),
    ],
)
def test_what_cannot_be_is_refused(spec: str, message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        build_cache_policy(f"actqkv:{spec}")


def test_the_paper_s_settings_read_2_048_tokens() -> None:
    kv = Actqkv()
    assert kv.initial + kv.local + kv.block * kv.blocks == 2048
    assert replace(kv, least=8).least == 8
