"""What makes logits of a head's states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from foretell.drafters.heads.formats.reading import load_any_head
from foretell.drafters.heads.networks.base import Head
from foretell.drafters.heads.networks.folder import build_head, save_head, target_shape
from foretell.drafters.heads.networks.model import HeadModel
from foretell.drafters.heads.networks.output import Output
from tests.drafters.heads.formats.test_formats import packed_target
from tests.drafters.heads.networks.published import check_greedy, logits_of, states_of, target


@torch.inference_mode()
def test_each_state_is_read_by_the_matrix_of_its_depth() -> None:
    torch.manual_seed(0)
    matrices = nn.ModuleList(nn.Linear(32, 97) for _ in range(3))
    output = Output(target(), None, matrices)
    states = torch.randn(2, 5, 32)
    depths = torch.tensor([[0, 2, 1, 0, 4], [1, 1, 3, 2, 0]])
    rows = output.logits(states, depths)
    for i in range(2):
        for j in range(5):
            wanted = matrices[min(int(depths[i, j]), 2)](states[i, j])
            torch.testing.assert_close(rows[i, j], wanted)
    torch.testing.assert_close(output.logits(states), matrices[0](states))
    assert output.size == 97 and list(output.tokens) == list(range(97))


OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", {"own_matrix": 400, "blocks": 3, "layers": 2}),
    "hydra++": (
        "hydra",
        {"own_matrix": 400, "blocks": 2, "prefix": True, "prefix_norm": True, "sees_first": False},
    ),
    "untied": ("mlp-speculator", {"own_matrix": 400, "tied": False, "inner": 96}),
    "tied": ("mlp-speculator", {"own_matrix": 400}),
}


def made(kind: str, options: dict[str, Any]) -> Head:
    torch.manual_seed(0)
    head = build_head(kind, target_shape(packed_target()), options)
    with torch.no_grad():
        for weight in head.parameters():
            if weight.ndim > 1:
                weight.copy_(torch.randn_like(weight) * weight.shape[-1] ** -0.5)
    return head


@pytest.mark.parametrize("own", OWN)
@torch.inference_mode()
def test_matrices_are_packed_beside_a_packed_target(
    own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, options = OWN[own]
    model = packed_target()
    save_head(made(kind, options), None, tmp_path, model, {})
    below = [] if kind == "medusa" else [7, 50]
    rows, sizes = [], []
    for packs in (True, False):
        if not packs:
            monkeypatch.setattr(
                "foretell.drafters.heads.networks.model.pack_layers", lambda head, format: 0
            )
        head, kept = load_any_head(tmp_path, model, kind)
        told = HeadModel(head, kept, model)
        rows.append(torch.cat(logits_of(told, states_of(model, head.taps), below)))
        sizes.append(told.weight_bytes)
    # Weights and activations are rounded to 8 bits.
    assert float(torch.cosine_similarity(*rows, dim=0)) > 0.99
    assert sizes[0] < 0.8 * sizes[1]
    monkeypatch.undo()
    check_greedy(model, kind, tmp_path)
