"""Training a model of blocks: it learns, resumes to the same weights, and its losses are added with
the weights that are named.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import foretell
from foretell.errors import BadConfig
from foretell.models.decoder.blockffn import watch_routers
from foretell.ops.expert_blocks import chunk_loss, locality_loss
from foretell.train.blockffn import (
    BlocksRun,
    TrainBlockFFN,
    build_blockffn,
    measure_texts,
    train_blockffn,
)
from foretell.train.lm import text_loss

TINY = TrainBlockFFN(
    hidden=16,
    layers=2,
    heads=2,
    kv_heads=1,
    blocks=4,
    width=4,
    chunk=16,
    adapt=3,
    vocab_size=300,
    context=32,
    tokens=12 * 64,
    batch=64,
    micro=32,
    warmup=2,
    windows=3,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("text") / "t.jsonl"
    rows = [
        {"text": f"line {i % 3} of the text, and line {i % 3} again\n" * 12, "path": f"d/{i}"}
        for i in range(300)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(path)]


def test_learns_and_resumes_to_the_same_weights(
    tmp_path: Path, text: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str, config: TrainBlockFFN = TINY) -> dict[str, Any]:
        return train_blockffn(tmp_path / "corpus", tmp_path / name, config, text, 0, quiet=True)

    report = run("whole")
    lines = (tmp_path / "whole" / "log.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert len(losses) == TINY.steps == 12 and losses[-1] < losses[0] - 0.5
    assert report == json.loads((tmp_path / "whole" / "report.json").read_text())
    shares = report["heldout"]["sparsity"]
    assert [*shares] == ["1", "2", "4", "8", "16", "32"]
    assert 1 > shares["1"] >= shares["8"] >= shares["32"] >= 0
    assert report["chunk_weight"] != TINY.chunk_weight  # it followed the loss

    done, advance = 0, BlocksRun.advance

    def breaks(self: Any, *rest: Any) -> float:
        nonlocal done
        done += 1
        if done == 8:  # in the middle of a window
            raise KeyboardInterrupt
        return advance(self, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(BlocksRun, "advance", breaks)
        with pytest.raises(KeyboardInterrupt):
            run("parts")
    run("parts")
    one, two = (load_file(tmp_path / name / "state.safetensors") for name in ("whole", "parts"))
    assert one.keys() == two.keys() and "extra.chunk_weight" in one
    assert all(torch.equal(one[key], two[key]) for key in one)
    lm = foretell.load(tmp_path / "whole" / "model")
    plain = lm.generate("line 1 of", method="plain", max_new_tokens=8).tokens
    assert lm.generate("line 1 of", method="ngram", max_new_tokens=8).tokens == plain


def test_losses_are_added_with_their_weights(tmp_path: Path) -> None:
    model = build_blockffn(TINY, end=0)
    ids = torch.randint(300, (2, 33), generator=torch.Generator().manual_seed(0))
    with watch_routers() as seen:
        alone = float(text_loss(model, None, ids).detach())
    local = sum(float(locality_loss(logits, 100.0).detach()) for logits in seen) / 2
    chunk = sum(float(chunk_loss(logits, 16).detach()) for logits in seen) / 2
    for weights in ((0.0, 0.0), (0.5, 0.0), (0.0, 0.25), (0.5, 0.25)):
        config = replace(TINY, locality_weight=weights[0], chunk_weight=weights[1])
        folder = tmp_path / str(weights)
        folder.mkdir()
        run = BlocksRun(folder, config, model, model.model.layers)
        found = float(run.loss(model, None, ids).detach())
        assert found == pytest.approx(alone + weights[0] * local + weights[1] * chunk, rel=1e-4)


def test_what_is_measured_is_counted_by_hand() -> None:
    model = build_blockffn(TINY, end=0).eval()
    texts = torch.randint(300, (2, 33), generator=torch.Generator().manual_seed(0))
    found = measure_texts(model, texts)
    nats, shares = [], []
    for text in texts:
        with torch.no_grad(), watch_routers() as seen:
            rows = model(input_ids=text[None, :-1]).logits[0].log_softmax(-1)
        nats += [-float(rows[i, text[i + 1]]) for i in range(32)]
        for logits in seen:
            for first in range(0, 32, 8):
                shares += (~(logits[0, first : first + 8] > 0).any(0)).float().tolist()
    assert found["loss"] == pytest.approx(sum(nats) / len(nats), abs=2e-5)
    assert found["sparsity"]["8"] == pytest.approx(sum(shares) / len(shares), abs=1e-4)


@pytest.mark.parametrize(
    "change", [{"heads": 3}, {"blocks": 0}, {"chunk": 24}, {"micro": 48}, {"chunk_weight": -0.1}]
)
def test_other_shapes_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BadConfig):
        replace(TINY, **change)


def test_too_few_texts_are_refused(tmp_path: Path, text: list[str]) -> None:
    config = replace(TINY, context=16384, batch=16384, micro=16384)
    with pytest.raises(BadConfig, match="too few"):
        train_blockffn(tmp_path / "corpus", tmp_path / "out", config, text, quiet=True)
