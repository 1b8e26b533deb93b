"""Rounds of code: found by tokens and by lines, as from scratch, and the law they leave."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretell.core.distribution import Sampler
from foretell.core.processor import About
from foretell.core.text import Detokenizer
from foretell.core.types import Sampling
from foretell.errors import BadConfig
from foretell.processors.lexing import STARTERS, lex_line
from foretell.processors.rpg import Rounds, Rpg
from tests import laws, tiny
from tests.processors.test_repeats import longhand

# Tokens of code: some begin or end lines, one is a part of a character, one ends the text.
PIECES = ["a", " b", "=", "1", "\n", "\n  ", "for", " 'x'", "'''", "[", "]", "# c\n", "", "\n\nif"]
END = PIECES.index("")
VOCAB = len(PIECES)
LINE, IF = PIECES.index("\n"), PIECES.index("\n\nif")
TWO_LINES = [IF, 1, LINE, IF, 1, 0, LINE]  # if b, if ba


def spelt(tokens: Sequence[int]) -> str:
    return "".join(PIECES[token] for token in tokens)


def lines_of(output: Sequence[int]) -> tuple[list[tuple[str, ...]], list[int], bool]:
    """Symbols of all complete lines that are not blank, the token that begins each, and whether a
    new line begins; from the whole text.
    """
    owners = [place for place, token in enumerate(output) for _ in PIECES[token]]
    found, starts = [], []
    inside, place = "", 0
    *whole, rest = spelt(output).split("\n")
    for line in whole:
        if line.strip():
            made, inside = lex_line(line, inside)
            found.append(made)
            starts.append(owners[place + len(line) - len(line.lstrip())])
        place += len(line) + 1
    return found, starts, not rest.strip()


class Looped:
    """The processor as a processor, from the beginning for every row. `prompt`: tokens of it."""

    def __init__(self, config: Rpg, prompt: int, ends: Sequence[int] = (END,), text: Any = spelt):
        self.config, self.prompt, self.ends, self.text = config, prompt, ends, text

    def critical(self, output: list[int]) -> dict[int, int]:
        found = {}
        length, times = longhand(output)
        if times > self.config.grace:
            found[output[-length]] = times - self.config.grace
        if self.text is spelt:
            lines, starts, begins = lines_of(output)
            length, times = longhand(lines)
            if begins and times > self.config.grace:
                token = output[starts[-length]]
                found[token] = max(found.pop(token, 0), times - self.config.grace)
        return found

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        row = scores[0].tolist()
        middle = statistics.median_low([x for x in row if x > -math.inf])
        warped = list(row)
        found = self.critical(ids[0].tolist()[self.prompt :])
        for token, times in found.items():
            warped[token] -= (1 - self.config.decay**times) * max(row[token] - middle, 0)
            last = self.text([token])
        if found and ("\n" in last or last.strip() in STARTERS or last.strip()[:1] == "#"):
            for end in self.ends:
                height = max(warped[end] - middle, 0)
                warped[end] += (self.config.boost**-times - 1) * height
        return torch.tensor([warped], dtype=scores.dtype)


texts = st.lists(st.sampled_from(range(VOCAB)), max_size=5).flatmap(
    lambda base: st.integers(1, 3).map(lambda times: base * times)
)
asked = st.lists(st.tuples(st.lists(texts, max_size=3), st.integers(0, 99)), min_size=1, max_size=6)


@given(asked, st.integers(0, 3), st.integers(0, 1))
def test_rounds_taken_back_are_those_found_from_scratch(
    asked: list[tuple[list[list[int]], int]], prompt: int, grace: int
) -> None:
    config = Rpg(grace=grace)
    track = config.start_track(About(prompt, (END,), spelt))
    for parts, seed in asked:
        text = [0] * prompt + [token for part in parts for token in part]
        generator = torch.Generator().manual_seed(seed)
        row = torch.randn(1, VOCAB, dtype=torch.float64, generator=generator) * 3
        ids = torch.tensor([text], dtype=torch.long)
        before = row.clone()
        got = track(ids, row)
        assert torch.equal(row, before)
        assert torch.equal(got, config.start_track(About(prompt, (END,), spelt))(ids, row))
        assert torch.allclose(got, Looped(config, prompt)(ids, row), atol=1e-12)


def test_a_track_that_forgets_no_lines_is_caught() -> None:
    class Hoarding(Rounds):
        def forget_behind(self, length: int) -> None:
            lines = list(self.lines.items)
            super().forget_behind(length)
            for line in lines[len(self.line_starts) :]:
                self.lines.append_item(line)

    about = About(0, (END,), spelt)
    row = torch.arange(float(VOCAB))[None]
    hoarding = Hoarding(Rpg(), about, Detokenizer(spelt))
    for text in (TWO_LINES, TWO_LINES[:3]):
        got = hoarding(torch.tensor([text]), row)
    assert not torch.equal(got, Rpg().start_track(about)(torch.tensor([text]), row))


def scores_after(text: Sequence[int], config: Rpg | None = None) -> torch.Tensor:
    """What becomes of rising scores after an output."""
    track = (config or Rpg()).start_track(About(0, (END,), spelt))
    return track(torch.tensor([text]), torch.arange(float(VOCAB))[None])[0]


def changed(text: Sequence[int], config: Rpg | None = None) -> list[int]:
    plain = torch.arange(float(VOCAB))
    return (scores_after(text, config) != plain).nonzero().flatten().tolist()


def test_no_round_changes_nothing() -> None:
    assert not changed([0, 1, 2, 3]) and not changed([])


def test_the_first_token_of_the_last_round_loses_and_ends_gain() -> None:
    a, b = PIECES.index(" 'x'"), PIECES.index("[")
    assert changed([a, b, a, b]) == [a], "by content; no statement begins here"
    once, twice = scores_after([a, b] * 2)[a], scores_after([a, b] * 3)[a]
    middle = (VOCAB - 1) // 2
    assert once == pytest.approx(a - 0.1 * (a - middle))
    assert twice == pytest.approx(a - (1 - 0.9**2) * (a - middle))
    assert not changed([a, b, a, b], Rpg(grace=1)) and changed([a, b] * 3, Rpg(grace=1)) == [a]
    # By structure: other names, the same symbols.
    assert changed(TWO_LINES) == [END, IF]
    assert scores_after(TWO_LINES)[END] == pytest.approx(END + (1 / 0.8 - 1) * (END - middle))
    assert not changed(TWO_LINES[:-1]), "the second line is not complete"
    assert not changed([*TWO_LINES, 0]), "a line has begun"


def test_a_logit_below_the_middle_is_not_raised() -> None:
    """As a multiplication of a negative one would."""
    row = torch.linspace(-9, -1, VOCAB)[None]
    track = Rpg().start_track(About(0, (0,), spelt))
    got = track(torch.tensor([[4, 4, 4]]), row)[0]
    assert bool((got <= row[0] + 1e-9).all()) and got[4] == row[0, 4]


@pytest.mark.parametrize("spec", ["plain", "ngram", "draft:length=2"])
def test_the_law_is_that_of_the_warped_rows(spec: str) -> None:
    config = Rpg(decay=0.3, boost=0.5)
    common: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 3, "stop": ("zz",)}
    strategy = laws.build(spec)
    models = laws.world(strategy, copy=1.0)
    law = laws.enumerate_law(
        strategy, laws.PROMPT, laws.Setting(Sampling(processor=(config,), **common), (2,)), models
    )
    looped = Looped(config, len(laws.PROMPT), (2,), laws.spell)
    wanted = laws.Setting(Sampling(logits_processors=(looped,), **common), (2,))
    toy: Any = models["target"]
    assert law.distance(laws.reference(toy, laws.PROMPT, wanted)) <= laws.EXACT
    plain = laws.Setting(Sampling(**common), (2,))
    assert law.distance(laws.reference(toy, laws.PROMPT, plain)) > 1e-3


def test_drafts_change_no_token_and_save_forwards() -> None:
    lm = tiny.lm()
    prompt = tiny.TEXTS[0] * 2
    plain = lm.generate(prompt, "plain", max_new_tokens=50)
    made = lm.generate(prompt, "plain", max_new_tokens=50, processor="rpg:decay=0.5")
    for method in ("suffix:nodes=6", "draft:length=3"):
        drafted = lm.generate(prompt, method, max_new_tokens=50, processor="rpg:decay=0.5")
        assert drafted.tokens == made.tokens
        assert drafted.stats.steps <= made.stats.steps
    off = lm.generate(
        prompt, "plain", max_new_tokens=50, logprobs=2, processor="rpg:decay=1,boost=1"
    )
    again = lm.generate(prompt, "plain", max_new_tokens=50, logprobs=2)
    assert off.tokens == plain.tokens and off.logprobs == again.logprobs


def test_tokens_without_text_are_refused_in_one_line() -> None:
    with pytest.raises(BadConfig, match=r"rpg: .* no tokenizer.*leave rpg out"):
        Sampler(Sampling(processor=(Rpg(),)), [1], (), 8)
    assert Sampler(Sampling(processor=(Rpg(1.0, 1.0),)), [1], (), 8).plain


def test_a_very_long_round_leaves_finite_scores() -> None:
    got = scores_after([LINE] * 2000, Rpg(boost=0.01))
    assert bool(got.isfinite().all()) and got[END] > END
