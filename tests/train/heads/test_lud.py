"""train/heads/lud.py: what units are, what is minimised, and what is written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("peft", reason="needs foretell[lora]")

import foretell
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.drafters.heads.networks.folder import build_head, target_shape
from foretell.errors import BadConfig
from foretell.strategies.parallel.lud import Lud
from foretell.train import answers
from foretell.train.heads.lud import (
    TrainLud,
    measure_rows,
    train_lud,
    unit_loss,
    unit_rows,
    units_of,
)
from foretell.train.heads.tuned import Tuned, TunedRun
from tests import tiny
from tests.cache.users import run

PROMPT, LENGTH = 3, 20
SETTINGS = TrainLud(
    k=3, rank=4, alpha=8, tokens=128 * 3, batch=128, window=32, rate=0.01, warmup=1, units=99
)


def text_of(tokens: list[int], chances: list[float], prompt: int = PROMPT) -> answers.Text:
    """An answer whose tokens have these probabilities; the best one is another where it is below
    half.
    """
    own = np.array(tokens[prompt:], np.int32)
    best = np.where(np.array(chances) > 0.5, own, own + 1)[:, None].astype(np.int32)
    logs = np.log(np.maximum(chances, 1 - np.array(chances)))[:, None].astype(np.float16)
    return answers.Text(np.array(tokens, np.int32), prompt, best, logs)


def random_text(seed: int) -> answers.Text:
    draw = np.random.default_rng(seed)
    tokens = draw.integers(1, 60, LENGTH).tolist()
    return text_of(tokens, draw.choice([0.3, 0.95, 0.99], LENGTH - PROMPT).tolist())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    path = tmp_path_factory.mktemp("answers") / "00000.safetensors"
    answers.save_texts(path, [random_text(seed) for seed in range(12)])
    return [path]


def model_of(moved: float = 0.05) -> Tuned:
    """A target with adapters that have been moved from doing nothing, and a PAD row."""
    target: Any = tiny.lm().models["target"]
    head: Any = build_head("lud", target_shape(target), {"rows": SETTINGS.k - 1})
    torch.manual_seed(1)
    head.take_weights(target)
    made = Tuned(target, head, SETTINGS)
    with torch.no_grad():
        head.vectors.normal_()
        for name, p in made.adapted.named_parameters():
            if "lora_B" in name:
                p.normal_(std=moved)
    made.adapted.eval()
    return made


def test_units_are_runs_of_tokens_that_were_sure() -> None:
    chances = [0.99, 0.95, 0.4, 0.91, 0.89, 0.9, 0.99, 0.99, 0.99, 0.99, 0.2]
    text = text_of([*range(10, 10 + 3 + len(chances))], chances)
    assert units_of(text, 0.9, 16) == [(3, 2), (5, 2), (7, 6), (13, 1)]
    assert units_of(text, 0.9, 4) == [(3, 2), (5, 2), (7, 4), (11, 2), (13, 1)]
    units = units_of(text, 0.9, 4)
    assert [p for first, n in units for p in range(first, first + n)] == [*range(3, 14)]
    below, places = unit_rows(units, 99, 0)
    assert below.tolist() == [2, 4, 6, 6, 6, 10] and places.tolist() == [0, 0, 0, 1, 2, 0]
    some, _ = unit_rows(units, 2, 0)
    assert len({*some.tolist()}) == 2 and {*some.tolist()} < {*below.tolist()}
    assert unit_rows([(3, 1)], 2, 0)[0].shape == (0,)


def test_the_loss_is_that_of_whole_forwards() -> None:
    """By a loop over units, each after an own forward of the text before it."""
    made, text = model_of(), random_text(5)
    found = float(unit_loss(made, text, SETTINGS, 0).detach())
    hf: Any = made.through.layers and made.adapted.base_model.model
    tokens = torch.tensor(text.tokens.tolist())
    with torch.no_grad():
        logs = hf(tokens[None]).logits[0].log_softmax(-1)
        plain = [-float(logs[i - 1, tokens[i]]) for i in range(PROMPT, LENGTH)]
        rows = []
        for first, size in units_of(text, SETTINGS.sure, SETTINGS.k):
            inputs = hf.get_input_embeddings()(tokens[:first])
            pads = made.head.vectors.expand(size - 1, -1)
            own = hf(inputs_embeds=torch.cat([inputs, pads])[None]).logits[0].log_softmax(-1)
            rows += [-float(own[first + i, tokens[first + 1 + i]]) for i in range(size - 1)]
    assert len(rows) > 4
    assert found == pytest.approx(np.mean(plain) + np.mean(rows), rel=1e-4)


def test_rows_never_change_the_text_and_learn_it_by_heart() -> None:
    made, text = model_of(0.0), random_text(6)
    optimiser = torch.optim.Adam([*made.tuned_parameters, *made.head.parameters()], lr=0.02)
    first = last = 0.0
    for _ in range(40):
        loss = unit_loss(made, text, SETTINGS, 0)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        first, last = first or loss.item(), loss.item()
    assert last < 0.2 * first
    assert measure_rows(made, [text], SETTINGS)[0] == [1.0, 1.0]


def test_without_units_the_text_alone_is_learnt() -> None:
    made = model_of()
    text = text_of([*range(5, 20)], [0.3] * 12)
    with torch.no_grad():
        tokens = made.tokens(text)
        alone = made.answer_loss(made.through.text(tokens)[1], tokens, PROMPT)
        assert torch.equal(unit_loss(made, text, SETTINGS, 0), alone)


def test_what_is_written_is_a_model_with_rows_of_its_own(files: list[Path], tmp_path: Path) -> None:
    report = train_lud(tiny.lm(), files, tmp_path / "run", SETTINGS, quiet=True, merged="float32")
    assert report["tokens_seen"] == 384 and len(report["hits"]) == len(report["wrong"]) == 2
    assert report["tokens_a_unit"] > 1
    told = json.loads((tmp_path / "run" / "report.json").read_text())
    assert told["perplexity"]["after"] != told["perplexity"]["before"]
    tuned = foretell.load(str(tmp_path / "run" / "model"), dtype="float32")
    strategy = Lud(head=str(tmp_path / "run" / "head"), beta=0.0)
    sampling = Sampling(max_new_tokens=9, temperature=0.0)
    (live,) = run(tuned.models, Request([1, 2, 3], strategy, sampling))
    assert live.ctx.stats.calls["target"] < 9  # a head of two rows says three tokens a step
    with pytest.raises(foretell.errors.BadModel, match="weights other than those of"):
        strategy.bring(tiny.lm().models)


def test_stopped_and_run_again_it_is_the_same(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_lud(tiny.lm(), files, tmp_path / "whole", SETTINGS, quiet=True)
    right, steps = TunedRun.advance_on, []

    def stopping(self: TunedRun, *args: Any) -> float:
        steps.append(self.step)
        if len(steps) == 3:
            self.save()
            raise KeyboardInterrupt
        return right(self, *args)

    monkeypatch.setattr(TunedRun, "advance_on", stopping)
    with pytest.raises(KeyboardInterrupt):
        train_lud(tiny.lm(), files, tmp_path / "parts", SETTINGS, quiet=True)
    monkeypatch.undo()
    train_lud(tiny.lm(), files, tmp_path / "parts", SETTINGS, quiet=True)
    for part in ("model", "head"):
        one, other = (tmp_path / name / part / "model.safetensors" for name in ("whole", "parts"))
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize(
    ("field", "value"), [("k", 1), ("sure", 0.5), ("sure", 1.0), ("units", 0), ("batch", 16)]
)
def test_settings_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(BadConfig, match=f"{field}={value}"):
        dataclasses.replace(SETTINGS, **{field: value})  # type: ignore[arg-type]
