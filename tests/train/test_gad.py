"""The trainer of gad: what blocks look like, that both models learn, and what is reported."""

from __future__ import annotations

import dataclasses
import json
import random
import signal
from pathlib import Path

import pytest
import torch

import foretell
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.errors import BadConfig
from foretell.models.encoder_decoder.seq2seq import EncoderDecoder
from foretell.spec import resolve_method
from foretell.train import gad
from foretell.train.corpus import SPECIALS
from foretell.train.gad import IGNORED, TrainGad, make_task, mask_blocks, reveal_masks, train_gad

TINY = TrainGad(
    hidden=32,
    encoder_layers=1,
    decoder_layers=1,
    heads=2,
    intermediate=48,
    vocab_size=300,
    k=6,
    steps=30,
    draft_steps=30,
    batch=8,
    context=128,
    warmup=5,
    share=0.3,
    measured=4,
)
WORDS = ("cats", "dogs", "birds", "trees", "cars"), ("see", "like", "find"), ("green", "old", "big")
START, MASK = 1, SPECIALS.index("<|mask|>")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("texts") / "t.jsonl"
    rows = []
    for who in WORDS[0]:
        for does in WORDS[1]:
            for kind in WORDS[2]:
                text = f"All the {who} here {does} many {kind} things."
                rows.append(json.dumps({"path": f"{who}{does}{kind}", "text": text}))
    path.write_text("\n".join(rows))
    return [str(path)]


@pytest.fixture(scope="module")
def trained(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:  # type: ignore[type-arg]
    out = tmp_path_factory.mktemp("run")
    return out, train_gad(out, texts, TINY, "cpu", quiet=True)


def test_a_block_stands_behind_its_text_and_sees_itself() -> None:
    answers = [[10, 11, 12, 13, 0], [20, 0]]
    draw = random.Random(0)
    sizes = set()
    for _ in range(60):
        made = mask_blocks(answers, 4, START, MASK, draw)
        for row, answer in enumerate(answers):
            ids, labels = made.ids[row].tolist(), made.labels[row].tolist()
            first = ids.index(MASK)
            count = ids.count(MASK)
            sizes.add(count)
            assert ids[:first] == [START, *answer][:first] and set(ids[first : first + count]) == {
                MASK
            }
            hidden = answer[first - 1 : first - 1 + count]
            assert labels[:first] == [IGNORED] * first
            assert labels[first:] == [*hidden, *[IGNORED] * (len(labels) - first - len(hidden))]
            sees = made.sees[row, 0] == 0
            for i in range(first + count):
                inside = first - 1 <= i
                seen = set(range(first + count)) if inside else set(range(i + 1))
                assert set(sees[i].nonzero()[:, 0].tolist()) == seen
    assert sizes == {1, 2, 3, 4}


def test_what_was_guessed_wrong_is_shown_in_part() -> None:
    draw = random.Random(1)
    made = mask_blocks([[10, 11, 12, 13, 14, 15, 16, 17, 18, 0]] * 20, 8, START, MASK, draw)
    right = torch.where(made.labels == IGNORED, 0, made.labels)
    assert torch.equal(reveal_masks(made, right, 1.0, draw).ids, made.ids)
    shown = reveal_masks(made, right + 1, 0.5, draw)
    for row in range(20):
        wrong = int((made.labels[row] != IGNORED).sum())
        taken_off = int((shown.ids[row] != made.ids[row]).sum())
        assert taken_off == wrong // 2 == int((made.labels[row] != shown.labels[row]).sum())
        places = shown.ids[row] != made.ids[row]
        assert torch.equal(shown.ids[row][places], made.labels[row][places])


def test_the_engine_reads_blocks_as_they_are_trained(trained: tuple[Path, dict]) -> None:  # type: ignore[type-arg]
    """A block's rows in the engine are those that the trainer computes its loss from."""
    out, _ = trained
    lm = foretell.load(out / "model", draft=out / "drafter", dtype="float32")
    drafter = lm.models["draft"]
    assert isinstance(drafter, EncoderDecoder) and drafter.mask_token == MASK
    source, answer = lm.encode("All the cats see."), [*lm.encode("All the cars see."), 0]
    made = mask_blocks([answer], TINY.k, START, MASK, random.Random(7))
    first = made.ids[0].tolist().index(MASK)
    count = made.ids[0].tolist().count(MASK)
    with torch.inference_mode():
        want = drafter.hf(
            input_ids=torch.tensor([source]),
            decoder_input_ids=made.ids,
            decoder_attention_mask=made.sees,
            use_cache=False,
        ).logits[0, first : first + count]
        text = made.ids[0, :first].tolist()
        inputs = {"source": tuple(source)}
        held = drafter.cache(Request(text, resolve_method("plain")[1], inputs=inputs))
        tree = TokenTree(text[-1]).chain([MASK] * count)
        job, _ = held.prepare(Ask(tree, rows=range(1, count + 1)), text, 99)
        got = drafter.forward([job])[0].logits
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_both_learn_and_the_report_says_what_drafts_bring(trained: tuple[Path, dict]) -> None:  # type: ignore[type-arg]
    out, report = trained
    assert json.loads((out / "report.json").read_text()) == json.loads(json.dumps(report))
    untrained = torch.log(torch.tensor(300.0))
    assert report["loss"]["corrector"] < 0.7 * untrained
    assert report["loss"]["drafter"] < 0.7 * untrained
    assert report["sentences"] == {"learnt": 45 - held_back_count(out), "measured": 4}
    plain, guided, block, relaxed = report["methods"].values()
    assert plain["tokens_per_step"] == 1 and plain["same_as_plain"] == 1
    assert guided["same_as_plain"] == block["same_as_plain"] == 1
    assert list(report["methods"])[3].endswith("rule=relaxed") and relaxed["tokens_per_step"] >= 1
    assert block["tokens_per_step"] > 1.2, "the drafter has learnt nothing"


def held_back_count(out: Path) -> int:
    made_by = json.loads((out / "settings.json").read_text())
    found = make_task(made_by["sources"], dataclasses.replace(TINY, measured=99))
    return len(found.held_back)


@pytest.mark.parametrize("part", ["corrector", "drafter"])
def test_an_interrupted_run_ends_as_one_that_was_not(
    texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    short = dataclasses.replace(TINY, steps=9, draft_steps=9, measured=1)
    whole = train_gad(tmp_path / "whole", texts, short, "cpu", quiet=True)
    loss_of, calls = getattr(gad, f"{part}_loss"), []

    def interrupted(*args: object) -> torch.Tensor:
        calls.append(args)
        if len(calls) == 4:
            signal.raise_signal(signal.SIGINT)
        return loss_of(*args)  # type: ignore[no-any-return]

    monkeypatch.setattr(gad, f"{part}_loss", interrupted)
    out = tmp_path / "parts"
    with pytest.raises(KeyboardInterrupt):
        train_gad(out, texts, short, "cpu", quiet=True)
    assert len(calls) == 4 and not (out / "report.json").exists()
    assert train_gad(out, texts, short, "cpu", quiet=True) == whole
    assert len(calls) == 9, "no step is done again"
    assert train_gad(out, texts, short, "cpu", quiet=True) == whole
    assert len(calls) == 9, "a finished run is not trained again"
    with pytest.raises(BadConfig, match="holds a run with other settings"):
        train_gad(out, texts, dataclasses.replace(short, seed=1), "cpu", quiet=True)


def test_a_step_has_the_same_pairs_whatever_was_asked_before(texts: list[str]) -> None:
    known, again = make_task(texts, TINY), make_task(texts, TINY)
    steps = [known.batch(TINY, step) for step in range(12)]
    assert len(known.learnt) < 12 * TINY.batch, "the steps reach into later rounds"
    assert again.batch(TINY, 11) == steps[11] and again.batch(TINY, 3) == steps[3]
    answers = [tuple(right) for pairs in steps for _, right in pairs]
    assert len({*answers[: len(known.learnt)]}) == len(known.learnt), "each sentence once a round"


def test_sentences_that_could_outgrow_the_positions_are_left_out(texts: list[str]) -> None:
    lengths = {len(sentence) for sentence in make_task(texts, TINY).learnt}
    limit = sorted(lengths)[len(lengths) // 2]
    narrow = dataclasses.replace(TINY, context=2 * (limit + 2), mistakes=1.0, batch=2)
    known = make_task(texts, narrow)
    assert {len(sentence) for sentence in known.learnt} == {n for n in lengths if n <= limit}
    for round in range(5):
        for sentence in known.learnt:
            assert max(map(len, known.pair(sentence, narrow, round))) < narrow.context
    with pytest.raises(BadConfig, match="a larger --context"):
        make_task(texts, dataclasses.replace(TINY, context=12))


def test_too_few_sentences_and_bad_settings_are_told(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("This is one sentence of it.")
    with pytest.raises(BadConfig, match="too few for a batch of 8"):
        train_gad(tmp_path / "out", [str(tmp_path / "t.txt")], TINY, "cpu", quiet=True)
    for field, value in (("k", 0), ("steps", 0), ("mistakes", 1.5), ("share", -1)):
        with pytest.raises(BadConfig, match=f"{field}={value}: must be"):
            dataclasses.replace(TINY, **{field: value})
    with pytest.raises(BadConfig, match="hidden=33 must be a multiple"):
        dataclasses.replace(TINY, hidden=33)
    with pytest.raises(BadConfig, match="hidden=33: must be even"):
        dataclasses.replace(TINY, hidden=33, heads=3)
    with pytest.raises(BadConfig, match="context=11 must be at least twice k=6"):
        dataclasses.replace(TINY, context=11)
