"""train/draft.py: what a step minimises, and that the model learns to say what its target says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import foretell
from foretell.drafters.model.exit_table import trained_exits
from foretell.errors import BadConfig
from foretell.train import answers, draft
from foretell.train.answers import Text
from foretell.train.draft import TrainDraft
from foretell.train.objectives import OBJECTIVES, divergence
from tests import tiny

VOCAB = 24
TINY = TrainDraft(
    hidden=16,
    layers=1,
    heads=2,
    kv_heads=1,
    intermediate=32,
    context=64,
    window=32,
    tokens=80 * 128,
    batch=128,
    micro=64,
    common=6,
    sampled=64,
    other_rate=0.02,
    warmup=2,
)


def texts(count: int = 3, seed: int = 0) -> list[Text]:
    draw = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        prompt, length = int(draw.integers(1, 5)), int(draw.integers(2, 9))
        laws = draw.dirichlet(np.ones(VOCAB), length)
        best = np.argsort(-laws, axis=1)[:, :5].astype(np.int32)
        logprobs = np.log(np.take_along_axis(laws, best, 1)).astype(np.float16)
        tokens = draw.integers(0, VOCAB, prompt + length).astype(np.int32)
        made.append(Text(tokens, prompt, best, logprobs))
    return made


def model(seed: int = 0) -> draft.LlamaForCausalLM:
    config = replace(TINY, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    return draft.new_draft(config, torch.randn(VOCAB, 20, generator=draw), [0]).eval()


def loss(
    student: Any,
    batch: draft.Batch,
    common: torch.Tensor,
    sampled: int = 0,
    seed: int = 0,
    **more: Any,
) -> torch.Tensor:
    """Of a step that looks at these tokens and so many others."""
    tokens = draft.step_vocabulary(batch, common, sampled, seed, VOCAB)
    return draft.exit_loss(student, batch, tokens, **more)


@torch.no_grad()
def test_the_loss_is_the_divergence_over_the_best_tokens_and_the_rest() -> None:
    student, given = model(), texts()
    batch = draft.make_batch(given)
    found = loss(student, batch, torch.arange(VOCAB))
    total, count = 0.0, 0
    for text in given:
        ids = torch.from_numpy(text.tokens.astype(np.int64))[None]
        with torch.no_grad():
            laws = student(input_ids=ids).logits[0].softmax(-1)
        for i, (best, logprobs) in enumerate(zip(text.top_tokens, text.logprobs, strict=True)):
            p = torch.exp(torch.from_numpy(logprobs.astype(np.float32)))
            q = laws[text.prompt + i - 1][torch.from_numpy(best).long()]
            p, q = torch.cat([p, 1 - p.sum()[None]]), torch.cat([q, 1 - q.sum()[None]])
            total += float((p * (p / q).log()).sum())
            count += 1
    assert float(found) == pytest.approx(total / count, rel=0.03)  # products in bfloat16


@torch.no_grad()
def test_sampled_tokens_stand_for_all_others() -> None:
    """Over many samples the sum they stand for is the whole one's, so the loss is near it."""
    student, batch = model(), draft.make_batch(texts())
    whole = float(loss(student, batch, torch.arange(VOCAB)))
    few = torch.tensor([], dtype=torch.long)
    sampled = [float(loss(student, batch, few, 3, seed)) for seed in range(60)]
    assert np.mean(sampled) == pytest.approx(whole, rel=0.05)
    assert float(loss(student, batch, few, VOCAB)) == pytest.approx(whole, rel=1e-3)


@torch.no_grad()
def test_an_objective_is_that_of_the_text_and_of_the_laws() -> None:
    student, batch = model(), draft.make_batch(texts())
    every = torch.arange(VOCAB)
    (logs,) = draft.exit_logs(student, batch, draft.step_vocabulary(batch, every, 0, 0, VOCAB))
    following = batch.ids.flatten()[batch.places + 1]
    shown = (batch.top_tokens == following[:, None]).any(1)
    assert 0 < int(shown.sum()) < len(shown)
    assert (batch.labels >= 0).tolist() == shown.tolist()
    wanted = -logs[shown][torch.arange(int(shown.sum())), batch.labels[shown]].sum() / len(shown)
    assert float(loss(student, batch, every, loss_by=OBJECTIVES["ce"])) == pytest.approx(
        float(wanted), rel=1e-4
    )
    distance = (logs.exp() - batch.laws).abs().sum(-1).mean() / 2
    assert float(loss(student, batch, every, loss_by=OBJECTIVES["tv"])) == pytest.approx(
        float(distance), rel=1e-3
    )


@torch.no_grad()
def test_beside_a_reference_it_learns_where_it_is_furthest_behind() -> None:
    student, reference, batch = model(), model(seed=1), draft.make_batch(texts())
    tokens = draft.step_vocabulary(batch, torch.arange(VOCAB), 0, 0, VOCAB)
    (own,), (known,) = (draft.exit_logs(one, batch, tokens) for one in (student, reference))
    ours, theirs = (divergence(logs, batch.laws, batch.labels) for logs in (own, known))
    count = round(0.3 * len(ours))
    furthest = (ours - theirs).argsort(descending=True)[:count]
    found = draft.exit_loss(student, batch, tokens, reference=reference, keep=0.3)
    assert float(found) == pytest.approx(float(ours[furthest].mean()), rel=1e-4)


def test_a_reference_is_another_draft_model_of_this_target(
    files: list[Path], tmp_path: Path
) -> None:
    report = draft.train_draft(tiny.lm(), files, tmp_path / "one", TINY, quiet=True)
    one = str(tmp_path / "one" / "model")
    config = replace(TINY, objective="tv", keep=0.5, tokens=4 * 128, seed=1)
    beside = draft.train_draft(
        tiny.lm(), files, tmp_path / "two", config, quiet=True, reference=one
    )
    assert beside["settings"]["objective"] == "tv" and report["settings"]["objective"] == "kl"
    with pytest.raises(BadConfig, match="is the model that training begins with"):
        draft.starting_models(tiny.lm(), TINY, init=one, reference=one)
    with pytest.raises(BadConfig, match="cannot begin with it"):
        draft.starting_models(tiny.lm(), replace(TINY, hidden=12), init=one)
    other = tiny.save(tiny.llama(vocab_size=40), tmp_path / "other")
    with pytest.raises(BadConfig, match="no draft model of this target"):
        draft.starting_models(tiny.lm(), TINY, reference=str(other))


@pytest.mark.parametrize("told", ["two", "0,2", "2,1", "4", "1.5"])
def test_exits_that_it_cannot_have_are_refused(told: str) -> None:
    with pytest.raises(BadConfig, match="exits="):
        replace(TINY, layers=3, exits=told)


def test_a_model_with_exits_says_so_and_agrees_at_each(files: list[Path], tmp_path: Path) -> None:
    config = replace(TINY, layers=2, exits="1")
    report = draft.train_draft(tiny.lm(), files, tmp_path, config, quiet=True)
    assert report["exits"].keys() == {"1", "2"} and report["exits"]["2"] == report["held_back"]
    assert all(shares["greedy"] > 0.9 for shares in report["exits"].values())
    told = trained_exits(foretell.load(tmp_path / "model").models["target"])
    assert told is not None and told.layers == (1, 2) and not told.targets


def test_every_text_is_in_one_block_of_a_round() -> None:
    given = [len(text.tokens) for text in texts(50)]
    groups = draft.group_lengths(given, 96, seed=1)
    assert sorted(number for group in groups for number in group) == list(range(50))
    for group in groups:
        assert len(group) * draft.ROUND <= 96
    assert groups != draft.group_lengths(given, 96, seed=2)


def test_embeddings_begin_as_the_targets_projected() -> None:
    wide = torch.randn(40, 3) @ torch.randn(3, 12)  # three directions hold all of it
    narrow = draft.project_embeddings(wide, 3)
    centred = wide - wide.mean(0)
    products, wanted = narrow @ narrow.T, centred @ centred.T
    scale = products.trace() / wanted.trace()
    # Some products are next to 0, where a ratio would be rounding.
    assert products.allclose(scale * wanted, atol=1e-3 * float(products.abs().max()))
    with pytest.raises(BadConfig, match="hidden=13"):
        draft.project_embeddings(wide, 13)


@torch.no_grad()
def test_with_exits_the_loss_is_the_mean_of_theirs() -> None:
    """Each by the last norm and head, as a model has it that ends there."""
    config = replace(TINY, layers=3, exits="1,2")
    assert config.exit_layers == (1, 2, 3)
    given = torch.randn(VOCAB, 20, generator=torch.Generator().manual_seed(0))
    student = draft.new_draft(config, given, [0]).eval()
    for weight in student.model.layers.parameters():
        weight *= 10  # or what they add to the embeddings is small
    batch, every = draft.make_batch(texts()), torch.arange(VOCAB)
    found = float(loss(student, batch, every, exits=config.exit_layers))
    layers, alone = list(student.model.layers), []
    for count in config.exit_layers:
        student.model.layers = torch.nn.ModuleList(layers[:count])
        alone.append(float(loss(student, batch, every)))
    assert found == pytest.approx(np.mean(alone), rel=0.01)  # in bfloat16
    assert max(alone) - min(alone) > 1e-2


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Answers that follow a rule, 3 letters in turns, with sharp laws."""
    folder = tmp_path_factory.mktemp("answers")
    made = []
    for number in range(200):
        tokens = (np.arange(number % 3, number % 3 + 20) % 3 + 5).astype(np.int32)
        best = np.stack([tokens[4:], (tokens[4:] - 4) % 3 + 5], 1)
        logprobs = np.log(np.tile([0.9, 0.05], (16, 1))).astype(np.float16)
        made.append(Text(tokens, 4, best, logprobs))
    answers.save_texts(folder / "00000.safetensors", made)
    return [folder / "00000.safetensors"]


def test_it_learns_exports_and_goes_on_to_the_same_weights(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = tiny.lm()
    report = draft.train_draft(lm, files, tmp_path / "whole", TINY, quiet=True)
    assert report["held_back"]["greedy"] > 0.9
    assert report["held_back"]["drawn"] > 0.7
    assert json.loads((tmp_path / "whole" / "report.json").read_text()) == report
    small = foretell.load(tmp_path / "whole" / "model")
    assert small.models["target"].vocab == lm.models["target"].vocab
    assert small.tokenizer is not None

    def stop(run: draft.DraftRun, *args: object) -> float:
        if run.step == 39:
            run.save()
            raise KeyboardInterrupt
        return advance(run, *args)  # type: ignore[arg-type]

    advance = draft.DraftRun.advance_on
    monkeypatch.setattr(draft.DraftRun, "advance_on", stop)
    with pytest.raises(KeyboardInterrupt):
        draft.train_draft(lm, files, tmp_path / "parts", TINY, quiet=True)
    monkeypatch.setattr(draft.DraftRun, "advance_on", advance)
    draft.train_draft(lm, files, tmp_path / "parts", TINY, quiet=True)
    weights = (tmp_path / "whole/model/model.safetensors").read_bytes()
    assert (tmp_path / "parts/model/model.safetensors").read_bytes() == weights
    with pytest.raises(BadConfig, match="other settings"):
        draft.train_draft(lm, files, tmp_path / "parts", replace(TINY, seed=1), quiet=True)


def test_too_few_answers_are_refused(tmp_path: Path) -> None:
    answers.save_texts(tmp_path / "a.safetensors", texts(1))
    with pytest.raises(BadConfig, match="too few answers"):
        draft.train_draft(
            tiny.lm(), [tmp_path / "a.safetensors"], tmp_path / "run", TINY, quiet=True
        )


@pytest.mark.parametrize("wrong", [{"heads": 3}, {"kv_heads": 3}, {"micro": 48}, {"window": 100}])
def test_sizes_that_do_not_fit_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(BadConfig):
        replace(TINY, **wrong)
