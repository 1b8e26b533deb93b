"""The trainer: it learns, it resumes to the same weights, its export loads, a student follows its
teacher.
"""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import foretell
from foretell.errors import BadConfig, BadModel
from foretell.train import lm
from foretell.train.lm import TrainLM, catch_interrupts, rate_share, train_lm

TINY = TrainLM(
    hidden=16,
    layers=1,
    heads=2,
    kv_heads=1,
    intermediate=32,
    vocab_size=300,
    context=32,
    short_context=16,
    long_share=0.25,
    tokens=12 * 64,
    batch=64,
    micro=32,
    warmup=2,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("text") / "t.jsonl"
    rows = [
        {"text": f"line {i % 3} of the text, and line {i % 3} again\n" * 3, "path": f"d/{i}"}
        for i in range(300)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(path)]


def run(
    tmp_path: Path, text: list[str], out: str, config: TrainLM = TINY, teacher: str | None = None
) -> dict[str, object]:
    return train_lm(
        tmp_path / "corpus", tmp_path / out, config, text, teacher, compiled=False, quiet=True
    )


def test_learns_exports_and_resumes_to_the_same_weights(
    tmp_path: Path, text: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = run(tmp_path, text, "whole")
    losses = [
        json.loads(line)["loss"]
        for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()
    ]
    assert len(losses) == TINY.steps == 12
    assert losses[-1] < losses[0] - 0.5
    bits = report["heldout_bits_per_byte"]
    assert isinstance(bits, dict)
    assert 0 < bits["all"] < 8
    assert report["tokens_seen"] == TINY.tokens

    advance, done = lm.Run.advance, 0

    def breaks(self: lm.Run, *rest: object) -> float:
        nonlocal done
        done += 1
        if done == 6:
            signal.raise_signal(
                signal.SIGINT
            )  # the step is finished, kept, and only then the run ends
        return advance(self, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(lm.Run, "advance", breaks)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, text, "parts")
    assert int(load_file(tmp_path / "parts" / "state.safetensors")["step"]) == 6
    run(tmp_path, text, "parts")
    assert done == 12
    one, two = (load_file(tmp_path / name / "state.safetensors") for name in ("whole", "parts"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)

    loaded = foretell.load(tmp_path / "whole" / "model")
    assert loaded.generate("line 1 of", method="ngram", max_new_tokens=8).tokens
    for other in ({"seed": 1}, {"tokens": TINY.tokens - 64}):
        with pytest.raises(BadConfig, match="other settings"):
            run(tmp_path, text, "whole", replace(TINY, **other))
    longer = run(tmp_path, text, "whole", replace(TINY, tokens=TINY.tokens + 2 * 64))
    steps = [
        json.loads(line)["step"]
        for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()
    ]
    assert steps == [*range(1, 15)]
    assert longer["tokens_seen"] == TINY.tokens + 2 * 64

    student = replace(TINY, hidden=8, tokens=24 * 64)
    run(tmp_path, text, "student", student, teacher=str(tmp_path / "whole" / "model"))
    kl = [
        json.loads(line)["loss"]
        for line in (tmp_path / "student" / "log.jsonl").read_text().splitlines()
    ]
    assert kl[-1] < kl[0]
    pair = foretell.load(tmp_path / "whole" / "model", draft=tmp_path / "student" / "model")
    assert pair.generate("line 1 of", method="draft", max_new_tokens=8).stats.calls["draft"] > 0


def test_a_run_can_begin_with_a_model(tmp_path: Path, text: list[str]) -> None:
    run(tmp_path, text, "first")
    model = str(tmp_path / "first" / "model")
    config = replace(TINY, tokens=64, warmup=1000)  # one step at next to no rate
    train_lm(
        tmp_path / "other", tmp_path / "next", config, text, compiled=False, quiet=True, init=model
    )
    own, taken = (
        json.loads((tmp_path / name / "tokenizer.json").read_text()) for name in ("corpus", "other")
    )
    assert own["model"] == taken["model"]
    first = json.loads((tmp_path / "first" / "log.jsonl").read_text().splitlines()[0])["loss"]
    begun = json.loads((tmp_path / "next" / "log.jsonl").read_text().splitlines()[0])["loss"]
    assert begun < first - 0.5
    with pytest.raises(BadConfig, match="cannot begin with it"):
        train_lm(
            tmp_path / "corpus",
            tmp_path / "wide",
            replace(TINY, hidden=32),
            text,
            quiet=True,
            init=model,
        )


def test_what_is_no_model_is_refused_before_anything_is_made(
    tmp_path: Path, text: list[str]
) -> None:
    for name in ("init", "teacher"):
        with pytest.raises(BadModel, match=r"\./none: no such folder"):
            train_lm(tmp_path / "corpus", tmp_path / "out", TINY, text, **{name: "./none"})  # type: ignore[arg-type]
    assert not any(tmp_path.iterdir())


def test_the_rate_rises_holds_and_falls_to_zero() -> None:
    config = replace(TINY, tokens=64 * 100, warmup=10, decay=0.5)
    rates = [rate_share(step, config) for step in range(101)]
    assert rates[0] == 0.1
    assert rates[10:51] == [1.0] * 41
    assert rates[75] == 0.5
    assert rates[100] == 0


@pytest.mark.parametrize(
    "change", [{"heads": 3}, {"kv_heads": 3}, {"batch": 65}, {"micro": 48}, {"context": 24}]
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(BadConfig):
        replace(TINY, **change)


def test_the_second_interrupt_ends_at_once() -> None:
    with catch_interrupts() as caught:
        signal.raise_signal(signal.SIGINT)
        assert caught == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
