"""Training of encoders of contexts: what learns, what stays, where a run goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import foretell
from foretell import Contexts
from foretell.errors import BadConfig, BadModel, Unsupported
from foretell.kv.encoded.encoders import KINDS, body_from
from foretell.loading.wrap import wrap
from foretell.models.decoder.learning import copy_modules
from foretell.train.caches.compressor import (
    CompressorRun,
    Texts,
    TrainCompressor,
    begin_weights,
    compressor_loss,
    context_bits,
    logits_behind,
    measure_compressor,
    own_share,
    shape_of,
    share_won,
    train_compressor,
)
from tests import tiny

DOCUMENTS = [f"{text} {number} {text}" * 3 for number in range(20) for text in tiny.TEXTS]
QUICK = TrainCompressor(
    layers=1,
    window=16,
    length=24,
    following=24,
    texts=96,
    batch=4,
    micro=2,
    held=4,
    warmup=1,
    rate=0.01,
    outer_rate=0.01,
)


def model(**more: Any) -> Any:
    return wrap(tiny.llama(**more), tiny.tokenizer(), name="tiny")


@pytest.mark.parametrize("kind", ["arc-encoder", "lclm"])
def test_the_encoder_learns_and_the_target_stays(tmp_path: Path, kind: str) -> None:
    lm = model()
    before = {name: p.clone() for name, p in lm.models["target"].hf.state_dict().items()}
    config = replace(QUICK, kind=kind)
    first = train_compressor(
        lm, DOCUMENTS, tmp_path / "none", replace(config, rate=0, outer_rate=0), 300, True
    )
    report = train_compressor(lm, DOCUMENTS, tmp_path / "run", config, quiet=True)
    assert report["bits_per_byte"]["compressed"] < first["bits_per_byte"]["compressed"]
    for name in ("full", "none", "raw"):
        assert report["bits_per_byte"][name] == first["bits_per_byte"][name]
    assert report["rows"] == {"arc-encoder": 7, "lclm": 8}[kind]
    now = lm.models["target"].hf.state_dict()
    assert all(torch.equal(weight, now[name]) for name, weight in before.items())
    assert json.loads((tmp_path / "run" / "report.json").read_text()) == report
    folder = tmp_path / "run" / "compressor"
    kv = f"{kind}:folder={folder}"
    assert lm.generate(Contexts([tiny.TEXTS[1]], "A"), "plain", max_new_tokens=4, kv=kv).tokens
    told = measure_compressor(lm, kind, folder, DOCUMENTS, 24, 24, 4)
    assert told["texts"] == 4 and told["rows"] == report["rows"]
    other = model()
    with torch.no_grad():
        other.models["target"].loop.norm.weight.add_(0.5)
    with pytest.raises(BadModel, match="other weights"):
        other.generate(Contexts([tiny.TEXTS[1]], "A"), "plain", max_new_tokens=4, kv=kv)


def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    lm = model()
    whole = train_compressor(
        lm, DOCUMENTS, tmp_path / "whole", replace(QUICK, texts=16), quiet=True
    )
    texts = Texts.of(lm, DOCUMENTS, replace(QUICK, texts=16))
    shape, body = shape_of(lm.models["target"], QUICK)
    torch.manual_seed(0)
    compressor = KINDS["arc-encoder"](shape, body)
    (tmp_path / "cut").mkdir()
    hf = copy_modules(lm.models["target"])
    run = CompressorRun(tmp_path / "cut", replace(QUICK, texts=16), compressor, hf)
    begin_weights(compressor, hf.get_input_embeddings().weight, texts.learnt[:64, :24])
    for _ in range(2):
        run.learn(texts)
    run.save()
    assert (
        train_compressor(lm, DOCUMENTS, tmp_path / "cut", replace(QUICK, texts=16), quiet=True)
        == whole
    )
    with pytest.raises(BadConfig, match="a run with other settings"):
        train_compressor(
            lm, DOCUMENTS, tmp_path / "cut", replace(QUICK, texts=16, ratio=2), quiet=True
        )


def test_three_stages_begin_with_the_adapter_and_end_with_the_decoder(tmp_path: Path) -> None:
    lm = model()
    config = replace(QUICK, kind="lclm", texts=12, alone=0.34, whole=0.34, target_rate=0.01)
    assert (config.steps, config.adapter_steps, config.fixed_steps) == (3, 1, 2)
    assert replace(config, whole=0).fixed_steps == 3
    texts = Texts.of(lm, DOCUMENTS, config)
    shape, body = shape_of(lm.models["target"], config)
    compressor: Any = KINDS["lclm"](shape, body)
    run = CompressorRun(tmp_path, config, compressor, copy_modules(lm.models["target"]))
    seen = []
    for _ in range(3):
        before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
        run.learn(texts)
        now = run.model.named_parameters()
        changed = {name for name, p in now if not torch.equal(p, before[name])}
        parts = ("hf.", "compressor.body.", "compressor.first.")
        seen.append([any(name.startswith(part) for name in changed) for part in parts])
    assert seen == [[False, False, True], [False, True, True], [True, True, True]]


def test_a_decoder_that_learnt_is_a_model_of_its_own(tmp_path: Path) -> None:
    lm = model()
    config = replace(QUICK, kind="lclm", texts=12, whole=0.5, target_rate=0.01)
    before = lm.models["target"].hf.state_dict()["model.norm.weight"].clone()
    report = train_compressor(lm, DOCUMENTS, tmp_path / "run", config, quiet=True)
    assert torch.equal(lm.models["target"].hf.state_dict()["model.norm.weight"], before)
    assert report["parameters"] > lm.models["target"].hf.num_parameters()
    tuned = foretell.load(tmp_path / "run" / "model", dtype="float32", backend="torch")
    kv = f"lclm:folder={tmp_path / 'run' / 'compressor'}"
    question = Contexts([tiny.TEXTS[1]], "A")
    assert tuned.generate(question, "plain", max_new_tokens=4, kv=kv).tokens
    with pytest.raises(BadModel, match="other weights"):
        lm.generate(question, "plain", max_new_tokens=4, kv=kv)


def test_a_projection_begins_as_the_mean_embedding() -> None:
    """Where an encoder without layers leaves the means, it can give them as they are."""
    lm = model()
    config = replace(QUICK, width=32)
    shape, _ = shape_of(lm.models["target"], config)
    body, told = body_from(lm.models["target"], 0)
    compressor: Any = KINDS["arc-encoder"](replace(shape, body=told), body)
    texts = Texts.of(lm, DOCUMENTS, config).learnt[:, :24]
    table = lm.models["target"].hf.get_input_embeddings().weight
    begin_weights(compressor, table, texts)
    want = compressor.encode_ids(texts[:1])
    got = compressor(texts[:1])
    assert (got[:, :-1] - want).abs().max() < 0.05 * want.abs().max()
    assert torch.allclose(got[0, -1], table[texts.flatten()].mean(0))


def test_bits_of_rows_that_are_the_tokens_are_those_of_a_full_context() -> None:
    lm = model()
    hf = lm.models["target"].hf
    shape, _ = shape_of(lm.models["target"], QUICK)
    body, told = body_from(lm.models["target"], 0)
    shape = replace(shape, ratio=1, width=32, marks=False, body=told)
    compressor: Any = KINDS["arc-encoder"](shape, body)
    with torch.no_grad():
        for matrix in (compressor.narrow, compressor.wide):
            matrix.weight.copy_(torch.eye(32))
    texts = Texts.of(lm, DOCUMENTS, QUICK).held_out
    told_bits = context_bits(lm, hf, compressor, texts, 24)
    assert told_bits["compressed"] == pytest.approx(told_bits["full"], rel=0.05)
    assert told_bits["raw"] == told_bits["full"] != told_bits["none"]
    shares = {"full": 1.0, "none": 2.0, "compressed": 1.25, "another": 1.75}
    assert share_won(shares) == 0.75 and own_share(shares) == 0.5
    goal = texts[:1, 24:]
    with torch.no_grad():
        behind = logits_behind(hf, compressor(texts[:1, :24]), goal, 1.0)
        plain = hf(input_ids=texts[:1]).logits[:, 23:-1]
        assert torch.allclose(behind, plain, atol=1e-4)
        repeated = compressor_loss(hf, compressor, texts[:1], 24, True)
        whole = torch.cat([texts[:1, :24], texts[:1, :24]], 1)
        rows = hf(input_ids=whole).logits[:, 23:-1]
    want = torch.nn.functional.cross_entropy(rows[0], texts[0, :24])
    assert float(repeated) == pytest.approx(float(want), rel=0.05)


def test_every_text_comes_as_often_as_the_others(tmp_path: Path) -> None:
    lm = model()
    config = replace(QUICK, texts=32)
    texts = Texts.of(lm, DOCUMENTS, config)
    assert texts.learnt.shape == (32, 48) and texts.held_out.shape == (4, 48)
    rows = [
        tuple(r) for s in range(8) for p in range(2) for r in texts.batch(s, p, config).tolist()
    ]
    assert sorted(rows) == sorted(map(tuple, texts.learnt.tolist()))


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    lm = model()
    for fields in (
        {"kind": "x"},
        {"ratio": 0},
        {"window": 18},
        {"length": 1},
        {"repeat": 2.0},
        {"batch": 3},
        {"whole": 0.5},
    ):
        with pytest.raises(BadConfig, match=next(iter(fields))):
            TrainCompressor(**fields)  # type: ignore[arg-type]
    with pytest.raises(BadConfig, match="layers=9: must be at most 2"):
        train_compressor(lm, DOCUMENTS, tmp_path, replace(QUICK, layers=9))
    with pytest.raises(BadConfig, match="length=200"):
        train_compressor(lm, DOCUMENTS, tmp_path, replace(QUICK, length=200))
    with pytest.raises(BadConfig, match="texts are too few"):
        train_compressor(lm, DOCUMENTS[:1], tmp_path, QUICK)
    with pytest.raises(Unsupported, match="train compressor"):
        train_compressor(wrap(tiny.gpt2(), tiny.tokenizer()), DOCUMENTS, tmp_path, QUICK)
    assert not any(tmp_path.iterdir())
