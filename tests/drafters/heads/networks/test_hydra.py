"""The network of Hydra: heads over the state and the tokens drafted so far."""

from __future__ import annotations

import pytest
import torch

from foretell.drafters.heads.networks.base import Texts
from foretell.drafters.heads.networks.folder import build_head
from foretell.drafters.heads.networks.hydra import Hydra
from foretell.errors import BadConfig
from tests.drafters.heads.networks.recurrences import NEAR, SHAPE, difference, leak, made, texts

PLUS = {"prefix": True, "blocks": 3}


@pytest.mark.parametrize("options", [{}, PLUS])
def test_training_computes_what_drafting_does(options: dict[str, object]) -> None:
    assert difference(made("hydra", **options), 4) < NEAR
    assert leak(made("hydra", **options)) < 1e-12


def test_slips_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token too early in training, and a head too low in drafting."""
    head = made("hydra", **PLUS)
    right = Texts.shift_left
    with monkeypatch.context() as patch:
        patch.setattr(Texts, "shift_left", lambda self, t, by: right(self, t, max(0, by - 1)))
        assert difference(head) > 1000 * NEAR
    draft = Hydra.draft_rows

    def lower(
        self: Hydra, vectors: torch.Tensor, embedded: torch.Tensor, depth: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lowered = depth - (vectors.ndim == 2 and depth > 1)
        return draft(self, vectors, embedded, lowered)

    monkeypatch.setattr(Hydra, "draft_rows", lower)
    assert difference(head) > 1000 * NEAR


@torch.no_grad()
def test_every_token_on_the_way_is_read() -> None:
    head = made("hydra")
    batch = texts(head)
    before = [drafted.states for drafted in head.unroll_depths(batch, 4)]
    batch.embedded[:, 2] += 1
    after = [drafted.states for drafted in head.unroll_depths(batch, 4)]
    for depth, (a, b) in enumerate(zip(before, after, strict=True)):
        changed = (a - b).abs().amax((0, 2)) > 1e-3
        # Anchors whose path has token 2 in it: those that stand `depth` before it at most.
        assert changed.tolist() == [2 - depth <= anchor <= 2 for anchor in range(8)]


@torch.no_grad()
def test_it_begins_with_the_state() -> None:
    """An untrained head without tokens says what the target's state says, and so does Hydra++."""
    for options in ({}, PLUS):
        torch.manual_seed(0)
        head = build_head("hydra", SHAPE, options).double()
        batch = texts(head)
        batch.embedded.zero_()
        for drafted in head.unroll_depths(batch, 4):
            assert (drafted.states - batch.features[..., :32]).abs().max() < 1e-12


@torch.no_grad()
def test_only_hydra_plus_plus_reads_the_text_before_the_state() -> None:
    for options, reads in (({}, False), (PLUS, True)):
        head = made("hydra", **options)
        batch = texts(head)
        (before, *_) = head.unroll_depths(batch, 1)
        batch.features[:, 1] += 1
        (after, *_) = head.unroll_depths(batch, 1)
        assert bool(((before.states - after.states)[:, 4].abs() > 1e-6).any()) == reads


@pytest.mark.parametrize("option", ["heads", "blocks"])
def test_counts_out_of_range_are_refused(option: str) -> None:
    with pytest.raises(BadConfig, match=f"hydra:{option}=0"):
        build_head("hydra", SHAPE, {option: 0})


def test_weights_are_as_many_as_the_paper_counts() -> None:
    d = SHAPE.hidden
    head = build_head("hydra", SHAPE, {"blocks": 2})
    want = sum(2 * ((i + 2) * d * d + d) + d * d + d for i in range(4))
    assert sum(weight.numel() for weight in head.parameters()) == want
