"""train/heads/tuned.py: the target as it was and as it is, beside transformers' own forwards."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("peft", reason="needs foretell[lora]")

from foretell.errors import BadConfig
from foretell.train import answers
from foretell.train.heads.head import TrainHead
from foretell.train.heads.tuned import check_tuning, export_tuned, split_answers
from tests import tiny
from tests.train.heads.test_lud import PROMPT, model_of, random_text


def test_before_is_the_target_without_any_training() -> None:
    made = model_of()
    text = random_text(1)
    tokens = made.tokens(text)
    with torch.no_grad():
        made.norm.mul_(1.5)
        hf = tiny.lm().models["target"].hf  # type: ignore[attr-defined]
        wanted = hf(tokens[None]).logits[0]
        with made.original_target():
            before = made.logits(made.through.text(tokens)[1])
        now = made.logits(made.through.text(tokens)[1])
    torch.testing.assert_close(before, wanted)
    assert float((now - wanted).abs().max()) > 0.1
    assert torch.equal(made.norm, made.norm_before * 1.5)


def test_perplexity_is_that_of_the_answers_alone() -> None:
    made = model_of(0.0)
    texts = [random_text(seed) for seed in (2, 3)]
    hf = tiny.lm().models["target"].hf  # type: ignore[attr-defined]
    nats = []
    with torch.no_grad():
        for text in texts:
            tokens = torch.tensor(text.tokens.tolist())
            logs = hf(tokens[None]).logits[0].log_softmax(-1)
            nats += [-float(logs[i - 1, tokens[i]]) for i in range(PROMPT, len(tokens))]
    assert made.perplexity(texts) == pytest.approx(math.exp(np.mean(nats)), rel=1e-4)


def test_every_trained_weight_has_a_gradient_and_no_other() -> None:
    made = model_of()
    text = random_text(4)
    tokens = made.tokens(text)
    made.answer_loss(made.through.text(tokens)[1], tokens, PROMPT).backward()  # type: ignore[no-untyped-call]
    graded = {name for name, p in made.adapted.named_parameters() if p.grad is not None}
    assert graded == {name for name, p in made.adapted.named_parameters() if p.requires_grad}
    assert {name.rsplit(".", 3)[-3] for name in graded if "lora" in name} == {"lora_A", "lora_B"}
    assert len([name for name in graded if "lora" not in name]) == 1  # the last norm


def test_answers_are_cut_and_some_held_back(tmp_path: Path) -> None:
    path = tmp_path / "00000.safetensors"
    answers.save_texts(path, [random_text(seed) for seed in range(30)])
    learnt, held_back = split_answers([path], 16)
    assert len(learnt) + len(held_back) == 30 and held_back
    assert all(len(text.tokens) == 16 and len(text.top_tokens) == 13 for text in learnt)
    with pytest.raises(BadConfig, match="too few answers"):
        split_answers([path], 9)


def test_a_number_format_is_checked() -> None:
    with pytest.raises(BadConfig, match="merged='int8'"):
        check_tuning("int8")


def test_a_model_that_cannot_be_told_from_its_target_is_warned_of(tmp_path: Path) -> None:
    made, lm = model_of(), tiny.lm()
    lm.models["target"].tokenizer = None
    with pytest.warns(UserWarning, match="so little was trained"):
        export_tuned(lm, made, tmp_path, "float32", {}, {})


@pytest.mark.parametrize("kind", ["lud", "k-forcing"])
def test_the_trainer_of_heads_refuses_what_its_target_is_tuned_with(kind: str) -> None:
    with pytest.raises(BadConfig, match=f"kind='{kind}'.*`train {kind}` makes this one"):
        TrainHead(kind=kind)
