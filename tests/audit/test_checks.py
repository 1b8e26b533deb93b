"""The comparisons with plain decoding: what is a tie and what is a mistake."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from foretell.audit.checks import Generated, check_greedy
from foretell.audit.copies import Copy
from foretell.audit.report import HELD, Check
from foretell.core.stats import Stats
from foretell.strategies.plain import Plain


class OneRow:
    """Stands for a model whose fresh row is known."""

    def __init__(self, row: list[float], narrow: bool = False):
        self.row = row
        self.narrow = narrow

    def score(self, tokens: Any) -> torch.Tensor:
        return torch.tensor([self.row])


def difference(
    row: list[float], dtype: torch.dtype, output: list[int], plain: list[int], narrow: bool = False
) -> Check:
    live = SimpleNamespace(ctx=SimpleNamespace(output=output, stats=Stats()))
    models: Any = {"target": OneRow(row, narrow)}
    lives: Any = [live]
    engine: Any = None
    generated = Generated(Copy(dtype, models, "nothing"), engine, lives)
    return check_greedy(generated, Plain(), [[1, 2]], [plain], claimed=True)


def held(*arguments: Any, **options: Any) -> bool:
    return difference(*arguments, **options).verdict == HELD


def test_a_divergence_is_a_tie_only_within_rounding() -> None:
    near, far = [16.0, 15.9, 3.0], [16.0, 15.0, 3.0]
    check = difference(near, torch.bfloat16, [5, 1], [5, 0])
    assert (
        check.verdict == HELD
        and "1 divergence at a tie; first: prompt 0, token 1, top-2 margin 0.1" in check.detail
    )
    assert check.numbers["differences"][0]["allowed"] == 2 * 2**-7 * 16
    assert not held(near, torch.float32, [5, 1], [5, 0])
    assert held([16.0, 15.9999, 3.0], torch.float32, [5, 1], [5, 0])
    assert not held(far, torch.bfloat16, [5, 1], [5, 0])
    assert held([16.0, 15.9, 15.95], torch.bfloat16, [5, 1], [5, 2]), "both are near the best"
    assert not held([30.0, 3.0, 3.0], torch.bfloat16, [5, 1], [5, 2]), "neither is the best"
    assert not held(near, torch.bfloat16, [5], [5, 0]), "ending early is no tie"
    assert difference(near, torch.bfloat16, [5, 0], [5, 0]).numbers["identical"] == 1
    assert held(near, torch.float32, [5, 1], [5, 0], narrow=True), "activations have 8 bits"
    assert not held(far, torch.float32, [5, 1], [5, 0], narrow=True)
