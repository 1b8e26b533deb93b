"""Policies that select at read time: the first and the last rows, against plain loops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from foretell.kv.select.base import Ends
from foretell.ops.attention import Attention


def test_the_ends_of_a_text_are_read_and_all_nodes() -> None:
    keys = torch.randn(2, 43, 4)
    asked = Attention(0, torch.randn(6, 3, 4), keys, keys, None, 1.0)
    job: Any = SimpleNamespace(cache=SimpleNamespace(base=40, length=40))
    for sinks, window in ((2, 5), (0, 1), (39, 0)):
        policy = Ends(0, sinks, window)
        assert policy.watches_job(job)
        read = policy.select_rows(job, asked).mask_rows(43)
        want = [row < sinks or row >= 40 - window for row in range(43)]
        assert read.shape == (2, 3, 43)
        assert all(read[head, node].tolist() == want for head in range(2) for node in range(3))
    assert not Ends(0, 30, 10).watches_job(job)
