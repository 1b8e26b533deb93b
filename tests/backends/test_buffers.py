"""Memory of outputs is given out again only when nobody can see it any more."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foretell.backends import buffers
from foretell.backends.buffers import OutputBuffers


def test_a_block_is_reused_when_no_tensor_of_it_lives() -> None:
    wrapped: list[np.ndarray] = []
    made = OutputBuffers(lambda memory: wrapped.append(memory) or len(wrapped))
    view, number = made.take_block(2, 3)
    part = torch.from_numpy(view)[1:]
    del view
    other, second = made.take_block(2, 3)
    assert (number, second) == (1, 2), "a part of it lives"
    part[:] = 7
    other[:] = 1
    assert part.tolist() == [[7, 7, 7]]
    del part
    assert made.take_block(2, 3)[1] == 1
    assert made.take_block(2, 4)[1] == 3, "another width"
    assert made.take_block(1, 3)[1] == 4, "another number of rows"


def test_few_blocks_are_kept_and_no_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    made = OutputBuffers(lambda memory: None)
    held = [made.take_block(1, 4)[0] for _ in range(buffers.KEPT_BLOCKS + 5)]
    assert len(made.blocks) == buffers.KEPT_BLOCKS and len(held) > buffers.KEPT_BLOCKS
    monkeypatch.setattr(buffers, "KEPT_BYTES", 15)
    before = len(made.blocks)
    made.take_block(1, 5)
    assert len(made.blocks) == before
