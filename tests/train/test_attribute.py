"""What the classifier of conditional-beam is learnt from, by hand, and that it is learnt."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.api.lm import LM
from foretell.errors import BadConfig, Unsupported
from foretell.testing.toy import Toy
from foretell.train import attribute as trainer
from foretell.train import judge
from foretell.train.attribute import TrainAttribute, answers_to, label_beginnings, train_attribute
from foretell.verification.judge_model import load_judge
from tests import tiny
from tests.strategies.lookahead.test_contrastive import fresh_states

PROMPTS = [[1 + i % 5, 2 + i // 5, 3, 1 + i % 3] for i in range(30)]


def lm(seed: int = 1) -> LM:
    made = LM(Toy(8, seed, sharpness=3.0, copy=1.0))
    made.engine.eos = (0,)
    made.decode = lambda tokens: "x" * len(tokens)  # type: ignore[method-assign]
    return made


def told(*_: Any) -> None:
    pass


def test_beginnings_have_the_states_and_the_label_of_their_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ids = lm(), PROMPTS[0]
    config = TrainAttribute(grams=2, answer_tokens=9, beams=3, samples=3)
    texts = answers_to(model, ids, config)
    assert len(texts) == len({tuple(text) for text in texts}) and all(texts)
    found = model.generate(ids, "beam:width=3,penalty=0", max_new_tokens=9).samples
    assert [one.tokens for one in found] == texts[: len(found)]
    monkeypatch.setattr(trainer, "PLACES", 3)
    states, good = label_beginnings(model, ids, config)
    rows, labels = [], []
    for text in texts:
        own = text[:-1] if text[-1] == 0 else text
        pairs = list(itertools.pairwise(own))
        every = fresh_states(Toy(8, 1, sharpness=3.0, copy=1.0), [*ids, *text])[len(ids) :]
        places = [round((i + 1) * len(text) / 3) - 1 for i in range(3)] if len(text) > 3 else []
        rows += [every[place] for place in places or range(len(text))]
        labels += [float(bool(own) and len(set(pairs)) == len(pairs))] * min(3, len(text))
    assert states.tolist() == torch.tensor(rows).tolist() and good.tolist() == labels
    assert 0 < float(good.mean()) < 1


def test_it_learns_what_the_states_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels that are a function of the state are learnt, and the file is a classifier's."""
    real = trainer.label_beginnings

    def by_state(*args: Any) -> trainer.Labelled:
        states, _ = real(*args)
        return states, (states @ torch.tensor([2.0, -1.0]) > 0.1).float()

    config = TrainAttribute(answer_tokens=6, beams=2, samples=2)
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "label_beginnings", by_state)
        report = train_attribute(lm(), PROMPTS, tmp_path / "a.safetensors", config, told)
    made = load_judge(tmp_path / "a.safetensors")
    assert report["prompts"] == 30 and report["auc"] > 0.95 and made.width == 2
    assert made.good_chances(torch.tensor([[3.0, 0.0], [-3.0, 0.0]])) == pytest.approx(
        [1, 0], abs=0.05
    )


def test_what_cannot_be_learnt_is_told(tmp_path: Path) -> None:
    few = TrainAttribute(answer_tokens=6, beams=2, samples=2)
    with pytest.raises(BadConfig, match="3 prompts gave texts, too few"):
        train_attribute(lm(), PROMPTS[:3], tmp_path / "a", few, told)
    with pytest.raises(BadConfig, match="there is nothing to learn"):
        TrainAttribute(least=0, grams=0)
    with pytest.raises(BadConfig, match="there is nothing to learn"):
        TrainAttribute(beams=0, samples=0)
    with pytest.raises(BadConfig, match="attribute:pattern"):
        TrainAttribute(pattern="(")
    with pytest.raises(BadConfig, match="answer_tokens=0"):
        TrainAttribute(answer_tokens=0)
    model = lm()
    model.models["target"].caps = model.models["target"].caps - {"taps"}
    with pytest.raises(Unsupported, match="hidden states"):
        train_attribute(model, PROMPTS, tmp_path / "a", few, told)


def test_a_trained_classifier_ranks_beams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "STRENGTHS", (0.01,))  # one try, for time
    model = tiny.lm(draft=False)
    config = TrainAttribute(grams=1, answer_tokens=8, beams=2, samples=2)
    texts = [f"def f{i}(a):" for i in range(24)]
    path = tmp_path / "a.safetensors"
    train_attribute(model, texts, path, config, told)
    spec = f"conditional-beam:attribute={path},weight=5,least=0,grams=0,width=3"
    ranked = model.generate(texts[0], spec, max_new_tokens=8)
    assert ranked.tokens and ranked.score is not None
