"""The network of Falcon: its LSTM, who sees whom in a block, what is shown in training."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from foretell.drafters.heads.falcon import Falcon as Drafter
from foretell.drafters.heads.networks import falcon
from foretell.drafters.heads.networks.base import Head, Nodes, Texts
from foretell.drafters.heads.networks.eagle import TextAttention
from foretell.drafters.heads.networks.falcon import Memory
from foretell.drafters.heads.networks.folder import build_head
from foretell.drafters.heads.networks.model import HeadModel
from foretell.errors import BadConfig
from tests.drafters.heads.networks import paths
from tests.drafters.heads.networks.paths import LENGTH, SHAPE, Rows, texts
from tests.drafters.heads.networks.serving import check_answers, check_held_rows, check_values

NEAR = 1e-5  # norms and rotations compute in float32
DRAFTER = Drafter(passes=2, breadth=2, total=7)


def made(**options: Any) -> Any:
    return paths.made("falcon", **options)


def batch_of(head: Head) -> Texts:
    """Random texts; the same state stands in every room of the features."""
    batch = texts(head)
    batch.features = batch.features[..., :32].repeat(1, 1, len(head.taps))
    return batch


def stepwise(head: Any, batch: Texts, row: int, anchor: int, depths: int) -> list[torch.Tensor]:
    """What is drafted after token `anchor` of a text, block after block.

    The text comes in two pieces, the second of which goes on from what the first has left.
    """
    rows, half = Rows(), (anchor + 1) // 2
    none = torch.zeros_like(batch.features[0, 0])
    for piece in (range(half), range(half, anchor + 1)):
        if piece:
            here = slice(piece[0], piece[-1] + 1)
            places = torch.tensor(piece)
            zeros = torch.zeros(len(piece), dtype=torch.long)
            nodes = Nodes(
                batch.embedded[row, here],
                batch.features[row, here],
                zeros > 0,
                places,
                zeros,
                runs=[(slice(0, len(piece)), none)],
            )
            states, handed_on = head.step(nodes, rows)
            none = handed_on[-1]
    found = list(states[-1])
    while len(found) < depths:
        below = torch.arange(1, head.size + 1) + len(found) - head.size
        places = below + anchor
        back = torch.arange(1, head.size)
        nodes = Nodes(
            batch.embedded[row, places],
            none.expand(head.size, -1),
            below > 0,
            places,
            below,
            batch.embedded[row, (places[:, None] - back).clamp(min=0)],
        )
        states, handed_on = head.step(nodes, rows)
        none = handed_on[-1]
        found += list(states[-1])
    return found[:depths]


def difference(head: Any, depths: int = 4) -> float:
    return paths.largest_gap(head, batch_of(head), depths, stepwise)


@pytest.mark.parametrize("block", [1, 2, 3])
def test_training_computes_what_drafting_does(block: int) -> None:
    assert difference(made(block=block)) < NEAR


@pytest.mark.parametrize("slip", ["tokens", "state", "order", "blocks"])
def test_slips_are_caught(slip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head = made()
    if slip == "tokens":
        right = Texts.shift_left
        monkeypatch.setattr(Texts, "shift_left", lambda self, t, by: right(self, t, max(0, by - 1)))
    elif slip == "state":  # the LSTM begins anew where a forward does
        remember = head.remember_steps
        head.remember_steps = lambda left, *given: remember(
            left * (len(left) > 1 or given[0].shape[1] == 1), *given
        )
    elif slip == "order":
        step = head.step

        def turned(nodes: Nodes, attend: Any) -> Any:
            read, left = step(nodes, attend)
            return read.flip(1), left

        head.step = turned
    else:  # no row sees the one after it
        monkeypatch.setattr(TextAttention, "__call__", in_order)
    assert difference(head) > 100 * NEAR


def in_order(self: TextAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    self.ends = None if self.ends is None else self.ends - int(not self.keys)
    return RIGHT(self, q, k, v).nan_to_num()


RIGHT: Any = TextAttention.__call__


def test_the_memory_is_an_lstm() -> None:
    twin = nn.LSTM(6, 5, batch_first=True).double()
    ours = Memory(6, 5).double()
    ours.load_state_dict(
        {
            "taken.weight": twin.weight_ih_l0,
            "taken.bias": twin.bias_ih_l0,
            "kept.weight": twin.weight_hh_l0,
            "kept.bias": twin.bias_hh_l0,
        }
    )
    x, h, c = torch.randn(3, 7, 6).double(), torch.randn(3, 5).double(), torch.randn(3, 5).double()
    want, (last, cell) = twin(x, (h[None], c[None]))
    hidden, cells = ours(x, h, c)
    assert torch.allclose(hidden, want, atol=1e-12)
    assert torch.allclose(cells[:, -1], cell[0], atol=1e-12)
    assert torch.allclose(hidden[:, -1], last[0], atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("block", [1, 2, 3])
def test_a_row_sees_up_to_the_end_of_its_block(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a later block has changes no row; what its own block has changes all of its rows."""
    monkeypatch.setattr(falcon, "DROPOUT", 0.0)
    head = made(block=block).train()
    for place in range(LENGTH):
        batch, other = batch_of(head), batch_of(head)
        other.embedded[:, place] += 1.0
        pairs = [list(head.unroll_depths(each, block)) for each in (batch, other)]
        ends = pairs[0][0].anchors.nonzero().flatten().tolist()
        assert {b - a for a, b in pairwise(ends)} == {block}
        for before, after in zip(*pairs, strict=True):
            changed = (before.states - after.states).abs().amax((0, 2)) > 1e-9
            assert changed.nonzero().flatten().tolist() == [end for end in ends if end >= place]


@torch.no_grad()
def test_one_block_of_any_parity_is_that_of_training() -> None:
    """Blocks side by side give what is found at every place by itself."""
    head = made()
    batch = batch_of(head)
    everywhere = list(head.unroll_depths(batch, 2))
    ends = set()
    for move in (0, 1):
        batch.ids[0, 0] += move
        head.train()
        chosen = head.block_ends(batch)
        head.eval()
        head.ends = lambda texts, chosen=chosen: chosen
        for one, other in zip(head.unroll_depths(batch, 2), everywhere, strict=True):
            gap = (one.states - other.states)[:, chosen].abs().max()
            assert gap < 1e-9
        del head.ends
        ends |= set(chosen.tolist())
    assert ends == set(range(LENGTH))


# --- glancing


class Answers:
    """Of a head whose guesses are right or wrong by choice: `best` tells guesses from truths."""

    def __init__(self, right: bool):
        self.right, self.calls = right, 0

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.full((len(states),), 0 if self.right else self.calls)


@pytest.mark.parametrize("block", [2, 3])
def test_as_many_rows_are_shown_as_the_rule_says(block: int) -> None:
    head = made(block=block).train()
    draw = torch.Generator().manual_seed(1)
    numbers = [torch.randn(3, 60, 32, generator=draw).double() for _ in range(2)]
    ids = torch.randint(50, (3, 60), generator=draw)
    batch = Texts(ids, numbers[0], numbers[1].repeat(1, 1, len(head.taps)), numbers[1])
    answers = torch.zeros(3, 60, dtype=torch.bool)
    answers[:, 20:50] = True
    ends = head.block_ends(batch)
    starts = ends - (block - 1)
    for progress, share in ((0.0, 0.45), (0.5, 0.275), (1.0, 0.1)):
        wrong = sum(
            int(answers[:, [int(e) + d + 1 for e in ends if e + d < 59]].sum())
            for d in range(block)
        )
        count = int(share * wrong) // (block if block > 2 else 1)
        shown = head.glance(batch, answers, Answers(right=False), progress)
        first = [at for at in starts.tolist() if shown[:, at].any()]
        assert int(shown[:, [at for at in starts.tolist() if at >= 0]].sum()) == count
        assert all(answers[row, at + block] for row in range(3) for at in first if shown[row, at])
        # A row further on is shown only after one that is, and the last of a block never.
        assert not shown[:, ends].any() or block == 1
        for at in shown.any(0).nonzero().flatten().tolist():
            if at not in starts:
                assert (shown[:, at] <= shown[:, at - 1]).all()
        assert not head.glance(batch, answers, Answers(right=True), progress).any()
    assert made(block=1).train().glance(batch, answers, Answers(right=False), 0.0) is None


@torch.no_grad()
def test_a_shown_row_reads_what_it_should_find() -> None:
    """The true state that it should give and the token after that state, and nobody else's."""
    head = made()
    batch = batch_of(head)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    right = head.remember_steps

    def spy(left: torch.Tensor, embedded: torch.Tensor, states: torch.Tensor) -> Any:
        seen.append((embedded, states))
        return right(left, embedded, states)

    head.remember_steps = spy
    shown = torch.zeros(batch.ids.shape, dtype=torch.bool)
    shown[0, 3] = shown[1, 4] = True
    batch.shown = shown
    list(head.unroll_depths(batch, 4))
    embedded, states = seen[0]
    for row in range(2):
        for place in range(LENGTH):
            if shown[row, place]:
                assert torch.equal(embedded[row, place], batch.embedded[row, place + 2])
                assert torch.equal(states[row, place], batch.finals[row, place + 1])
            else:
                assert torch.equal(embedded[row, place], batch.embedded[row, place])
                assert torch.equal(states[row, place], batch.features[row, place, :32])
    # Drafted tokens are the text's own, shown or not.
    assert torch.equal(seen[1][0][:, 0].view(2, LENGTH, 32)[:, :-1], batch.embedded[:, 1:])


@torch.no_grad()
def test_a_block_that_is_not_shown_learns_nothing_of_the_tokens_behind_it() -> None:
    head = made()
    head.train()
    batch, other = batch_of(head), batch_of(head)
    ends = head.block_ends(batch).tolist()
    place = ends[1] - 1
    for texts_, more in ((batch, 0.0), (other, 1.0)):
        texts_.shown = torch.zeros(batch.ids.shape, dtype=torch.bool)
        texts_.shown[:, place] = True
        texts_.finals[:, place + 1] += more
    pairs = []
    for texts_ in (batch, other):
        torch.manual_seed(0)
        pairs.append(list(head.unroll_depths(texts_, 2)))
    for before, after in zip(*pairs, strict=True):
        changed = (before.states - after.states).abs().amax((0, 2)) > 1e-9
        assert changed.nonzero().flatten().tolist() == ends[1:]


# --- in the engine


def test_a_transformers_tokens_are_those_of_plain_decoding(tmp_path: Path) -> None:
    check_answers("falcon", DRAFTER, tmp_path)


@pytest.mark.parametrize("block", [2, 3])
def test_nodes_are_worth_what_training_says(block: int, tmp_path: Path) -> None:
    check_values("falcon", DRAFTER, tmp_path, block=block)


def from_nothing(self: HeadModel, nodes: Nodes, jobs: Any) -> Any:
    return [(run, torch.zeros_like(before)) for run, before in RUNS(self, nodes, jobs)]


RUNS = HeadModel._text_runs


def test_an_lstm_that_begins_anew_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HeadModel, "_text_runs", from_nothing)
    with pytest.raises(AssertionError):
        check_values("falcon", DRAFTER, tmp_path)
    with pytest.raises(AssertionError, match="stale"):
        check_held_rows("falcon", DRAFTER, 20)


def test_after_many_rounds_rows_and_memory_are_those_of_a_fresh_prefill() -> None:
    assert check_held_rows("falcon", Drafter(passes=1, breadth=8, total=8), 200) >= 200


@pytest.mark.parametrize("block", [0, 9, 1.5])
def test_a_block_out_of_range_is_refused(block: Any) -> None:
    with pytest.raises(BadConfig, match="falcon:block"):
        build_head("falcon", SHAPE, {"block": block})


def test_weights_are_as_many_as_the_paper_counts() -> None:
    d, inner, keys = SHAPE.hidden, SHAPE.intermediate, SHAPE.kv_heads * SHAPE.width
    layer = 2 * d * d + 2 * d * keys + 3 * d * inner + d
    count = sum(weight.numel() for weight in build_head("falcon", SHAPE).parameters())
    assert count == 20 * d * d + 16 * d + layer
