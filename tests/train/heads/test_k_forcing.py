"""k_forcing.py: what teachers draw, what is minimised, the stages, and what is written."""

from __future__ import annotations

import dataclasses
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
from foretell.strategies.parallel.k_forcing import KForcing
from foretell.train import answers
from foretell.train.heads.k_forcing import (
    KForcingRun,
    Places,
    TrainKForcing,
    by_rows,
    by_target,
    by_teacher,
    k_forcing_loss,
    places_of,
    row_agreement,
    tokens_at_noise,
    train_k_forcing,
)
from foretell.train.heads.tuned import Tuned, TunedRun
from tests import tiny
from tests.cache.users import run
from tests.train.heads.test_lud import LENGTH, PROMPT, random_text

SETTINGS = TrainKForcing(
    k=4, rank=4, alpha=8, tokens=128 * 6, batch=128, window=32, rate=0.01, warmup=1, anchors=4
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    path = tmp_path_factory.mktemp("answers") / "00000.safetensors"
    answers.save_texts(path, [random_text(seed) for seed in range(12)])
    return [path]


def model_of(moved: float = 0.05) -> Tuned:
    """A target with adapters that have been moved from doing nothing, and a network of rows."""
    target: Any = tiny.lm().models["target"]
    torch.manual_seed(1)
    head: Any = build_head("k-forcing", target_shape(target))
    head.take_weights(target)
    made = Tuned(target, head, SETTINGS)
    with torch.no_grad():
        for name, p in made.adapted.named_parameters():
            if "lora_B" in name:
                p.normal_(std=moved)
        for weight in head.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    made.adapted.eval()
    return made


def logits_after(hf: Any, inputs: list[torch.Tensor]) -> torch.Tensor:
    """(n, V) of one whole forward over embeddings (n, E) in parts."""
    with torch.no_grad():
        logits: torch.Tensor = hf(inputs_embeds=torch.cat(inputs)[None]).logits[0]
    return logits


def inner(made: Tuned) -> Any:
    return made.adapted.base_model.model


def test_noise_draws_each_token_as_often_as_its_law_has_it() -> None:
    """A grid of numbers, as a histogram; and the best token where nothing is drawn."""
    torch.manual_seed(0)
    logits = torch.randn(7)
    grid = (torch.arange(20_000) + 0.5) / 20_000
    drawn = tokens_at_noise(logits.expand(20_000, -1), grid.double(), 0.7)
    shares = torch.bincount(drawn, minlength=7) / 20_000
    torch.testing.assert_close(shares, (logits / 0.7).softmax(-1), atol=1e-3, rtol=0)
    assert drawn.tolist() == sorted(drawn.tolist())  # in the order of the vocabulary
    assert tokens_at_noise(logits[None], torch.tensor([0.1]), 0.0).tolist() == [
        int(logits.argmax())
    ]


def test_the_target_draws_one_by_one_as_plain_loops_do() -> None:
    made, text = model_of(), random_text(1)
    places = places_of(text, SETTINGS, 3, 0)
    places.temperature = 0.8
    found = by_target(made, text, places)
    hf: Any = tiny.lm().models["target"].hf  # type: ignore[attr-defined]
    for anchor, noise, drawn in zip(places.anchors, places.noise, found, strict=True):
        known = text.tokens[: int(anchor) + 1].tolist()
        for z in noise:
            with torch.no_grad():
                law = (hf(torch.tensor([known])).logits[0, -1].double() / 0.8).softmax(-1)
            known.append(int((law.cumsum(0) <= z).sum()))
        assert known[-3:] == drawn.tolist()


def test_rows_and_the_doubled_teacher_are_those_of_whole_forwards() -> None:
    made, text = model_of(), random_text(2)
    places = places_of(text, SETTINGS, 4, 0)
    said, taught = by_rows(made, text, places), by_teacher(made, text, places)
    hf, head = inner(made), made.head
    embed = hf.get_input_embeddings()
    for number, anchor in enumerate(places.anchors.tolist()):
        heat = torch.full((4,), places.temperature).double()
        with torch.no_grad():
            before = embed(torch.tensor(text.tokens[: anchor + 1].tolist()))
            rows = head.noise_vectors(places.noise[number], heat)
            own = logits_after(hf, [before, rows])[anchor + 1 :].argmax(-1)
            assert own.tolist() == said[number].tolist()
            first = own[:2]
            again = logits_after(hf, [before, embed(first), rows[2:]])[anchor + 3 :].argmax(-1)
        assert taught[number].tolist() == [*first.tolist(), *again.tolist()]
    assert not torch.equal(said, taught)


def test_the_loss_is_that_of_the_labels_and_of_the_laws_held() -> None:
    made, text = model_of(), random_text(3)
    places = places_of(text, SETTINGS, 2, 0)
    labels = by_target(made, text, places)
    found = float(k_forcing_loss(made, text, SETTINGS, labels, places).detach())
    hf, embed = inner(made), inner(made).get_input_embeddings()
    tokens = torch.tensor(text.tokens.tolist())
    total = [0.0, 0.0]
    heat = torch.full((2,), places.temperature).double()
    with torch.no_grad():
        for number, anchor in enumerate(places.anchors.tolist()):
            rows = made.head.noise_vectors(places.noise[number], heat)
            logs = logits_after(hf, [embed(tokens[: anchor + 1]), rows]).log_softmax(-1)
            for i in range(2):
                total[i] -= float(logs[anchor + 1 + i, labels[number, i]])
        now = hf(tokens[None]).logits[0].log_softmax(-1)
        was = tiny.lm().models["target"].hf(tokens[None]).logits[0].log_softmax(-1)  # type: ignore[attr-defined]
        held = (was.exp() * (was - now)).sum(-1)[PROMPT - 1 : LENGTH - 1].mean()
    assert float(held) > 0.001
    wanted = sum(total) / len(places.anchors) + float(held)
    assert found == pytest.approx(wanted, rel=1e-3)


def test_stages_double_and_the_teacher_is_the_student_before(tmp_path: Path) -> None:
    assert [SETTINGS.row_count_at(step) for step in range(6)] == [1, 1, 2, 2, 4, 4]
    assert [dataclasses.replace(SETTINGS, k=1).row_count_at(step) for step in (0, 5)] == [1, 1]
    made = model_of(0.0)
    ran = KForcingRun(tmp_path, SETTINGS, made)
    assert ran.prepare() == 1 and ran.teacher is None
    ran.step = 2
    before = {name: p.detach().clone() for name, p in ran.trained.items()}
    assert ran.prepare() == 2
    with torch.no_grad():
        for p in ran.trained.values():
            p.add_(1.0)
    own = ran.swap_weights(ran.teacher or {})
    assert all(torch.equal(p, before[name]) for name, p in ran.trained.items())
    ran.swap_weights(own)
    assert all(torch.equal(p, before[name] + 1.0) for name, p in ran.trained.items())
    ran.teacher = None
    ran.taught = 1
    assert ran.prepare() == 2  # run again, it is the one that was written
    assert all(torch.equal(value, before[name]) for name, value in (ran.teacher or {}).items())


def test_rows_learn_to_draw_as_the_target_does() -> None:
    """With its noise, and not with other."""
    made, text = model_of(0.0), random_text(4)
    settings = dataclasses.replace(SETTINGS, k=1, hold=0.0, anchors=99)
    fixed = places_of(text, settings, 1, 0)
    labels = by_target(made, text, fixed)
    optimiser = torch.optim.Adam([*made.tuned_parameters, *made.head.parameters()], lr=0.01)
    for _ in range(80):
        loss = k_forcing_loss(made, text, settings, labels, fixed)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    assert float((by_rows(made, text, fixed) == labels).float().mean()) > 0.9
    other = Places(fixed.anchors, 1 - fixed.noise, fixed.temperature)
    assert float((by_rows(made, text, other) == labels).float().mean()) < 0.8


def test_agreement_counts_a_row_if_all_before_it_are_right() -> None:
    made, text = model_of(), random_text(5)
    shares = row_agreement(made, [text], SETTINGS, 1.0)
    places = places_of(text, SETTINGS, 4, 0)
    places.temperature = 1.0
    right = (by_rows(made, text, places) == by_target(made, text, places)).numpy()
    wanted = [float(np.mean(right[:, : i + 1].all(1))) for i in range(4)]
    assert shares["shared"] == pytest.approx(wanted, abs=1e-4)


def test_what_is_written_is_a_model_with_rows_of_its_own(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And stopped and run again it is the same to the last bit."""
    report = train_k_forcing(tiny.lm(), files, tmp_path / "whole", SETTINGS, quiet=True)
    assert len(report["drawn"]["shared"]) == len(report["greedy"]) == 4
    right, steps = TunedRun.advance_on, []

    def stopping(self: TunedRun, *args: Any) -> float:
        steps.append(self.step)
        if len(steps) == 4:
            self.save()
            raise KeyboardInterrupt
        return right(self, *args)

    monkeypatch.setattr(TunedRun, "advance_on", stopping)
    with pytest.raises(KeyboardInterrupt):
        train_k_forcing(tiny.lm(), files, tmp_path / "parts", SETTINGS, quiet=True)
    monkeypatch.undo()
    train_k_forcing(tiny.lm(), files, tmp_path / "parts", SETTINGS, quiet=True)
    for part in ("model", "head"):
        one, other = (tmp_path / name / part / "model.safetensors" for name in ("whole", "parts"))
        assert one.read_bytes() == other.read_bytes()
    tuned = foretell.load(str(tmp_path / "whole" / "model"), dtype="float32")
    strategy = KForcing(head=str(tmp_path / "whole" / "head"))
    sampling = Sampling(max_new_tokens=8, temperature=1.0, ignore_eos=True)
    (live,) = run(tuned.models, Request([1, 2, 3], strategy, sampling))
    assert live.ctx.stats.calls["target"] == 2
    with pytest.raises(foretell.errors.BadModel, match="weights other than those of"):
        strategy.bring(tiny.lm().models)


@pytest.mark.parametrize(("field", "value"), [("k", 3), ("hottest", -1.0), ("batch", 16)])
def test_settings_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(BadConfig, match=f"{field}={value}"):
        dataclasses.replace(SETTINGS, **{field: value})  # type: ignore[arg-type]
