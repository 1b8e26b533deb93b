"""Recurrent heads on a transformer: caches, texts in pieces, trees of several requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.core.drafter import Drafter
from foretell.drafters.heads.clover import Clover
from foretell.drafters.heads.hydra import Hydra
from foretell.drafters.heads.mlp_speculator import MlpSpeculator
from foretell.drafters.heads.networks.base import Nodes
from foretell.drafters.heads.networks.folder import head_kinds
from foretell.drafters.heads.networks.layers import Attend
from foretell.drafters.heads.networks.recurrent import Recurrent
from tests.drafters.heads.networks.serving import check_answers, check_values

DRAFTERS: list[tuple[str, Drafter, dict[str, Any]]] = [
    ("hydra", Hydra(depth=3, breadth=3, total=7), {}),
    ("hydra", Hydra(depth=3, breadth=3, total=7), {"prefix": True}),
    ("mlp-speculator", MlpSpeculator(children=(2, 2, 1), suffixes=3), {}),
    ("clover", Clover(depth=3, breadth=3, total=7, share=0.05), {}),
]


def test_all_kinds_are_here() -> None:
    recurrent = {kind for kind, made in head_kinds().items() if issubclass(made, Recurrent)}
    assert recurrent == {kind for kind, _, _ in DRAFTERS}


@pytest.mark.parametrize(("kind", "drafter", "options"), DRAFTERS)
def test_a_transformers_tokens_are_those_of_plain_decoding(
    kind: str, drafter: Drafter, options: dict[str, Any], tmp_path: Path
) -> None:
    check_answers(kind, drafter, tmp_path, **options)


@pytest.mark.parametrize(("kind", "drafter", "options"), DRAFTERS)
def test_nodes_are_worth_what_training_says(
    kind: str, drafter: Drafter, options: dict[str, Any], tmp_path: Path
) -> None:
    check_values(kind, drafter, tmp_path, **options)


def test_a_vector_that_is_not_handed_on_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In drafting alone, so that the values of nodes below the first level are others."""
    right = Recurrent.step

    def step(self: Recurrent, nodes: Nodes, attend: Attend) -> tuple[torch.Tensor, torch.Tensor]:
        read, left = right(self, nodes, attend)
        left[:, : self.hidden] = 0
        return read, left

    monkeypatch.setattr(Recurrent, "step", step)
    kind, drafter, options = DRAFTERS[0]
    with pytest.raises(AssertionError):
        check_values(kind, drafter, tmp_path, **options)
