"""Lessons, the loss by hand, and which weights a request has."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from foretell.core.context import Context
from foretell.core.request import Request
from foretell.core.tokenizer_bytes import Shared
from foretell.engine.engine import Engine
from foretell.models.online import (
    MERGED,
    Learner,
    Lesson,
    build_lesson,
    forward_divergence,
    reverse_divergence,
)
from foretell.models.translated import Translated
from foretell.strategies.plain import Plain
from tests import vocabularies


def lesson(name: int = 0) -> Lesson:
    chances = torch.tensor([[0.7, 0.2]])
    return Lesson([name, 1, 2, 0], [1], torch.tensor([[0, 1]]), chances, [(2, 4)])


def test_the_divergence_and_its_gradient_are_those_of_the_reverse_direction() -> None:
    p = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    logits = torch.tensor([[0.0, 1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    q = logits.detach().softmax(-1)[0]
    reverse = float((q * (q / p).log()).sum())
    loss = reverse_divergence(logits.log_softmax(-1)[:, :2], p[None, :2]).sum()
    assert loss.item() == pytest.approx(reverse, abs=1e-9)
    loss.backward()
    assert logits.grad is not None
    by_hand = q * ((q / p).log() - reverse)
    assert logits.grad[0].tolist() == pytest.approx(by_hand.tolist(), abs=1e-9)
    forward = q - p  # what the other direction would give
    assert (logits.grad[0] - forward).abs().max() > 0.05


def test_merged_tokens_add_a_fifth_of_their_negative_log_likelihood() -> None:
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    laws = logits.log_softmax(-1)
    one = lesson()
    direct = reverse_divergence(laws[:1, [0, 1]], one.chances).sum()
    merged = -laws[1, 2] - laws[2, 0]
    assert float(one.loss(logits)) == pytest.approx(float(direct + MERGED * merged), rel=1e-6)
    assert one.size == 2


def test_an_update_is_made_once_of_the_lessons_in_order() -> None:
    seen: list[list[int]] = []

    def learn(lessons: Sequence[Lesson]) -> int:
        seen.append([one.ids[0] for one in lessons])
        return len(seen)

    learner = Learner(2, learn)
    first = learner.last_update
    for name in range(2):
        learner.take_lesson(lesson(name))
    second = learner.last_update
    assert not seen and first.get_weights() is None
    assert (second.get_weights(), second.get_weights()) == (1, 1)
    assert seen == [[0, 1]]


def test_lessons_that_nobody_asks_for_give_way_to_newer_ones() -> None:
    learner = Learner(2, lambda lessons: [one.ids[0] for one in lessons])
    for name in range(7):
        learner.take_lesson(lesson(name))
    assert len(learner.lessons) == 2 and learner.last_update.get_weights() == [0, 1]
    learner.last_update.was_requested = True
    learner.take_lesson(lesson(7))
    assert learner.last_update.get_weights() == [6, 7]


def test_what_fails_is_raised_once_and_the_weights_before_hold_on() -> None:
    def learn(lessons: Sequence[Lesson]) -> Any:
        if lessons[0].ids[0] == 1:
            raise ValueError("no")
        return lessons[0].ids[0]

    learner = Learner(1, learn)
    for name in (0, 1):
        learner.take_lesson(lesson(name))
        learner.last_update.was_requested = True
    with pytest.raises(ValueError, match="no"):
        learner.last_update.get_weights()
    assert learner.last_update.get_weights() == 0


@pytest.mark.parametrize(
    ("pair", "text", "count", "direct", "merged"),
    [
        ("merged", (0, 1, 2, 0), 3, [4, 1], [(2, 4)]),  # a b ab a
        ("special", (0, 1, 2), 2, [3, 2], []),  # a b and the end, after a start of theirs
        ("bytes", (0, 1, 2, 0), 3, [2], []),  # a, the halves of a character, a
        ("bytes", (0, 1, 2), 2, None, None),
        ("merged", (0, 1), 2, [1], []),  # nothing stands before their first token
    ],
)
def test_bytes_tell_which_tokens_stand_in_the_same_place(
    pair: str, text: tuple[int, ...], count: int, direct: Any, merged: Any
) -> None:
    models = vocabularies.pair(pair)
    translated = Translated(Context(Engine(models), Request(text, Plain())))
    translated.read_text(text)
    shared = Shared(translated.target_words, translated.model_words, models["target"].vocab, 8)
    laws = [
        (torch.tensor([place]), torch.tensor([float(place)]))
        for place in range(len(text) - count, len(text))
    ]
    found = build_lesson(translated, shared, text, laws)
    if direct is None:
        assert found is None
        return
    assert found is not None
    assert (found.direct, found.merged) == (direct, merged)
    for place, law in zip(found.direct, found.tokens, strict=True):
        # The law is the one in which this very token was seen.
        token = text[int(law[0])]
        assert shared.partner[token] == translated.token_ids[place]


def test_the_forward_divergence_is_the_targets_from_the_drafts() -> None:
    p = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    logits = torch.tensor([[0.0, 1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    q = logits.detach().softmax(-1)[0]
    loss = forward_divergence(logits.log_softmax(-1)[:, :2], p[None, :2]).sum()
    assert loss.item() == pytest.approx(float((p * (p / q).log()).sum()), abs=1e-9)
    loss.backward()
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx((q - p).tolist(), abs=1e-9)


@pytest.mark.parametrize("forward", [False, True])
def test_tokens_without_a_row_are_left_out_of_the_targets_law(forward: bool) -> None:
    """Rows of tokens 0, 2 and 3: what is learnt of (0.5, 0.25, 0.25, 0) is (2/3, 1/3, 0)."""
    kept = torch.tensor([0, 2, 3])
    tokens, chances = torch.tensor([[0, 1, 2]]), torch.tensor([[0.5, 0.25, 0.25]])
    logits = torch.randn(2, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()
    loss = Lesson([0, 3], [1], tokens, chances, [], forward).loss(logits, kept)
    loss.backward()
    measure = forward_divergence if forward else reverse_divergence
    law = torch.tensor([[2 / 3, 1 / 3]])
    own = logits.detach().log_softmax(-1)[:1, :2]
    assert loss.item() == pytest.approx(measure(own, law).sum().item(), abs=1e-6)
    assert logits.grad is not None and bool(logits.grad.isfinite().all())
    merged = Lesson([0, 3, 1], [], tokens[:0], chances[:0], [(1, 2), (2, 3)])
    rows = torch.zeros(3, 3)
    assert float(merged.loss(rows, kept)) == pytest.approx(MERGED * math.log(3))


def test_a_copy_of_a_learner_goes_on_by_itself() -> None:
    learner = Learner(2, lambda lessons: [one.ids[0] for one in lessons])
    for name in range(3):
        learner.take_lesson(lesson(name))
    twin = copy.deepcopy(learner)
    twin.last_update.was_requested = True
    twin.take_lesson(lesson(9))
    assert [one.ids[0] for one in learner.lessons] == [2]
    assert (twin.last_update.get_weights(), learner.last_update.get_weights()) == ([2, 9], [0, 1])
