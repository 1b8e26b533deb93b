"""What the output's tokens lose and gain, against loops; nothing that is given is written."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretell.core.penalties import Biased, Copying, Counted, Held

VOCAB = 7
texts = st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=12)


def row() -> torch.Tensor:
    return torch.linspace(-2, 3, VOCAB, dtype=torch.float64)[None]


def asked(processor: Callable[..., torch.Tensor], text: list[int]) -> list[float]:
    scores = row()
    found = processor(torch.tensor([text]), scores)
    assert torch.equal(scores, row()), "what is given is written"
    return found[0].tolist()


@given(texts, st.integers(0, 2), st.floats(-2, 2), st.floats(-2, 2))
def test_tokens_are_counted_in_the_output(
    text: list[int], prompt: int, presence: float, frequency: float
) -> None:
    want = row()[0].tolist()
    output = text[prompt:]
    for token in set(output):
        want[token] -= presence + frequency * output.count(token)
    assert asked(Counted(prompt, presence, frequency), text) == pytest.approx(want, abs=1e-12)


def test_biases_are_added_once() -> None:
    want = row()[0].tolist()
    want[2] += 1.5
    want[5] -= math.inf
    assert asked(Biased({2: 1.5, 5: -math.inf}), [1, 2, 2]) == want


def test_ends_are_held_until_there_are_enough_tokens() -> None:
    held = Held(4, {1, 6})
    early, late = asked(held, [0, 0, 0]), asked(held, [0, 0, 0, 0])
    assert [token for token, score in enumerate(early) if score == -math.inf] == [1, 6]
    assert late == row()[0].tolist()


def test_a_processor_of_the_user_writes_into_a_copy() -> None:
    def writing(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 3] = 9
        return scores

    assert asked(Copying(writing), [1])[3] == 9
