"""The trainer of models that fill canvases: it learns, it resumes to the same weights, what it
writes is read as it was trained, and what wrote from left to right is made to fill canvases.
"""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import foretell
from foretell.core.masked_text import MASKED, make_look
from foretell.errors import BadConfig, BadFile
from foretell.models.diffusion.canvas import Denoiser
from foretell.train.answers import PIECE, Text, save_texts, write_texts
from foretell.train.diffusion import dlm
from foretell.train.diffusion.dlm import (
    Answers,
    DLMRun,
    TrainDLM,
    answers_in,
    new_model,
    pad_texts,
    train_dlm,
)
from foretell.train.diffusion.lists import LONGEST, Example, Lists
from foretell.train.diffusion.masking import OUTSIDE, Reader
from tests import tiny

TINY = TrainDLM(
    masks="count",
    hidden=16,
    layers=1,
    heads=2,
    intermediate=24,
    examples=12 * 8,
    batch=8,
    micro=512,
    warmup=2,
)
TUNED = replace(TINY, matrix_rate=0.0, rate=1e-3, examples=4 * 8, window=64)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    train_dlm(out, TINY, quiet=True)
    return out


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of the tiny model's tokens."""
    draw = np.random.default_rng(0)
    texts = []
    for number in range(80):
        tokens = draw.integers(1, 300, 12 + number % 5)
        none = np.zeros((len(tokens) - 4, 1))
        texts.append(Text(tokens, 4, none.astype(np.int64), none))
    path = tmp_path_factory.mktemp("answers") / "0.safetensors"
    save_texts(path, texts)
    return [path]


def log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def rows(model: Any, canvas: list[int]) -> torch.Tensor:
    """Of the masked positions, as decoding computes them."""
    wanted = [place for place, token in enumerate(canvas) if token == MASKED]
    cache = model.cache()
    job, _ = cache.prepare(make_look(canvas[0], canvas, wanted), canvas[:1], len(canvas))
    with torch.inference_mode():
        found: torch.Tensor = model.forward([job])[0].logits
    return found


def check_read_as_trained(model: Any, reader: Reader) -> None:
    """Rows of decoding are those that were trained."""
    assert isinstance(model, Denoiser)
    about = (reader.mask_id, reader.shift, reader.block)
    assert (model.mask_id, model.shift, model.block) == about
    canvas = [5, 9, 31, MASKED, MASKED, 12, MASKED, 3]
    ids = torch.tensor([canvas])
    masked = ids == MASKED
    with torch.inference_mode():
        trained = reader.logits(ids.clamp_min(0), masked)
    ours = rows(model, canvas).float().clone()
    ours[:, reader.mask_id] = -torch.inf
    assert torch.allclose(ours, trained, atol=0.02 * float(trained[trained > -1e9].abs().max()))


def test_it_learns_and_resumes_to_the_same_weights(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = [line["loss"] for line in log(made)]
    assert len(losses) == TINY.steps == 12
    assert np.mean(losses[-3:]) < losses[0] - 0.3
    report = json.loads((made / "report.json").read_text())
    assert report["examples_seen"] == TINY.examples
    assert set(report["right"]) == {"0.15", "0.5", "0.9"}

    advance, done = DLMRun.advance_on, 0

    def breaks(self: DLMRun) -> float:
        nonlocal done
        done += 1
        if done == 5:
            signal.raise_signal(signal.SIGINT)
        return advance(self)

    monkeypatch.setattr(DLMRun, "advance_on", breaks)
    with pytest.raises(KeyboardInterrupt):
        train_dlm(tmp_path / "parts", TINY, quiet=True)
    assert int(load_file(tmp_path / "parts" / "state.safetensors")["step"]) == 5
    train_dlm(tmp_path / "parts", TINY, quiet=True, workers=1)
    one, two = (load_file(folder / "state.safetensors") for folder in (made, tmp_path / "parts"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)
    with pytest.raises(BadConfig, match="other settings"):
        train_dlm(tmp_path / "parts", replace(TINY, seed=1), quiet=True)


def test_what_it_writes_fills_canvases(made: Path) -> None:
    lm = foretell.load(made / "model", dtype="float32", backend="torch")
    model: Any = lm.models["target"]
    check_read_as_trained(model, Reader(model.hf, 1))
    answer = lm.generate("Copy the list.", "threshold", max_new_tokens=8, ignore_eos=True)
    assert len(answer.tokens) == 8 and 1 not in answer.tokens
    text = 'Copy the list.\n\nList: ["Astrid"]\nAnswer:'
    assert lm.decode(lm.encode(text)) == text


@pytest.mark.parametrize(
    "more", [{}, {"masks": "rate"}, {"objective": "certainty", "certain": 4}, {"block": 5}], ids=str
)
def test_a_step_is_the_same_however_it_is_cut(more: dict[str, Any], tmp_path: Path) -> None:
    """Gradients of texts of three lengths, in forwards of one text and of all."""
    texts: Any = [Example(np.arange(3 + i, 15 + i + 2 * (i % 3)), 4 + i % 3) for i in range(6)]
    losses, gradients = [], []
    for micro in (16, 512):
        config = replace(TINY, batch=6, micro=micro, **more)
        folder = tmp_path / str(micro)
        folder.mkdir()
        run = DLMRun(folder, config, new_model(config, 40, 1, 0, 64), texts)
        run.update = lambda: None  # type: ignore[method-assign]
        losses.append(run.advance_on())
        gradients.append([p.grad for p in run.model.parameters()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    for one, two in zip(*gradients, strict=True):
        assert torch.allclose(one, two, atol=1e-4, rtol=1e-3) and one.abs().max() > 0


@pytest.mark.parametrize("objective", ["masked", "certainty"])
def test_in_half_precision_the_loss_is_nearly_the_same(objective: str, tmp_path: Path) -> None:
    runs = []
    for precision in ("float32", "bfloat16"):
        config = replace(TINY, objective=objective, precision=precision)
        folder = tmp_path / precision
        folder.mkdir()
        runs.append(DLMRun(folder, config, new_model(config, 2048, 1, 0, 512), Lists(0)))
    one, two = (run.advance_on() for run in runs)
    assert one == pytest.approx(two, rel=1e-2) and one != two


@pytest.mark.parametrize(("rank", "precision"), [(0, "float32"), (2, "float32"), (2, "bfloat16")])
def test_a_model_that_wrote_from_left_to_right_is_converted(
    rank: int, precision: str, answers: list[Path], tmp_path: Path
) -> None:
    lm = tiny.lm(draft=False)
    before = {n: p.clone() for n, p in lm.models["target"].hf.state_dict().items()}  # type: ignore[attr-defined]
    vocab = lm.models["target"].vocab
    config = replace(TUNED, rank=rank, masks="rate", precision=precision)
    report = train_dlm(tmp_path / "run", config, lm, answers, quiet=True)
    assert report["examples_seen"] == 32
    sizes = [p.numel() for p in lm.models["target"].hf.parameters()]  # type: ignore[attr-defined]
    adapted = 2 * 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))  # layers, rank, matrices
    assert report["parameters"] == (adapted if rank else sum(sizes) + 2 * 32), "a mask has two rows"
    again = foretell.load(tmp_path / "run" / "model", dtype="float32", backend="torch")
    model: Any = again.models["target"]
    assert (model.mask_id, model.shift, model.vocab) == (vocab, 1, vocab + 1)
    assert again.tokenizer.mask_token_id == vocab
    check_read_as_trained(model, Reader(model.hf, vocab, 1))
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    changed = {n for n, p in before.items() if not torch.equal(after[n][: len(p)], p.bfloat16())}
    assert any("q_proj" in name for name in changed)
    assert ("model.norm.weight" in changed) == (not rank)
    if rank:
        row = after["model.embed_tokens.weight"][vocab]
        assert torch.allclose(row.float(), before["model.embed_tokens.weight"].mean(0), atol=0.01)
        state = load_file(tmp_path / "run" / "state.safetensors")
        assert all(n.endswith((".a", ".b")) for n in state if n.startswith("model."))


def test_certainty_is_learnt_on_its_own_answers(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(TUNED, objective="certainty", certain=8, longest=8, window=200)

    def start() -> foretell.LM:
        return foretell.load(made / "model", dtype="float32", backend="torch")

    train_dlm(tmp_path / "run", config, start(), own=40, quiet=True)
    kept = load_file(tmp_path / "run" / "own.safetensors")
    assert len(kept["given"]) == 40
    lm = start()
    example = Lists(0)[3]
    prompt = example.ids[: example.given_count].tolist()
    told = lm.generate(prompt, "confidence:block=8", max_new_tokens=8, temperature=0.0)
    low, high = kept["starts"][3:5].tolist()
    cut = told.finish_reason == "length"
    own = told.tokens if cut else told.tokens[:-1]
    assert kept["ids"][low:high].tolist() == [*prompt, *own]
    assert kept["cut"][3] == cut
    monkeypatch.setattr(dlm, "own_answers", None)  # they are there
    train_dlm(tmp_path / "run", replace(config, examples=48), start(), own=40, quiet=True)
    assert [line["step"] for line in log(tmp_path / "run")] == [*range(1, 7)]
    model: Any = foretell.load(tmp_path / "run" / "model", dtype="float32").models["target"]
    assert (model.mask_id, model.shift) == (1, 0), "it fills canvases as it did"
    assert model.longest_canvas == LONGEST, "of lists, which the model it began with was taught"


def test_own_answers_of_an_earlier_version_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.safetensors"
    save_file({"ids": torch.arange(3), "starts": torch.tensor([0, 3])}, path)
    with pytest.raises(BadFile, match="earlier version; remove it"):
        dlm.keep_texts(path, list)


def words(text: Example) -> str:
    """Without ends after its first."""
    return " ".join(map(str, text.ids)).partition(" 0")[0] + " 0"


def test_answers_end_and_some_are_held_back() -> None:
    texts = [Example(np.full(5 + i % 3, 9), 2) for i in range(70)]
    data = Answers(texts, 0, 7, 1)
    assert len(data.held_back) == 2 and len(data.train) == 45, "those of 7 tokens are too long"
    turn = [data[i] for i in range(45)]
    for text, own in zip(sorted(map(words, turn)), sorted(map(words, data.train)), strict=True):
        assert text == own and text.endswith("9 0")
    assert [words(data[45 + i]) for i in range(45)] != [words(text) for text in turn]
    more = [len(text.ids) for text in turn if text.ids[-2] == 0]
    assert more and len(more) < 20 and max(more) == 7, "some have more ends, up to the window"
    ids, answers = pad_texts([data.train[0], Example(np.full(9, 4), 3)])
    assert ids.shape == answers.shape == (2, 9)
    length = len(data.train[0].ids)
    assert ids[0, length:].eq(OUTSIDE).all() and not ids[1].eq(OUTSIDE).any()
    assert answers[0].tolist() == [False] * 2 + [True] * (length - 2) + [False] * (9 - length)
    cut = Answers([Example(np.full(6, 9), 1, is_cut=True)] * 40, 0, 7, 1)
    assert all(len(cut[i].ids) == 6 for i in range(80)), "what goes on has no end"
    with pytest.raises(BadConfig, match="too few"):
        Answers(texts[:1], 0, 7, 1)


def test_answers_that_learn_certainty_fill_their_blocks_with_ends() -> None:
    """As canvases do, whose last block is never cut after the answer."""
    texts = [Example(np.full(5 + i % 5, 9), 2, is_cut=not i % 7) for i in range(70)]
    data = Answers(texts, 0, 30, 1, block=4)
    for text in (data[i] for i in range(2 * len(data.train))):
        answer = text.ids[text.given_count :].tolist()
        assert len(answer) <= data.longest == 8
        if text.is_cut:
            assert 0 not in answer
        else:
            ends = answer.count(0)
            assert len(answer) % 4 == 0 and 1 <= ends <= 4 and answer[-ends:] == [0] * ends


def test_pieces_of_plain_texts_are_cut_where_they_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text(json.dumps({"text": "ab " * 700}))
    files = write_texts(tiny.lm(draft=False).encode, [str(path)], tmp_path / "text", 10_000, 0)
    texts = answers_in(files, {0})
    assert {text.given_count for text in texts} == {1} and len(texts) > 1
    assert [text.is_cut for text in texts] == [len(text.ids) == PIECE for text in texts]
    assert any(text.is_cut for text in texts) and not all(text.is_cut for text in texts)


def test_answers_in_files_that_came_to_no_end_are_cut(tmp_path: Path) -> None:
    """Whoever learns from them puts one end after each of the others."""
    end = 9
    texts = []
    for tokens in ([1, 2, 3, 4, end], [1, 2, 3, 4, 5], [1, 2, end]):
        none = np.zeros((len(tokens) - 2, 1))
        texts.append(Text(np.array(tokens), 2, none.astype(np.int64), none))
    save_texts(tmp_path / "0.safetensors", texts)
    found = answers_in([tmp_path / "0.safetensors"], {end})
    assert [(text.ids.tolist(), text.is_cut) for text in found] == [
        ([1, 2, 3, 4], False),
        ([1, 2, 3, 4, 5], True),
    ]
    data = Answers([found[0]] * 40, end, 5, 0)
    assert data.held_back[0].ids.tolist() == [1, 2, 3, 4, end]
    assert Answers([found[1]] * 40, end, 5, 0).held_back[0].ids.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("layers", "left"), [(1, [0]), (2, [0, 4]), (3, [0, 2, 4]), (5, [*range(5)])]
)
def test_layers_are_left_out_at_even_distances(
    layers: int, left: list[int], answers: list[Path], tmp_path: Path
) -> None:
    lm = foretell.wrap(tiny.llama(num_hidden_layers=5), tiny.tokenizer(), None, "tiny")
    before: Any = lm.models["target"]
    config = replace(TUNED, cut=layers, examples=8, rate=1e-7)
    train_dlm(tmp_path / "run", config, lm, answers, quiet=True)
    model: Any = foretell.load(tmp_path / "run" / "model", dtype="float32").models["target"]
    assert len(model.hf.model.layers) == model.hf.config.num_hidden_layers == layers
    assert len(before.hf.model.layers) == 5, "the model to begin with is as it was"
    for own, place in zip(model.hf.model.layers, left, strict=True):
        one, two = (layer.mlp.up_proj.weight for layer in (own, before.hf.model.layers[place]))
        assert torch.allclose(one, two, atol=0.01)
    check_read_as_trained(model, Reader(model.hf, before.vocab, 1))
    with pytest.raises(BadConfig, match="at most 5, the model's layers"):
        train_dlm(tmp_path / "more", replace(config, cut=6), lm, answers, quiet=True)


def test_lists_stand_beside_the_answers(answers: list[Path], tmp_path: Path) -> None:
    config = replace(TUNED, window=400, examples=16, seed=5)
    lm = tiny.lm(draft=False)
    seen: list[Example] = []

    def watched(texts: Any, *others: Any) -> Answers:
        seen.extend(texts)
        return Answers(texts, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dlm, "Answers", watched)
        train_dlm(tmp_path / "run", config, lm, answers, quiet=True, lists=40)
    assert len(seen) == 120
    asked = [lm.decode(text.ids) for text in seen[80:]]
    assert any(text.endswith('"]') for text in asked) and all("Answer:" in text for text in asked)
    train_dlm(tmp_path / "alone", config, lm, quiet=True, lists=40)


def test_what_does_not_go_together_is_refused(tmp_path: Path, answers: list[Path]) -> None:
    with pytest.raises(BadConfig, match="give --init"):
        train_dlm(tmp_path / "a", replace(TINY, objective="certainty"))
    with pytest.raises(BadConfig, match="give --answers, --text or --lists N"):
        train_dlm(tmp_path / "b", TUNED, tiny.lm(draft=False))
    with pytest.raises(BadConfig, match="give --init"):
        train_dlm(tmp_path / "b", TUNED, lists=3)
    with pytest.raises(BadConfig, match="writes from left to right"):
        train_dlm(tmp_path / "c", TUNED, tiny.lm(draft=False), answers, own=3)
    with pytest.raises(BadConfig, match="device='nowhere' cannot be used"):
        train_dlm(tmp_path / "d", TINY, device="nowhere")
    for bad in (
        {"masks": "all"},
        {"objective": "kl"},
        {"rank": 4},
        {"beta": -1.0},
        {"heads": 3},
        {"precision": "int8"},
    ):
        with pytest.raises(BadConfig):
            replace(TINY, **bad)  # type: ignore[arg-type]
