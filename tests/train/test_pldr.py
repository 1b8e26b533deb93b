"""Training a PLDR-LLM: it learns and resumes, its folders load, and what a cached metric costs is
measured on the right rows.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import foretell
from foretell.errors import BadConfig
from foretell.models.decoder.pldr_model import (
    PldrForCausalLM,
    fixed_metrics,
    infer_metrics,
    metrics_from,
)
from foretell.train.pldr import (
    LEAST,
    PldrRun,
    TrainPLDR,
    build_pldr,
    measure_metrics,
    second_half_loss,
    train_pldr,
)

TINY = TrainPLDR(
    layers=1,
    heads=2,
    width=8,
    units=1,
    inner=8,
    vocab_size=300,
    context=32,
    tokens=12 * 64,
    batch=64,
    micro=32,
    rate=0.02,
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


def test_learns_resumes_and_writes_two_models(
    tmp_path: Path, text: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str, config: TrainPLDR = TINY) -> dict[str, Any]:
        return train_pldr(tmp_path / "corpus", tmp_path / name, config, text, quiet=True)

    report = run("whole")
    lines = (tmp_path / "whole" / "log.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert len(losses) == TINY.steps == 12 and losses[-1] < losses[0] - 0.3
    assert report == json.loads((tmp_path / "whole" / "report.json").read_text())
    assert 0 < report["heldout_bits_per_byte"]["all"] < 8

    done, advance = 0, PldrRun.advance

    def breaks(self: Any, *rest: Any) -> float:
        nonlocal done
        done += 1
        if done == 6:
            raise KeyboardInterrupt
        return advance(self, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(PldrRun, "advance", breaks)
        with pytest.raises(KeyboardInterrupt):
            train_pldr(
                tmp_path / "corpus", tmp_path / "parts", TINY, text, save_every=0, quiet=True
            )
    run("parts")
    one, two = (load_file(tmp_path / name / "state.safetensors") for name in ("whole", "parts"))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)

    learnt = foretell.load(tmp_path / "whole" / "model", backend="torch")
    frozen = foretell.load(tmp_path / "whole" / "frozen", backend="torch")
    prompt = learnt.encode("line 1 of the text, and")
    for lm in (learnt, frozen):
        plain = lm.generate(prompt, method="plain", max_new_tokens=8).tokens
        assert lm.generate(prompt, method="ngram", max_new_tokens=8).tokens == plain
    without = run("identity", replace(TINY, metric="identity", tokens=64))
    assert "metric" not in without and not (tmp_path / "identity" / "frozen").exists()


def test_losses_are_of_second_halves_under_the_metric_that_is_named() -> None:
    model = build_pldr(TINY, end=0).eval()
    torch.manual_seed(1)
    texts = [torch.randint(300, (12,)) for _ in range(2)]
    kept = infer_metrics(model, texts[1])
    found = measure_metrics(model, texts, kept)

    def by_hand(text: torch.Tensor, metrics: torch.Tensor | None) -> float:
        nats = []
        with (
            torch.no_grad(),
            metrics_from(fixed_metrics(metrics)) if metrics is not None else torch.no_grad(),
        ):
            rows = model(input_ids=text[None, :-1]).logits[0].log_softmax(-1)
        for place in range(6, 12):
            nats.append(-float(rows[place - 1, text[place]]))
        return sum(nats) / len(nats)

    for name, given in {"whole": None, "frozen": kept}.items():
        wanted = sum(by_hand(text, given) for text in texts) / 2
        assert math.isclose(found["loss"][name], wanted, abs_tol=2e-5), name
    cached = sum(by_hand(text, infer_metrics(model, text[:6])) for text in texts) / 2
    assert math.isclose(found["loss"]["cached"], cached, abs_tol=2e-5)
    assert found["between_texts"]["rmse"] > 0 and found["of_halves"] > 0
    assert math.isclose(
        second_half_loss(model, texts[1], kept), by_hand(texts[1], kept), rel_tol=1e-5
    )
    one = F.cross_entropy(torch.zeros(1, 300), texts[0][:1])
    assert abs(found["loss"]["whole"] - float(one)) > 1e-4


def test_the_rate_is_a_rise_and_a_cosine() -> None:
    config = replace(TINY, tokens=64 * 102, warmup=2)
    run = PldrRun.__new__(PldrRun)
    run.config = config
    shares = []
    for run.step in range(103):
        shares.append(run.share())
    assert shares[:3] == [0.5, 1.0, 1.0]
    assert math.isclose(shares[52], (1 + LEAST) / 2)
    assert math.isclose(shares[102], LEAST)


@pytest.mark.parametrize(
    "change", [{"metric": "x"}, {"layers": 0}, {"width": 7}, {"micro": 48}, {"batch": 65}]
)
def test_other_shapes_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BadConfig):
        replace(TINY, **change)


def test_too_few_texts_are_refused(tmp_path: Path, text: list[str]) -> None:
    with pytest.raises(BadConfig, match="too few"):
        train_pldr(
            tmp_path / "corpus",
            tmp_path / "out",
            replace(TINY, context=16384, batch=16384, micro=16384),
            text,
            quiet=True,
        )
    assert type(build_pldr(replace(TINY, metric="random"), 0)) is PldrForCausalLM
