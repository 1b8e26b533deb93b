"""Exact extraction against every span scored singly, on toys and on transformers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell.core.request import Request
from foretell.core.spending import Spending
from foretell.core.tokenizer_bytes import Words
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.errors import BadConfig, RequestFailed, Unsupported
from foretell.guidance.cfg import Cfg
from foretell.strategies.plain import Plain
from foretell.strategies.search import spans
from foretell.strategies.search.extract import Extract
from foretell.testing.toy import Toy
from tests import laws, tiny
from tests.cache.users import Evictor

SPECS = ["extract:longest=2,normalised=yes"]
PIECES = (b"x", b" x", b"y", b" y", b" ", b"xy", b".", b"!")
END = 7
PASSAGE = "x y xy y. x"
PROMPT = [4, 1, 3, 5, 3, 6, 1]


def words(tokens: Sequence[int]) -> str:
    return b"".join(PIECES[token] for token in tokens if token != END).decode()


def toy(seed: int) -> Toy:
    model = Toy(len(PIECES), seed, sharpness=2.0)
    model.tokenizer = Words(PIECES)
    return model


def write(config: Any, seed: int = 0, sampling: Sampling | None = None, **more: Any) -> Live:
    sampling = sampling or Sampling(max_new_tokens=20)
    engine = Engine({"target": toy(seed)}, eos=(END,))
    live = engine.add(Request(PROMPT, config, sampling, text=words, **more))
    list(engine.run())
    if live.error is not None:
        raise live.error
    return live


def candidates(longest: int, room: int) -> set[tuple[int, ...]]:
    """Every span as tokens, with a space before it and without."""
    places = [match.span() for match in re.finditer(r"\w+|[^\w\s]", PASSAGE)]
    found = set()
    for first, (start, _) in enumerate(places):
        for last, (_, end) in enumerate(places[first:], 1):
            if not longest or last <= longest:
                for text in (PASSAGE[start:end], " " + PASSAGE[start:end]):
                    found.add(tuple(Words(PIECES).encode(text.encode())))
    return {tokens for tokens in found if len(tokens) < room}


def scored(
    seed: int, setting: laws.Setting, longest: int, normalised: bool
) -> dict[tuple[int, ...], float]:
    """Each span with its end, by the chain rule over the toy's own rows."""
    found = {}
    for tokens in candidates(longest, setting.sampling.max_new_tokens):
        total = torch.zeros((), dtype=torch.float64)
        for place, token in enumerate([*tokens, END]):
            law = laws.expected_law(toy(seed), PROMPT, tokens[:place], setting)
            total += torch.tensor(law[token], dtype=torch.float64).log()
        if total > -torch.inf:
            found[*tokens, END] = float(total) / (len(tokens) + 1 if normalised else 1)
    return found


@pytest.mark.parametrize("longest", [0, 2])
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("setting", ["plain", "penalties", "short"])
def test_the_answer_is_the_best_of_all_spans_scored_singly(
    setting: str, normalised: bool, longest: int
) -> None:
    base = laws.SETTINGS.get(setting, laws.Setting(Sampling(max_new_tokens=4)))
    most = 4 if setting == "short" else 20
    one = laws.Setting(replace(base.sampling, temperature=1.0, max_new_tokens=most), (END,))
    for seed in range(4):
        want = scored(seed, one, longest, normalised)
        best = sorted(want.values(), reverse=True)[:5]
        config = Extract(PASSAGE, longest=longest, normalised=normalised, count=5)
        live = write(config, seed, replace(one.sampling, temperature=0.0))
        assert [score for _, score, _ in live.answers] == pytest.approx(best, abs=1e-9)
        for tokens, score, reason in live.answers:
            assert want[tuple(tokens)] == pytest.approx(score, abs=1e-9) and reason == "stop"
        assert live.ctx.output == live.answers[0][0] and not live.caches
        spans_told = live.ctx.stats.notes["spans"]
        assert spans_told == len(candidates(longest, one.sampling.max_new_tokens))


def test_small_trees_and_small_forwards_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for normalised in (False, True):
        config = Extract(PASSAGE, normalised=normalised, count=3)
        whole = [write(config, seed).answers for seed in range(3)]
        with monkeypatch.context() as patch:
            patch.setattr(spans, "NODES", 5)
            patch.setattr(spans, "ROWS", 2)
            assert [write(config, seed).answers for seed in range(3)] == whole


def test_what_cannot_win_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Extract(PASSAGE)
    pruned = sum(write(config, seed).ctx.stats.calls["target"] for seed in range(5))
    monkeypatch.setattr(spans.Search, "is_hopeful", lambda self, place: True)
    seen = sum(write(config, seed).ctx.stats.calls["target"] for seed in range(5))
    assert pruned < seen


def test_a_bound_that_is_too_low_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slip: a normalised score is bounded by the mean so far, which a good token may raise."""

    def hopeful(self: spans.Search, place: spans.Place) -> bool:
        return not self.best_spans or place.total / len(place.text) > self.best_spans[-1].score

    monkeypatch.setattr(spans.Search, "is_hopeful", hopeful)
    with pytest.raises(AssertionError):
        for longest in (0, 2):
            test_the_answer_is_the_best_of_all_spans_scored_singly("plain", True, longest)


def test_notes_tell_how_greedy_decoding_did() -> None:
    told = set()
    for seed in range(40):
        live, plain = write(Extract(PASSAGE), seed), write(Plain(), seed)
        output = tuple(plain.ctx.output)
        notes = live.ctx.stats.notes
        extractive = output[-1] == END and output[:-1] in candidates(32, 20)
        assert notes["greedy_is_extractive"] == extractive
        assert notes["greedy_is_optimal"] == (output == tuple(live.ctx.output))
        told.add((notes["greedy_is_extractive"], notes["greedy_is_optimal"]))
    assert {(0, 0), (1, 1)} <= told


def test_rows_of_another_source_are_scored_by() -> None:
    texts = [write(Extract(PASSAGE), seed, source=Cfg(g=1.0)).answers for seed in range(6)]
    assert texts == [write(Extract(PASSAGE), seed).answers for seed in range(6)]
    assert texts != [write(Extract(PASSAGE), seed, source=Cfg(g=3.0)).answers for seed in range(6)]


def test_where_the_budget_is_spent_the_best_span_so_far_is_told() -> None:
    config, reasons = Extract(PASSAGE, normalised=True), set()
    for forwards in range(1, 12):
        live = write(config, 1, budget=Spending(forwards=forwards))
        assert live.ctx.stats.calls["target"] <= forwards and not live.caches
        assert not live.answers or tuple(live.ctx.output[:-1]) in candidates(0, 20)
        reasons.add((live.reason, bool(live.answers)))
    assert {("budget", True), ("stop", True)} <= reasons


QUESTION = "Text: the quick brown fox jumps over a lazy dog.\nQ: who jumps?\nA:"


def test_on_a_transformer_it_is_the_best_of_all_spans() -> None:
    lm, network = tiny.lm(), tiny.llama()
    got = lm.generate(QUESTION, "extract:start=Text:,stop=Q:,longest=3", max_new_tokens=24)
    passage = "the quick brown fox jumps over a lazy dog."
    parts = re.findall(r"\w+|\.", passage)
    prompt = lm.encode(QUESTION)
    best = (-1e9, "")
    for first in range(len(parts)):
        for last in range(first + 1, min(first + 3, len(parts)) + 1):
            text = " ".join(parts[first:last]).replace(" .", ".")
            for form in (text, " " + text):
                ids = lm.encode(form, special=False)
                whole = torch.tensor([[*prompt, *ids, 0]])
                with torch.inference_mode():
                    rows = network(whole).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                total = float(rows.gather(1, whole[0, len(prompt) :, None]).sum())
                best = max(best, (total, form))
    assert got.text == best[1] and got.finish_reason == "stop"
    assert got.score == pytest.approx(best[0], abs=1e-3)


def test_the_passage_is_where_it_is_said_to_be() -> None:
    text = "Story: a b. End. Story: c"
    assert spans.text_between(text, "Story:", "End.") == " a b. "
    assert spans.text_between(text, "", "") == text
    assert spans.text_between(text, "End. ", "") == "Story: c"
    assert spans.text_between(text, "Tale:", "") is None
    assert spans.text_between(text, "End.", "Nowhere") is None
    live = write(Extract(start="y", stop="."))  # of " x yxy y. x"
    assert live.ctx.stats.notes["spans"] == len({"xy", " xy", "xy y", " xy y", "y", " y"})


def test_what_cannot_be_is_refused() -> None:
    for sampling in (Sampling(temperature=0.5), Sampling(logprobs=1)):
        with pytest.raises(BadConfig, match=r"extract cannot honour (temperature|logprobs)"):
            write(Extract(), sampling=sampling)
    with pytest.raises(Unsupported, match="a token that ends a text"):
        write(Extract(), sampling=Sampling(ignore_eos=True))
    with pytest.raises(BadConfig, match="the prompt has no start='Passage:'"):
        write(Extract(start="Passage:"))
    with pytest.raises(BadConfig, match="the passage has no word"):
        write(Extract(" \n "))
    with pytest.raises(BadConfig, match="leave start and stop out"):
        Extract("a", start="b")
    with pytest.raises(BadConfig, match="under the cache policy Evictor"):
        write(Extract(), policy=Evictor())
    with pytest.raises(RequestFailed, match="no span of the passage is a possible answer"):
        write(Extract("x y"), sampling=Sampling(max_new_tokens=5, min_new_tokens=5))
    with pytest.raises(BadConfig, match="longest"):
        Extract(longest=-1)
    with pytest.raises(BadConfig, match="count"):
        Extract(count=0)
