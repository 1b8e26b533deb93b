"""The network of Clover: a gated recurrence after two layers over the text."""

from __future__ import annotations

import pytest
import torch

from foretell.drafters.heads.networks import clover, recurrent
from foretell.drafters.heads.networks.base import Texts
from foretell.drafters.heads.networks.clover import Clover, Gate
from tests.drafters.heads.networks.recurrences import NEAR, SHAPE, difference, leak, made, texts


def test_training_computes_what_drafting_does() -> None:
    assert difference(made("clover"), 4) < NEAR
    assert leak(made("clover")) < 1e-12


def test_slips_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token too early, layers that see the text to come, and a vector handed on ungated."""
    head = made("clover")
    right = Texts.shift_left
    with monkeypatch.context() as patch:
        patch.setattr(Texts, "shift_left", lambda self, t, by: right(self, t, max(0, by - 1)))
        assert difference(head) > 1000 * NEAR

    def open_to_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(q, k, v, enable_gqa=True).transpose(1, 2)

    with monkeypatch.context() as patch:
        patch.setattr(recurrent, "attend_causally", open_to_all)
        assert difference(head) > 100 * NEAR and leak(head) > 1e-3
    draft = Clover.draft_rows

    def ungated(
        self: Clover, vectors: torch.Tensor, embedded: torch.Tensor, depth: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        read, below = draft(self, vectors, embedded, depth)
        return read, vectors[..., : self.hidden] if vectors.ndim == 2 else below

    monkeypatch.setattr(Clover, "draft_rows", ungated)
    assert difference(head) > 1000 * NEAR


@torch.no_grad()
def test_without_values_and_noise_every_depth_says_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clover, "NEAR", 0.0)
    head = Clover(made("clover").config).double()
    states = [drafted.states for drafted in head.unroll_depths(texts(head), 4)]
    assert all((other - states[0]).abs().max() < 1e-12 for other in states)
    # A gate with values makes depths differ.
    torch.nn.init.normal_(head.gate.v_proj.weight)
    states = [drafted.states for drafted in head.unroll_depths(texts(head), 2)]
    assert (states[0] - states[1]).abs().max() > 0.1


@torch.no_grad()
def test_a_gate_is_one_cosine_a_head() -> None:
    """Against a loop over heads; and a token's length changes no cosine."""
    torch.manual_seed(1)
    gate = Gate(SHAPE.layer_shape()).double()
    torch.nn.init.normal_(gate.v_proj.weight)
    x, token = torch.randn(2, 32).double(), torch.randn(2, 32).double()
    out = gate(x, token)
    q, k, v = gate.q_proj(gate.norm(x)), gate.k_proj(token), gate.v_proj(token)
    for row in range(2):
        for head in range(4):
            part = slice(8 * head, 8 * head + 8)
            a, b = q[row, part], k[row, part]
            want = x[row, part] + (a @ b) / (a.norm() * b.norm()) * v[row, part]
            assert (out[row, part] - want).abs().max() < NEAR
    assert ((gate(x, 3 * token) - x) / (out - x)).flatten().tolist() == pytest.approx(
        [3.0] * 64, rel=1e-3
    )
