"""Blocks of code: found as the text goes on and as it is taken back, and the law they leave."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from foretell.core.distribution import Sampler
from foretell.core.processor import About
from foretell.core.types import Sampling
from foretell.errors import BadConfig
from foretell.processors.comments import Blocks, Comments
from tests import laws, tiny

PIECES = [
    "\n",
    "    ",
    " #",
    "# c",
    "for x in y:",
    "else:",
    "x = 1",
    '"""',
    " ",
    "\n  ",
    "a: b",
    "##",
]
FITTING = ["    ", " #", "# c", " ", "##"]


def spelt(tokens: Sequence[int]) -> str:
    return "".join(PIECES[token] for token in tokens)


def ids(*texts: str) -> list[int]:
    return [PIECES.index(text) for text in texts]


def gained(*texts: str) -> list[str]:
    """The tokens that gain after a text."""
    track = Comments(7.0).start_track(About(0, (), spelt))
    row = torch.arange(float(len(PIECES)))
    got = track(torch.tensor([ids(*texts)]), row[None])[0]
    assert bool(((got == row) | (got == row + 7)).all())
    return [PIECES[token] for token in (got > row).nonzero().flatten().tolist()]


def test_a_block_opens_with_a_comment() -> None:
    opened = ("for x in y:", "\n")
    assert gained(*opened) == FITTING and gained("else:", " ", "\n", "    ") == FITTING
    assert gained(*opened, "\n  ", " ") == FITTING, "blank lines are no line of a block"
    assert not gained("for x in y:"), "the line goes on"
    assert not gained(*opened, " #"), "a comment has begun"
    assert not gained(*opened, "# c", "\n") and not gained(*opened, "x = 1", "\n")
    assert gained(*opened, "# c", "\n", *opened) == FITTING
    assert not gained("x = 1", "\n") and not gained("a: b", "\n") and not gained()


def test_a_docstring_is_read_over() -> None:
    opened = ("for x in y:", "\n", "    ", '"""')
    assert not gained(*opened, "x = 1", "\n")
    assert gained(*opened, "x = 1", "\n", '"""', "\n") == FITTING
    assert gained(*opened, '"""', "\n", "    ") == FITTING
    assert not gained(*opened, '"""', "\n", "x = 1", "\n")


def test_where_no_comment_is_possible_nothing_changes() -> None:
    track = Comments().start_track(About(0, (), spelt))
    row = torch.arange(float(len(PIECES)))
    row[ids(" #", "# c", "##")] = -math.inf
    assert track(torch.tensor([ids("else:", "\n")]), row[None])[0] is not row
    assert torch.equal(track(torch.tensor([ids("else:", "\n")]), row[None])[0], row)


class Looped:
    """The processor as a processor that reads the whole text anew for every row."""

    def __init__(self, boost: float, text: Any = spelt):
        self.boost, self.text = boost, text

    def __call__(self, given: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        track = Comments(self.boost).start_track(About(0, (), self.text))
        return track(given, scores)


def test_blocks_taken_back_are_those_found_from_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> int:
        draw = np.random.default_rng(3)
        track = Comments().start_track(About(0, (), spelt))
        path: list[int] = []
        changed = 0
        for _ in range(300):
            path = path[: draw.integers(0, len(path) + 1)] if draw.random() < 0.5 else path
            path += draw.integers(0, len(PIECES), 3).tolist()
            row = torch.from_numpy(draw.normal(0, 3, (1, len(PIECES))))
            got = track(torch.tensor([path]), row)
            assert torch.equal(got, Looped(50.0)(torch.tensor([path]), row))
            changed += not torch.equal(got, row)
        return changed

    assert asked() > 10
    monkeypatch.setattr(Blocks, "forget_behind", lambda self, length: None)
    with pytest.raises(AssertionError):
        asked()


def code(tokens: Sequence[int]) -> str:
    """A line that opens a block, a comment, a space."""
    return "".join(("else:\n", "#", " ")[token] for token in tokens)


@pytest.mark.parametrize("spec", ["plain", "ngram", "draft:length=2"])
def test_the_law_is_that_of_the_warped_rows(spec: str) -> None:
    common: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 3}
    strategy = laws.build(spec)
    models = laws.world(strategy, copy=1.0)

    class Coded(laws.Setting):
        text = staticmethod(code)  # type: ignore[assignment]

    law = laws.enumerate_law(
        strategy, laws.PROMPT, Coded(Sampling(processor=(Comments(2.0),), **common)), models
    )
    toy: Any = models["target"]
    wanted = laws.Setting(Sampling(logits_processors=(Looped(2.0, code),), **common))
    assert law.distance(laws.reference(toy, laws.PROMPT, wanted)) <= laws.EXACT
    plain = laws.Setting(Sampling(**common))
    assert law.distance(laws.reference(toy, laws.PROMPT, plain)) > 1e-3


def test_on_a_tokenizer_blocks_open_with_comments_whatever_drafts() -> None:
    lm = tiny.lm()
    prompt = "def add(a, b):\n"
    made = lm.generate(prompt, "plain", max_new_tokens=20, processor="comments")
    assert made.text.lstrip(" \t").startswith("#")
    for method in ("suffix:nodes=6", "draft:length=3", "mango"):
        text = lm.generate(prompt, method, max_new_tokens=20, processor="comments")
        assert text.tokens == made.tokens or method == "mango"
    off = lm.generate(prompt, "plain", max_new_tokens=20, processor="comments:boost=0")
    assert off.tokens == lm.generate(prompt, "plain", max_new_tokens=20).tokens != made.tokens


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(BadConfig, match="comments:boost"):
        Comments(-1.0)
    with pytest.raises(BadConfig, match=r"comments: .* no tokenizer.*leave comments out"):
        Sampler(Sampling(processor=(Comments(),)), [1], (), 8)
