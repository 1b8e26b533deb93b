"""What backends return."""

from __future__ import annotations

import torch

from foretell.core.model import Computed
from foretell.models.backend import join_results


def test_results_of_several_forwards_are_one() -> None:
    first = Computed(torch.ones(2, 3), {1: torch.ones(4, 5), 0: torch.ones(4, 5)})
    second = Computed(torch.zeros(1, 3), {1: torch.zeros(2, 5), 2: torch.zeros(2, 5)})
    assert join_results([first]) is first
    joined = join_results([first, second])
    assert joined.logits.tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3]
    assert joined.hidden.keys() == {1}
    assert joined.hidden[1][:, 0].tolist() == [1, 1, 1, 1, 0, 0]
