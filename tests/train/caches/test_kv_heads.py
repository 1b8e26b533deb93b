"""Heads that are merged: what is chosen, what is lost, what learns, and the folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import foretell
from foretell.errors import BadConfig, Unsupported
from foretell.loading.wrap import wrap
from foretell.testing.toy import Toy
from foretell.train.caches.kv_heads import (
    Corpus,
    TrainKVHeads,
    choose_learning,
    compress_heads,
    train_kv_heads,
)
from tests import tiny
from tests.models.decoder import families

DOCUMENTS = [f"{text} {number} {text}" for number in range(20) for text in tiny.TEXTS]
QUICK = TrainKVHeads(
    length=32, window=32, micro=32, batch=64, tokens=768, held=300, warmup=1, rate=0.01
)


def model(**more: Any) -> Any:
    """An LM of fused layers by torch."""
    lm = wrap(tiny.llama(**more), tiny.tokenizer(), name="tiny")
    assert lm.models["target"].fused  # type: ignore[attr-defined]
    return lm


@pytest.mark.parametrize("tune", ["none", "lora", "attention", "all"])
def test_a_setting_decides_what_learns(tmp_path: Path, tune: str) -> None:
    lm = model()
    before = {name: p.clone() for name, p in lm.models["target"].hf.state_dict().items()}
    told: list[tuple[str, int, int | None]] = []

    def tell(what: str, done: int, total: int | None) -> None:
        told.append((what, done, total))

    config = replace(QUICK, tune=tune, stored="float32")
    report = train_kv_heads(lm, DOCUMENTS, tmp_path, config, quiet=True, tell=tell)
    assert told[0][0] == "reading" and told[-1][1] + 1 == told[-1][2]
    now = lm.models["target"].hf.state_dict()
    assert all(torch.equal(weight, now[name]) for name, weight in before.items())
    assert report["heads"] == {"before": 2, "after": 1}
    found = foretell.load(tmp_path / "model", backend="torch")
    hf: Any = found.models["target"].hf  # type: ignore[attr-defined]
    assert found.models["target"].layout == ((1, 8, 8),) * 2
    other = tmp_path / "before"
    train_kv_heads(lm, DOCUMENTS, other, replace(config, tune="none"), quiet=True)
    start: Any = foretell.load(other / "model", backend="torch").models["target"]
    same = {
        name for name, weight in start.hf.state_dict().items()
        if torch.equal(weight, hf.state_dict()[name])
    }  # fmt: skip
    changed = {name for name in hf.state_dict() if name not in same}
    wanted = {
        "none": lambda name: False,
        "lora": lambda name: "_proj" in name,
        "attention": lambda name: "self_attn" in name,
        "all": lambda name: True,
    }[tune]
    assert changed == {name for name in hf.state_dict() if wanted(name)}
    if tune != "none":
        assert report["perplexity"]["tuned"] < report["perplexity"]["merged"]
        assert json.loads((tmp_path / "report.json").read_text()) == report
        again = train_kv_heads(lm, DOCUMENTS, tmp_path, config, quiet=True)
        assert again["perplexity"] == report["perplexity"]


def test_what_is_lost_is_least_where_nothing_hinders_it(tmp_path: Path) -> None:
    lm = model(num_key_value_heads=4)
    lost = {}
    for basis in ("svd", "folded", "mean"):
        config = replace(QUICK, basis=basis, tune="none", merge=4)
        report = train_kv_heads(lm, DOCUMENTS, tmp_path / basis, config, quiet=True)
        lost[basis] = report["lost"]["keys"]
        loaded = foretell.load(tmp_path / basis / "model", backend="torch")
        assert loaded.models["target"].layout == ((1, 8, 8),) * 2
    assert lost["svd"] < lost["folded"] < lost["mean"]
    ordinary = json.loads((tmp_path / "folded" / "model" / "config.json").read_text())
    assert ordinary["num_key_value_heads"] == 1 and "key_projection" not in ordinary


def test_the_loss_reaches_every_matrix_that_was_changed() -> None:
    lm = model()
    width = (2, 2, 1, 2, 8, 8)
    hf = compress_heads(lm.models["target"].hf, torch.rand(width, dtype=torch.float64), False)
    choose_learning(hf, QUICK)
    hf(torch.tensor([[1, 2, 3, 4]])).logits.sum().backward()
    learns = {name for name, p in hf.named_parameters() if p.requires_grad}
    assert all(bool(p.grad.any()) for p in hf.parameters() if p.requires_grad)
    assert "model.layers.0.self_attn.key_basis" in learns
    assert all("self_attn" in name for name in learns) and len(learns) == 10


def test_documents_are_held_out_whole() -> None:
    lm = model()
    config = replace(QUICK, tokens=1 << 20, held=1 << 20)
    corpus = Corpus.of(lm, DOCUMENTS, config)
    assert len(corpus.documents) == len(DOCUMENTS) - 4
    whole = [lm.encode(text, special=False) for text in DOCUMENTS]
    assert len(corpus.learnt) + len(corpus.held_out) == sum(map(len, whole)) + len(DOCUMENTS)
    missing = [text for text in DOCUMENTS if text not in corpus.documents]
    held = "".join(lm.decode(corpus.held_out.tolist()) for _ in range(1))
    assert all(text in held for text in missing)


def test_what_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    lm = model()
    with pytest.raises(BadConfig, match=r"merge=3: must be a divisor of the 2 key heads.*1, 2"):
        train_kv_heads(lm, DOCUMENTS, tmp_path, replace(QUICK, merge=3))
    normed = wrap(families.tiny("qwen3"), None, name="normed")
    with pytest.raises(Unsupported, match=r"basis=folded.*no norm follows"):
        train_kv_heads(normed, DOCUMENTS, tmp_path, replace(QUICK, basis="folded"))
    for other in (foretell.LM(Toy(8)), wrap(tiny.gpt2(), tiny.tokenizer())):
        with pytest.raises(Unsupported, match=r"train kv-heads.*llama family's build"):
            train_kv_heads(other, DOCUMENTS, tmp_path, QUICK)
    with pytest.raises(BadConfig, match="texts are too few"):
        train_kv_heads(lm, DOCUMENTS[:1], tmp_path, QUICK)
    for fields in ({"basis": "pca"}, {"tune": "some"}, {"merge": 0}, {"stored": "int3"}):
        with pytest.raises(BadConfig, match=next(iter(fields))):
            TrainKVHeads(**fields)  # type: ignore[arg-type]
    with pytest.raises(BadConfig, match="multiple of micro"):
        replace(QUICK, micro=48)
    assert not any(tmp_path.iterdir())
