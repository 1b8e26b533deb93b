"""The network of the MLP speculator: a state that takes in one token after the other."""

from __future__ import annotations

import pytest
import torch

from foretell.drafters.heads.networks.base import Texts
from foretell.drafters.heads.networks.folder import build_head
from foretell.drafters.heads.networks.mlp_speculator import MlpSpeculator, unit_length
from tests.drafters.heads.networks.recurrences import NEAR, SHAPE, difference, leak, made, texts


def test_training_computes_what_drafting_does() -> None:
    assert difference(made("mlp-speculator"), 5) < NEAR
    assert leak(made("mlp-speculator")) < 1e-12


def test_slips_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token too early in training, and the text's projection used again in drafting."""
    head = made("mlp-speculator")
    right = Texts.shift_left
    with monkeypatch.context() as patch:
        patch.setattr(Texts, "shift_left", lambda self, t, by: right(self, t, max(0, by - 1)))
        assert difference(head) > 1000 * NEAR
    draft = MlpSpeculator.draft_rows

    def first_again(
        self: MlpSpeculator, vectors: torch.Tensor, embedded: torch.Tensor, depth: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return draft(self, vectors, embedded, 0 if vectors.ndim == 2 else depth)

    monkeypatch.setattr(MlpSpeculator, "draft_rows", first_again)
    assert difference(head) > 1000 * NEAR


@torch.no_grad()
def test_without_weights_for_tokens_none_is_read() -> None:
    head = made("mlp-speculator")
    assert isinstance(head, MlpSpeculator)
    head.read.weight.zero_()
    batch = texts(head)
    before = [drafted.states for drafted in head.unroll_depths(batch, 3)]
    batch.embedded.normal_()
    after = [drafted.states for drafted in head.unroll_depths(batch, 3)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@torch.no_grad()
def test_after_its_steps_the_text_has_half_of_the_variance() -> None:
    """By what the scale is made for: each step multiplies the state's part by 0.5 ** (0.5 / 3)."""
    torch.manual_seed(0)
    head = build_head("mlp-speculator", SHAPE)
    assert isinstance(head, MlpSpeculator)
    # The text's part of a state has the variance 1/2 at first; a step scales both parts alike.
    text, tokens = 0.5, 0.0
    for _ in range(3):
        tokens += head.scale**2
        text, tokens = (0.5 * part / (text + tokens) for part in (text, tokens))
    assert text / (text + tokens) == pytest.approx(0.5)
    x = torch.randn(4, 32)
    assert unit_length(x).square().mean(-1).tolist() == pytest.approx([1.0] * 4, rel=1e-4)
