"""The network of Chimera: words of three tokens, one layer over all states, what stands below."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.cache.job import Job
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.drafters.heads.chimera import Chimera as Drafter
from foretell.drafters.heads.networks.base import Head, Nodes, Texts
from foretell.drafters.heads.networks.caches import KnownTokens
from foretell.drafters.heads.networks.chimera import Chimera
from foretell.drafters.heads.networks.eagle import TextAttention
from foretell.drafters.heads.networks.folder import build_head
from foretell.errors import BadConfig
from tests.drafters.heads.networks.paths import LENGTH, SHAPE, Rows, largest_gap, made, texts
from tests.drafters.heads.networks.serving import check_answers, check_held_rows, check_values

NEAR = 1e-5  # norms and rotations compute in float32
DRAFTER = Drafter(depth=3, breadth=3, total=7)


class Beside(Rows):
    """Rows by plain lists, with a key of each node's own that no other node sees."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, own: Any) -> torch.Tensor:
        outs = []
        for row in range(q.shape[1]):
            self.keys[0].append(k[:, row])
            self.values[0].append(v[:, row])
            keys = torch.stack([*self.keys[0], own[0][:, row]], 1)
            values = torch.stack([*self.values[0], own[1][:, row]], 1)
            heads = []
            for h in range(len(q)):
                shared = h * len(k) // len(q)
                scores = keys[shared] @ q[h, row] * q.shape[-1] ** -0.5
                heads.append(scores.softmax(0) @ values[shared])
            outs.append(torch.stack(heads))
        return torch.stack(outs)


def earlier(batch: Texts, row: int, place: int) -> torch.Tensor:
    """(2, E) of the tokens before, the nearest first."""
    return torch.stack([batch.embedded[row, max(0, place - back)] for back in (1, 2)])


def stepwise(head: Head, batch: Texts, row: int, anchor: int, depths: int) -> list[torch.Tensor]:
    """What is drafted after token `anchor` of a text, one node after the other."""
    rows, found = Beside(), []
    handed_on = batch.features[row, : anchor + 1]
    for depth in range(depths):
        places = range(anchor + 1) if not depth else range(anchor + depth, anchor + depth + 1)
        nodes = Nodes(
            batch.embedded[row, places[0] : places[-1] + 1],
            handed_on,
            torch.full((len(places),), depth > 0),
            torch.tensor(places),
            torch.full((len(places),), depth),
            torch.stack([earlier(batch, row, place) for place in places]),
        )
        states, handed_on = head.step(nodes, rows)
        found.append(states[-1])
        handed_on = handed_on[-1:]
    return found


def batch_of(head: Head) -> Texts:
    """Random texts; the same state stands in both rooms of the features."""
    batch = texts(head)
    batch.features = batch.features[..., :32].repeat(1, 1, 2)
    return batch


def difference(head: Head, depths: int = 4) -> float:
    return largest_gap(head, batch_of(head), depths, stepwise)


def test_training_computes_what_drafting_does() -> None:
    assert difference(made("chimera")) < NEAR


def blind(self: TextAttention, q: Any, k: Any, v: Any, own: Any = None) -> torch.Tensor:
    return RIGHT(self, q, k, v)


RIGHT: Callable[..., torch.Tensor] = TextAttention.__call__


@pytest.mark.parametrize("slip", ["tokens", "own key", "handed on"])
def test_slips_are_caught(slip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head: Any = made("chimera")
    if slip == "tokens":
        right = Texts.shift_left
        monkeypatch.setattr(Texts, "shift_left", lambda self, t, by: right(self, t, max(0, by - 1)))
    elif slip == "own key":
        monkeypatch.setattr(TextAttention, "__call__", blind)
    else:
        # The anchor's state in the place of the estimate, and the other way about.
        step = head.step
        head.step = lambda *given: (lambda read, left: (read, left.roll(32, -1)))(*step(*given))
    assert difference(head) > 100 * NEAR


@torch.no_grad()
def test_what_an_anchor_reads() -> None:
    """All states before it, and no token further back than the words reach."""
    head, place = made("chimera"), 3
    batch = batch_of(head)
    before = [drafted.states for drafted in head.unroll_depths(batch, 3)]
    for part in ("embedded", "features"):
        other = batch_of(head)
        getattr(other, part)[:, place] += 1.0
        for depth, (a, b) in enumerate(zip(head.unroll_depths(other, 3), before, strict=True)):
            changed = ((a.states - b).abs().amax((0, 2)) > 1e-6).tolist()
            if part == "features":
                assert changed == [anchor >= place for anchor in range(LENGTH)]
            else:
                # Words of the anchor or of a drafted token have the token among them.
                assert changed == [place - depth <= anchor <= place + 2 for anchor in range(LENGTH)]


@torch.no_grad()
def test_each_depth_reads_its_anchors_state() -> None:
    """With matrices that take the anchor's half alone, every depth says what the state says."""
    head: Any = made("chimera")
    for linear in head.heads:
        linear.weight.copy_(torch.eye(32, 64))
    batch = batch_of(head)
    for drafted in head.unroll_depths(batch, 4):
        assert torch.equal(drafted.states, batch.features[..., :32])
        assert drafted.feature is not None and not torch.equal(drafted.feature, drafted.states)


@pytest.mark.parametrize("options", [{}, {"words": 1, "attention": False}])
def test_a_transformers_tokens_are_those_of_plain_decoding(
    options: dict[str, Any], tmp_path: Path
) -> None:
    check_answers("chimera", DRAFTER, tmp_path, **options)


@pytest.mark.parametrize("options", [{}, {"words": 1}, {"attention": False}])
def test_nodes_are_worth_what_training_says(options: dict[str, Any], tmp_path: Path) -> None:
    check_values("chimera", DRAFTER, tmp_path, **options)


def forgetful(self: KnownTokens, job: Job) -> list[list[int]]:
    """Words end where the new nodes begin."""
    self.latest = self.latest[:0]
    return EARLIER(self, job)


EARLIER = KnownTokens.tokens_above


def test_words_that_are_cut_off_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KnownTokens, "tokens_above", forgetful)
    with pytest.raises(AssertionError):
        check_values("chimera", DRAFTER, tmp_path)


def test_words_are_the_last_tokens_of_the_path() -> None:
    """Against a plain walk through random trees after random texts, in pieces of any length."""
    draw = random.Random(5)
    for _ in range(60):
        cache = KnownTokens((), torch.float64, torch.device("cpu"))
        cache.reach = draw.randint(0, 4)
        text = [draw.randrange(9) for _ in range(draw.randint(1, 7))]
        cache.length = draw.randrange(len(text))
        tree = TokenTree(text[-1])
        for _ in range(draw.randrange(6)):
            tree.add(draw.randrange(len(tree)), draw.randrange(9))
        job, _ = cache.prepare(Ask(tree), text, 99)
        found = cache.tokens_above(job)
        assert len(found) == len(job.tokens) == len(text) - 1 - cache.length + len(tree)
        for number, tokens in enumerate(found):
            node = number + job.first
            path = text[: node + len(text)] if node < 0 else list(text)
            below: list[int] = []
            while node > 0:
                below.insert(0, tree.tokens[node])
                node = tree.parents[node]
            path = [path[0]] * cache.reach + path + below
            assert tokens == path[:-1][::-1][: cache.reach]


def test_after_many_rounds_its_rows_are_those_of_a_fresh_prefill() -> None:
    assert check_held_rows("chimera", Drafter(depth=2, breadth=8, total=8), 200) >= 200


@pytest.mark.parametrize("option", ["heads", "words"])
def test_counts_out_of_range_are_refused(option: str) -> None:
    with pytest.raises(BadConfig, match=f"chimera:{option}=0"):
        build_head("chimera", SHAPE, {option: 0})
    with pytest.raises(BadConfig, match="chimera:attention=3"):
        build_head("chimera", SHAPE, {"attention": 3})


def test_weights_are_as_many_as_the_paper_counts() -> None:
    d, inner, keys = SHAPE.hidden, SHAPE.intermediate, SHAPE.kv_heads * SHAPE.width
    layer = 2 * d * d + 2 * d * keys + 3 * d * inner + 2 * d
    count = sum(weight.numel() for weight in build_head("chimera", SHAPE).parameters())
    assert count == 9 * d * d + 3 * d + 3 * d * d + layer + 4 * 2 * d * d
    assert Chimera.depths == 4
