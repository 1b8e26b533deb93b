"""What is wanted of rows of logits."""

import torch

from foretell.ops.rows import firsts, zeros


def test_firsts_are_the_best_and_of_equals_the_lowest():
    rows = torch.randn(7, 33)
    rows[2] = 0
    rows[3, 5] = rows[3, 30] = 100
    assert firsts(rows) == [int(row.argmax()) for row in rows]
    assert firsts(rows)[2:4] == [0, 5]
    assert firsts(rows[:0]) == []
    assert firsts(rows.double()) == firsts(rows)


def test_zeros_are_what_torch_s_are():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        made = zeros((2, 3, 5, 7), dtype, torch.device("cpu"))
        assert torch.equal(made, torch.zeros(2, 3, 5, 7, dtype=dtype))
        assert made.dtype == dtype
        assert made.is_contiguous()
        made[0, 1, 2] = 1
        assert int(made.sum()) == 7
