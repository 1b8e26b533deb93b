"""sentence-kv: against plain loops, with drafts that end sentences, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from foretell.core.tokenizer_bytes import Words
from foretell.errors import BadConfig, ForetellError, Unsupported
from foretell.kv.select.sentence_kv import SentenceKv, Sentences
from foretell.kv.select.sentences import END, Index, sentence_ends
from foretell.testing.toy import Toy
from tests import tiny
from tests.kv import driving
from tests.kv.driving import SCALE, TIMES, differs, rows_of, text_of
from tests.kv.policies import target

# What laws of all policies use, see tests/kv/policies.py.
SMALL_SPEC = "sentence-kv:budget=8,factor=2,sinks=2,recent=3,window=3,kernel=3"

ENDS = frozenset({0, 1, 2})
WORDS = Words([b"." if token in ENDS else b"x%d" % token for token in range(driving.VOCAB)])
PROMPT = 19
WHOLE = text_of(40, seed=3)
SMALL = SentenceKv(budget=9, factor=1.5, sinks=2, recent=3, window=3, kernel=3)


def policy(config: SentenceKv = SMALL) -> Sentences:
    model = Toy(driving.VOCAB)
    model.tokenizer = WORDS
    return config.build_policy(model)


def voted(text: tuple[int, ...], layer: int, group: int, config: SentenceKv) -> list[int]:
    """The places of the prompt that stay, by loops."""
    budget = int(config.factor * config.budget)
    if len(text) <= budget:
        return [*range(len(text))]
    keys = [rows_of(text[: place + 1], layer)[1][group] for place in range(len(text))]
    votes = [0.0] * (len(text) - config.window)
    for asking in range(len(text) - config.window, len(text)):
        q = rows_of(text[: asking + 1], layer)[0]
        for head in range(group * TIMES, (group + 1) * TIMES):
            scores = torch.stack([q[head] @ key for key in keys[: asking + 1]]) * SCALE
            given = scores.softmax(0).tolist()
            votes = [vote + given[place] / TIMES for place, vote in enumerate(votes)]
    half = config.kernel // 2
    smooth = [max(votes[max(0, i - half) : i + half + 1]) for i in range(len(votes))]
    heavy = sorted(range(len(votes)), key=lambda place: (smooth[place], place))
    window = range(len(votes), len(text))
    return [*sorted(heavy[len(votes) - (budget - config.window) :]), *window]


def loops(config: SentenceKv) -> Any:
    """The places that a head reads of a text's last token, by loops over places."""

    @cache
    def reads(text: tuple[int, ...], layer: int, group: int) -> Sequence[int]:
        held = [*voted(text[:PROMPT], layer, group, config), *range(PROMPT, len(text))]
        sentences: list[list[int]] = [[]]
        for place in range(len(text)):  # the last token's own sentence is the last of them
            if place in held:
                sentences[-1].append(place)
            if place < len(text) - 1 and (text[place] in ENDS or place == PROMPT - 1):
                sentences.append([])
        begun = max([PROMPT, *(p + 1 for p in range(PROMPT, len(text) - 1) if text[p] in ENDS)])
        asking = range(begun, len(text))
        if len(asking) <= config.threshold:
            return held
        heads = range(group * TIMES, (group + 1) * TIMES)
        queries = [rows_of(text[: p + 1], layer)[0][head] for p in asking for head in heads]
        asked = torch.stack(queries).mean(0)
        keys = {place: rows_of(text[: place + 1], layer)[1][group] for place in held}

        def gives(sentence: list[int]) -> float:
            return float(asked @ torch.stack([keys[place] for place in sentence]).mean(0))

        ended = sorted((one for one in sentences[:-1] if one), key=gives, reverse=True)
        order = [place for sentence in [*ended, sentences[-1]] for place in sentence]
        between = held[config.sinks : len(held) - config.recent]
        room = config.budget - config.sinks - config.recent
        taken = [place for place in order if place in between][:room]
        return sorted({*held[: config.sinks], *taken, *held[len(held) - config.recent :]})

    return lambda text, layer, head: reads(text, layer, head // TIMES)


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        SentenceKv(budget=9, factor=9, sinks=2, recent=1, window=3, kernel=3),
        SentenceKv(budget=8, factor=2, sinks=0, recent=2, window=1, kernel=1, threshold=2),
    ],
)
@pytest.mark.parametrize(("depth", "wrong", "chunk"), [(0, False, 99), (6, False, 5), (5, True, 1)])
def test_every_node_reads_what_loops_say(
    config: SentenceKv, depth: int, wrong: bool, chunk: int
) -> None:
    assert differs(policy(config), PROMPT, WHOLE, loops(config), depth, wrong, chunk) < 1e-9


def test_the_drafts_end_sentences_that_are_rejected() -> None:
    """Else the test above would say nothing of them."""
    rejected = 0
    for text, _, _ in driving.drive(policy(), PROMPT, WHOLE, 6, True):
        other = text != tuple(WHOLE[: len(text)])
        rejected += other and any(token in ENDS for token in text[PROMPT:-1])
    assert rejected > 20


def test_a_full_stop_that_is_rejected_leaves_no_trace() -> None:
    running = 0
    for length in (30, 33, 36, 40):
        held: list[Sentences] = []
        for depth in (0, 5):
            for _ in driving.drive(policy(), PROMPT, WHOLE[:length], depth, True, told=held.append):
                pass
        plain, drafted = held
        running += plain.count
        assert plain.closed == drafted.closed and plain.count == drafted.count
        assert plain.query_sums.keys() == drafted.query_sums.keys()
        for layer, index in plain.index.items():
            assert torch.equal(index.sentence_of, drafted.index[layer].sentence_of)
            assert torch.allclose(index.means, drafted.index[layer].means)
        for layer, asked in plain.query_sums.items():
            assert torch.allclose(asked, drafted.query_sums[layer])
    assert running > 3


@pytest.mark.parametrize("slip", ["index", "queries", "ends"])
def test_slips_are_seen(slip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if slip == "index":  # a draft's full stops end no sentence in the index
        monkeypatch.setattr(Index, "extend_along", lambda self, *_: self)
    elif slip == "queries":  # the queries of committed tokens are forgotten
        nothing = property(lambda self: {}, lambda self, sums: None)
        monkeypatch.setattr(Sentences, "query_sums", nothing, raising=False)
    else:  # what follows a full stop counts to the sentence before it
        monkeypatch.setattr(
            "foretell.kv.select.sentences.Path.running_rows", property(lambda self: self.rows)
        )
    assert differs(policy(), PROMPT, WHOLE[:34], loops(SMALL), 5, True) > 1e-3


def test_each_row_that_stayed_is_in_one_sentence_and_empty_ones_are_never_read() -> None:
    keys = torch.randn(2, 5, 4, dtype=torch.float64)
    places = torch.tensor([[0, 1, 2, 7, 8], [0, 5, 6, 7, 8]])
    index = Index.of_places(keys, places, [1, 4, 8])
    assert index.sentence_of.tolist() == [[1, 1, 2, 3, 3], [1, 3, 3, 3, 3]]
    assert torch.allclose(index.means[1, 2], keys[1, 1:].mean(0))
    assert torch.equal(index.means[1, 1], torch.zeros(4, dtype=torch.float64))
    given = index.score_rows(torch.randn(2, 4, dtype=torch.float64), 7)
    for group in range(2):
        ranked = given[group].argsort(descending=True, stable=True).tolist()
        assert ranked[-2:] == [5, 6]  # rows in no sentence
        numbers = index.sentence_of[group][ranked[:-2]].tolist()
        assert numbers == sorted(numbers, key=numbers.index)  # sentences in one piece


def test_with_room_for_everything_it_is_the_full_cache_bit_by_bit() -> None:
    wide = SentenceKv(budget=200, sinks=2, recent=3)
    plain = driving.drive(driving.Full(), PROMPT, WHOLE, 4, True)
    for (_, _, ours), (_, _, full) in zip(
        driving.drive(policy(wide), PROMPT, WHOLE, 4, True), plain, strict=True
    ):
        assert torch.equal(ours, full)


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        (".", True), (". ", True), (" ...", True), ('."', True), (".)\n", True), ("\n\n", True),
        ("。", True), ("?!", True), ("\n", False), (",", False), ("a.", False), (".5", False),
        ("", False), (" ", False),
    ],
)  # fmt: skip
def test_tokens_that_end_a_sentence(text: str, ends: bool) -> None:
    assert (END.fullmatch(text) is not None) == ends


def test_the_ends_come_from_the_tokenizer() -> None:
    model = target()
    assert sentence_ends(model, "x") == {token for token in range(97) if token % 4 == 0}
    real = tiny.tokenizer()
    toy = Toy(len(real))
    toy.tokenizer = real
    texts = {real.decode([token]) for token in sentence_ends(toy, "x")}
    assert {".", "!", "?"} <= texts and not texts & {"\n", ",", "a"}


@pytest.mark.parametrize("words", [None, Words([b"a", b"b"])])
def test_without_a_tokenizer_that_tells_it_refuses(words: Words | None) -> None:
    model = Toy(11)
    model.tokenizer = words
    with pytest.raises(Unsupported, match=r"kv=sentence-kv cannot run on .* a tokenizer"):
        SentenceKv().build_policy(model)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"budget": 64}, "sentence-kv:budget=64.*at least 65"),
        ({"factor": 0.5}, "sentence-kv:factor"),
        ({"budget": 70, "window": 300}, "sentence-kv:factor.*300"),
    ],
)
def test_bad_settings_are_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(BadConfig, match=said) as error:
        SentenceKv(**fields)
    assert isinstance(error.value, ForetellError) and "\n" not in str(error.value)
