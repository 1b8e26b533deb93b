"""The network of multi-token prediction: one layer, used again on what it handed on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.core.model import Model
from foretell.drafters.heads.mtp import Mtp
from foretell.drafters.heads.networks.base import Head, Nodes, Texts
from foretell.drafters.heads.networks.eagle import OneLayer
from foretell.drafters.heads.networks.folder import build_head, save_head, target_shape
from foretell.drafters.heads.networks.model import NativeLayer
from foretell.native import library
from tests.backends.test_native import tied
from tests.drafters.heads.networks.driving import trees
from tests.drafters.heads.networks.paths import SHAPE, Rows, largest_gap, made, texts

NEAR = 1e-5  # norms and rotations compute in float32


def stepwise(head: Head, batch: Texts, row: int, anchor: int, depths: int) -> list[torch.Tensor]:
    """What is drafted after token `anchor` of a text, one node after the other."""
    rows = Rows()
    nodes = Nodes(
        batch.embedded[row, : anchor + 1],
        batch.features[row, : anchor + 1],
        torch.zeros(anchor + 1, dtype=torch.bool),
        torch.arange(anchor + 1),
    )
    states, handed_on = head.step(nodes, rows)
    found = [states[-1]]
    for depth in range(1, depths):
        nodes = Nodes(
            batch.embedded[row, anchor + depth, None],
            handed_on[-1:],
            torch.ones(1, dtype=torch.bool),
            torch.tensor([anchor + depth]),
        )
        states, handed_on = head.step(nodes, rows)
        found.append(states[-1])
    return found


def difference(head: Head, depths: int = 4) -> float:
    """The largest one between training and drafting, over all anchors and depths."""
    return largest_gap(head, texts(head), depths, stepwise)


@torch.no_grad()
def test_training_computes_what_drafting_does() -> None:
    assert difference(made("mtp")) < NEAR


@torch.no_grad()
def test_a_state_that_is_handed_on_without_its_norm_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = OneLayer.leave_layer
    head = made("mtp")

    def other(self: OneLayer, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        read, state = right(self, out)
        return read, out if out.ndim == 3 else state

    monkeypatch.setattr(OneLayer, "leave_layer", other)
    # The next step's own norm takes out the length, and not the weight.
    assert difference(head) > 1000 * NEAR


def test_it_has_as_many_weights_as_the_formula_says() -> None:
    width, inner, keys = SHAPE.hidden, SHAPE.intermediate, SHAPE.kv_heads * SHAPE.width
    layer = 2 * width * width + 2 * width * keys + 3 * width * inner + 2 * width
    count = sum(weight.numel() for weight in build_head("mtp", SHAPE).parameters())
    assert count == 2 * width * width + layer + 3 * width


class ByLevels(Mtp):
    """It asks its head for every level."""

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        brought: Any = super().bring(models)
        assert "grows" in brought["head"].caps
        brought["head"].caps -= {"grows"}
        return brought  # type: ignore[no-any-return]


def saved(folder: Path, target: Any) -> str:
    """A head with norms that change what they read."""
    torch.manual_seed(1)
    head = build_head("mtp", target_shape(target))
    with torch.no_grad():
        for weight in head.parameters():
            if weight.ndim == 1:
                weight.add_(0.2 * torch.randn_like(weight))
    save_head(head, torch.arange(0, target.vocab, 5)[:64], folder, target, {})
    return str(folder)


def gap(folder: str, settings: tuple[int, int, int]) -> float:
    """The largest of probabilities in the first trees, of one call and of a call a level."""
    target: Any = tied("llama", "int8")
    text = [5, 40, 10, 300, 7]
    whole, calls = trees(Mtp(folder, *settings), target, text, tokens=8)
    levels, asked = trees(ByLevels(folder, *settings), target, text, tokens=8)
    assert asked["head"] >= calls["head"] > 2 and len(whole[0]) == settings[2] + 1
    one, other = whole[0], levels[0]
    if (one.tokens, one.parents) != (other.tokens, other.parents):
        return 1.0
    return max(abs(a - b) / b for a, b in zip(one.values, other.values, strict=True))


@pytest.mark.skipif(not library.is_available(), reason="the C library is not built")
@torch.inference_mode()
def test_one_call_grows_what_a_call_a_level_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the rounding of states to bfloat16 from one call to the next."""
    folder = saved(tmp_path, tied("llama", "int8"))
    assert gap(folder, (3, 1, 3)) < 0.05 and gap(folder, (3, 4, 12)) < 0.05
    grow = NativeLayer._grow_trees

    def without_norm(self: NativeLayer, step: Any, levels: int) -> Any:
        self.head.hands_on_normed = False
        return grow(self, step, levels)

    monkeypatch.setattr(NativeLayer, "_grow_trees", without_norm)
    assert gap(folder, (3, 1, 3)) > 0.05
