"""drafters/model/levels.py: how nodes are shared out; the trees are tested with their drafters."""

from __future__ import annotations

from foretell.drafters.model.levels import share_children


def test_children_are_shared_out_evenly() -> None:
    assert share_children(2, 3, 9) == [2, 2, 2]
    assert share_children(2, 3, 4) == [2, 1, 1]
    assert share_children(2, 3, 1) == [1]
    assert share_children(2, 3, 0) == []
    assert share_children(2, 0, 1) == []
