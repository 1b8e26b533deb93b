"""What policies that hold blocks share: representatives, heads that share keys, and when rows
leave. The methods' own tests hold the whole to loops.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretell.kv.select.blocks import mean_by_key_head, mean_top_keys, sum_by_key_head
from foretell.kv.select.infllm import InfllmPolicy
from tests.kv.blocks import SMALL, made


def test_representatives_are_the_mean_of_the_keys_that_got_the_most() -> None:
    keys = torch.randn(2, 3, 5, 4, dtype=torch.bfloat16)
    masses = torch.rand(2, 3, 5)
    got = mean_top_keys(keys, masses, 2)
    assert got.shape == (3, 2, 4) and got.dtype == torch.float32
    for head in range(2):
        for block in range(3):
            mass = masses[head, block].tolist()
            first, second = sorted(range(5), key=lambda place: -mass[place])[:2]
            rows = keys[head, block].float()
            want = (rows[first] + rows[second]) / 2
            assert torch.allclose(got[block, head], want)


def test_heads_that_share_keys_stand_side_by_side() -> None:
    x = torch.randn(6, 5, 3)
    assert torch.allclose(sum_by_key_head(x, 2)[:, 1], x[3:].sum(0))
    total = torch.rand(6, 5, 1) + 0.5
    want = (x / total)[4:].mean(0)
    assert torch.allclose(mean_by_key_head(x, total, 3, False)[2], want, atol=1e-6)
    assert torch.allclose(mean_by_key_head(x, total, 3, True)[2, 0], want.sum(0), atol=1e-5)
    # Sums that were taken in another order of dimensions, as those of few nodes are.
    turned = total.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.allclose(mean_by_key_head(x, turned, 3, True)[2, 0], want.sum(0), atol=1e-5)


@given(st.integers(0, 200), st.integers(1, 30), st.integers(1, 9), st.integers(1, 5))
def test_events_are_where_committed_tokens_say(
    prompt: int, every: int, block: int, alone: int
) -> None:
    """However a text is cut, the same lengths are met."""
    kv = replace(SMALL, every=every, block=block, representatives=1, alone=alone)
    policy = made(InfllmPolicy, kv)
    policy.begin_text(prompt)
    met = {length + policy.room_left(length) for length in range(300)}
    switch = max(0, prompt - alone)
    for length in range(1, 290):
        beyond = length - kv.initial - kv.local
        in_prompt = length <= switch and (length % every == 0 or length == switch)
        behind = length > switch and beyond > 0 and beyond % block == 0
        assert (length in met) == (in_prompt or behind)
    assert policy.room_of(10, prompt + 7) == made_of(kv, prompt + 7).room_left(10)


def made_of(kv: object, prompt: int) -> InfllmPolicy:
    policy: InfllmPolicy = made(InfllmPolicy, kv)
    policy.begin_text(prompt)
    return policy


@pytest.mark.parametrize(("context", "endless"), [(22, True), (21, False)])
def test_it_is_endless_where_its_rows_fit(context: int, endless: bool) -> None:
    assert made(InfllmPolicy, SMALL, context).endless == endless
