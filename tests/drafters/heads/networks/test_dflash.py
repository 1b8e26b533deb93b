"""The network of DFlash: blocks see the text before them and themselves, and nothing else."""

from __future__ import annotations

import pytest
import torch

from foretell.drafters.heads.networks.base import Head, Nodes, Texts
from foretell.drafters.heads.networks.dflash import ANCHORS, BlockAttention, Dflash
from foretell.drafters.heads.networks.folder import build_head
from tests.drafters.heads.networks.paths import LENGTH, SHAPE, Rows, made, texts

NEAR = 1e-5  # norms and rotations compute in float32


def stepwise(head: Head, batch: Texts, row: int, anchor: int) -> torch.Tensor:
    """(7, E): what is drafted after token `anchor` of a text by one pass."""
    masks = head.block - 1
    count = anchor + head.block
    assert head.blank is not None
    block = torch.cat([batch.embedded[row, anchor, None], head.blank.expand(masks, -1)])
    none = batch.features.new_zeros(head.block, batch.features.shape[-1])
    nodes = Nodes(
        torch.cat([torch.ones_like(batch.embedded[row, :anchor]), block]),
        torch.cat([batch.features[row, :anchor], none]),
        torch.arange(count) >= anchor,
        torch.arange(count),
    )
    seen = [range(i + 1) if i < anchor else range(count) for i in range(count)]
    states, _ = head.step(nodes, Rows(head.layers, seen))
    return states[anchor + 1 :]


def difference(head: Head) -> float:
    """The largest one between training and drafting, over all anchors and depths."""
    batch = texts(head)
    trained = torch.stack([drafted.states for drafted in head.unroll_depths(batch, 64)], 2)
    assert trained.shape[2] == head.block - 1
    gaps = [
        float((trained[row, anchor] - stepwise(head, batch, row, anchor)).abs().max())
        for row in range(len(batch.ids))
        for anchor in range(LENGTH)
    ]
    return max(gaps)


@torch.no_grad()
def test_training_computes_what_drafting_does() -> None:
    assert difference(made("dflash")) < NEAR


@torch.no_grad()
@pytest.mark.parametrize("slip", ["the anchor's own state", "other blocks", "masks in order"])
def test_slips_in_who_sees_whom_are_caught(slip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = BlockAttention.__init__

    def wrong(self: BlockAttention, anchors: torch.Tensor, size: int, text: int) -> None:
        right(self, anchors + (slip == "the anchor's own state"), size, text)
        if slip == "other blocks":
            self.seen[:, text:] = True
        elif slip == "masks in order":
            self.seen[:, text:] &= torch.ones_like(self.seen[:, text:]).tril()

    monkeypatch.setattr(BlockAttention, "__init__", wrong)
    assert difference(made("dflash")) > 1000 * NEAR


@torch.no_grad()
def test_a_block_depends_on_its_anchor_and_the_states_before_it() -> None:
    head, place = made("dflash"), 4
    batch = texts(head)
    before = torch.stack([drafted.states for drafted in head.unroll_depths(batch, 7)])
    for part in ("embedded", "features"):
        other = texts(head)
        getattr(other, part)[:, place] += 1.0
        after = torch.stack([drafted.states for drafted in head.unroll_depths(other, 7)])
        changed = (after - before).abs().amax((0, 1, 3)) > 1e-9
        want = range(LENGTH) if part == "features" else [place]
        assert changed.nonzero().flatten().tolist() == [
            i for i in want if part == "embedded" or i > place
        ]


@torch.no_grad()
def test_in_training_some_places_are_anchors_and_give_what_all_do() -> None:
    head = made("dflash")
    batch, more = texts(head), 2 * ANCHORS // LENGTH
    parts = (batch.ids, batch.embedded, batch.features, batch.finals)
    longer = Texts(*(part.repeat(1, more, *[1] * (part.ndim - 2)) for part in parts))
    whole = list(head.unroll_depths(longer, 7))
    some = list(head.train().unroll_depths(longer, 7))
    for one, other in zip(whole, some, strict=True):
        assert one.anchors is not None and bool(one.anchors.all())
        assert other.anchors is not None and int(other.anchors.sum()) == ANCHORS
        torch.testing.assert_close(
            one.states[:, other.anchors], other.states[:, other.anchors], rtol=0, atol=1e-9
        )
        assert not other.states[:, ~other.anchors].any()


def test_it_has_as_many_weights_as_the_formula_says() -> None:
    width, inner, keys = SHAPE.hidden, SHAPE.intermediate, SHAPE.kv_heads * SHAPE.width
    layer = 2 * width * width + 2 * width * keys + 3 * width * inner + 2 * width
    count = sum(weight.numel() for weight in build_head("dflash", SHAPE).parameters())
    assert count == 3 * width * width + 2 * layer + 3 * width
    assert Dflash.decay == pytest.approx(0.7788, abs=1e-4)  # exp(-1 / 4)
